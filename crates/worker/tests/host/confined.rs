//! Agents in a sandbox. On a machine that cannot make one, the agent must not start.

use std::path::{Path, PathBuf};

use qd_keeper::procfs;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnStopReason};
use qd_protocol::sandbox::{SandboxLevel, SandboxSetting};
use qd_protocol::sandbox_spec::{SandboxSpec, SandboxSupport};
use qd_protocol::worker::WorkerHostSpec;
use qd_sandbox::{pid_namespaces_below_ours, probe_sandbox};
use tempfile::TempDir;

use crate::harness::{DaemonSide, WorkerUnderTest, wait_until_all_exited};

/// The home of a daemon, with a secret in it.
fn home_with_token() -> (TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let token = home.path().join("token");
    std::fs::write(&token, "the daemon's token").unwrap();
    (home, token)
}

/// Asks for a sandbox that hides this home.
fn confine(host: &mut WorkerHostSpec, home: &Path) {
    for agent in &mut host.agents {
        let sandbox = SandboxSpec {
            asked: SandboxSetting::Deck,
            home: home.to_owned(),
            workspace: agent.cwd.clone(),
            ..SandboxSpec::default()
        };
        agent.sandbox = Some(Box::new(sandbox));
    }
}

/// A worker with a confined agent, unless this machine cannot confine any.
async fn confined(agent: &str, home: &Path) -> Option<(WorkerUnderTest, DaemonSide)> {
    let support = probe_sandbox(Path::new(env!("CARGO_BIN_EXE_worker-under-test")));
    if support.strongest >= SandboxLevel::Deck {
        return Some(WorkerUnderTest::attached(agent, |host| confine(host, home)).await);
    }
    let (worker, spec) = WorkerUnderTest::with(agent, |host| confine(host, home)).await;
    let AgentExitReason::Failed(error) = worker.attach(&spec, 0, None).wait_for_gone().await else {
        panic!("it started although {:?}", support.missing)
    };
    assert_eq!(error.code, "sandbox_unavailable");
    None
}

#[tokio::test]
async fn a_confined_agent_works_cannot_read_the_home_and_names_pids_of_the_machine() {
    let (home, token) = home_with_token();
    let Some((worker, mut daemon)) = confined("script", home.path()).await else { return };
    let file = worker.home.path().join("made");
    let steps = r#"[{"write":{"path":"made","content":"x"}},{"spawn":{"argv":["sleep","600"],"setsid":true,"double_fork":true}}]"#;
    daemon.prompt("a", steps);
    let text = daemon.wait_for_end("a").await.text;
    assert_eq!(std::fs::read_to_string(file).unwrap(), "x");
    let pid: u32 = text.trim().strip_prefix("pid ").unwrap().parse().unwrap();
    assert_eq!(procfs::name(pid).as_deref(), Some("sleep"));
    assert_eq!(pid_namespaces_below_ours(pid).unwrap().len(), 1);
    daemon.prompt("b", &format!(r#"[{{"read":"{}"}}]"#, token.display()));
    let ended = daemon.wait_for_end("b").await;
    assert_ne!(ended.outcome.stop, TurnStopReason::EndTurn, "it reads the home: {}", ended.text);
}

#[tokio::test]
async fn a_cancel_ends_what_a_confined_turn_started_and_an_idle_stop_keeps_what_one_left() {
    let (home, _token) = home_with_token();
    let Some((mut worker, mut daemon)) = confined("script", home.path()).await else { return };
    let spec = crate::harness::agent_spec(&worker.home, "script", "one");
    let sleep = r#"{"spawn":{"argv":["sleep","600"],"setsid":true,"double_fork":true}}"#;
    daemon.prompt("a", &format!(r#"[{sleep},{{"say":" begun"}},{{"sleep_ms":600000}}]"#));
    daemon.wait_for_text("begun").await;
    daemon.cancel("a");
    let ended = daemon.wait_for_end("a").await;
    assert_eq!((ended.outcome.stop, ended.outcome.processes.survivors), (TurnStopReason::Cancelled, 0));
    assert!(ended.outcome.processes.killed >= 1);

    daemon.prompt("b", &format!("[{sleep}]"));
    let text = daemon.wait_for_end("b").await.text;
    let leftover: u32 = text.trim().strip_prefix("pid ").unwrap().parse().unwrap();
    daemon.link.stop_idle_agent();
    daemon.wait_for(|update| *update == AgentUpdate::IdleStopped).await;
    let alive: Vec<u32> = procfs::find_marked(&spec.mark).into_iter().map(|process| process.pid).collect();
    assert_eq!(alive, [leftover]);
    daemon.link.close();
    assert_eq!(daemon.wait_for_gone().await, AgentExitReason::Stopped);
    assert!(worker.wait_for_exit().await.success());
    wait_until_all_exited(&spec).await;
}

#[tokio::test]
async fn a_confined_program_has_its_terminal() {
    let (home, _token) = home_with_token();
    let Some((_worker, mut daemon)) = confined("pty:bash --norc --noprofile", home.path()).await else {
        return;
    };
    daemon.prompt("a", "tty; echo $$");
    let text = daemon.wait_for_end("a").await.text;
    assert!(text.contains("/dev/pts/"), "{text}");
}

#[tokio::test]
async fn a_worker_takes_the_daemons_word_for_what_its_machine_can_do() {
    let (home, _token) = home_with_token();
    let missing = "the daemon has tried it".to_owned();
    let support = SandboxSupport { missing: Some(missing.clone()), ..SandboxSupport::default() };
    let confine_without_support = |host: &mut WorkerHostSpec| {
        confine(host, home.path());
        for sandbox in host.agents.iter_mut().filter_map(|agent| agent.sandbox.as_mut()) {
            sandbox.support = Some(support.clone());
        }
    };
    let (worker, spec) = WorkerUnderTest::with("script", confine_without_support).await;
    let AgentExitReason::Failed(error) = worker.attach(&spec, 0, None).wait_for_gone().await else {
        panic!("it started although the daemon says that it cannot be confined")
    };
    assert_eq!(error.code, "sandbox_unavailable");
    assert!(error.message.contains(&missing), "{}", error.message);
}
