//! Starts and ends of agents that speak Claude Code's protocol, tested with a shell script that speaks as much of it as
//! needed. Some prompts are instructions to the script; it answers others with the arguments it was started with.

use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnUpdate};
use qd_protocol::manifest::PolicyEnforcement;
use qd_protocol::worker::{AgentSpec, WorkerHostSpec};

use crate::harness::{DaemonSide, WorkerUnderTest};

const AGENT: &str = r#"
result() { echo "{\"is_error\":$1,\"subtype\":\"x\",\"errors\":[$2],\"result\":\"$3\",\"user_message_uuids\":[\"$4\"],\"type\":\"result\"}"; }
read -r hello
case "$*" in
*"--resume gone"*) result true '"No conversation found"' "" ""; echo "No conversation found" >&2; exit 1;;
*"--model broken"*) echo "it is broken" >&2; exit 3;;
*"--model mute"*) read -r never;;
esac
echo '{"type":"control_response","response":{"subtype":"success","request_id":"qd-hello","response":{}}}'
while read -r line; do
  uuid=$(printf '%s' "$line" | sed 's/.*"uuid":"\([^"]*\)".*/\1/')
  echo "{\"type\":\"command_lifecycle\",\"command_uuid\":\"$uuid\",\"state\":\"started\"}"
  case "$line" in
  *'"text":"die"'*) echo "out of luck" >&2; exit 7;;
  *'"text":"/clear"'*) echo '{"type":"system","subtype":"init","session_id":"another"}';;
  esac
  result false "" "$*" "$uuid"
done
"#;

/// Makes the script the agent's program.
fn use_script(host: &mut WorkerHostSpec, change: impl FnOnce(&mut AgentSpec)) {
    let spec = &mut host.agents[0];
    let path = host.dir.join("agent.sh");
    std::fs::write(&path, AGENT).unwrap();
    let mut manifest = Catalog::built_in().get("claude").unwrap();
    manifest.startup.command = vec!["sh".to_owned(), path.to_string_lossy().into_owned()];
    // Its arguments have quotes, which the script cannot escape.
    manifest.policy = PolicyEnforcement::default();
    spec.manifest = Some(Box::new(manifest));
    change(spec);
}

async fn start_agent(change: impl FnOnce(&mut AgentSpec)) -> (WorkerUnderTest, DaemonSide, String) {
    let (worker, spec) = WorkerUnderTest::with("claude", |host| use_script(host, change)).await;
    let mut daemon = worker.attach(&spec, 0, None);
    let name = daemon.conversation_id().await;
    (worker, daemon, name)
}

async fn start_failing_agent(change: impl FnOnce(&mut AgentSpec)) -> RunError {
    let (worker, spec) = WorkerUnderTest::with("claude", |host| use_script(host, change)).await;
    match worker.attach(&spec, 0, None).wait_for_gone().await {
        AgentExitReason::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

impl DaemonSide {
    /// Waits until the agent is ready, and returns the id of its conversation.
    async fn conversation_id(&mut self) -> String {
        let mut updates = self.wait_for(|update| matches!(update, AgentUpdate::Ready { .. })).await;
        match updates.pop() {
            Some(AgentUpdate::Ready { agent_session_id: Some(name), steers: true }) => name,
            other => panic!("{other:?}"),
        }
    }

    async fn run_prompt(&mut self, run: &str, prompt: &str) -> String {
        self.prompt(run, prompt);
        self.wait_for_end(run).await.outcome.text.unwrap()
    }
}

#[tokio::test]
async fn a_conversation_has_a_name_of_ours_before_its_first_prompt_and_the_flags_of_its_session() {
    let (_worker, mut daemon, name) = start_agent(|spec| {
        spec.model = Some("opus".to_owned());
        spec.system_prompt = Some("brief".to_owned());
    })
    .await;
    let arguments = daemon.run_prompt("a", "x").await;
    assert_eq!(arguments, format!("--model opus --append-system-prompt brief --session-id {name}"));
    let (_other, _, another) = start_agent(|_| {}).await;
    assert_ne!(name, another);
}

#[tokio::test]
async fn a_conversation_is_resumed_by_its_id_and_a_lost_one_begins_anew_with_a_notice() {
    let (_worker, mut daemon, name) =
        start_agent(|spec| spec.agent_session_id = Some("old".to_owned())).await;
    assert_eq!((name.as_str(), daemon.run_prompt("a", "x").await.as_str()), ("old", "--resume old"));

    let (_worker, mut daemon, name) =
        start_agent(|spec| spec.agent_session_id = Some("gone".to_owned())).await;
    assert_ne!(name, "gone");
    daemon.prompt("a", "x");
    let updates = daemon.wait_for(|update| matches!(update, AgentUpdate::TurnEnded { .. })).await;
    let AgentUpdate::Turn { update: TurnUpdate::Notice { text, .. }, .. } = &updates[0] else {
        panic!("{updates:?}")
    };
    assert!(text.ends_with("No conversation found"), "{text}");
    let Some(AgentUpdate::TurnEnded { outcome, .. }) = updates.last() else { panic!("{updates:?}") };
    assert_eq!(outcome.text, Some(format!("--session-id {name}")));
}

#[tokio::test]
async fn a_start_that_fails_says_what_the_agent_said() {
    let error = start_failing_agent(|spec| spec.model = Some("broken".to_owned())).await;
    assert_eq!((error.code.as_str(), error.exit_status), ("agent_exited", Some(3)));
    assert_eq!(error.stderr, ["it is broken"]);
    let error = start_failing_agent(|spec| {
        spec.model = Some("mute".to_owned());
        spec.manifest.as_mut().unwrap().startup.init_timeout_seconds = Some(1);
    })
    .await;
    assert_eq!(error.code, "agent_not_ready");
}

#[tokio::test]
async fn an_agent_that_ends_in_its_turn_leaves_its_status_and_its_last_words() {
    let (_worker, mut daemon, _) = start_agent(|_| {}).await;
    daemon.prompt("a", "die");
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!((error.code.as_str(), error.exit_status), ("agent_exited", Some(7)));
    assert_eq!(error.stderr, ["out of luck"]);
}

#[tokio::test]
async fn a_command_that_begins_another_conversation_changes_the_id_to_resume() {
    let (_worker, mut daemon, name) = start_agent(|_| {}).await;
    assert_ne!(name, "another");
    daemon.run_prompt("a", "/clear").await;
    assert_eq!(daemon.conversation_id().await, "another");
    daemon.run_prompt("b", "x").await;
}
