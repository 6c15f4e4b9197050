//! A journal that is not whole is never taken for a new one, and damage inside it is found and named.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use qd_testkit::script::say;
use qd_testkit::{TestCommandOutput, TestDaemon};

/// A stopped daemon whose session has had forty runs.
async fn stopped_daemon() -> TestDaemon {
    let mut daemon = TestDaemon::start_with(|options| {
        options.env("QD_CHECK_AFTER_MS", "1");
    })
    .await;
    let session = daemon.session("script").await;
    for round in 0..40 {
        session.run_script(&[say(&format!("round {round} {}", "of many words ".repeat(60)))]).await;
    }
    session.close().await;
    session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
    assert_eq!(daemon.terminate().await, Some(0));
    daemon
}

fn serve_fails(output: TestCommandOutput, words: &str) {
    let error = output.stderr.clone();
    output.expect_exit(1);
    assert!(error.contains(words) && error.contains("nothing was changed"), "{error}");
}

#[tokio::test]
async fn a_daemon_refuses_a_journal_that_is_not_whole_and_touches_nothing() {
    let mut daemon = stopped_daemon().await;
    let home = &daemon.home;
    let file = home.path().join("journal.db");
    let whole = fs::read(&file).unwrap();
    let mut foreign = whole.clone();
    foreign[68..72].fill(7);
    let headless = [vec![0; 4096], whole[4096..].to_vec()].concat();
    for (content, words) in [
        (Vec::new(), "is empty (0 bytes)"),
        (foreign, "not a Quarterdeck journal"),
        (headless, "not an SQLite database"),
        (whole[..whole.len() / 2].to_vec(), "is cut short"),
    ] {
        fs::write(&file, &content).unwrap();
        fs::write(home.path().join("journal.db-wal"), "the rest").unwrap();
        serve_fails(home.qd(&["serve"]).await, words);
        assert!(fs::read(&file).unwrap() == content, "{words}");
        assert_eq!(fs::read(home.path().join("journal.db-wal")).unwrap(), b"the rest");
        let doctor = home.qd(&["doctor"]).await.expect_exit(1);
        assert!(
            doctor.lines().any(|line| line.starts_with("bad  journal") && line.contains(words)),
            "{doctor}"
        );
    }
    fs::remove_file(&file).unwrap();
    serve_fails(home.qd(&["serve"]).await, "journal.db is missing, but journal.db-wal in the home");
    fs::remove_file(home.path().join("journal.db-wal")).unwrap();
    fs::write(home.path().join("blobs/abc"), "x").unwrap();
    serve_fails(home.qd(&["serve"]).await, "journal.db is missing, but blobs/abc in the home");
    let rebuild = home.qd(&["doctor", "--rebuild"]).await;
    assert_ne!(rebuild.code, Some(0));
    assert!(!file.exists(), "nothing creates a journal here");
    // With the journal back in its place, everything is as before.
    fs::write(&file, &whole).unwrap();
    fs::remove_file(home.path().join("blobs/abc")).unwrap();
    daemon.start_again().await;
    assert_eq!(daemon.client().get("/v1/sessions").await.list().len(), 1);
}

/// Zeroes the leaf page in the middle of a table.
fn zero_a_page(home: &Path, table: &str) {
    let db = rusqlite::Connection::open(home.join("journal.db")).unwrap();
    let root: i64 = db
        .query_row("SELECT rootpage FROM sqlite_schema WHERE name = ?1", [table], |row| row.get(0))
        .unwrap();
    drop(db);
    let file = OpenOptions::new().read(true).write(true).open(home.join("journal.db")).unwrap();
    let offset = |page: u64| (page - 1) * 4096;
    let mut page = vec![0; 4096];
    file.read_exact_at(&mut page, offset(root as u64)).unwrap();
    assert_eq!(page[0], 5, "the root has pages below it");
    let cell = usize::from(u16::from_be_bytes([page[3], page[4]])) / 2;
    let at = usize::from(u16::from_be_bytes([page[12 + 2 * cell], page[13 + 2 * cell]]));
    let leaf = u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    file.write_all_at(&[0; 4096], offset(u64::from(leaf))).unwrap();
}

#[tokio::test]
async fn a_zeroed_page_is_found_in_the_background_and_by_doctor() {
    let mut daemon = stopped_daemon().await;
    zero_a_page(&daemon.home.path(), "events");
    daemon.start_again().await;
    loop {
        let metrics = String::from_utf8_lossy(&daemon.client().get("/metrics").await.body).into_owned();
        if metrics.contains("\nquarterdeck_journal_checks_total 1\n") {
            assert!(metrics.contains("\nquarterdeck_journal_damaged_places 1\n"), "{metrics}");
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let log = fs::read_to_string(daemon.home.path().join("log/daemon.log")).unwrap_or_default();
    let log = format!("{log}{}", daemon.stderr());
    assert!(log.contains("ERROR") && log.contains("the table events is damaged from seq"), "{log}");
    let report = daemon.client().get("/v1/journal/check").await.expect(200);
    assert_eq!(report["damage"][0]["table"], "events");
    assert_eq!(report["damage"][0]["sessions"].as_array().unwrap().len(), 1, "{report}");
    let doctor = daemon.qd(&["doctor"]).await.expect_exit(1);
    let words = "bad  journal   the table events is damaged from seq ";
    assert!(doctor.contains(words) && doctor.contains("restore a backup"), "{doctor}");
}

#[tokio::test]
async fn a_zeroed_page_of_the_runs_is_found_and_rebuilt() {
    let mut daemon = stopped_daemon().await;
    zero_a_page(&daemon.home.path(), "runs");
    daemon.start_again().await;
    let doctor = daemon.qd(&["doctor"]).await.expect_exit(1);
    assert!(doctor.contains("the table runs is damaged") && doctor.contains("doctor --rebuild"), "{doctor}");
    daemon.terminate().await;
    daemon.qd(&["doctor", "--rebuild"]).await.ok();
    daemon.start_again().await;
    let doctor = daemon.qd(&["doctor"]).await;
    assert!(doctor.stdout.contains("ok   journal   undamaged: "), "{doctor:?}");
    let workspace = daemon.client().get("/v1/workspaces").await.list()[0]["id"].clone();
    let path = format!("/v1/workspaces/{}/runs", workspace.as_str().unwrap());
    assert_eq!(daemon.client().get(&path).await.list().len(), 40);
}
