//! What happens when the storage fails: nothing is acknowledged, the error names the cause, and the journal works again
//! once there is space. Most tests fill the disk by limiting the database's pages; one uses a real, small file system.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use qd_journal::faults::FaultInjector;
use qd_journal::{AppendError, AppendRequest, Journal, JournalOpenError, JournalOptions, NewEvent};
use qd_protocol::Seq;
use qd_protocol::limits::RESERVE_BYTES;

use crate::fixture::*;

fn large(number: u64, may_use_reserve: bool) -> AppendRequest {
    let data = format!(r#"{{"text":"{}"}}"#, "x".repeat(100_000)).into_bytes();
    AppendRequest {
        events: vec![NewEvent { data, ..event(&scope(1), number) }],
        may_use_reserve,
        ..AppendRequest::default()
    }
}

/// Appends until the disk is full. Returns the number of the first event that did not fit.
async fn fill(journal: &Journal) -> u64 {
    for number in 1.. {
        match journal.append(large(number, false)).await {
            Ok(_) => assert!(number < 10_000, "the disk does not fill"),
            Err(error) => {
                assert_eq!(error, AppendError::Full);
                return number;
            }
        }
    }
    unreachable!("numbers do not end")
}

#[tokio::test]
async fn on_a_full_disk_nothing_is_acknowledged_and_the_reserve_is_for_cancels_and_ends() {
    let fixture = JournalFixture::new();
    let mut watcher = fixture.journal.subscribe(everything(), None);
    fixture.faults.page_limit.store(200, SeqCst);
    let number = fill(&fixture.journal).await;
    assert_eq!(fixture.journal.head(), Seq(number - 1));
    assert!(fixture.home.path().join("reserve").exists(), "an ordinary append does not touch the reserve");
    // The end of a run still fits.
    fixture.journal.append(large(number, true)).await.unwrap();
    assert_eq!(fixture.journal.head(), Seq(number));
    assert!(fixture.journal.stats().failed_commits.load(Relaxed) > 0);
    // Once there is space again, appends work and the reserve is recreated.
    fixture.faults.page_limit.store(0, SeqCst);
    fixture.journal.append(large(number + 1, false)).await.unwrap();
    assert_eq!(std::fs::metadata(fixture.home.path().join("reserve")).unwrap().len(), RESERVE_BYTES);
    let mut seen = 0;
    while seen < number + 1 {
        for event in watcher.next().await.unwrap() {
            seen += 1;
            assert_eq!(event.seq.0, seen);
        }
    }
    assert_eq!(fixture.journal.quick_check().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn while_the_reserve_is_spent_ordinary_appends_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let faults = Arc::new(FaultInjector::default());
    // A retry time so long that the reserve is never recreated.
    let options = JournalOptions {
        reserve_retry: std::time::Duration::from_secs(3600),
        faults: Some(faults.clone()),
        ..JournalOptions::default()
    };
    let journal = Journal::open(home.path(), options).unwrap();
    faults.page_limit.store(200, SeqCst);
    let number = fill(&journal).await;
    journal.append(large(number, true)).await.unwrap();
    assert_eq!(journal.stats().reserve_spent.load(Relaxed), 1);
    faults.page_limit.store(0, SeqCst);
    assert_eq!(journal.append(large(number + 1, false)).await, Err(AppendError::Full));
    journal.append(large(number + 1, true)).await.unwrap();
    journal.close().await;
    // The next start recreates the reserve or fails.
    let journal = open(home.path());
    assert!(home.path().join("reserve").exists());
    journal.append(large(number + 2, false)).await.unwrap();
}

#[tokio::test]
async fn a_read_only_disk_is_named_as_such() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    fixture.faults.read_only.store(true, SeqCst);
    let refused = append(&fixture.journal, &scope(1), 2).await.unwrap_err();
    assert_eq!(
        (&refused, refused.code(), refused.retryable()),
        (&AppendError::ReadOnly, "storage_read_only", true)
    );
    assert_eq!(fixture.journal.head(), Seq(1));
    fixture.faults.read_only.store(false, SeqCst);
    assert_eq!(append(&fixture.journal, &scope(1), 2).await.unwrap().first, Seq(2));
}

#[tokio::test]
async fn a_failed_commit_acknowledges_and_shows_nothing_and_the_next_one_works() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    let mut watcher = fixture.journal.subscribe(everything(), None);
    fixture.faults.failing_commits.store(2, SeqCst);
    for _ in 0..2 {
        let refused = append(&fixture.journal, &scope(1), 2).await.unwrap_err();
        assert!(matches!(refused, AppendError::Io(_)) && refused.retryable(), "{refused:?}");
        assert_eq!(fixture.journal.head(), Seq(1));
        assert_eq!(seqs(&all(&fixture.journal, &everything()).await), [1]);
    }
    append(&fixture.journal, &scope(1), 2).await.unwrap();
    assert_eq!(seqs(&watcher.next().await.unwrap()), [2]);
    let fixture = fixture.reopen().await;
    assert_eq!(seqs(&all(&fixture.journal, &everything()).await), [1, 2]);
}

#[tokio::test]
async fn a_home_has_one_owner_and_the_second_is_told_who_it_is() {
    let fixture = JournalFixture::new();
    match Journal::open(fixture.home.path(), JournalOptions::default()) {
        Err(JournalOpenError::HomeLocked { pid }) => assert_eq!(pid, Some(std::process::id())),
        other => panic!("{other:?}"),
    }
    let JournalFixture { home, journal, .. } = fixture;
    let clone = journal.clone();
    drop(journal);
    assert!(matches!(
        Journal::open(home.path(), JournalOptions::default()),
        Err(JournalOpenError::HomeLocked { .. })
    ));
    drop(clone);
    open(home.path());
}

#[tokio::test]
async fn a_journal_of_a_newer_version_is_not_touched() {
    let fixture = JournalFixture::new();
    append(&fixture.journal, &scope(1), 1).await.unwrap();
    fixture.journal.close().await;
    let file = fixture.home.path().join("journal.db");
    let db = rusqlite::Connection::open(&file).unwrap();
    db.pragma_update(None, "user_version", 1000).unwrap();
    drop(db);
    let refused = Journal::open(fixture.home.path(), JournalOptions::default()).unwrap_err();
    assert!(matches!(refused, JournalOpenError::TooNew { found: 1000, .. }));
    assert!(refused.to_string().contains("newer"), "{refused}");
}

/// Mounts a small, private file system and runs this test again on it.
#[tokio::test]
async fn a_really_full_disk_behaves_like_the_injected_one() {
    if let Some(small) = std::env::var_os("SMALL") {
        return in_a_small_home(Path::new(&small)).await;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=40m none "$SMALL" && exec "$0" --exact "$1" --nocapture"#;
    // Without root, `unshare -r` makes us root in a user namespace.
    let flags = if rustix::process::geteuid().is_root() { "-m" } else { "-rm" };
    let output = std::process::Command::new("unshare")
        .args([flags, "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg("storage::a_really_full_disk_behaves_like_the_injected_one")
        .env("SMALL", dir.path())
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

async fn in_a_small_home(small: &Path) {
    let home = small.join("home");
    let journal = Journal::open(&home, options(&Arc::default())).unwrap();
    let number = fill(&journal).await;
    assert!(number > 50, "{number}");
    for end in number..number + 10 {
        journal.append(large(end, true)).await.unwrap();
    }
    assert_eq!(journal.head(), Seq(number + 9));
    assert_eq!(journal.append(large(number + 10, false)).await, Err(AppendError::Full));
    journal.close().await;
    // A home without space for the reserve is refused with a specific error.
    let mut ballast = std::fs::File::create(home.join("ballast")).unwrap();
    let _ = std::io::copy(&mut std::io::repeat(1), &mut ballast);
    match Journal::open(&home, JournalOptions::default()) {
        Err(JournalOpenError::DiskFull { needed }) => assert_eq!(needed, RESERVE_BYTES),
        other => panic!("{other:?}"),
    }
}
