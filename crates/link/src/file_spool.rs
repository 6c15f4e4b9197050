//! A spool on disk: the updates of one agent as JSON lines `{"n":NUMBER,"up":{…}}`, in segments named by their first
//! number, in a folder of its own. The files outlive the worker, so the daemon can read what a dead worker could not
//! deliver.
//!
//! Design: docs/design/spool-is-trimmed-by-the-journal.md

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use qd_protocol::WorkerId;
use qd_protocol::link::{AgentUpdate, UpdateNumber};
use serde::Deserialize;

use crate::spool::Spool;
use crate::update_window::NumberedUpdate;

/// Size at which a new segment is begun. Disk space is freed a whole segment at a time.
const SEGMENT_BYTES: u64 = 1 << 20;
/// The folder of all spools, beside the workers' records.
const SPOOLS_FOLDER: &str = "spool";
const SEGMENT_SUFFIX: &str = ".jsonl";
/// How many times creating a folder is retried while another spool's removal deletes its parent.
const CREATE_TRIES: usize = 16;

/// A spool that is being written.
#[derive(Debug)]
pub struct FileSpool {
    dir: PathBuf,
    /// Oldest first. Only the last segment grows.
    segments: VecDeque<SpoolSegment>,
    /// The last segment, open for appending.
    current_file: Option<File>,
    /// The last number that was appended.
    last: UpdateNumber,
    /// Everything up to this number may be deleted.
    trimmed: UpdateNumber,
    /// Where the last read ended, because the next one usually continues there.
    cursor: Option<SpoolCursor>,
    /// Whether a file was created in the folder since the folder was last synced.
    folder_unsynced: bool,
}

#[derive(Debug)]
struct SpoolSegment {
    path: PathBuf,
    first: UpdateNumber,
    last: UpdateNumber,
    bytes: u64,
    unsynced: bool,
    /// The file may be longer than `bytes`: an append failed half-way, and so did its removal.
    has_torn_end: bool,
}

#[derive(Debug, Clone, Copy)]
struct SpoolCursor {
    /// The number that was read last.
    number: UpdateNumber,
    /// The first number of the segment that it is in.
    segment: UpdateNumber,
    /// The byte offset of the next line.
    offset: u64,
}

impl FileSpool {
    /// The folder of a worker's spool. `dir` is the folder of the workers' records.
    pub fn folder(dir: &Path, worker: &WorkerId) -> PathBuf {
        dir.join(SPOOLS_FOLDER).join(worker.as_str())
    }

    /// The workers that have a spool. `dir` is the folder of the workers' records.
    pub fn workers(dir: &Path) -> Vec<WorkerId> {
        let folders = fs::read_dir(dir.join(SPOOLS_FOLDER)).into_iter().flatten().flatten();
        folders.filter_map(|folder| WorkerId::parse(folder.file_name().to_str()?).ok()).collect()
    }

    /// Creates an empty spool in this folder. An older spool there is removed, because its numbers will be reused.
    pub fn create(folder: &Path) -> io::Result<Self> {
        Self::remove(folder)?;
        create_folder(folder)?;
        Ok(Self {
            dir: folder.to_owned(),
            segments: VecDeque::new(),
            current_file: None,
            last: UpdateNumber(0),
            trimmed: UpdateNumber(0),
            cursor: None,
            folder_unsynced: true,
        })
    }

    /// Reads the remaining updates after this number, in order and without gaps. Reading stops at the first line that
    /// cannot be parsed, such as one that a crash left incomplete. A missing folder reads as empty.
    pub fn read_undelivered(folder: &Path, after: UpdateNumber) -> io::Result<Vec<NumberedUpdate>> {
        let mut updates: Vec<NumberedUpdate> = Vec::new();
        for path in segment_paths(folder)? {
            let mut lines = BufReader::new(File::open(&path)?);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line)? > 0 {
                match serde_json::from_slice::<SpoolLine>(&line) {
                    Ok(SpoolLine { n, up }) => {
                        let newest = updates.last().map(|update| update.number);
                        if newest.is_some_and(|newest| n.0 > newest.0 + 1) {
                            tracing::warn!(path = %path.display(), before = n.0, "gap in a spool: ignoring the rest");
                            return Ok(updates);
                        }
                        if n > newest.unwrap_or(after) {
                            updates.push(NumberedUpdate { number: n, update: up });
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, path = %path.display(), "damaged line in a spool: ignoring the rest");
                        return Ok(updates);
                    }
                }
                line.clear();
            }
        }
        Ok(updates)
    }

    /// The newest complete line.
    pub fn read_last(folder: &Path) -> io::Result<Option<NumberedUpdate>> {
        let Some(path) = segment_paths(folder)?.pop() else { return Ok(None) };
        let mut newest = None;
        let mut lines = BufReader::new(File::open(path)?);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line)? > 0 {
            if line.ends_with(b"\n") {
                newest = Some(std::mem::take(&mut line));
            }
            line.clear();
        }
        let read = newest.map(|line| serde_json::from_slice::<SpoolLine>(&line)).transpose()?;
        Ok(read.map(|SpoolLine { n, up }| NumberedUpdate { number: n, update: up }))
    }

    /// Removes a spool and its contents, and the folder of all spools if this was the last one.
    pub fn remove(folder: &Path) -> io::Result<()> {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if let Some(parent) = folder.parent() {
            // Fails while other spools exist, as it should.
            let _not_empty: io::Result<()> = fs::remove_dir(parent);
        }
        Ok(())
    }

    /// The segment to append to. Begins a new one if the last is full.
    fn current_segment(&mut self, first: UpdateNumber) -> io::Result<(&mut File, &mut SpoolSegment)> {
        if self.segments.back().is_none_or(|segment| segment.bytes >= SEGMENT_BYTES) {
            self.current_file = None;
        }
        if self.current_file.is_none() {
            let path = self.dir.join(format!("{:020}{SEGMENT_SUFFIX}", first.0));
            self.current_file =
                Some(OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?);
            self.folder_unsynced = true;
            let last = UpdateNumber(first.0.saturating_sub(1));
            self.segments.push_back(SpoolSegment {
                path,
                first,
                last,
                bytes: 0,
                unsynced: false,
                has_torn_end: false,
            });
        }
        match (&mut self.current_file, self.segments.back_mut()) {
            (Some(file), Some(segment)) => Ok((file, segment)),
            _ => Err(io::Error::other("the spool has no segment to write to")),
        }
    }

    /// The segment and offset where the line after this number is found.
    fn seek(&self, after: UpdateNumber) -> Option<(&SpoolSegment, u64)> {
        if let Some(cursor) = self.cursor.filter(|cursor| cursor.number == after)
            && let Some(segment) = self.segments.iter().find(|segment| segment.first == cursor.segment)
            && segment.last > after
        {
            return Some((segment, cursor.offset));
        }
        self.segments.iter().find(|segment| segment.last > after).map(|segment| (segment, 0))
    }
}

impl Spool for FileSpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        let mut text = Vec::with_capacity(lines.iter().map(|line| line.len() + 32).sum());
        for (number, line) in (first.0..).zip(lines) {
            write!(text, "{{\"n\":{number},\"up\":")?;
            text.extend_from_slice(line);
            text.extend_from_slice(b"}\n");
        }
        let Some(count) = u64::try_from(lines.len()).ok().filter(|count| *count > 0) else { return Ok(()) };
        let (file, segment) = self.current_segment(first)?;
        if segment.has_torn_end {
            file.set_len(segment.bytes)?;
            segment.has_torn_end = false;
        }
        if let Err(error) = file.write_all(&text) {
            // Half a line would corrupt the next one. If it cannot be removed now, it is removed before the next append;
            // a reader of a dead worker's spool stops there.
            segment.has_torn_end = file.set_len(segment.bytes).is_err();
            return Err(error);
        }
        segment.bytes += text.len() as u64;
        segment.last = UpdateNumber(first.0 + count - 1);
        segment.unsynced = true;
        self.last = segment.last;
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        for segment in self.segments.iter_mut().filter(|segment| segment.unsynced) {
            File::open(&segment.path)?.sync_data()?;
            segment.unsynced = false;
        }
        if self.folder_unsynced {
            for folder in self.dir.ancestors().take(2) {
                File::open(folder)?.sync_all()?;
            }
            self.folder_unsynced = false;
        }
        Ok(())
    }

    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
        self.trimmed = self.trimmed.max(upto);
        while let Some(segment) = self.segments.front()
            && segment.last <= self.trimmed
            && (self.segments.len() > 1 || segment.bytes >= SEGMENT_BYTES)
        {
            fs::remove_file(&segment.path)?;
            self.segments.pop_front();
        }
        if self.segments.is_empty() {
            self.current_file = None;
        }
        Ok(())
    }

    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
        let after = after.max(self.trimmed);
        let Some((segment, mut offset)) = self.seek(after) else { return Ok(Vec::new()) };
        let mut file = File::open(&segment.path)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut lines = BufReader::new(file.take(segment.bytes - offset));
        let (mut found, mut bytes, mut line) = (Vec::new(), 0, Vec::new());
        let mut cursor = self.cursor;
        while bytes < max_bytes.max(1) && lines.read_until(b'\n', &mut line)? > 0 {
            offset += line.len() as u64;
            let (number, up) = split_line(&line).ok_or_else(|| damaged_error(&segment.path))?;
            if number > after {
                bytes += up.len();
                found.push((number, Bytes::copy_from_slice(up)));
                cursor = Some(SpoolCursor { number, segment: segment.first, offset });
            }
            line.clear();
        }
        self.cursor = cursor;
        Ok(found)
    }

    fn bytes(&self) -> u64 {
        if self.trimmed >= self.last { 0 } else { self.segments.iter().map(|segment| segment.bytes).sum() }
    }
}

impl Drop for FileSpool {
    /// Syncs undelivered updates when the worker ends, so that even a power failure does not lose them.
    fn drop(&mut self) {
        if self.trimmed < self.last
            && let Err(error) = self.sync()
        {
            tracing::warn!(%error, path = %self.dir.display(), "failed to sync the spool on close");
        }
    }
}

#[derive(Debug, Deserialize)]
struct SpoolLine {
    n: UpdateNumber,
    up: AgentUpdate,
}

/// Splits a line written by [`FileSpool::append`] into its number and its update, without parsing the update.
fn split_line(line: &[u8]) -> Option<(UpdateNumber, &[u8])> {
    let rest = line.strip_prefix(b"{\"n\":")?;
    let digits = rest.iter().position(|byte| *byte == b',')?;
    let number = std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()?;
    let up = rest[digits..].strip_prefix(b",\"up\":")?.strip_suffix(b"}\n")?;
    Some((UpdateNumber(number), up))
}

fn damaged_error(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()))
}

/// Creates a spool's folder. Retries if the removal of another spool deletes the parent folder in between.
fn create_folder(folder: &Path) -> io::Result<()> {
    let create = || DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let parent_vanished = |created: &io::Result<()>| {
        created.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    };
    let mut created = create();
    for _ in 0..CREATE_TRIES {
        if !parent_vanished(&created) {
            break;
        }
        created = create();
    }
    created
}

/// The segments of a spool, oldest first.
fn segment_paths(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.to_str().is_some_and(|path| path.ends_with(SEGMENT_SUFFIX)) {
            paths.push(path);
        }
    }
    // File names have leading zeros, so name order is number order.
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;
    use qd_protocol::EventNumber;

    use super::*;

    fn up(number: u64) -> AgentUpdate {
        AgentUpdate::SteerMissed { steer: EventNumber(number) }
    }

    fn line(number: u64) -> Bytes {
        serde_json::to_vec(&up(number)).unwrap().into()
    }

    fn large_line(number: u64) -> Bytes {
        let run = qd_protocol::RunId::parse("r").unwrap();
        let text = format!("{number} {}", "x".repeat(300_000));
        let what = qd_protocol::link::TurnUpdate::Text { text };
        serde_json::to_vec(&AgentUpdate::Turn { run, update: what }).unwrap().into()
    }

    fn numbers(read: &[(UpdateNumber, Bytes)]) -> Vec<u64> {
        read.iter().map(|(number, _)| number.0).collect()
    }

    fn undelivered_numbers(folder: &Path, after: u64) -> Vec<u64> {
        let updates = FileSpool::read_undelivered(folder, UpdateNumber(after)).unwrap();
        updates.iter().map(|update| update.number.0).collect()
    }

    #[test]
    fn what_was_kept_is_read_again_in_order_and_after_a_death_too() {
        let home = tempfile::tempdir().unwrap();
        let folder = FileSpool::folder(home.path(), &WorkerId::parse("wrk_a").unwrap());
        let mut spool = FileSpool::create(&folder).unwrap();
        spool.append(UpdateNumber(8), &[line(8), line(9)]).unwrap();
        spool.append(UpdateNumber(10), &[line(10)]).unwrap();
        assert_eq!(
            spool.read(UpdateNumber(8), 1 << 20).unwrap(),
            [(UpdateNumber(9), line(9)), (UpdateNumber(10), line(10))]
        );
        assert_eq!(numbers(&spool.read(UpdateNumber(7), 1).unwrap()), [8]);
        assert_eq!(numbers(&spool.read(UpdateNumber(8), 1).unwrap()), [9]);
        assert_eq!(numbers(&spool.read(UpdateNumber(10), 1).unwrap()), [] as [u64; 0]);
        std::mem::forget(spool);
        let updates = FileSpool::read_undelivered(&folder, UpdateNumber(8)).unwrap();
        assert_eq!(
            updates,
            [9, 10].map(|number| NumberedUpdate { number: UpdateNumber(number), update: up(number) })
        );
        FileSpool::remove(&folder).unwrap();
        assert_eq!(undelivered_numbers(&folder, 0), [] as [u64; 0]);
        assert_eq!(FileSpool::read_last(&folder).unwrap(), None);
        assert!(!home.path().join(SPOOLS_FOLDER).exists());
    }

    #[test]
    fn a_line_that_was_torn_by_a_crash_is_left_out() {
        let home = tempfile::tempdir().unwrap();
        let mut spool = FileSpool::create(home.path()).unwrap();
        spool.append(UpdateNumber(1), &[line(1), line(2)]).unwrap();
        let path = spool.segments[0].path.clone();
        OpenOptions::new()
            .append(true)
            .open(path)
            .unwrap()
            .write_all(b"{\"n\":3,\"up\":{\"steer_mi")
            .unwrap();
        assert_eq!(undelivered_numbers(home.path(), 0), [1, 2]);
        let last = FileSpool::read_last(home.path()).unwrap();
        assert_eq!(last, Some(NumberedUpdate { number: UpdateNumber(2), update: up(2) }));
    }

    #[test]
    fn trimming_gives_whole_segments_back_and_counts_nothing_when_all_is_acknowledged() {
        let home = tempfile::tempdir().unwrap();
        let mut spool = FileSpool::create(home.path()).unwrap();
        for number in 1..=20 {
            spool.append(UpdateNumber(number), &[large_line(number)]).unwrap();
        }
        assert!(spool.segments.len() >= 4);
        let before = spool.bytes();
        assert!(before > 20 * 300_000);
        spool.sync().unwrap();
        spool.trim(UpdateNumber(10)).unwrap();
        assert!(spool.bytes() < before && spool.bytes() >= 10 * 300_000);
        assert_eq!(numbers(&spool.read(UpdateNumber(0), usize::MAX).unwrap())[0], 11);
        spool.trim(UpdateNumber(20)).unwrap();
        assert_eq!(spool.bytes(), 0);
        assert!(segment_paths(home.path()).unwrap().len() <= 1);
        spool.append(UpdateNumber(21), &[line(21)]).unwrap();
        assert_eq!(numbers(&spool.read(UpdateNumber(20), 1).unwrap()), [21]);
        assert_eq!(undelivered_numbers(home.path(), 20), [21]);
    }

    #[test]
    fn a_new_spool_knows_nothing_of_an_older_one_in_its_place() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("spool").join("w");
        FileSpool::create(&folder).unwrap().append(UpdateNumber(1), &[line(1)]).unwrap();
        let mut spool = FileSpool::create(&folder).unwrap();
        assert!(spool.read(UpdateNumber(0), 1).unwrap().is_empty());
        assert_eq!(undelivered_numbers(&folder, 0), [] as [u64; 0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn whatever_the_order_of_appends_trims_and_reads_nothing_is_lost(
            steps in proptest::collection::vec((0u8..3, 1usize..4, any::<prop::sample::Index>()), 1..30),
        ) {
            let home = tempfile::tempdir().unwrap();
            let mut spool = FileSpool::create(home.path()).unwrap();
            let (mut last, mut trimmed) = (0u64, 0u64);
            for (step, count, at) in steps {
                let somewhere = trimmed + at.index(usize::try_from(last - trimmed).unwrap() + 1) as u64;
                match step {
                    0 => {
                        let lines: Vec<Bytes> = (last + 1..).take(count).map(large_line).collect();
                        spool.append(UpdateNumber(last + 1), &lines).unwrap();
                        last += count as u64;
                    }
                    1 => {
                        spool.trim(UpdateNumber(somewhere)).unwrap();
                        trimmed = somewhere;
                    }
                    _ => {
                        let read = spool.read(UpdateNumber(somewhere), count * 200_000).unwrap();
                        prop_assert_eq!(read.is_empty(), somewhere == last);
                        for ((number, bytes), expected) in read.iter().zip(somewhere + 1..) {
                            prop_assert_eq!(number.0, expected);
                            prop_assert!(*bytes == large_line(expected));
                        }
                    }
                }
            }
            prop_assert_eq!(undelivered_numbers(home.path(), trimmed), (trimmed + 1..=last).collect::<Vec<_>>());
        }
    }
}
