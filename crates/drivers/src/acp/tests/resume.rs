//! Conversations that are resumed: by another process, and after waiting for other sessions.

use qd_protocol::event::{ContextUsage, TokenUsage};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};
use serde_json::json;

use super::{scripted, scripted_with, start_with};
use crate::harness::assert_ended_well;
use qd_script::ScriptSetup;

#[tokio::test(start_paused = true)]
async fn the_replay_of_a_resumed_agent_is_dropped_and_its_totals_continue() {
    let state = tempfile::tempdir().unwrap();
    let setup = ScriptSetup { state_dir: Some(state.path().to_owned()), ..ScriptSetup::default() };
    let used = r#"[{"say":"the past"},{"usage":{"input_tokens":7,"cost_usd":0.5}}]"#;
    let mut first = start_with(|_| {}, {
        let setup = setup.clone();
        async move |pipe| {
            let (from, to) = tokio::io::split(pipe);
            qd_script::serve(from, to, setup).await;
        }
    });
    let AgentUpdate::Ready { agent_session_id: Some(id), .. } = first.next_update().await else {
        panic!("ready")
    };
    assert_eq!(first.run_turn("a", used).await.text(), "the past");
    drop(first);

    let mut second = scripted_with(setup, |spec| spec.agent_session_id = Some(id)).await;
    let ended =
        second.run_turn("b", r#"[{"tool":{"name":"T"}},{"usage":{"input_tokens":1,"cost_usd":0.1}}]"#).await;
    assert_ended_well(&ended);
    let updates = ended.turn_updates();
    assert!(
        matches!(&updates[0], TurnUpdate::ToolStarted { call_id, .. } if call_id == "call_2_1"),
        "{updates:?}"
    );
    let usage = TokenUsage { input_tokens: 1, output_tokens: 0, cost_usd: 0.1 };
    let usage = TurnUpdate::Usage { usage, conversation_cost_usd: Some(0.6) };
    let context = TurnUpdate::Context(ContextUsage { used: 8, size: 1 << 20 });
    assert_eq!(updates[2..], [usage, context]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_cannot_resume_starts_a_new_conversation_and_the_first_turn_reports_it() {
    let state = tempfile::tempdir().unwrap();
    let setup = ScriptSetup { state_dir: Some(state.path().to_owned()), ..ScriptSetup::default() };
    let mut agent = scripted_with(setup, |spec| spec.agent_session_id = Some("gone".to_owned())).await;
    let updates = agent.run_turn("a", "hello").await.turn_updates();
    let [TurnUpdate::Notice { text, .. }, TurnUpdate::Text { text: hello }] = &updates[..] else {
        panic!("{updates:?}")
    };
    assert!(text.starts_with("the agent could not resume its old conversation"), "{text}");
    assert_eq!(hello, "hello");
    assert_eq!(
        agent.run_turn("b", "again").await.turn_updates(),
        [TurnUpdate::Text { text: "again".to_owned() }]
    );
}

#[tokio::test(start_paused = true)]
async fn a_stateless_script_gives_no_notice_about_a_lost_conversation() {
    let old = |spec: &mut qd_protocol::worker::AgentSpec| spec.agent_session_id = Some("gone".to_owned());
    let mut agent = scripted_with(ScriptSetup::default(), old).await;
    assert_eq!(
        agent.run_turn("a", "hello").await.turn_updates(),
        [TurnUpdate::Text { text: "hello".to_owned() }]
    );
}

#[tokio::test(start_paused = true)]
async fn a_suspended_turn_continues_after_its_step_from_its_transcript_in_any_process() {
    let script = r#"[{"say":"one"},{"suspend":true},{"say":"two"}]"#;
    let mut agent = scripted().await;
    let ended = agent.run_turn("a", script).await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::Suspended, "one"));
    let mut messages = ended.outcome.transcript;
    assert_eq!(messages[0], json!({"role": "user", "content": script}));
    assert_eq!(messages[1]["content"], "one");
    drop(agent);

    let result = json!({"session_id": "ses_x", "finish_reason": "end_turn", "text": "done"});
    messages.push(json!({"role": "user", "content": result}));
    let mut other = scripted().await;
    other.prompt_with("a", "", vec![], messages);
    let ended = other.wait_for_end("a").await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (TurnStopReason::EndTurn, "two"));
}
