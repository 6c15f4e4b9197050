//! Recorded exchanges with the real server, played again without it. The driver must write what it wrote then, and the
//! session must hear what was said. How they were recorded stands beside them.

use qd_protocol::event::{Decision, Usage};
use qd_protocol::link::{AskRequest, Said, Stop, Up};
use qd_protocol::worker::AgentSpec;
use serde_json::{Value, json};

use super::hand::Hand;
use super::{Ended, Stage, decide, rest, run};

/// A recording being played.
struct Play {
    stage: Stage,
    hand: Hand,
    /// How many prompts there were, each a run of its number.
    prompts: usize,
    /// What was heard of the run under way.
    ups: Vec<Up>,
    ended: Vec<Ended>,
}

/// Plays it to its end; gives every run.
async fn play(recording: &str) -> Vec<Ended> {
    let lines: Vec<(String, Value)> = recording.lines().map(line).collect();
    let resumed = lines.iter().find(|(_, said)| said["method"] == "thread/resume");
    let resumed = resumed.map(|(_, said)| said["params"]["threadId"].as_str().unwrap().to_owned());
    let prompted = lines.iter().find(|(_, said)| said["method"] == "thread/start");
    let params = prompted.map(|(_, said)| said["params"].clone()).unwrap_or_default();
    let word = |name: &str| params[name].as_str().map(str::to_owned);
    let (stage, hand) = Stage::with(|spec: &mut AgentSpec| {
        spec.agent_session_id = resumed;
        spec.model = word("model");
        spec.system_prompt = word("developerInstructions");
    });
    let mut play = Play { stage, hand, prompts: 0, ups: Vec::new(), ended: Vec::new() };
    for (who, said) in lines {
        match who.as_str() {
            "<" => play.hand.write(&said.to_string()).await,
            ">" => {
                let mut heard = play.hand.hear().await;
                if let Some(version) = heard.pointer_mut("/params/clientInfo/version") {
                    *version = json!("0");
                }
                assert_eq!(heard, said);
            }
            _ => play.act(&said).await,
        }
    }
    play.end().await;
    play.hand.expect_silence().await;
    play.ended
}

fn line(line: &str) -> (String, Value) {
    let value: Value = serde_json::from_str(line).unwrap();
    let (who, said) = value.as_object().unwrap().iter().next().unwrap();
    (who.clone(), said.clone())
}

impl Play {
    /// Does what the session did.
    async fn act(&mut self, said: &Value) {
        let (what, value) = said.as_object().unwrap().iter().next().unwrap();
        let words = value.as_str().unwrap_or_default();
        rest().await;
        let name = self.prompts.to_string();
        match what.as_str() {
            "prompt" => {
                self.end().await;
                self.prompts += 1;
                self.stage.prompt(&self.prompts.to_string(), words);
            }
            "cancel" => self.stage.cancel(&name),
            "steer" => drop(self.stage.steer(&name, words)),
            "allow" => {
                let ask = self.ask().await;
                self.stage.answer(&ask, decide(Decision::AllowOnce, None));
            }
            "deny" => {
                let ask = self.ask().await;
                self.stage.answer(&ask, decide(Decision::Deny, Some(words)));
            }
            other => panic!("nobody can {other}"),
        }
    }

    async fn ask(&mut self) -> AskRequest {
        loop {
            let up = self.stage.hear().await;
            self.ups.push(up.clone());
            if let Up::Ask { ask, .. } = up {
                return ask;
            }
        }
    }

    /// Waits for the end of the run under way, if there is one.
    async fn end(&mut self) {
        if self.prompts == 0 {
            assert!(matches!(self.stage.hear().await, Up::Ready { .. }));
        } else if self.ended.len() < self.prompts {
            let Ended { ups, outcome } = self.stage.ended(&self.prompts.to_string()).await;
            let ups = self.ups.drain(..).chain(ups).collect();
            self.ended.push(Ended { ups, outcome });
        }
    }
}

/// What was heard of every one of these, in order: name and failure of each tool that ended.
fn tools(ended: &Ended) -> Vec<(String, Value, bool)> {
    let tools = ended.said().into_iter().filter_map(|said| match said {
        Said::ToolFinished { name, output, is_error, .. } => Some((name, output, is_error)),
        _ => None,
    });
    tools.collect()
}

fn usage(ended: &Ended) -> Vec<(u64, u64)> {
    let usage = ended.said().into_iter().filter_map(|said| match said {
        Said::Usage { usage: Usage { input_tokens, output_tokens, .. } } => {
            Some((input_tokens, output_tokens))
        }
        _ => None,
    });
    usage.collect()
}

#[tokio::test(start_paused = true)]
async fn two_prompts() {
    let runs = play(include_str!("recorded/hello.jsonl")).await;
    let [first, second] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!((first.stop(), first.text().as_str()), (Stop::EndTurn, "ECHO[hello] users=1 results=0"));
    assert_eq!(first.outcome.text.as_deref(), Some("ECHO[hello] users=1 results=0"));
    assert_eq!(second.text(), "ECHO[and again] users=2 results=0");
    assert_eq!((usage(first), usage(second)), (vec![(100, 7)], vec![(100, 7)]));
    assert_eq!((first.turns(), second.turns()), (1, 1));
    // A warning comes with every turn, and is shown once.
    let notices = |run: &Ended| run.said().iter().filter(|said| matches!(said, Said::Notice { .. })).count();
    assert_eq!((notices(first), notices(second)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_allowed() {
    let runs = play(include_str!("recorded/allowed.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    let asked = only.ups.iter().find_map(|up| if let Up::Ask { ask, .. } = up { Some(ask) } else { None });
    let input = json!({"command": "echo hi > made", "cwd": "/w", "reason": "scripted: allow?"});
    assert_eq!(asked.map(|ask| &ask.input), Some(&input));
    assert_eq!(only.stop(), Stop::EndTurn);
    let ended = json!({"status": "completed", "exit_code": 0, "output": null});
    assert_eq!(tools(only), [("Bash".to_owned(), ended, false)]);
    assert_eq!((usage(only).len(), only.turns()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_tool_that_was_denied_with_a_reason() {
    let runs = play(include_str!("recorded/denied.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    // The turn goes on, and the model has heard why.
    assert_eq!(only.stop(), Stop::EndTurn);
    assert_eq!(only.text(), "ECHO[This was refused, for the reason: not on a Friday] users=2 results=0");
    let ended = json!({"status": "declined", "exit_code": null, "output": null});
    assert_eq!(tools(only), [("Bash".to_owned(), ended, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_patch_that_was_allowed() {
    let runs = play(include_str!("recorded/patch.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    let started = only.said().into_iter().find_map(|said| match said {
        Said::ToolStarted { name, input, .. } => Some((name, input)),
        _ => None,
    });
    let changes = json!([{"path": "/w/patched.txt", "kind": "add", "diff": "hello\n"}]);
    assert_eq!(started, Some(("Edit".to_owned(), json!({"path": "/w/patched.txt", "changes": changes}))));
    assert_eq!(tools(only), [("Edit".to_owned(), json!({"status": "completed"}), false)]);
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_the_middle_of_the_words() {
    let runs = play(include_str!("recorded/cancel-stream.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!(only.stop(), Stop::Cancelled);
    assert!(only.text().starts_with("tok0"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_at_once_and_the_next_prompt() {
    let runs = play(include_str!("recorded/cancel-at-once.jsonl")).await;
    let stops: Vec<Stop> = runs.iter().map(Ended::stop).collect();
    assert_eq!(stops, [Stop::EndTurn, Stop::Cancelled, Stop::EndTurn]);
    assert_eq!(runs[1].text(), "");
    assert!(runs[2].text().starts_with("ECHO[and now?]"));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_that_the_server_refuses_because_it_has_not_begun() {
    let recording = include_str!("recorded/cancel-early.jsonl");
    assert!(recording.contains("no active turn to interrupt"));
    let runs = play(recording).await;
    let stops: Vec<Stop> = runs.iter().map(Ended::stop).collect();
    assert_eq!(stops, [Stop::Cancelled, Stop::EndTurn]);
    assert_eq!(runs[0].text(), "");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_in_a_command() {
    let runs = play(include_str!("recorded/cancel-tool.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!(only.stop(), Stop::Cancelled);
    let [(name, output, true)] = &tools(only)[..] else { panic!("{:?}", tools(only)) };
    assert_eq!((name.as_str(), &output["status"]), ("Bash", &json!("failed")));
}

#[tokio::test(start_paused = true)]
async fn a_word_on_the_way() {
    let runs = play(include_str!("recorded/steer.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!(only.stop(), Stop::EndTurn);
    assert!(only.ups.iter().any(|up| matches!(up, Up::SteerTaken { .. })));
    assert_eq!(only.outcome.text.as_deref(), Some("ECHO[turn left] users=2 results=0"));
}

#[tokio::test(start_paused = true)]
async fn a_model_that_fails_and_then_does_not() {
    let runs = play(include_str!("recorded/error.jsonl")).await;
    let [failed, fine] = &runs[..] else { panic!("{runs:?}") };
    let error = failed.outcome.error.clone().unwrap();
    assert_eq!((error.code.as_str(), error.message.as_str()), ("agent_error", "scripted 400"));
    assert_eq!((failed.stop(), fine.stop()), (Stop::Error, Stop::EndTurn));
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_in_a_new_process() {
    let runs = play(include_str!("recorded/resume.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!(only.text(), "ECHO[the second] users=2 results=0");
    assert_eq!(usage(only), [(100, 7)]);
    assert!(only.ups.iter().all(|up| !matches!(up, Up::Said { run: of, .. } if *of != run("1"))));
}

#[tokio::test(start_paused = true)]
async fn an_old_conversation_that_is_no_more() {
    let runs = play(include_str!("recorded/resume-refused.jsonl")).await;
    let [only] = &runs[..] else { panic!("{runs:?}") };
    assert_eq!((only.stop(), only.text().as_str()), (Stop::EndTurn, "ECHO[the second] users=1 results=0"));
    assert!(matches!(&only.said()[0], Said::Notice { text } if text.contains("no rollout found")));
}
