//! Merges streamed text that is long finished, so that a text of hundreds of small events takes the space of one. A
//! merged row is stored at the seq and number of the first event that it replaces, and remembers all of them: where each
//! ended in its text, with its seq, time and update number. Readers turn it into the same events again, so merging is
//! invisible to them. Only neighbours within their session are merged, and only a limited number of seqs apart, so that
//! a reader need not look far back. Planning reads; the writer carries a plan out in one transaction.
//!
//! Design: docs/design/streamed-text-is-merged.md

use std::ops::ControlFlow;

use qd_protocol::event::MessageDelta;
use qd_protocol::limits::DELTA_MAX;
use qd_protocol::link::UpdateNumber;
use qd_protocol::{EventNumber, Millis, Seq};
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::error::{AppendError, JournalReadError};
use crate::event::SessionKey;
use crate::read::{
    blob_column, damage_error, is_merged, merged_parts, number_column, text_column, update_number_column,
    visit_indexed_rows,
};
use crate::rows::{from_sql_int, to_sql_int};
use crate::schema::INDEXED_THROUGH_SQL;

/// The kinds whose neighbours are merged.
const KINDS: [&str; 2] = ["text.delta", "thought.delta"];
/// The seqs of a merged row lie at most this far apart.
pub(crate) const MERGED_SPAN: u64 = 2048;
/// Rows that one plan merges, about, and so the rows that one transaction deletes.
const PLAN_ROWS: usize = 256;
/// Rows that one plan looks at.
const PLAN_SCAN: usize = 4096;
/// Sessions that are listed in one read.
const PLAN_SESSIONS: usize = 256;
/// What a deleted event takes besides its data, in bytes: its other columns, and its entry in the index.
const ROW_OVERHEAD: u64 = 90;

/// The events that a merged row stands for, in order. They have consecutive numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MergedParts {
    /// The bytes of the data before the text.
    prefix: usize,
    /// The bytes of the data after the text.
    suffix: usize,
    parts: Vec<TextPart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TextPart {
    seq: Seq,
    ts: Millis,
    update_number: Option<UpdateNumber>,
    /// The bytes of the text as it is escaped in JSON. Pieces of JSON strings can be joined and cut between characters
    /// without decoding them.
    length: usize,
}

/// One of the events that a merged row stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MergedPart {
    pub(crate) seq: Seq,
    pub(crate) number: EventNumber,
    pub(crate) ts: Millis,
    pub(crate) update_number: Option<UpdateNumber>,
    pub(crate) data: Vec<u8>,
}

impl MergedParts {
    /// The parts of a row: those that it was merged from, or itself. `None` if its data is not exactly what a delta of
    /// today looks like.
    fn of_row(row: &Row<'_>) -> Result<Option<Self>, JournalReadError> {
        if is_merged(row)? {
            return merged_parts(row).map(Some);
        }
        let (seq, ts) = (Seq(from_sql_int(row.get(0)?)), Millis(from_sql_int(row.get(4)?)));
        Ok(Self::of_event(seq, ts, update_number_column(row)?, blob_column(row, 8)?))
    }

    fn of_event(seq: Seq, ts: Millis, update_number: Option<UpdateNumber>, data: &[u8]) -> Option<Self> {
        const TEXT: &[u8] = br#""text":""#;
        let delta: MessageDelta = serde_json::from_slice(data).ok()?;
        // Fields that this version does not know would be lost, and `after_run` comes behind the text.
        if delta.after_run.is_some() || serde_json::to_vec(&delta).ok()? != data {
            return None;
        }
        // Ids contain no quotes, so this cannot be in the message's id.
        let prefix = data.windows(TEXT.len()).position(|part| part == TEXT)? + TEXT.len();
        let suffix = br#""}"#.len();
        let length = data.len().checked_sub(prefix + suffix)?;
        Some(Self { prefix, suffix, parts: vec![TextPart { seq, ts, update_number, length }] })
    }

    fn text<'a>(&self, data: &'a [u8]) -> &'a [u8] {
        &data[self.prefix..data.len() - self.suffix]
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + 5 * self.parts.len());
        for value in [self.prefix, self.suffix, self.parts.len()] {
            push_number(&mut bytes, value as u64);
        }
        // Each number is stored as its distance from the one before, which is small.
        let mut last = [0; 3];
        for part in &self.parts {
            let update = part.update_number.map_or(0, |number| number.0.wrapping_add(1));
            for (value, last) in [part.seq.0, part.ts.0, update].into_iter().zip(&mut last) {
                push_number(&mut bytes, zigzag(value.wrapping_sub(*last)));
                *last = value;
            }
            push_number(&mut bytes, part.length as u64);
        }
        bytes
    }

    /// Decodes the parts of a row with this data, whose text they must cover exactly.
    pub(crate) fn decode(mut bytes: &[u8], data: &[u8]) -> Option<Self> {
        let mut next = || take_number(&mut bytes);
        let (prefix, suffix, count) = (next()?, next()?, next()?);
        let (prefix, suffix) = (usize::try_from(prefix).ok()?, usize::try_from(suffix).ok()?);
        let (mut parts, mut last) = (Vec::new(), [0_u64; 3]);
        let mut total = prefix.checked_add(suffix)?;
        for _ in 0..count {
            for value in &mut last {
                *value = value.wrapping_add(unzigzag(next()?));
            }
            let length = usize::try_from(next()?).ok()?;
            total = total.checked_add(length)?;
            let [seq, ts, update] = last;
            let update_number = update.checked_sub(1).map(UpdateNumber);
            parts.push(TextPart { seq: Seq(seq), ts: Millis(ts), update_number, length });
        }
        let is_whole = bytes.is_empty() && !parts.is_empty() && total == data.len();
        is_whole.then_some(Self { prefix, suffix, parts })
    }

    /// The events as they were. `first` is the number of the first one.
    pub(crate) fn expand(&self, data: &[u8], first: EventNumber) -> Vec<MergedPart> {
        let (head, tail) = (&data[..self.prefix], &data[data.len() - self.suffix..]);
        let mut at = self.prefix;
        let part = |(number, part): (u64, &TextPart)| {
            let TextPart { seq, ts, update_number, length } = *part;
            let text = &data[at..at + length];
            at += length;
            let (number, data) = (EventNumber(number), [head, text, tail].concat());
            MergedPart { seq, number, ts, update_number, data }
        };
        (first.0..).zip(&self.parts).map(part).collect()
    }
}

/// Maps small distances in both directions to small numbers.
fn zigzag(distance: u64) -> u64 {
    let signed = distance.cast_signed();
    ((signed << 1) ^ (signed >> 63)).cast_unsigned()
}

fn unzigzag(value: u64) -> u64 {
    (value >> 1) ^ (value & 1).wrapping_neg()
}

/// Writes seven bits per byte, the lowest first.
fn push_number(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    bytes.push(value.to_le_bytes()[0]);
}

fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// A session with events that nobody has looked at yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MergeCandidate {
    session: SessionKey,
    /// Everything up to this number was looked at before.
    after: EventNumber,
    /// The number of the session's snapshot. A session is never loaded from events before it.
    snapshot: EventNumber,
}

/// Sessions after a key that have events to look at, in the order of their keys.
fn candidates(db: &Connection, after: SessionKey) -> Result<Vec<MergeCandidate>, JournalReadError> {
    let mut statement = db.prepare_cached(
        "SELECT s.session, s.number, coalesce(m.number, 0) FROM snapshots s
         LEFT JOIN merged_through m ON m.session = s.session
         WHERE s.session > ?1 AND s.number > coalesce(m.number, 0) ORDER BY s.session LIMIT ?2",
    )?;
    let limit = i64::try_from(PLAN_SESSIONS).unwrap_or(i64::MAX);
    let rows = statement.query_map(params![after.0, limit], |row| {
        Ok(MergeCandidate {
            session: SessionKey(row.get(0)?),
            snapshot: EventNumber(from_sql_int(row.get(1)?)),
            after: EventNumber(from_sql_int(row.get(2)?)),
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Where to look next for text to merge. The default is the beginning.
#[derive(Debug, Clone, Default)]
pub struct MergePosition {
    /// Sessions that are still to be looked at, the next one last.
    sessions: Vec<MergeCandidate>,
    /// The last session that was listed.
    listed_through: i64,
}

/// Plans the next transaction from a position on, and returns where to look afterwards; nothing at the end. There may
/// be no plan although there is a next position.
pub(crate) fn plan_next(
    db: &Connection,
    mut position: MergePosition,
    before: Millis,
) -> Result<(Option<MergePlan>, Option<MergePosition>), JournalReadError> {
    if position.sessions.is_empty() {
        position.sessions = candidates(db, SessionKey(position.listed_through))?;
        position.sessions.reverse();
        let Some(last) = position.sessions.first() else { return Ok((None, None)) };
        position.listed_through = last.session.0;
    }
    while let Some(candidate) = position.sessions.pop() {
        if let Some(plan) = plan(db, candidate, before)? {
            position.sessions.push(plan.rest(candidate));
            return Ok((Some(plan), Some(position)));
        }
    }
    Ok((None, Some(position)))
}

/// What the writer is to do for one session in one transaction.
#[derive(Debug)]
pub(crate) struct MergePlan {
    session: SessionKey,
    groups: Vec<MergeGroup>,
    /// Everything up to this number has been looked at.
    through: EventNumber,
}

/// Neighbouring rows that become one.
#[derive(Debug)]
struct MergeGroup {
    kind: String,
    run: String,
    /// Seq and number of each row. The first row stays and gets the data.
    rows: Vec<(Seq, EventNumber)>,
    data: Vec<u8>,
    parts: MergedParts,
    /// The bytes of the rows' data before.
    bytes_before: u64,
}

/// How much merging saves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeSavings {
    /// Events that become part of another one.
    pub events: u64,
    /// The bytes that they take, about.
    pub bytes: u64,
}

impl MergePlan {
    pub(crate) fn savings(&self) -> MergeSavings {
        let mut savings = MergeSavings::default();
        for group in &self.groups {
            let gone = group.rows.len() as u64 - 1;
            let after = group.data.len() + group.parts.encode().len();
            savings.events += gone;
            savings.bytes += (group.bytes_before + gone * ROW_OVERHEAD).saturating_sub(after as u64);
        }
        savings
    }

    /// The session with the rest of its events.
    fn rest(&self, candidate: MergeCandidate) -> MergeCandidate {
        MergeCandidate { after: self.through, ..candidate }
    }
}

/// Plans the next transaction for a session: looks at its next rows, up to its snapshot, to the first one that was decided
/// at `before` or later, and to the first one of an unfinished run. `None` if there are none.
fn plan(
    db: &Connection,
    candidate: MergeCandidate,
    before: Millis,
) -> Result<Option<MergePlan>, JournalReadError> {
    let indexed: i64 = db.query_row(&format!("SELECT {INDEXED_THROUGH_SQL}"), [], |row| row.get(0))?;
    let MergeCandidate { session, after, snapshot } = candidate;
    let mut plan = MergePlan { session, groups: Vec::new(), through: after };
    let mut open: Option<MergeGroup> = None;
    // Whether the run of the last row has finished.
    let mut last_run: Option<(String, bool)> = None;
    let (mut seen, mut merged) = (0, 0);
    let _: ControlFlow<()> = visit_indexed_rows(db, session, to_sql_int(after.0) + 1, |row| {
        let (seq, number) = (row.get::<_, i64>(0)?, number_column(row)?.unwrap_or_default());
        let is_old = row.get::<_, i64>(4)? < to_sql_int(before.0);
        let is_enough = seen == PLAN_SCAN || merged >= PLAN_ROWS;
        if number > snapshot || !is_old || seq > indexed || is_enough {
            return Ok(ControlFlow::Break(()));
        }
        let run = row.get_ref(6)?.as_str_or_null().map_err(damage_error)?;
        if let Some(run) = run
            && last_run.as_ref().is_none_or(|(known, _)| known != run)
        {
            let finished: Option<bool> = db
                .prepare_cached("SELECT finished FROM runs WHERE id = ?1")?
                .query_row([run], |row| row.get(0))
                .optional()?;
            last_run = Some((run.to_owned(), finished.unwrap_or(false)));
        }
        if run.is_some() && last_run.as_ref().is_some_and(|(_, finished)| !finished) {
            return Ok(ControlFlow::Break(()));
        }
        plan.through = number;
        seen += 1;
        let kind = text_column(row, 5)?;
        let parts = if KINDS.contains(&kind) { MergedParts::of_row(row)? } else { None };
        let (Some(run), Some(parts)) = (run, parts) else {
            plan.groups.extend(open.take());
            return Ok(ControlFlow::Continue(()));
        };
        plan.through = EventNumber(number.0 + parts.parts.len() as u64 - 1);
        let data = blob_column(row, 8)?;
        match open.as_mut().filter(|group| group.accepts(kind, run, number, data, &parts)) {
            Some(group) => {
                group.add(number, data, parts);
                merged += 1;
            }
            None => plan.groups.extend(open.replace(MergeGroup::new(kind, run, number, data, parts))),
        }
        Ok(ControlFlow::Continue(()))
    })?;
    plan.groups.extend(open);
    plan.groups.retain(|group| group.rows.len() > 1);
    Ok((seen > 0).then_some(plan))
}

impl MergeGroup {
    fn new(kind: &str, run: &str, number: EventNumber, data: &[u8], parts: MergedParts) -> Self {
        Self {
            kind: kind.to_owned(),
            run: run.to_owned(),
            rows: vec![(parts.parts[0].seq, number)],
            data: data.to_vec(),
            parts,
            bytes_before: data.len() as u64,
        }
    }

    /// Whether a row continues this text: the next one of its session, of the same kind, run and message.
    fn accepts(&self, kind: &str, run: &str, number: EventNumber, data: &[u8], parts: &MergedParts) -> bool {
        let next = self.rows[0].1.0 + self.parts.parts.len() as u64;
        let span = parts.parts[parts.parts.len() - 1].seq.0 - self.rows[0].0.0;
        self.kind == kind
            && self.run == run
            && number.0 == next
            && span < MERGED_SPAN
            && self.parts.suffix == parts.suffix
            && self.data[..self.parts.prefix] == data[..parts.prefix]
            && self.data.len() + parts.text(data).len() <= DELTA_MAX
    }

    fn add(&mut self, number: EventNumber, data: &[u8], parts: MergedParts) {
        let end = self.data.len() - self.parts.suffix;
        let tail = self.data.split_off(end);
        self.data.extend_from_slice(parts.text(data));
        self.data.extend_from_slice(&tail);
        self.rows.push((parts.parts[0].seq, number));
        self.parts.parts.extend(parts.parts);
        self.bytes_before += data.len() as u64;
    }
}

/// Carries out a plan in one transaction. Returns false, with nothing changed, if the events are not there any more
/// because the session was purged.
pub(crate) fn carry_out(db: &Connection, plan: &MergePlan) -> Result<bool, AppendError> {
    let transaction = db.unchecked_transaction()?;
    for group in &plan.groups {
        let Some(((first, _), gone)) = group.rows.split_first() else { continue };
        let mut delete = db.prepare_cached("DELETE FROM events WHERE gid = ?1 AND session = ?2")?;
        let mut forget =
            db.prepare_cached("DELETE FROM session_events WHERE session = ?1 AND number = ?2")?;
        for (seq, number) in gone {
            let deleted = delete.execute([to_sql_int(seq.0), plan.session.0])?;
            let forgotten = forget.execute([plan.session.0, to_sql_int(number.0)])?;
            if (deleted, forgotten) != (1, 1) {
                return Ok(false);
            }
        }
        let updated = db
            .prepare_cached("UPDATE events SET data = ?1, parts = ?2 WHERE gid = ?3 AND session = ?4")?
            .execute(params![group.data, group.parts.encode(), to_sql_int(first.0), plan.session.0])?;
        if updated != 1 {
            return Ok(false);
        }
    }
    db.prepare_cached(
        "INSERT OR REPLACE INTO merged_through(session, number)
         SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM snapshots WHERE session = ?1)",
    )?
    .execute([plan.session.0, to_sql_int(plan.through.0)])?;
    transaction.commit()?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(texts: &[(u64, u64, Option<u64>, &str)]) -> MergeGroup {
        let mut group: Option<MergeGroup> = None;
        for (number, (seq, ts, update, text)) in (9..).map(EventNumber).zip(texts) {
            let data = serde_json::json!({ "message_id": "msg_1", "text": text }).to_string().into_bytes();
            let parts =
                MergedParts::of_event(Seq(*seq), Millis(*ts), update.map(UpdateNumber), &data).unwrap();
            match &mut group {
                None => group = Some(MergeGroup::new("text.delta", "run_1", number, &data, parts)),
                Some(group) => {
                    assert!(group.accepts("text.delta", "run_1", number, &data, &parts));
                    group.add(number, &data, parts);
                }
            }
        }
        group.unwrap()
    }

    #[test]
    fn a_merged_row_expands_to_the_events_that_it_replaced() {
        let texts = [
            (3, 1_794_774_645_123, None, "a \"quoted\"\n"),
            (7, 1_794_774_645_123, Some(0), ""),
            (900, 1_794_774_645_001, Some(u64::MAX - 1), "ünï\u{1}"),
            (901, 1_794_774_999_999, Some(5), "\\end"),
        ];
        let group = merged(&texts);
        let delta: MessageDelta = serde_json::from_slice(&group.data).unwrap();
        assert_eq!(delta.text, texts.map(|(.., text)| text).concat());
        let parts = MergedParts::decode(&group.parts.encode(), &group.data).unwrap();
        assert_eq!(parts, group.parts);
        let expanded = parts.expand(&group.data, EventNumber(9));
        assert_eq!(expanded.len(), texts.len());
        for ((part, (seq, ts, update, text)), number) in expanded.iter().zip(texts).zip(9..) {
            assert_eq!((part.seq, part.ts, part.number), (Seq(seq), Millis(ts), EventNumber(number)));
            assert_eq!(part.update_number, update.map(UpdateNumber));
            let data = serde_json::json!({ "message_id": "msg_1", "text": text }).to_string();
            assert_eq!(part.data, data.as_bytes());
        }
    }

    #[test]
    fn parts_that_do_not_fit_their_text_are_damage() {
        let MergeGroup { data, parts, .. } = merged(&[(1, 5, None, "one"), (2, 6, Some(3), "two")]);
        let bytes = parts.encode();
        assert_eq!(MergedParts::decode(&bytes, &data).unwrap(), parts);
        for length in 0..bytes.len() {
            assert_eq!(MergedParts::decode(&bytes[..length], &data), None);
        }
        assert_eq!(MergedParts::decode(&bytes, &data[1..]), None);
        assert_eq!(MergedParts::decode(&[0xff; 30], &data), None);
    }

    #[test]
    fn only_data_that_can_be_joined_is_merged() {
        let parts = |data: &str| MergedParts::of_event(Seq(1), Millis(1), None, data.as_bytes());
        for other in [
            r#"{"message_id":"msg_1","text":"a","after_run":"run_1"}"#,
            r#"{"message_id":"msg_1","text":"a","new":1}"#,
            r#"{"text":"a","message_id":"msg_1"}"#,
            r#"{"message_id": "msg_1","text":"a"}"#,
            r#"{"text":"\u0041"}"#,
        ] {
            assert_eq!(parts(other), None, "{other}");
        }
        assert!(parts(r#"{"text":""}"#).is_some());
        let group = merged(&[(1, 1, None, "a")]);
        let accepts = |kind, run, number, data: &str, seq| {
            let parts = MergedParts::of_event(Seq(seq), Millis(1), None, data.as_bytes()).unwrap();
            group.accepts(kind, run, EventNumber(number), data.as_bytes(), &parts)
        };
        let next = r#"{"message_id":"msg_1","text":"b"}"#;
        assert!(accepts("text.delta", "run_1", 10, next, 2048));
        assert!(!accepts("text.delta", "run_1", 10, next, 2049), "too far apart");
        assert!(!accepts("text.delta", "run_1", 11, next, 3), "not the next event of its session");
        assert!(!accepts("thought.delta", "run_1", 10, next, 3));
        assert!(!accepts("text.delta", "run_2", 10, next, 3));
        assert!(!accepts("text.delta", "run_1", 10, r#"{"message_id":"msg_2","text":"b"}"#, 3));
    }
}
