//! What lists show of a session besides its settings: the run that it works on, the run that ended last, and a title made
//! of the first prompt.

use qd_core::rows::SessionDoc;
use qd_core::session::{PromptSubmission, SessionCommand, SessionState};
use qd_protocol::api::{ActiveRun, LastRun, Session};
use qd_protocol::limits::AUTO_TITLE_CHARS_MAX;
use qd_protocol::link::TurnStopReason;
use qd_protocol::{FinishReason, Millis, RunId};

use crate::harness::{SessionHarness, clocks_at};

fn shown(harness: &SessionHarness) -> Session {
    SessionDoc::of(&harness.state).view(false, None)
}

fn prompt_with(harness: &mut SessionHarness, run: &str, prompt: &str) {
    let run = RunId::parse(run).unwrap();
    let fingerprint = run.to_string();
    let submission = PromptSubmission { prompt: prompt.into(), fingerprint, attachments: Vec::new(), run };
    harness.command(SessionCommand::AcceptPrompt(submission));
}

#[test]
fn a_session_shows_the_run_it_works_on_and_how_the_last_one_ended() {
    let mut harness = SessionHarness::new();
    assert_eq!((shown(&harness).active_run, shown(&harness).last_run), (None, None));
    harness.context.now = clocks_at(1000);
    harness.prompt("first");
    harness.context.now = clocks_at(2000);
    harness.prompt("second");
    let first = RunId::parse("first").unwrap();
    let active = ActiveRun { id: first.clone(), accepted_at: Millis(1000), started_at: Some(Millis(1000)) };
    assert_eq!(shown(&harness).active_run, Some(active));

    harness.context.now = clocks_at(5000);
    harness.end("first", TurnStopReason::Refused);
    let ended = LastRun { id: first, finish_reason: FinishReason::Refused, finished_at: Millis(5000) };
    assert_eq!(shown(&harness).last_run, Some(ended));
    assert_eq!(shown(&harness).active_run.unwrap().id.as_str(), "second");

    harness.context.now = clocks_at(9000);
    harness.end("second", TurnStopReason::EndTurn);
    let last = shown(&harness).last_run.unwrap();
    assert_eq!((last.id.as_str(), last.finish_reason), ("second", FinishReason::EndTurn));
    assert_eq!(shown(&harness).active_run, None);
}

#[test]
fn a_session_without_a_title_shows_the_beginning_of_its_first_prompt() {
    let long = format!("  \n\x1b\n  fix\tthe {}\nand more", "ä".repeat(200));
    let mut harness = SessionHarness::new();
    prompt_with(&mut harness, "first", &long);
    let title = shown(&harness).auto_title.unwrap();
    assert!(title.starts_with("fix the ää"), "{title}");
    assert_eq!(title.chars().count(), AUTO_TITLE_CHARS_MAX);
    prompt_with(&mut harness, "second", "something else");
    assert_eq!(shown(&harness).auto_title, Some(title));
    harness.state.settings.title = Some("nightly".to_owned());
    assert_eq!(shown(&harness).auto_title, None, "a title takes its place");

    let mut titled = SessionHarness::new();
    titled.state.settings.title = Some("nightly".to_owned());
    titled.prompt("first");
    assert_eq!(titled.state.auto_title, None, "nothing is stored that nobody sees");

    let mut blank = SessionHarness::new();
    prompt_with(&mut blank, "first", " \n\t\n");
    assert_eq!(shown(&blank).auto_title, None);
}

#[test]
fn a_snapshot_of_an_earlier_release_loads_without_what_it_does_not_know() {
    let mut harness = SessionHarness::new();
    harness.prompt("first");
    harness.end("first", TurnStopReason::EndTurn);
    let mut stored = serde_json::to_value(&harness.state).unwrap();
    for added in ["last_run", "auto_title"] {
        assert!(stored.as_object_mut().unwrap().remove(added).is_some(), "{added}");
    }
    let loaded: SessionState = serde_json::from_value(stored).unwrap();
    let session = SessionDoc::of(&loaded).view(false, None);
    assert_eq!((session.last_run, session.auto_title), (None, None));
}
