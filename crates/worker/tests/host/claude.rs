//! Starts and ends of agents that speak Claude Code's protocol, shown with a shell script that speaks as much of it as
//! it must. Its prompts are what it is to do; it answers others with the arguments that it was started with.

use qd_catalog::Catalog;
use qd_protocol::event::RunError;
use qd_protocol::link::{AgentExitReason, AgentUpdate, TurnUpdate};
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

/// Makes the agent that script.
fn scripted(host: &mut WorkerHostSpec, change: impl FnOnce(&mut AgentSpec)) {
    let spec = &mut host.agents[0];
    let path = host.dir.join("agent.sh");
    std::fs::write(&path, AGENT).unwrap();
    let mut manifest = Catalog::built_in().get("claude").unwrap();
    manifest.startup.command = vec!["sh".to_owned(), path.to_string_lossy().into_owned()];
    spec.manifest = Some(Box::new(manifest));
    change(spec);
}

async fn started(change: impl FnOnce(&mut AgentSpec)) -> (WorkerUnderTest, DaemonSide, String) {
    let (worker, spec) = WorkerUnderTest::with("claude", |host| scripted(host, change)).await;
    let mut daemon = worker.attach(&spec, 0, None);
    let name = daemon.name().await;
    (worker, daemon, name)
}

async fn failed(change: impl FnOnce(&mut AgentSpec)) -> RunError {
    let (worker, spec) = WorkerUnderTest::with("claude", |host| scripted(host, change)).await;
    match worker.attach(&spec, 0, None).gone().await {
        AgentExitReason::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

impl DaemonSide {
    /// The agent's name for its conversation, with which it becomes ready.
    async fn name(&mut self) -> String {
        let mut ups = self.until(|up| matches!(up, AgentUpdate::Ready { .. })).await;
        match ups.pop() {
            Some(AgentUpdate::Ready { agent_session_id: Some(name), steers: true }) => name,
            other => panic!("{other:?}"),
        }
    }

    async fn result(&mut self, run: &str, prompt: &str) -> String {
        self.prompt(run, prompt);
        self.ended(run).await.outcome.text.unwrap()
    }
}

#[tokio::test]
async fn a_conversation_has_a_name_of_ours_before_its_first_prompt_and_the_flags_of_its_session() {
    let (_worker, mut daemon, name) = started(|spec| {
        spec.model = Some("opus".to_owned());
        spec.system_prompt = Some("brief".to_owned());
    })
    .await;
    let arguments = daemon.result("a", "x").await;
    assert_eq!(arguments, format!("--model opus --append-system-prompt brief --session-id {name}"));
    let (_other, _, another) = started(|_| {}).await;
    assert_ne!(name, another);
}

#[tokio::test]
async fn a_conversation_goes_on_under_its_name_and_one_that_is_gone_begins_anew_with_a_word_about_it() {
    let (_worker, mut daemon, name) = started(|spec| spec.agent_session_id = Some("old".to_owned())).await;
    assert_eq!((name.as_str(), daemon.result("a", "x").await.as_str()), ("old", "--resume old"));

    let (_worker, mut daemon, name) = started(|spec| spec.agent_session_id = Some("gone".to_owned())).await;
    assert_ne!(name, "gone");
    daemon.prompt("a", "x");
    let ups = daemon.until(|up| matches!(up, AgentUpdate::Terminal { .. })).await;
    let AgentUpdate::Turn { update: TurnUpdate::Notice { text }, .. } = &ups[0] else { panic!("{ups:?}") };
    assert!(text.ends_with("No conversation found"), "{text}");
    let Some(AgentUpdate::Terminal { outcome, .. }) = ups.last() else { panic!("{ups:?}") };
    assert_eq!(outcome.text, Some(format!("--session-id {name}")));
}

#[tokio::test]
async fn a_start_that_fails_says_what_the_agent_said() {
    let error = failed(|spec| spec.model = Some("broken".to_owned())).await;
    assert_eq!((error.code.as_str(), error.exit_status), ("agent_exited", Some(3)));
    assert_eq!(error.stderr, ["it is broken"]);
    let error = failed(|spec| {
        spec.model = Some("mute".to_owned());
        spec.manifest.as_mut().unwrap().startup.init_timeout_seconds = Some(1);
    })
    .await;
    assert_eq!(error.code, "agent_not_ready");
}

#[tokio::test]
async fn an_agent_that_ends_in_its_turn_leaves_its_status_and_its_last_words() {
    let (_worker, mut daemon, _) = started(|_| {}).await;
    daemon.prompt("a", "die");
    let AgentExitReason::Failed(error) = daemon.gone().await else { panic!("it failed") };
    assert_eq!((error.code.as_str(), error.exit_status), ("agent_exited", Some(7)));
    assert_eq!(error.stderr, ["out of luck"]);
}

#[tokio::test]
async fn a_command_that_begins_another_conversation_changes_the_name_to_go_on_with() {
    let (_worker, mut daemon, name) = started(|_| {}).await;
    assert_ne!(name, "another");
    daemon.result("a", "/clear").await;
    assert_eq!(daemon.name().await, "another");
    daemon.result("b", "x").await;
}
