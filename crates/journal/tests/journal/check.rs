//! The check of all rows: a sound journal has no damage, and a page that was overwritten is reported with its table, its
//! rows and the sessions it belongs to.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use qd_journal::{AppendRequest, Journal, NewEvent, RowChange, SessionKey};
use qd_protocol::EventNumber;
use qd_protocol::api::JournalCheckReport;

use crate::fixture::*;

const PAGE: u64 = 4096;
const EVENTS: u64 = 3000;

/// Runs a check to its end.
async fn check(journal: &Journal) -> JournalCheckReport {
    let mut check = journal.begin_check().await.unwrap();
    while check.step().unwrap() {}
    check.into_report()
}

/// A journal of two sessions whose events take turns, with long ones among them, and some rows. It is closed, so that
/// everything is in the file.
async fn filled_home() -> tempfile::TempDir {
    let JournalFixture { home, journal, .. } = JournalFixture::new();
    for number in 1..=EVENTS / 2 {
        let long = |session: i64| {
            let data = match number % 500 {
                0 => format!(r#"{{"text":"{}"}}"#, "long".repeat(4000)),
                _ => format!(r#"{{"text":"event {number} of session {session}, of a usual length"}}"#),
            };
            NewEvent {
                data: data.into_bytes(),
                number: Some(EventNumber(number)),
                ..event(&scope(session), number)
            }
        };
        let rows = match number <= 200 {
            true => vec![RowChange::Session(session_row(i64::try_from(number).unwrap()))],
            false => Vec::new(),
        };
        let append = AppendRequest { events: vec![long(1), long(2)], rows, ..AppendRequest::default() };
        journal.append(append).await.unwrap();
    }
    journal.close().await;
    home
}

/// The pages of a table or index, leaves and overflow pages included, with the way to each.
fn pages_of(home: &Path, name: &str) -> Vec<u64> {
    let db = rusqlite::Connection::open(home.join("journal.db")).unwrap();
    let root: i64 =
        db.query_row("SELECT rootpage FROM sqlite_schema WHERE name = ?1", [name], |row| row.get(0)).unwrap();
    let file = OpenOptions::new().read(true).open(home.join("journal.db")).unwrap();
    let page = |number: u64| {
        let mut bytes = vec![0; PAGE as usize];
        file.read_exact_at(&mut bytes, (number - 1) * PAGE).unwrap();
        bytes
    };
    let (mut found, mut open) = (Vec::new(), vec![root as u64]);
    while let Some(number) = open.pop() {
        let bytes = page(number);
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        match bytes[0] {
            2 | 5 => {
                let cells = u16::from_be_bytes([bytes[3], bytes[4]]);
                for cell in 0..usize::from(cells) {
                    let at = usize::from(u16::from_be_bytes([bytes[12 + 2 * cell], bytes[13 + 2 * cell]]));
                    open.push(u64::from(word(at)));
                }
                open.push(u64::from(word(8)));
            }
            _ => found.push(number),
        }
    }
    found.sort_unstable();
    found
}

fn zero_page(home: &Path, page: u64) {
    let file = OpenOptions::new().write(true).open(home.join("journal.db")).unwrap();
    file.write_all_at(&vec![0; PAGE as usize], (page - 1) * PAGE).unwrap();
}

#[tokio::test]
async fn a_sound_journal_has_no_damage_and_every_row_is_read() {
    let home = filled_home().await;
    let journal = open(home.path());
    let report = check(&journal).await;
    assert_eq!(report.damage, []);
    // Each event is in `events` and in the index; there are 200 sessions with names, and a few counters.
    assert!((2 * EVENTS + 400..2 * EVENTS + 410).contains(&report.rows), "{}", report.rows);
    assert!(report.bytes > 100_000);
}

#[tokio::test]
async fn a_zeroed_page_of_events_is_reported_with_its_seqs_and_sessions() {
    let home = filled_home().await;
    let pages = pages_of(home.path(), "events");
    assert!(pages.len() > 30, "{} pages", pages.len());
    zero_page(home.path(), pages[pages.len() / 2]);
    let journal = open(home.path());
    let report = check(&journal).await;
    let [damage] = &report.damage[..] else { panic!("{:?}", report.damage) };
    assert_eq!((damage.table.as_str(), damage.rebuildable), ("events", false));
    let (first, last) = (damage.first.unwrap(), damage.last.unwrap());
    assert!(first > 100 && last < EVENTS && (5..200).contains(&(last - first + 1)), "{first} to {last}");
    assert_eq!(damage.sessions, ["ses_0001", "ses_0002"]);
    // Exactly the rows outside of the reported range can be read.
    let db = rusqlite::Connection::open(home.path().join("journal.db")).unwrap();
    let reads = |seq: u64| {
        db.query_row("SELECT gid FROM events WHERE gid = ?1", [seq as i64], |row| row.get::<_, i64>(0))
            .is_ok()
    };
    assert!(reads(first - 1) && reads(last + 1));
    assert!((first..=last).all(|seq| !reads(seq)));
    let text = damage.to_string();
    assert!(
        text.starts_with(&format!(
            "the table events is damaged from seq {first} to {last}, in events of ses_0001"
        )),
        "{text}"
    );
}

#[tokio::test]
async fn every_zeroed_page_of_any_table_or_index_is_found() {
    let home = filled_home().await;
    let copy = tempfile::tempdir().unwrap();
    let names = ["events", "session_events", "sessions", "sessions_by_workspace", "sessions_open"];
    for name in names {
        let pages = pages_of(home.path(), name);
        // All pages of the small tables, and a part of the large ones.
        for page in pages.iter().step_by(pages.len().div_ceil(7)) {
            std::fs::copy(home.path().join("journal.db"), copy.path().join("journal.db")).unwrap();
            zero_page(copy.path(), *page);
            let journal = match Journal::open(copy.path(), Default::default()) {
                Ok(journal) => journal,
                Err(refused) => {
                    assert!(refused.to_string().contains("damaged"), "{name}: {refused}");
                    continue;
                }
            };
            let report = check(&journal).await;
            let table = if name.starts_with("sessions") { "sessions" } else { name };
            assert!(!report.damage.is_empty(), "page {page} of {name}");
            assert!(report.damage.iter().all(|damage| damage.table == table), "{name}: {:?}", report.damage);
            assert!(report.damage.iter().all(|damage| damage.rebuildable == (table != "events")));
            journal.close().await;
            rebuild_if_possible(copy.path(), table != "events").await;
        }
    }
}

/// A rebuild makes a sound journal of one whose rows are damaged, and leaves one alone whose events are.
async fn rebuild_if_possible(home: &Path, is_possible: bool) {
    let before = check(&open(home)).await;
    let rebuilt = qd_journal::rebuild(home, |_| Vec::new());
    if !is_possible {
        assert!(rebuilt.is_err());
        assert_eq!(check(&open(home)).await, before);
        return;
    }
    assert_eq!(rebuilt.unwrap(), EVENTS);
    let journal = open(home);
    assert_eq!(check(&journal).await.damage, []);
    assert_eq!(all(&journal, &everything()).await.len() as u64, EVENTS);
    assert_eq!(journal.load(SessionKey(2)).await.unwrap().events.len() as u64, EVENTS / 2);
    journal.close().await;
}

#[tokio::test]
async fn a_zeroed_page_of_a_long_event_is_reported_with_its_seq() {
    let home = filled_home().await;
    let db = rusqlite::Connection::open(home.path().join("journal.db")).unwrap();
    let seq: i64 = db
        .query_row("SELECT gid FROM events WHERE length(data) > 10000 ORDER BY gid LIMIT 1", [], |row| {
            row.get(0)
        })
        .unwrap();
    drop(db);
    let content = std::fs::read(home.path().join("journal.db")).unwrap();
    // Overflow pages hold nothing but the number of the next one and the text.
    let is_overflow = |page: &[u8]| page[4..].iter().all(|byte| b"long".contains(byte));
    let pages: Vec<u64> = content
        .chunks(PAGE as usize)
        .zip(1..)
        .filter(|(page, _)| is_overflow(page))
        .map(|(_, number)| number)
        .collect();
    assert!(!pages.is_empty());
    zero_page(home.path(), pages[0]);
    let journal = open(home.path());
    let report = check(&journal).await;
    let [damage] = &report.damage[..] else { panic!("{:?}", report.damage) };
    assert_eq!(damage.table, "events");
    assert_eq!(damage.first, damage.last);
    assert!(damage.first.unwrap() as i64 >= seq);
    assert_eq!(damage.sessions.len(), 1);
}
