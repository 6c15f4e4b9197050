//! The file `journal.db` before SQLite opens it. A new one is built beside its place and renamed into it, so a kill
//! leaves either no journal or a whole one. An existing one is inspected first: SQLite takes an empty file for a new
//! database and deletes the log beside it, so anything that is not a whole journal of ours is refused and left alone.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rusqlite::Connection;

use crate::error::JournalOpenError;
use crate::schema::{self, APPLICATION_ID, DATABASE_FILE, LOG_FILE};

/// A journal that is being built. Its whole content is worthless until it is renamed.
const NEW_FILE: &str = "journal.db.new";
/// What SQLite appends to the name of a database for the files beside it.
const SIDE_FILES: [&str; 3] = ["-wal", "-shm", "-journal"];

const MAGIC: &[u8] = b"SQLite format 3\0";
const HEADER_BYTES: usize = 100;
const LOG_HEADER_BYTES: usize = 32;
const LOG_FRAME_HEADER_BYTES: usize = 24;
/// The log's magic number. Its lowest bit says whether checksums read the log as big-endian words.
const LOG_MAGIC: u32 = 0x377f_0682;
/// SQLite never uses the page with this byte of the file, where it places its locks.
const LOCK_BYTE: u64 = 0x4000_0000;

/// Checks that `journal.db` is a whole journal of ours, as far as its size and its header tell. Changes nothing. The
/// caller holds the home's lock, or knows that no daemon runs.
pub fn inspect_journal(home: &Path) -> Result<(), JournalOpenError> {
    match find_journal(home)? {
        Some(()) => Ok(()),
        None => Err(JournalOpenError::Missing { sign: None }),
    }
}

/// Creates the journal unless there is one. A home that has a history but no journal is refused.
pub(crate) fn ensure_journal(home: &Path) -> Result<(), JournalOpenError> {
    remove_unfinished(home)?;
    if find_journal(home)?.is_some() {
        return Ok(());
    }
    match sign_of_history(home) {
        Some(sign) => Err(JournalOpenError::Missing { sign: Some(sign) }),
        None => create(home, |_| Ok::<_, JournalOpenError>(())),
    }
}

/// Builds another journal and puts it in the place of the old one, whose log must be empty and which nobody may use.
pub(crate) fn replace_journal<E: From<JournalOpenError>>(
    home: &Path,
    fill: impl FnOnce(&Connection) -> Result<(), E>,
) -> Result<(), E> {
    remove_unfinished(home)?;
    create(home, fill)
}

/// Inspects the file; `None` if it does not exist.
fn find_journal(home: &Path) -> Result<Option<()>, JournalOpenError> {
    let doing = "read journal.db";
    let mut file = match File::open(home.join(DATABASE_FILE)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(JournalOpenError::io(doing)(error)),
    };
    let length = file.metadata().map_err(JournalOpenError::io(doing))?.len();
    if length == 0 {
        return Err(JournalOpenError::Empty);
    }
    let mut header = [0; HEADER_BYTES];
    match file.read_exact(&mut header) {
        Ok(()) if header.starts_with(MAGIC) => {}
        Ok(()) => return Err(JournalOpenError::NotADatabase),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(JournalOpenError::Truncated { found: length, expected: None });
        }
        Err(error) => return Err(JournalOpenError::io(doing)(error)),
    }
    let log =
        CommittedLog::read(&home.join(LOG_FILE)).map_err(JournalOpenError::io("read journal.db-wal"))?;
    judge_header(&header, length, log.as_ref()).map(Some)
}

/// Judges a database by its header, or by the newer one in the log, and by its length. `length` is that of the file.
fn judge_header(
    header: &[u8; HEADER_BYTES],
    length: u64,
    log: Option<&CommittedLog>,
) -> Result<(), JournalOpenError> {
    let newest = log.and_then(|log| log.header.as_ref()).unwrap_or(header);
    if i64::from(word(newest, 68)) != APPLICATION_ID {
        return Err(JournalOpenError::Foreign);
    }
    schema::check_version(i64::from(word(newest, 60)))?;
    let page_size = match u64::from(u16::from_be_bytes([header[16], header[17]])) {
        // 65536 does not fit into the field.
        1 => 65536,
        size if size.is_power_of_two() && size >= 512 => size,
        _ => return Err(JournalOpenError::NotADatabase),
    };
    let complete = length / page_size;
    let expected = match log {
        Some(log) => u64::from(log.pages),
        // The number of pages is valid only if it was written together with the last change.
        None if word(header, 24) == word(header, 92) => u64::from(word(header, 28)),
        None => complete,
    };
    let in_log = |page: u64| log.is_some_and(|log| log.changed.contains(&page));
    let lock_page = LOCK_BYTE / page_size + 1;
    match (complete + 1..=expected).any(|page| page != lock_page && !in_log(page)) {
        true => Err(JournalOpenError::Truncated { found: length, expected: Some(expected * page_size) }),
        false => Ok(()),
    }
}

/// What the committed transactions in SQLite's log say about the database. A start after a crash finds such a log.
struct CommittedLog {
    /// The beginning of page 1, if the log has it.
    header: Option<[u8; HEADER_BYTES]>,
    /// The pages that the log has.
    changed: HashSet<u64>,
    /// The number of pages of the database after the last transaction.
    pages: u32,
}

impl CommittedLog {
    /// Reads the log up to its last whole transaction, as SQLite does. `None` if there is no such transaction.
    fn read(path: &Path) -> io::Result<Option<Self>> {
        let mut file = match File::open(path) {
            Ok(file) => BufReader::with_capacity(1 << 18, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut head = [0; LOG_HEADER_BYTES];
        if !fill(&mut file, &mut head)? || word(&head, 0) & !1 != LOG_MAGIC {
            return Ok(None);
        }
        let big_endian = word(&head, 0) & 1 == 1;
        let page_size = word(&head, 8);
        let mut sum = checksum((0, 0), &head[..24], big_endian);
        if sum != (word(&head, 24), word(&head, 28)) || !(512..=65536).contains(&page_size) {
            return Ok(None);
        }
        let mut frame = vec![0; LOG_FRAME_HEADER_BYTES + page_size as usize];
        let (mut committed, mut header): (Option<Self>, Option<[u8; HEADER_BYTES]>) = (None, None);
        let mut changed = Vec::new();
        while fill(&mut file, &mut frame)? {
            let (info, page) = frame.split_at(LOG_FRAME_HEADER_BYTES);
            sum = checksum(checksum(sum, &info[..8], big_endian), page, big_endian);
            if info[8..16] != head[16..24] || sum != (word(info, 16), word(info, 20)) {
                break;
            }
            changed.push(u64::from(word(info, 0)));
            if word(info, 0) == 1 {
                header = page[..HEADER_BYTES].try_into().ok();
            }
            let pages = word(info, 4);
            if pages > 0 {
                let log =
                    committed.get_or_insert_with(|| Self { header: None, changed: HashSet::new(), pages });
                log.pages = pages;
                log.changed.extend(changed.drain(..));
                log.header = header.or(log.header);
            }
        }
        Ok(committed)
    }
}

/// Fills a buffer. False if the file ends before.
fn fill(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match file.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// A big-endian number in a header.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Continues the checksum of SQLite's log. The length is a multiple of 8.
fn checksum((mut first, mut second): (u32, u32), bytes: &[u8], big_endian: bool) -> (u32, u32) {
    for pair in bytes.chunks_exact(8) {
        let read = |at: usize| match big_endian {
            true => word(pair, at),
            false => word(pair, at).swap_bytes(),
        };
        first = first.wrapping_add(read(0)).wrapping_add(second);
        second = second.wrapping_add(read(4)).wrapping_add(first);
    }
    (first, second)
}

/// A file that only a daemon with a journal leaves in a home.
fn sign_of_history(home: &Path) -> Option<String> {
    let log = home.join(LOG_FILE);
    if log.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        return Some(LOG_FILE.to_owned());
    }
    // `workers/key` and `worktrees/scratch` say nothing about any session.
    let is_neutral = |name: &str| matches!(name, "key" | "scratch" | "spool") || name.starts_with('.');
    for folder in ["blobs", "mail", "secrets", "worktrees", "workers/spool", "workers"] {
        let Ok(entries) = fs::read_dir(home.join(folder)) else { continue };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        if let Some(name) = names.into_iter().find(|name| !is_neutral(name)) {
            return Some(format!("{folder}/{name}"));
        }
    }
    None
}

/// Removes what a killed creation has left.
fn remove_unfinished(home: &Path) -> Result<(), JournalOpenError> {
    for suffix in [""].iter().chain(&SIDE_FILES) {
        match fs::remove_file(home.join(format!("{NEW_FILE}{suffix}"))) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(JournalOpenError::io("remove an unfinished journal.db.new")(error)),
        }
    }
    Ok(())
}

/// Builds a journal, which `fill` may fill, and puts it into its place.
fn create<E: From<JournalOpenError>>(
    home: &Path,
    fill: impl FnOnce(&Connection) -> Result<(), E>,
) -> Result<(), E> {
    let doing = "create journal.db";
    let path = home.join(NEW_FILE);
    // Created here, so that it and SQLite's files next to it are private to the owner whatever the umask is.
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(JournalOpenError::io(doing))?;
    schema::build(&path, fill)?;
    // The log was moved into the file when the connection was closed. One that is left would hold part of the journal.
    if home.join(format!("{NEW_FILE}-wal")).exists() {
        return Err(JournalOpenError::Refused("wal_checkpoint(TRUNCATE)").into());
    }
    file.sync_all()
        .and_then(|()| fs::rename(&path, home.join(DATABASE_FILE)))
        .and_then(|()| File::open(home)?.sync_all())
        .map_err(JournalOpenError::io(doing))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(home: &Path) -> JournalOpenError {
        ensure_journal(home).unwrap_err()
    }

    #[test]
    fn a_new_journal_is_whole_and_alone_when_it_appears() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join(NEW_FILE), "half").unwrap();
        fs::write(home.path().join(format!("{NEW_FILE}-wal")), "half").unwrap();
        ensure_journal(home.path()).unwrap();
        let names: Vec<_> =
            fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [DATABASE_FILE], "no leftovers");
        let first = fs::read(home.path().join(DATABASE_FILE)).unwrap();
        ensure_journal(home.path()).unwrap();
        assert_eq!(fs::read(home.path().join(DATABASE_FILE)).unwrap(), first);
    }

    #[test]
    fn files_that_are_no_whole_journal_are_refused_by_name_and_not_touched() {
        let home = tempfile::tempdir().unwrap();
        ensure_journal(home.path()).unwrap();
        let file = home.path().join(DATABASE_FILE);
        let whole = fs::read(&file).unwrap();
        let mut foreign = whole.clone();
        foreign[68..72].fill(0);
        let mut headless = whole.clone();
        headless[..4096].fill(0);
        let truncated = whole[..whole.len() - 4096].to_vec();
        let short = whole[..50].to_vec();
        for (content, words) in [
            (Vec::new(), "is empty"),
            (foreign, "not a Quarterdeck journal"),
            (headless, "not an SQLite database"),
            (truncated, "is cut short"),
            (short, "is cut short"),
            (b"hello, this is not a database at all, but it has more than one hundred bytes: xxxxxxxxxxxxxxxxxxxxxxxxx".to_vec(), "not an SQLite database"),
        ] {
            fs::write(&file, &content).unwrap();
            let log = home.path().join(LOG_FILE);
            fs::write(&log, "not a log").unwrap();
            let message = refusal(home.path()).to_string();
            assert!(message.contains(words), "{words}: {message}");
            assert!(message.contains("restore"), "{message}");
            assert_eq!(fs::read(&file).unwrap(), content, "{words}");
            assert_eq!(fs::read(&log).unwrap(), b"not a log", "{words}");
        }
    }

    #[test]
    fn a_home_with_a_history_but_no_journal_is_refused() {
        for sign in [
            "journal.db-wal",
            "blobs/abc",
            "mail/ses_1",
            "secrets/ses_1.json",
            "worktrees/ses_1",
            "workers/w.json",
            "workers/spool/w",
        ] {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join(sign);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
            let message = refusal(home.path()).to_string();
            assert!(message.contains("journal.db is missing") && message.contains(sign), "{message}");
            assert!(!home.path().join(DATABASE_FILE).exists());
            assert_eq!(fs::read(&path).unwrap(), b"x");
        }
        let home = tempfile::tempdir().unwrap();
        for neutral in ["workers/key", "token", "config.toml", "agents/mine.toml", "journal.db-shm"] {
            let path = home.path().join(neutral);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "x").unwrap();
        }
        ensure_journal(home.path()).unwrap();
    }

    /// A crash in the middle of a checkpoint leaves a file that is shorter than its header says, and the rest in the log.
    #[test]
    fn pages_that_are_only_in_the_log_are_not_missing() {
        let home = tempfile::tempdir().unwrap();
        ensure_journal(home.path()).unwrap();
        let db = schema::open_writer(home.path()).unwrap();
        db.execute_batch(
            "PRAGMA user_version = 1; CREATE TABLE pad(a); INSERT INTO pad VALUES (zeroblob(60000));",
        )
        .unwrap();
        let crashed = tempfile::tempdir().unwrap();
        for name in [DATABASE_FILE, LOG_FILE] {
            fs::copy(home.path().join(name), crashed.path().join(name)).unwrap();
        }
        inspect_journal(crashed.path()).unwrap();
        let log = CommittedLog::read(&crashed.path().join(LOG_FILE)).unwrap().unwrap();
        let length = crashed.path().join(DATABASE_FILE).metadata().unwrap().len();
        assert!(u64::from(log.pages) > length / 4096 + 10, "{} pages, {length} bytes", log.pages);
        assert_eq!(word(&log.header.unwrap(), 60), 1, "the version in the log wins");
        // A page that is neither in the file nor in the log is missing.
        let file = OpenOptions::new().write(true).open(crashed.path().join(DATABASE_FILE)).unwrap();
        file.set_len(3 * 4096).unwrap();
        assert!(matches!(inspect_journal(crashed.path()), Err(JournalOpenError::Truncated { .. })));
    }

    #[test]
    fn a_log_counts_only_up_to_its_last_whole_transaction() {
        let home = tempfile::tempdir().unwrap();
        ensure_journal(home.path()).unwrap();
        let db = schema::open_writer(home.path()).unwrap();
        db.execute_batch("PRAGMA user_version = 1; PRAGMA user_version = 2;").unwrap();
        let path = home.path().join(LOG_FILE);
        let whole = fs::read(&path).unwrap();
        let version = |content: &[u8]| {
            let copy = home.path().join("copy");
            fs::write(&copy, content).unwrap();
            CommittedLog::read(&copy).unwrap().map(|log| word(&log.header.unwrap(), 60))
        };
        assert_eq!(version(&whole), Some(2));
        let mut torn = whole.clone();
        let end = torn.len();
        torn[end - 4000..].fill(0);
        assert_eq!(version(&torn), Some(1), "the checksum of the last page does not match");
        assert_eq!(version(&whole[..LOG_HEADER_BYTES + 100]), None);
        assert_eq!(version(b""), None);
    }
}
