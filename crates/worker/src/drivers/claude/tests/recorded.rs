//! Exchanges with the real program, replayed line by line: what it said then is said again, and what we said must be
//! said again too. The tapes, and how they were made, are in `tests/fixtures/claude`.

use qd_protocol::event::{Decision, Usage};
use qd_protocol::link::{Said, Stop, Up};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

use super::hand::Hand;
use super::{Ended, Given, Stage, assert_well, choose, decide};

/// One line of a tape.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    from: Who,
    line: Value,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Who {
    Qd,
    Agent,
}

macro_rules! tape {
    ($name:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/claude/", $name, ".jsonl"))
    };
}

/// The agent of a tape, and what tells when another message of ours has reached it.
async fn stage(tape: &'static str) -> (Stage, mpsc::Receiver<()>) {
    let (told, tells) = mpsc::channel(64);
    let mut stage = Stage::given(Given::default(), |far| replay(far, tape, told));
    assert!(matches!(stage.hear().await, Up::Ready { .. }));
    (stage, tells)
}

/// Plays the agent of a tape. Names of our messages are random: those of the tape become those of today.
async fn replay(far: DuplexStream, tape: &'static str, told: mpsc::Sender<()>) {
    let mut hand = Hand::new(far);
    let mut names: Vec<(String, String)> = Vec::new();
    for text in tape.lines() {
        let Line { from, line } = serde_json::from_str(text).expect("a line of a tape");
        match from {
            Who::Agent => hand.write(&renamed(line, &names)).await,
            Who::Qd => {
                let heard = hand.hear().await;
                if let (Some(then), Some(now)) = (line["uuid"].as_str(), heard["uuid"].as_str()) {
                    names.push((then.to_owned(), now.to_owned()));
                }
                let wanted: Value = serde_json::from_str(&renamed(line, &names)).expect("JSON");
                assert_eq!(heard, wanted);
                if heard["type"] == "user" {
                    told.send(()).await.expect("the test listens");
                }
            }
        }
    }
    hand.idle().await;
}

fn renamed(line: Value, names: &[(String, String)]) -> String {
    names.iter().fold(line.to_string(), |text, (then, now)| text.replace(then, now))
}

fn tools(ended: &Ended) -> Vec<(String, bool)> {
    let tool = |said| match said {
        Said::ToolFinished { name, is_error, .. } => Some((name, is_error)),
        _ => None,
    };
    ended.said().into_iter().filter_map(tool).collect()
}

#[tokio::test(start_paused = true)]
async fn hello_and_a_second_prompt_that_remembers() {
    let (mut agent, _told) = stage(tape!("hello")).await;
    for (name, prompt, text) in
        [("a", "hello", "ECHO[hello] users=1 results=0"), ("b", "again", "ECHO[again] users=2 results=0")]
    {
        let ended = agent.play(name, prompt).await;
        assert_well(&ended);
        assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), (text, Some(text)));
        assert_eq!(ended.usage(), Usage { input_tokens: 100, output_tokens: 7, cost_usd: 0.00054 });
        assert_eq!(ended.turns(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_allowed() {
    let (mut agent, _told) = stage(tape!("tool_allowed")).await;
    agent.prompt("a", "TOOL:write:x.txt");
    let ask = agent.until_ask().await;
    assert_eq!(ask.tool.as_deref(), Some("Bash"));
    assert_eq!(ask.input["command"], "echo hi > x.txt");
    agent.answer(&ask, decide(Decision::AllowOnce, None));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert_eq!(
        (tools(&ended), ended.turns()),
        (vec![("Bash".to_owned(), false)], 1),
        "the first call came before"
    );
    assert!(ended.text().contains("results=1"));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_denied() {
    let (mut agent, _told) = stage(tape!("tool_denied")).await;
    agent.prompt("a", "TOOL:write:y.txt");
    let ask = agent.until_ask().await;
    agent.answer(&ask, decide(Decision::Deny, Some("not today")));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert_eq!(tools(&ended), [("Bash".to_owned(), true)]);
    assert!(ended.text().contains("lastresult='not today'"), "the model was told why: {}", ended.text());
}

#[tokio::test(start_paused = true)]
async fn a_question() {
    let (mut agent, _told) = stage(tape!("question")).await;
    agent.prompt("a", "TOOL:ask");
    let ask = agent.until_ask().await;
    assert_eq!(
        (ask.prompt.as_str(), &ask.options[..]),
        ("Which colour?", &["Red".to_owned(), "Blue".to_owned()][..])
    );
    agent.answer(&ask, choose("Blue"));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert!(ended.text().contains(r#""Which colour?"="Blue""#), "{}", ended.text());
}

#[tokio::test(start_paused = true)]
async fn a_cancel_while_the_model_speaks_and_a_prompt_after_it() {
    let (mut agent, _told) = stage(tape!("cancel_speaking")).await;
    agent.prompt("a", "SLOW:20");
    agent.until_text("tok1 ").await;
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.outcome.stop, Stop::Cancelled);
    let after = agent.play("b", "after").await;
    assert_well(&after);
    assert!(after.outcome.text.unwrap().starts_with("ECHO[after]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_and_a_prompt_after_it() {
    let (mut agent, mut told) = stage(tape!("cancel_at_once")).await;
    agent.prompt("a", "SLOW:20");
    told.recv().await.expect("it was prompted");
    agent.cancel("a");
    let ended = agent.ended("a").await;
    assert_eq!((ended.outcome.stop, ended.turns()), (Stop::Cancelled, 0), "the model was never called");
    let after = agent.play("b", "after").await;
    assert!(after.outcome.text.unwrap().starts_with("ECHO[after] users=1"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_during_a_tool() {
    let (mut agent, mut told) = stage(tape!("steer_in_tool")).await;
    agent.prompt("a", "TOOL:sleep:3");
    let ask = agent.until_ask().await;
    agent.answer(&ask, decide(Decision::AllowOnce, None));
    told.recv().await.expect("it was prompted");
    let steer = agent.steer("a", "steered");
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert!(ended.ups.contains(&Up::SteerTaken { steer }));
    assert_eq!(ended.outcome.text.as_deref(), Some("ECHO[steered] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_steer_while_the_model_speaks() {
    let (mut agent, mut told) = stage(tape!("steer_speaking")).await;
    agent.prompt("a", "SLOW:2");
    told.recv().await.expect("it was prompted");
    let steer = agent.steer("a", "steered");
    let ended = agent.ended("a").await;
    assert_well(&ended);
    assert!(ended.ups.contains(&Up::SteerTaken { steer }));
    assert!(ended.text().contains("SLOWENDECHO[steered]"), "both are its text: {}", ended.text());
    assert_eq!((ended.outcome.text.as_deref(), ended.turns()), (Some("ECHO[steered] users=2 results=0"), 2));
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_one_that_is_called_again() {
    let (mut agent, _told) = stage(tape!("model_error")).await;
    let ended = agent.play("a", "ERR:400").await;
    let error = ended.outcome.error.as_ref().expect("an error");
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "API Error: 400 scripted 400"));
    assert_eq!(ended.text(), "");
    let again = agent.play("b", "ERRONCE:529").await;
    assert_well(&again);
    assert!(again.said().iter().any(|said| matches!(said, Said::Notice { text } if text.contains("529"))));
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_goes_on_in_another_process_and_is_charged_for_what_is_new() {
    let (told, _tells) = mpsc::channel(64);
    let given = Given { resumed: true, ..Given::default() };
    let mut agent = Stage::given(given, |far| replay(far, tape!("resume"), told));
    assert!(matches!(agent.hear().await, Up::Ready { .. }));
    let ended = agent.play("a", "two").await;
    assert_eq!(ended.outcome.text.as_deref(), Some("ECHO[two] users=2 results=0"));
    assert_eq!(ended.usage().cost_usd, 0.00054);
}

#[tokio::test(start_paused = true)]
async fn a_conversation_that_is_not_there() {
    let (told, _tells) = mpsc::channel(64);
    let mut agent = Stage::given(Given::default(), |far| replay(far, tape!("resume_unknown"), told));
    let error = agent.gone().await;
    assert!(error.message.starts_with("No conversation found"), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_turn_of_the_agents_own_after_a_task_in_the_background() {
    let (mut agent, _told) = stage(tape!("background")).await;
    let prompt = background();
    agent.prompt("a", &prompt);
    let ask = agent.until_ask().await;
    agent.answer(&ask, decide(Decision::AllowOnce, None));
    assert_well(&agent.ended("a").await);
    agent.until_text("it has ended").await;
    let ended = agent.play("b", "after").await;
    assert!(ended.outcome.text.as_deref().is_some_and(|text| text.starts_with("ECHO[after]")));
}

/// The prompt of that tape: what the model is to do, step by step.
fn background() -> String {
    let run =
        json!({"Bash": {"command": "sleep 1; echo x > bg", "description": "d", "run_in_background": true}});
    format!("RAW:{}", json!([[run], [{"text": "begun"}], [{"text": "it has ended"}]]))
}

#[tokio::test(start_paused = true)]
async fn a_helper_whose_tools_are_shown_and_whose_words_are_not() {
    let (mut agent, _told) = stage(tape!("helper")).await;
    agent.prompt("a", &helper());
    let ask = agent.until_ask().await;
    agent.answer(&ask, decide(Decision::AllowOnce, None));
    let ended = agent.ended("a").await;
    assert_well(&ended);
    let names: Vec<_> = tools(&ended).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["Bash", "Agent"]);
    assert_eq!((ended.text().as_str(), ended.outcome.text.as_deref()), ("done", Some("done")));
    assert!(ended.usage().input_tokens > 200, "the helper's calls count, too: {:?}", ended.usage());
}

fn helper() -> String {
    let inner = json!([
        [{"text": "inner words "}, {"Bash": {"command": "echo x > q", "description": "d"}}],
        [{"text": "inner end"}],
    ]);
    let outer = json!({"description": "helps", "prompt": format!("RAW:{inner}"),
        "run_in_background": false, "subagent_type": "general-purpose"});
    format!("RAW:{}", json!([[{"Agent": outer}], [{"text": "done"}]]))
}
