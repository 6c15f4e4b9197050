//! Sessions in their own git worktrees: created when the agent first starts, whatever dies meanwhile, and without ever
//! losing work. Merging and removal are in `worktrees_merge.rs`.

use std::path::{Path, PathBuf};

use qd_testkit::git::{commit, git, make_repository};
use qd_testkit::{ObservedProcess, TestDaemon, TestSession, journal_rules, poll_until, script::*};
use serde_json::{Value, json};

/// Turns the home's project directory into a repository with one commit on `main`.
pub(crate) fn repository(daemon: &TestDaemon) -> PathBuf {
    let repo = daemon.home.project_dir().canonicalize().unwrap();
    make_repository(&repo);
    repo
}

pub(crate) async fn in_worktree(daemon: &TestDaemon) -> (TestSession, PathBuf) {
    let session = daemon.session_with(json!({ "agent": "script", "worktree": true })).await;
    let path = path_of(&session).await;
    (session, path)
}

pub(crate) async fn path_of(session: &TestSession) -> PathBuf {
    PathBuf::from(session.show().await["worktree"].as_str().expect("it has a worktree"))
}

/// The working directory that the session's agent reports.
async fn directory(session: &TestSession) -> String {
    session.run_script(&[config()]).await["text"].as_str().unwrap().to_owned()
}

async fn notices(session: &TestSession) -> Vec<String> {
    let events = session.events().await;
    let shown = events.iter().filter(|event| event.kind == "notice.shown");
    shown.map(|event| event.data["text"].as_str().unwrap().to_owned()).collect()
}

/// Writes the project file, and trusts it if `trusted`.
async fn project_file(daemon: &TestDaemon, repo: &Path, text: &str, trusted: bool) {
    std::fs::create_dir_all(repo.join(".quarterdeck")).unwrap();
    std::fs::write(repo.join(".quarterdeck/project.toml"), text).unwrap();
    if trusted {
        daemon.client().post("/v1/trust", &json!({ "path": repo })).await.expect(200);
    }
}

#[tokio::test]
async fn a_session_works_in_a_worktree_of_its_own() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    let root = daemon.home.path().canonicalize().unwrap().join("worktrees");
    assert_eq!(path, root.join(&session.id));
    assert!(!path.exists(), "nothing is made before its agent is started");
    let run = session.run_script(&[write("made.txt", "by the agent"), config()]).await;
    assert_eq!(run["finish_reason"], "end_turn", "{run}");
    assert!(run["text"].as_str().unwrap().contains(path.to_str().unwrap()), "{run}");
    assert_eq!(std::fs::read_to_string(path.join("made.txt")).unwrap(), "by the agent");
    assert_eq!(git(&path, &["symbolic-ref", "--short", "HEAD"]), format!("qd/{}", session.id));
    assert_eq!(git(&path, &["rev-parse", "HEAD"]), git(&repo, &["rev-parse", "main"]));
    assert_eq!(git(&repo, &["status", "--porcelain"]), "", "the user's checkout is as it was");
    assert!(notices(&session).await[0].contains("from main"));
    journal_rules::check(&session.events().await);
    // The list shows the same path as the session.
    let listed = session.client.get(&session.workspace_path("/sessions")).await.list();
    assert_eq!(listed[0]["worktree"], path.to_str().unwrap());
    assert_eq!(daemon.session("echo").await.show().await["worktree"], Value::Null);
}

#[tokio::test]
async fn a_workspace_below_the_top_is_the_same_place_in_the_worktree() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    std::fs::create_dir_all(repo.join("pkg/web")).unwrap();
    let workspace = daemon.client().workspace(&repo.join("pkg/web")).await;
    let session = workspace.session_with(json!({ "agent": "script", "worktree": true })).await;
    let path = path_of(&session).await;
    let directory_text = directory(&session).await;
    assert!(directory_text.contains(path.join("pkg/web").to_str().unwrap()), "{directory_text}");
}

#[tokio::test]
async fn outside_git_a_worktree_is_refused_and_no_repository_is_made() {
    let daemon = TestDaemon::start().await;
    let work = daemon.home.project_dir();
    std::fs::write(work.join(".env"), "SECRET=1").unwrap();
    let workspace = daemon.workspace().await;
    let new = json!({ "agent": "script", "worktree": true });
    let refusal = workspace.try_session(new.clone()).await;
    assert_eq!(refusal.expect_refusal(400, "unsupported_setting")["setting"], "worktree");
    let message = refusal.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("not in a git repository"), "{message}");
    let file = "fleet:\n  base_branch: main\n  task: x\n  sessions: { a: { agent: echo } }\n  start: a\n";
    workspace.try_fleet(file).await.expect_refusal(400, "unsupported_setting");
    let output = daemon.qd(&["run", "--agent", "echo", "--worktree", "x"]).await;
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("not in a git repository"), "{}", output.stderr);
    assert!(!work.join(".git").exists());
    assert!(daemon.client().get("/v1/worktrees").await.list().is_empty());
    // A repository without a commit has nothing to start from.
    git(&work, &["init", "-q"]);
    workspace.try_session(new).await.expect_refusal(400, "unsupported_setting");
    // A remote agent cannot use a worktree.
    let away = json!({ "agent": "a2a:http://127.0.0.1:9/x", "worktree": true });
    workspace.try_session(away).await.expect_refusal(400, "unsupported_setting");
}

#[tokio::test]
async fn work_is_there_after_every_crash() {
    let mut daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[write("made.txt", "first")]).await;
    commit(&repo, "later.txt", "main moves on");
    daemon.kill9().await;
    daemon.home.kill_workers();
    daemon.start_again().await;
    let run = session.run_script(&[read("made.txt")]).await;
    assert_eq!(run["text"], "first", "{run}");
    assert!(!path.join("later.txt").exists(), "it still starts from the original commit");
    // Also if the directory was removed: the commits are on its branch.
    commit(&path, "kept.txt", "kept");
    daemon.kill9().await;
    daemon.home.kill_workers();
    std::fs::remove_dir_all(&path).unwrap();
    daemon.start_again().await;
    let run = session.run_script(&[read("kept.txt")]).await;
    assert_eq!(run["text"], "kept", "{run}");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_kill_at_any_moment_of_the_start_costs_nothing() {
    let mut daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    // Enough files that a checkout takes a moment.
    for number in 0..500 {
        std::fs::write(repo.join(format!("f{number}.txt")), format!("{number}\n")).unwrap();
    }
    commit(&repo, "many.txt", "many");
    for sign in ["", ".git", "a.txt", "many.txt"] {
        let (session, path) = in_worktree(&daemon).await;
        let run = session.prompt_script(&[write("made.txt", "once"), config()]).await;
        if !sign.is_empty() {
            poll_until("the worktree", async || path.join(sign).exists().then_some(())).await;
        }
        daemon.kill9().await;
        daemon.start_again().await;
        let run = session.wait(&run).await;
        assert_eq!(run["finish_reason"], "end_turn", "killed at {sign:?}: {run}");
        assert_eq!(std::fs::read_to_string(path.join("made.txt")).unwrap(), "once");
        assert_eq!(git(&path, &["status", "--porcelain"]), "?? made.txt", "killed at {sign:?}");
        journal_rules::check(&session.events().await);
    }
    assert_eq!(git(&repo, &["status", "--porcelain"]), "");
}

#[tokio::test]
async fn a_set_up_that_a_crash_cut_off_is_done_again_and_by_nobody_else() {
    let mut daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (log, go) = (daemon.home.sibling_path("log"), daemon.home.sibling_path("go"));
    let line = format!(
        "echo begun >> {0}; until [ -e {1} ]; do sleep 0.05; done; echo done >> {0}; echo ready",
        log.display(),
        go.display()
    );
    project_file(&daemon, &repo, &format!("[worktree]\nsetup = [{}]\n", json!(line)), true).await;
    let (session, path) = in_worktree(&daemon).await;
    let run = session.prompt_script(&[say("hello")]).await;
    let begun = |times| {
        let log = log.clone();
        async move || {
            (std::fs::read_to_string(&log).unwrap_or_default().lines().count() == times).then_some(())
        }
    };
    poll_until("the set-up to begin", begun(1)).await;
    assert_eq!(session.show().await["state"], "starting");
    daemon.kill9().await;
    daemon.start_again().await;
    poll_until("the set-up to begin again", begun(2)).await;
    std::fs::write(&go, "").unwrap();
    assert_eq!(session.wait(&run).await["text"], "hello");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "begun\nbegun\ndone\n", "the first one was ended");
    assert!(notices(&session).await.iter().any(|text| text.contains("set-up") && text.contains("ready")));
    // The set-up runs once: the next agent finds it done.
    daemon.kill9().await;
    daemon.home.kill_workers();
    daemon.start_again().await;
    session.run_script(&[say("again")]).await;
    assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 3);
    assert!(path.exists());
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_sandbox_that_is_changed_during_the_set_up_is_the_one_that_is_shown() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (log, go) = (daemon.home.sibling_path("log"), daemon.home.sibling_path("go"));
    let line = format!("echo begun >> {}; until [ -e {} ]; do sleep 0.05; done", log.display(), go.display());
    project_file(&daemon, &repo, &format!("[worktree]\nsetup = [{}]\n", json!(line)), true).await;
    let (session, _) = in_worktree(&daemon).await;
    let run = session.prompt_script(&[say("hello")]).await;
    poll_until("the set-up to begin", async || log.exists().then_some(())).await;
    session.patch(json!({ "sandbox": "off" })).await;
    std::fs::write(&go, "").unwrap();
    assert_eq!(session.wait(&run).await["text"], "hello");
    let events = session.events().await;
    let started = events.iter().position(|event| event.is_of_run(&run, "run.started")).unwrap();
    let worker = events[..started].iter().rev().find(|event| event.kind == "worker.started").unwrap();
    assert_eq!(worker.data["sandbox"]["asked"], "off", "{worker:?}");
    assert_eq!(session.show().await["sandbox"]["asked"], "off");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "begun\n", "the set-up runs once");
    journal_rules::check(&events);
}

#[tokio::test]
async fn a_close_and_a_cancel_do_not_wait_for_a_set_up() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let is_set_up = |process: &ObservedProcess| process.args.contains(&"1000".to_owned());
    let runs = || daemon.home.agent_processes().iter().any(is_set_up);
    project_file(&daemon, &repo, "[worktree]\nsetup = ['exec sleep 1000']\n", true).await;
    let (session, path) = in_worktree(&daemon).await;
    let run = session.prompt_script(&[say("hello")]).await;
    poll_until("the set-up to begin", async || runs().then_some(())).await;
    assert_eq!(session.cancel().await["cancelled"], json!([run]));
    assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    session.close().await;
    session.wait_for_event("its end", |event| event.kind == "session.closed").await;
    poll_until("the end of the set-up", async || (!runs()).then_some(())).await;
    assert!(path.exists(), "closing removes nothing");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_set_up_that_fails_fails_the_start_with_its_words() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    project_file(&daemon, &repo, "[worktree]\nsetup = ['echo no such registry; exit 7']\n", true).await;
    let (session, _) = in_worktree(&daemon).await;
    let run = session.run_script(&[say("hello")]).await;
    assert_eq!(
        (&run["finish_reason"], &run["error"]["code"]),
        (&json!("error"), &json!("setup_failed")),
        "{run}"
    );
    assert!(run["error"]["message"].as_str().unwrap().contains("no such registry"), "{run}");
    // After the file is fixed and trusted again, the same session works.
    project_file(&daemon, &repo, "[worktree]\nsetup = ['echo better > set-up.txt']\n", true).await;
    assert_eq!(session.run_script(&[read("set-up.txt")]).await["text"], "better\n");
}

#[tokio::test]
async fn set_up_and_tear_down_are_confined_like_the_agent() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (token, log) = (daemon.home.path().join("token"), daemon.home.sibling_path("log"));
    let look = format!(
        "cat {} > /dev/null 2>&1 && echo token read || echo token hidden; \
         kill -0 {} 2> /dev/null && echo daemon seen || echo daemon unseen",
        token.display(),
        daemon.pid()
    );
    let teardown = format!("({look}) > {}", log.display());
    let text = format!("[worktree]\nsetup = [{}]\nteardown = [{}]\n", json!(look), json!(teardown));
    project_file(&daemon, &repo, &text, true).await;
    let can_confine =
        daemon.workspace().await.try_session(json!({ "agent": "script", "sandbox": "deck" })).await;
    for level in ["auto", "off"] {
        let asked = json!({ "agent": "script", "worktree": true, "sandbox": level });
        let session = daemon.session_with(asked).await;
        session.run_script(&[write("new.txt", "new")]).await;
        let found = match level == "auto" && can_confine.status == 201 {
            true => "token hidden\ndaemon unseen",
            false => "token read\ndaemon seen",
        };
        let notices = notices(&session).await;
        assert!(notices.iter().any(|notice| notice.ends_with(found)), "{level}: {notices:?}");
        session.close().await;
        session.wait_for_event("session.closed", |event| event.kind == "session.closed").await;
        session.client.delete(&session.path("/worktree?force=true")).await.expect(200);
        assert_eq!(std::fs::read_to_string(&log).unwrap().trim(), found, "{level}");
        assert!(!path_of(&session).await.exists());
    }
}

#[tokio::test]
async fn a_project_that_is_not_trusted_starts_nothing_and_brings_nothing() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    commit(&repo, ".gitignore", ".env\nconfig/*.local\n.quarterdeck\n");
    std::fs::write(repo.join(".env"), "KEY=1").unwrap();
    let text = "[worktree]\nsetup = ['echo ran > ran.txt']\nbring = ['.env', 'config/*.local']\n";
    project_file(&daemon, &repo, text, false).await;
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[say("x")]).await;
    assert!(!path.join("ran.txt").exists() && !path.join(".env").exists());
    assert!(notices(&session).await.iter().any(|text| text.contains("qd trust")));
    daemon.qd(&["trust", repo.to_str().unwrap()]).await.ok();
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[say("x")]).await;
    assert!(path.join("ran.txt").exists());
    assert_eq!(std::fs::read_to_string(path.join(".env")).unwrap(), "KEY=1");
    // After a change the file is not trusted any more.
    std::fs::write(repo.join(".quarterdeck/project.toml"), "[worktree]\nsetup = ['touch evil']\n").unwrap();
    let (session, path) = in_worktree(&daemon).await;
    session.run_script(&[say("x")]).await;
    assert!(!path.join("evil").exists());
}

#[tokio::test]
async fn what_git_says_is_told() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    let (session, path) = in_worktree(&daemon).await;
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("precious"), "x").unwrap();
    let run = session.run_script(&[say("x")]).await;
    assert_eq!(
        (&run["finish_reason"], &run["error"]["code"]),
        (&json!("error"), &json!("worktree_failed")),
        "{run}"
    );
    assert!(path.join("precious").exists());
    std::fs::remove_dir_all(&path).unwrap();
    assert_eq!(session.run_script(&[say("x")]).await["finish_reason"], "end_turn");
    // A repository that was moved away.
    let (session, _) = in_worktree(&daemon).await;
    std::fs::rename(repo.join(".git"), repo.join("moved")).unwrap();
    let run = session.run_script(&[say("x")]).await;
    assert!(run["error"]["message"].as_str().unwrap().contains("not in a git repository"), "{run}");
}

/// A fleet file with two sessions that write the same file.
fn file(task: &str, base: &str) -> String {
    format!(
        "fleet:\n  base_branch: {base}\n  task: {}\n  sessions:\n    one: {{ agent: script }}\n    two: {{ agent: script }}\n    \
         three: {{ agent: echo, worktree: false }}\n  start: [one, two, three]\n",
        json!(task)
    )
}

#[tokio::test]
async fn members_of_fleets_have_worktrees_from_their_base_branch_and_never_meet() {
    let daemon = TestDaemon::start().await;
    let repo = repository(&daemon);
    git(&repo, &["checkout", "-q", "-b", "other"]);
    commit(&repo, "other.txt", "not in main");
    let workspace = daemon.workspace().await;
    let task = steps(&[write("made.txt", "work"), config()]);
    let first = workspace.fleet(&file(&task, "main")).await;
    let second = workspace.fleet(&file(&task, "main")).await;
    let mut paths = std::collections::BTreeSet::new();
    for fleet in [&first, &second] {
        assert_eq!(fleet.wait_for_end().await["state"], "done");
        for name in ["one", "two"] {
            let path = path_of(&fleet.session(name).await).await;
            assert_eq!(std::fs::read_to_string(path.join("made.txt")).unwrap(), "work");
            assert!(!path.join("other.txt").exists(), "it begins at main");
            paths.insert(path);
        }
        assert_eq!(fleet.session("three").await.show().await["worktree"], Value::Null);
    }
    assert_eq!(paths.len(), 4);
    // A later fleet starts at the current commit of the branch, not at that of an earlier fleet.
    git(&repo, &["branch", "-f", "main", "other"]);
    let third = workspace.fleet(&file(&task, "main")).await;
    assert_eq!(third.wait_for_end().await["state"], "done");
    let path = path_of(&third.session("one").await).await;
    assert!(path.join("other.txt").exists());
    for path in paths {
        assert!(path.join("made.txt").exists(), "the end of a fleet removes nothing");
    }
    workspace.try_fleet(&file(&task, "nosuch")).await.expect_refusal(400, "invalid_value");
}

#[tokio::test]
async fn a_cancelled_fleet_keeps_its_worktrees() {
    let daemon = TestDaemon::start().await;
    repository(&daemon);
    let workspace = daemon.workspace().await;
    let task = steps(&[write("made.txt", "half of it"), say("x"), sleep_forever()]);
    let fleet = workspace.fleet(&file(&task, "main")).await;
    for name in ["one", "two"] {
        fleet.session(name).await.wait_for_event("its words", |event| event.kind == "text.delta").await;
    }
    fleet.cancel().await;
    fleet.wait_for_end().await;
    for name in ["one", "two"] {
        let path = path_of(&fleet.session(name).await).await;
        assert_eq!(std::fs::read_to_string(path.join("made.txt")).unwrap(), "half of it");
    }
}
