//! The work in a worktree is shown, merged completely or not at all, and never removed while it exists nowhere else.

use std::path::Path;

use qd_testkit::git::{commit, git};
use qd_testkit::{TestDaemon, TestSession, script::*};
use serde_json::{Value, json};

use crate::worktrees::{in_worktree, path_of, repository};

const LINES: &str = "one\ntwo\nthree\nfour\nfive\nsix\nseven\n";

fn with_line(number: usize, words: &str) -> String {
    let mut lines: Vec<&str> = LINES.lines().collect();
    lines[number - 1] = words;
    lines.join("\n") + "\n"
}

async fn merge(session: &TestSession, request: Value) -> qd_testkit::TestResponse {
    session.client.post(&session.path("/merge"), &request).await
}

async fn listed(daemon: &TestDaemon, session: &TestSession) -> Value {
    let all = daemon.client().get("/v1/worktrees").await.list();
    all.into_iter().find(|one| one["session_id"] == session.id.as_str()).expect("it is listed")
}

async fn close_and_wait(session: &TestSession) {
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
}

fn state_of(repo: &Path) -> (String, String) {
    (git(repo, &["for-each-ref"]), git(repo, &["status", "--porcelain"]))
}

#[tokio::test]
async fn a_diff_shows_all_that_a_session_did() {
    let daemon = TestDaemon::start().await;
    repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.client.get(&session.path("/diff")).await.expect_refusal(409, "no_worktree");
    session.run_script(&[write("new.txt", "new\n"), write("a.txt", &with_line(2, "2"))]).await;
    commit(&path, "committed.txt", "x\n");
    std::fs::write(path.join("late.txt"), "y\n").unwrap();
    let diff = session.client.get(&session.path("/diff")).await.expect(200);
    let names: Vec<_> = diff["files"].as_array().unwrap().iter().map(|file| file["path"].clone()).collect();
    assert_eq!(names, ["a.txt", "committed.txt", "late.txt", "new.txt"]);
    assert_eq!(diff["uncommitted"], true);
    let patch = daemon.qd(&["diff", &session.id]).await.ok();
    assert!(patch.contains("-two\n+2\n") && patch.contains("+++ b/late.txt"), "{patch}");
    assert_eq!(patch, diff["patch"].as_str().unwrap());
    let stat = daemon.qd(&["diff", "--stat", &session.id]).await.ok();
    assert!(stat.contains("late.txt") && !stat.contains("@@"), "{stat}");
    let plain = daemon.session("script").await;
    plain.client.get(&plain.path("/diff")).await.expect_refusal(409, "no_worktree");
    assert_eq!(daemon.qd(&["diff", "nobody"]).await.code, Some(3));
}

#[tokio::test]
async fn a_merge_commits_the_rest_and_moves_a_clean_checkout() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "work\n")]).await;
    commit(&repo, "main.txt", "meanwhile\n");
    let output = daemon.qd(&["merge", &session.id]).await.ok();
    assert!(
        output.contains("committed the uncommitted changes") && output.contains("merged into main"),
        "{output}"
    );
    assert_eq!(std::fs::read_to_string(repo.join("new.txt")).unwrap(), "work\n");
    assert_eq!(git(&repo, &["status", "--porcelain"]), "");
    assert_eq!(git(&repo, &["log", "-1", "--format=%an"]), "A Person");
    assert_eq!(listed(&daemon, &session).await["state"], "merged");
    assert!(!daemon.home.path().join("worktrees/scratch").join(&session.id).exists());
    // The session continues and can be merged again, as one commit and into another branch.
    session.run_script(&[write("more.txt", "more\n")]).await;
    git(&repo, &["branch", "release"]);
    let done = merge(&session, json!({ "into": "release", "squash": true })).await.expect(200);
    assert_eq!((&done["moved"], &done["checkout"]), (&json!(true), &Value::Null));
    assert_eq!(git(&repo, &["show", "release:more.txt"]), "more");
    assert_eq!(git(&repo, &["rev-list", "--count", "--merges", "main..release"]), "0");
    assert!(!repo.join("more.txt").exists(), "main is as it was");
    let again = merge(&session, json!({ "into": "release", "squash": true })).await.expect(200);
    assert_eq!((&again["moved"], &again["committed"]), (&json!(false), &Value::Null));
    assert!(path.exists());
    merge(&session, json!({ "into": "nosuch" })).await.expect_refusal(400, "invalid_value");
    merge(&session, json!({ "into": "--force" })).await.expect_refusal(400, "invalid_value");
    merge(&session, json!({ "inot": "main" })).await.expect_refusal(400, "invalid_request");
}

#[tokio::test]
async fn a_conflict_is_shown_and_nothing_is_half_done() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("a.txt", &with_line(2, "MINE")), write("new.txt", "new\n")]).await;
    commit(&repo, "a.txt", &with_line(2, "YOURS"));
    let before = (state_of(&repo), state_of(&path));
    let output = daemon.qd(&["merge", &session.id]).await;
    assert_eq!(output.code, Some(1));
    for words in ["a.txt", "MINE", "YOURS", "nothing was changed", "'merge main into your branch"] {
        assert!(output.stderr.contains(words), "{words}: {}", output.stderr);
    }
    let error = merge(&session, json!({})).await.expect_refusal(409, "merge_conflict");
    assert_eq!(error["conflicts"][0]["path"], "a.txt");
    assert_eq!((state_of(&repo), state_of(&path)), before);
    assert_eq!(git(&repo, &["worktree", "list"]).lines().count(), 2, "no scratch worktree is left");
}

#[tokio::test]
async fn what_a_person_has_not_committed_is_never_touched() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, _) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "work\n")]).await;
    std::fs::write(repo.join("a.txt"), "mine").unwrap();
    let before = state_of(&repo);
    let refusal = merge(&session, json!({})).await;
    refusal.expect_refusal(409, "git_refused");
    assert!(refusal.to_string().contains("commit or stash"), "{refusal}");
    assert_eq!(state_of(&repo), before);
    assert_eq!(std::fs::read_to_string(repo.join("a.txt")).unwrap(), "mine");
}

#[tokio::test]
async fn nobody_commits_in_the_name_of_nobody() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, _) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "work\n")]).await;
    git(&repo, &["config", "--unset", "user.email"]);
    let refusal = merge(&session, json!({})).await;
    refusal.expect_refusal(409, "git_refused");
    assert!(refusal.to_string().contains("user.email"), "{refusal}");
    assert_eq!(listed(&daemon, &session).await["state"], "dirty");
}

#[tokio::test]
async fn a_live_run_is_not_merged_and_an_open_session_keeps_its_worktree() {
    let daemon = TestDaemon::start().await;
    repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    let run = session.prompt_script(&[write("new.txt", "half"), say("x"), sleep_forever()]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    merge(&session, json!({})).await.expect_refusal(409, "busy");
    session.client.get(&session.path("/diff")).await.expect(200);
    session.cancel().await;
    session.wait(&run).await;
    session.client.delete(&session.path("/worktree?force=true")).await.expect_refusal(409, "busy");
    assert!(path.join("new.txt").exists());
}

#[tokio::test]
async fn closing_and_purging_keep_work_and_only_what_is_merged_goes() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (dirty, dirty_path) = in_worktree(&daemon).await;
    let (ahead, ahead_path) = in_worktree(&daemon).await;
    let (merged, merged_path) = in_worktree(&daemon).await;
    let (clean, clean_path) = in_worktree(&daemon).await;
    dirty.run_script(&[write("dirty.txt", "x")]).await;
    ahead.run_script(&[say("x")]).await;
    commit(&ahead_path, "ahead.txt", "x");
    merged.run_script(&[write("merged.txt", "x")]).await;
    merge(&merged, json!({})).await.expect(200);
    clean.run_script(&[say("x")]).await;
    for (session, state) in [(&dirty, "dirty"), (&ahead, "ahead"), (&merged, "merged"), (&clean, "clean")] {
        let one = listed(&daemon, session).await;
        assert_eq!((&one["state"], &one["session_state"]), (&json!(state), &json!("idle")), "{one}");
        assert!(one["size_bytes"].as_u64().unwrap() > 0);
        close_and_wait(session).await;
    }
    let id = ahead.id.clone();
    ahead.client.delete(&ahead.path("?purge=true")).await.expect(200);
    qd_testkit::poll_until("the purge", async || {
        (ahead.client.get(&ahead.path("")).await.status == 404).then_some(())
    })
    .await;
    let orphan = listed(&daemon, &ahead).await;
    assert_eq!((&orphan["state"], &orphan["session_state"]), (&json!("ahead"), &Value::Null), "{orphan}");

    let error = dirty.client.delete(&dirty.path("/worktree")).await.expect_refusal(409, "unmerged_work");
    assert_eq!(error["changed_files"], 1);
    let output = daemon.qd(&["worktrees", "rm", &dirty.id]).await;
    assert!(output.code == Some(1) && output.stderr.contains("--force"), "{}", output.stderr);
    let gone = daemon.qd(&["worktrees", "gc"]).await.ok();
    assert!(gone.contains(&merged.id) && gone.contains(&clean.id), "{gone}");
    assert!(dirty_path.join("dirty.txt").exists() && ahead_path.join("ahead.txt").exists());
    assert!(!merged_path.exists() && !clean_path.exists());
    let branches = git(&repo, &["branch", "--list", "qd/*"]);
    assert!(!branches.contains(&merged.id) && branches.contains(&dirty.id) && branches.contains(&id));

    // With --force the files are removed and commits stay on their branch, also for a purged session.
    daemon.qd(&["worktrees", "rm", "--force", &dirty.id, &id]).await.ok();
    assert!(!dirty_path.exists() && !ahead_path.exists());
    assert_eq!(git(&repo, &["show", &format!("qd/{id}:ahead.txt")]), "x");
    assert!(daemon.client().get("/v1/worktrees").await.list().is_empty());
    daemon.client().delete(&format!("/v1/worktrees/{id}")).await.expect_refusal(409, "no_worktree");
    assert_eq!(daemon.qd(&["worktrees", "rm", "nobody"]).await.code, Some(3));
}

#[tokio::test]
async fn a_tear_down_comes_before_the_end_and_a_failing_one_stops_it() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let log = daemon.home.sibling_path("log");
    std::fs::create_dir(repo.join(".quarterdeck")).unwrap();
    let file = |line: &str| format!("[worktree]\nteardown = [{}]\n", json!(line));
    let write_file = |line: &str| std::fs::write(repo.join(".quarterdeck/project.toml"), file(line)).unwrap();
    let trust = json!({ "path": repo });
    write_file("exit 3");
    daemon.client().post("/v1/trust", &trust).await.expect(200);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[say("x")]).await;
    close_and_wait(&session).await;
    session.client.delete(&session.path("/worktree")).await.expect_refusal(409, "git_refused");
    assert!(path.exists());
    write_file(&format!("echo $QD_SESSION > {}", log.display()));
    daemon.client().post("/v1/trust", &trust).await.expect(200);
    session.client.delete(&session.path("/worktree")).await.expect(200);
    assert!(!path.exists());
    assert_eq!(std::fs::read_to_string(log).unwrap().trim(), session.id);
}

#[tokio::test]
async fn two_sessions_that_changed_the_same_lines_are_pointed_out_before_a_merge() {
    let daemon = TestDaemon::start().await;
    repository(&daemon);
    let (one, _) = in_worktree(&daemon).await;
    let (two, _) = in_worktree(&daemon).await;
    let (three, _) = in_worktree(&daemon).await;
    one.run_script(&[write("a.txt", &with_line(2, "2"))]).await;
    two.run_script(&[write("a.txt", &with_line(2, "zwei"))]).await;
    three.run_script(&[write("a.txt", &with_line(6, "6"))]).await;
    let overlaps = listed(&daemon, &one).await["overlaps"].clone();
    assert_eq!(overlaps.as_array().unwrap().len(), 1, "{overlaps}");
    assert_eq!(overlaps[0]["session_id"], two.id.as_str());
    assert_eq!(overlaps[0]["files"][0], json!({ "path": "a.txt", "lines": [{ "first": 2, "last": 2 }] }));
    assert_eq!(listed(&daemon, &three).await["overlaps"], json!([]));
    let shown = daemon.qd(&["worktrees"]).await;
    assert!(shown.stdout.contains("dirty 1, open"), "{}", shown.stdout);
    assert!(shown.stderr.contains("changed the same lines: a.txt 2"), "{}", shown.stderr);
    let merged = daemon.qd(&["merge", &one.id]).await;
    assert!(merged.stderr.contains(&two.id), "{}", merged.stderr);
    assert_eq!(merged.code, Some(0));
    // The second merge has a conflict, the third does not.
    merge(&two, json!({})).await.expect_refusal(409, "merge_conflict");
    merge(&three, json!({})).await.expect(200);
}

#[tokio::test]
async fn a_merge_that_the_daemon_did_not_live_to_finish_can_be_asked_for_again() {
    let mut daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("new.txt", "work\n")]).await;
    // What a crash can leave behind: a scratch worktree with an unfinished merge.
    let scratch = daemon.home.path().canonicalize().unwrap().join("worktrees/scratch").join(&session.id);
    git(&repo, &["worktree", "add", "-q", "--detach", scratch.to_str().unwrap(), "main"]);
    std::fs::write(scratch.join("half.txt"), "half").unwrap();
    daemon.restart().await;
    let all = daemon.client().get("/v1/worktrees").await.list();
    assert_eq!(all.len(), 1, "a scratch worktree belongs to no session");
    merge(&session, json!({})).await.expect(200);
    assert!(!scratch.exists() && !repo.join("half.txt").exists());
    assert_eq!(std::fs::read_to_string(repo.join("new.txt")).unwrap(), "work\n");
    assert_eq!(path_of(&session).await, path);
}
