//! Mail folders: a program without HTTP writes a file into `tmp` and renames it into `new`. Each file is taken once,
//! whatever dies in between, and a file that is not a message is moved aside with the reason.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use qd_testkit::{TestDaemon, TestSession, poll_until};
use serde_json::{Value, json};

fn folder(daemon: &TestDaemon, session: &TestSession) -> PathBuf {
    daemon.home.path().join("mail").join(&session.id)
}

/// Drops a file as the protocol asks: written in `tmp`, renamed into `new`.
fn drop_in(folder: &Path, name: &str, content: &str) {
    std::fs::write(folder.join("tmp").join(name), content).unwrap();
    std::fs::rename(folder.join("tmp").join(name), folder.join("new").join(name)).unwrap();
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

async fn in_folder(folder: &Path, wanted: &[&str]) {
    poll_until(&format!("{wanted:?} in {}", folder.display()), async || {
        (names(folder) == wanted).then_some(())
    })
    .await;
}

async fn mail(session: &TestSession) -> Vec<Value> {
    session.client.get(&session.path("/mail")).await.list()
}

#[tokio::test]
async fn a_file_is_a_message_from_a_file_whatever_it_says() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let folder = folder(&daemon, &session);
    for part in ["", "tmp", "new", "cur", "corrupt"] {
        let mode = std::fs::metadata(folder.join(part)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700, "{part}");
    }
    drop_in(
        &folder,
        "1",
        &json!({ "text": "hello", "from": "lead", "kind": "handoff", "id": "m1" }).to_string(),
    );
    in_folder(&folder.join("cur"), &["1"]).await;
    assert!(names(&folder.join("new")).is_empty());
    let one = mail(&session).await.remove(0);
    assert_eq!((&one["id"], &one["from"], &one["kind"]), (&json!("m1"), &json!("file"), &json!("handoff")));
    let run = session.wait(one["run_id"].as_str().unwrap()).await;
    assert_eq!(run["prompt"], "--- handoff from file (m1) ---\nhello");
}

#[tokio::test]
async fn what_was_dropped_while_no_daemon_lived_is_taken_up_once_in_the_order_of_arrival() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let folder = folder(&daemon, &session);
    daemon.kill9().await;
    for name in ["c", "a", "b"] {
        drop_in(&folder, name, &json!({ "text": name, "deliver": "hold" }).to_string());
        // File timestamps have a resolution of milliseconds, and messages are taken in their order.
        let stamp = |path: &Path| {
            std::fs::symlink_metadata(path)
                .map(|about| std::os::unix::fs::MetadataExt::ctime_nsec(&about))
                .unwrap()
        };
        let before = stamp(&folder.join("new").join(name));
        let tick = folder.join("tmp/tick");
        poll_until("a tick", async || {
            std::fs::write(&tick, "").unwrap();
            (stamp(&tick) != before).then_some(())
        })
        .await;
        std::fs::remove_file(&tick).unwrap();
    }
    daemon.start_again().await;
    let session = session.with_client(daemon.client());
    in_folder(&folder.join("cur"), &["a", "b", "c"]).await;
    let texts: Vec<_> =
        mail(&session).await.iter().map(|one| one["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, ["c", "a", "b"]);
    // As if the daemon had died after journalling the message and before the rename: the file is in `new` again.
    daemon.kill9().await;
    for name in ["a", "b"] {
        std::fs::rename(folder.join("cur").join(name), folder.join("new").join(name)).unwrap();
    }
    daemon.start_again().await;
    let session = session.with_client(daemon.client());
    in_folder(&folder.join("cur"), &["a", "b", "c"]).await;
    assert_eq!(mail(&session).await.len(), 3, "known by name and content");
    // The same text under another file name is another message.
    drop_in(&folder, "d", &json!({ "text": "a", "deliver": "hold" }).to_string());
    in_folder(&folder.join("cur"), &["a", "b", "c", "d"]).await;
    assert_eq!(mail(&session).await.len(), 4);
}

#[tokio::test]
async fn an_id_is_known_over_http_and_files_alike() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let folder = folder(&daemon, &session);
    drop_in(&folder, "x", r#"{"id":"same","text":"one","deliver":"hold"}"#);
    in_folder(&folder.join("cur"), &["x"]).await;
    drop_in(&folder, "y", r#"{"id":"same","text":"one","deliver":"hold"}"#);
    in_folder(&folder.join("cur"), &["x", "y"]).await;
    assert_eq!(mail(&session).await.len(), 1);
    drop_in(&folder, "z", r#"{"id":"same","text":"two","deliver":"hold"}"#);
    in_folder(&folder.join("corrupt"), &["z", "z.reason"]).await;
    let other = json!({ "id": "same", "text": "one", "deliver": "hold" });
    session.client.post(&session.path("/mail"), &other).await.expect_refusal(409, "mail_id_conflict");
}

#[tokio::test]
async fn what_is_no_message_is_put_aside_with_the_reason() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("echo").await;
    let folder = folder(&daemon, &session);
    let secret = daemon.home.sibling_path("secret");
    std::fs::write(&secret, r#"{"text":"not yours"}"#).unwrap();
    symlink(&secret, folder.join("new/link")).unwrap();
    std::fs::create_dir(folder.join("new/folder")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        folder.join("new/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    drop_in(&folder, "broken", "{\"text\":");
    drop_in(&folder, "empty", r#"{"text":""}"#);
    drop_in(&folder, "large", &format!("{{\"text\":\"{}\"}}", "x".repeat(1 << 20)));
    drop_in(&folder, "other", r#"{"text":"x","to":"ses_nobody"}"#);
    drop_in(&folder, "good", r#"{"text":"x","deliver":"hold"}"#);
    in_folder(&folder.join("cur"), &["good"]).await;
    let bad = ["broken", "empty", "folder", "large", "link", "other", "pipe"];
    let all: Vec<String> =
        bad.iter().flat_map(|name| [(*name).to_owned(), format!("{name}.reason")]).collect();
    in_folder(&folder.join("corrupt"), &all.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for (name, hint) in [
        ("broken", "not a message in JSON"),
        ("empty", "`text` is empty"),
        ("large", "larger than"),
        ("link", "not a regular file"),
        ("pipe", "not a regular file"),
        ("folder", "not a regular file"),
        ("other", "another session"),
    ] {
        let reason = std::fs::read_to_string(folder.join("corrupt").join(format!("{name}.reason"))).unwrap();
        assert!(reason.contains(hint), "{name}: {reason}");
    }
    assert_eq!(
        std::fs::read_to_string(&secret).unwrap(),
        r#"{"text":"not yours"}"#,
        "the file was not moved"
    );
    assert_eq!(mail(&session).await.len(), 1);
    assert!(session.runs().await.is_empty());
}

#[tokio::test]
async fn a_closed_session_takes_no_files_and_a_purge_removes_them() {
    let daemon = TestDaemon::start().await;
    let (session, gone) = (daemon.session("echo").await, daemon.session("echo").await);
    let (kept, purged) = (folder(&daemon, &session), folder(&daemon, &gone));
    for folder in [&kept, &purged] {
        drop_in(folder, "1", r#"{"text":"x","deliver":"hold"}"#);
        in_folder(&folder.join("cur"), &["1"]).await;
    }
    session.close().await;
    session.wait_for_event("the end", |event| event.kind == "session.closed").await;
    poll_until("empty folders go", async || (names(&kept) == ["cur"]).then_some(())).await;
    std::fs::create_dir(kept.join("new")).unwrap();
    std::fs::write(kept.join("new/2"), r#"{"text":"too late"}"#).unwrap();
    in_folder(&kept.join("corrupt"), &["2", "2.reason"]).await;
    gone.client.delete(&gone.path("?purge=true")).await;
    poll_until("the purge", async || (!purged.exists()).then_some(())).await;
}
