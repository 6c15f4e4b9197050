//! Conversations that go on: in another process, and after a wait for other sessions.

use qd_protocol::event::Usage;
use qd_protocol::link::{Said, Stop, Up};
use serde_json::json;

use super::{scripted, scripted_with, with};
use crate::drivers::stage::assert_well;
use crate::script::Setup;

#[tokio::test(start_paused = true)]
async fn a_resumed_agents_past_is_thrown_away_and_its_totals_go_on() {
    let state = tempfile::tempdir().unwrap();
    let setup = Setup { state: Some(state.path().to_owned()), ..Setup::default() };
    let used = r#"[{"say":"the past"},{"usage":{"input_tokens":7,"cost_usd":0.5}}]"#;
    let mut first = with(|_| {}, {
        let setup = setup.clone();
        async move |far| {
            let (from, to) = tokio::io::split(far);
            crate::script::serve(from, to, setup).await;
        }
    });
    let Up::Ready { agent_session_id: Some(id), .. } = first.hear().await else { panic!("ready") };
    assert_eq!(first.play("a", used).await.text(), "the past");
    drop(first);

    let mut second = scripted_with(setup, |spec| spec.agent_session_id = Some(id)).await;
    let ended =
        second.play("b", r#"[{"tool":{"name":"T"}},{"usage":{"input_tokens":1,"cost_usd":0.1}}]"#).await;
    assert_well(&ended);
    let said = ended.said();
    assert!(matches!(&said[0], Said::ToolStarted { call_id, .. } if call_id == "call_2_1"), "{said:?}");
    let usage = Usage { input_tokens: 1, output_tokens: 0, cost_usd: 0.1 };
    assert_eq!(said[2..], [Said::Usage { usage }]);
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_has_forgotten_begins_anew_and_the_first_turn_says_so() {
    let state = tempfile::tempdir().unwrap();
    let setup = Setup { state: Some(state.path().to_owned()), ..Setup::default() };
    let mut agent = scripted_with(setup, |spec| spec.agent_session_id = Some("gone".to_owned())).await;
    let said = agent.play("a", "hello").await.said();
    let [Said::Notice { text }, Said::Text { text: hello }] = &said[..] else { panic!("{said:?}") };
    assert!(text.starts_with("the agent could not go on with its old conversation"), "{text}");
    assert_eq!(hello, "hello");
    assert_eq!(agent.play("b", "again").await.said(), [Said::Text { text: "again".to_owned() }]);
}

#[tokio::test(start_paused = true)]
async fn a_script_that_remembers_nothing_raises_no_alarm_about_it() {
    let old = |spec: &mut qd_protocol::worker::AgentSpec| spec.agent_session_id = Some("gone".to_owned());
    let mut agent = scripted_with(Setup::default(), old).await;
    assert_eq!(agent.play("a", "hello").await.said(), [Said::Text { text: "hello".to_owned() }]);
}

#[tokio::test(start_paused = true)]
async fn a_suspended_turn_goes_on_behind_its_step_with_its_transcript_in_any_process() {
    let script = r#"[{"say":"one"},{"suspend":true},{"say":"two"}]"#;
    let mut agent = scripted().await;
    let ended = agent.play("a", script).await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (Stop::Suspended, "one"));
    let mut messages = ended.outcome.transcript;
    assert_eq!(messages[0], json!({"role": "user", "content": script}));
    assert_eq!(messages[1]["content"], "one");
    drop(agent);

    let result = json!({"session_id": "ses_x", "finish_reason": "end_turn", "text": "done"});
    messages.push(json!({"role": "user", "content": result}));
    let mut other = scripted().await;
    other.prompt_with("a", "", vec![], messages);
    let ended = other.ended("a").await;
    assert_eq!((ended.outcome.stop, ended.text().as_str()), (Stop::EndTurn, "two"));
}
