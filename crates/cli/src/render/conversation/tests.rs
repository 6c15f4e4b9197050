//! The rendered text of a conversation, event by event.

use qd_protocol::policy::Risk;
use qd_protocol::{Millis, Seq};
use serde_json::json;

use super::*;
use crate::render::ask::tests::permission;
use crate::render::view_snapshot::assert_view;

fn event(kind: &str, data: Value) -> Event {
    Event {
        seq: Seq(1),
        ts: Millis(0),
        workspace_id: None,
        session_id: None,
        run_id: Some(RunId::parse("run_1").unwrap()),
        kind: kind.to_owned(),
        data,
    }
}

fn delta(text: &str) -> Event {
    event("text.delta", json!({"message_id": "m", "text": text}))
}

fn finished(reason: &str, text: &str) -> Event {
    let usage = json!({"input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0});
    let processes = json!({"killed": 0, "survivors": 0});
    event(
        "run.finished",
        json!({"finish_reason": reason, "text": text, "error": null, "usage": usage, "processes": processes}),
    )
}

/// What `events` put into the two channels.
fn shown(shared_screen: bool, events: &[Event]) -> (String, String) {
    let options = ConversationOptions {
        style: TextStyle::new(false),
        shared_screen,
        show_prompts: true,
        width: None,
        answer_on_terminal: false,
    };
    let mut conversation = ConversationRenderer::new(options);
    let (mut answer, mut aside) = (String::new(), String::new());
    for event in events {
        for piece in conversation.render_event(event) {
            match piece.channel {
                OutputChannel::Answer => answer.push_str(&piece.text),
                OutputChannel::Aside => aside.push_str(&piece.text),
            }
        }
    }
    (answer, aside)
}

/// Both channels on one screen.
fn screen(events: &[Event]) -> String {
    let options = ConversationOptions {
        style: TextStyle::new(false),
        shared_screen: true,
        show_prompts: true,
        width: Some(80),
        answer_on_terminal: true,
    };
    let mut conversation = ConversationRenderer::new(options);
    events.iter().flat_map(|event| conversation.render_event(event)).map(|piece| piece.text).collect()
}

#[test]
fn streamed_text_is_the_answer_and_its_result_is_not_printed_again() {
    let (answer, aside) =
        shown(false, &[delta("hello "), delta("you "), finished("end_turn", "echo: hello you")]);
    assert_eq!((answer.as_str(), aside.as_str()), ("hello you \n", ""));
}

#[test]
fn a_run_that_streamed_nothing_shows_its_result() {
    assert_eq!(shown(false, &[finished("end_turn", "done")]).0, "done\n");
    assert_eq!(shown(false, &[finished("end_turn", "")]).0, "", "an empty result prints nothing");
}

#[test]
fn streamed_text_of_one_run_does_not_hide_the_result_of_the_next() {
    let mut next = finished("end_turn", "two");
    next.run_id = Some(RunId::parse("run_2").unwrap());
    assert_eq!(shown(false, &[delta("one"), finished("end_turn", "one"), next]).0, "one\ntwo\n");
}

#[test]
fn data_stays_exact_while_asides_come_between_and_a_tool_ends_a_message() {
    let tool = event("tool.started", json!({"call_id": "c", "name": "Bash", "input": {"command": "ls"}}));
    let notice = event("notice.shown", json!({"text": "hm"}));
    let (answer, aside) = shown(false, &[delta("a"), notice, delta("b"), finished("end_turn", "")]);
    assert_eq!((answer.as_str(), aside.as_str()), ("ab\n", "hm\n"));
    let events =
        [delta("I look."), tool.clone(), delta("Fixed.\n"), tool, delta("Done."), finished("end_turn", "")];
    let (answer, aside) = shown(false, &events);
    assert_eq!(answer, "I look.\nFixed.\nDone.\n");
    assert_eq!(aside, "tool Bash: ls\ntool Bash: ls\n");
}

#[test]
fn on_one_screen_every_aside_has_its_own_line() {
    let tool = event("tool.started", json!({"call_id": "c", "name": "Bash", "input": {"command": "ls"}}));
    let done = event("tool.finished", json!({"call_id": "c", "output": "x\ny", "is_error": false}));
    let thought = event("thought.delta", json!({"text": "hm"}));
    let events = [delta("a"), tool, done, thought, delta("b"), finished("end_turn", "")];
    assert_eq!(screen(&events), "a\ntool Bash: ls\n  = x (+1 line)\nhm\nb\n");
}

#[test]
fn a_prompt_is_shown_by_its_speaker() {
    let parts = json!([{"type": "text", "text": "do this\nand that"}]);
    let prompt = event("message.created", json!({"message_id": "m", "role": "user", "parts": parts}));
    assert_eq!(screen(&[prompt]), "> do this\n  and that\n");
}

#[test]
fn a_failed_run_says_why() {
    let mut failed = finished("error", "");
    failed.data["error"] =
        json!({"code": "agent_exited", "message": "the agent exited", "exit_status": 3, "stderr": ["boom"]});
    let (_, aside) = shown(false, &[failed]);
    assert_eq!(aside, "run failed: the agent exited (exit status 3)\n    boom\n");
    let lost = shown(false, &[finished("interrupted", "")]).1;
    assert_eq!(lost, "run interrupted (its worker was lost)\n");
    assert_eq!(shown(false, &[finished("timeout", "")]).1, "run timed out\n");
}

#[test]
fn an_error_of_a_run_is_printed_once_at_its_end() {
    let error = json!({"code": "agent_failed", "message": "no luck", "exit_status": null, "stderr": []});
    let raised = event("error.raised", error.clone());
    let mut failed = finished("error", "");
    failed.data["error"] = error;
    assert_eq!(screen(&[delta("boo"), raised.clone(), failed]), "boo\nrun failed: no luck\n");
    assert_eq!(
        screen(&[Event { run_id: None, ..raised }]),
        "error: no luck\n",
        "an error without a run is printed by itself"
    );
}

#[test]
fn late_text_is_never_the_answer() {
    let late = event("text.delta", json!({"text": "too late", "after_run": "run_1"}));
    let (answer, aside) = shown(false, &[late]);
    assert_eq!((answer.as_str(), aside.as_str()), ("", "late: too late\n"));
}

#[test]
fn a_terminal_obeys_nothing_that_an_agent_says_however_it_is_cut() {
    assert_eq!(screen(&[delta("a\x1b]0;owned\x07b")]), "a^[]0;owned^Gb");
    assert_eq!(screen(&[delta("a\x1b"), delta("[2Jb\u{202e}")]), "a^[[2Jb\\u{202e}");
    assert_eq!(screen(&[delta("a\r"), delta("\nb\r"), finished("end_turn", "")]), "a\nb^M\n");
    let thought = |text: &str| event("thought.delta", json!({"text": text}));
    assert_eq!(screen(&[thought("a\x1b"), thought("[8mb"), delta("c")]), "a^[[8mb\nc");
}

#[test]
fn an_answer_that_is_data_stays_exact() {
    let said = "a\x1b[31m\tb\r\n\u{202e}c\n";
    assert_eq!(shown(false, &[delta(said), finished("end_turn", "")]).0, said);
}

#[test]
fn an_unknown_kind_and_data_of_another_shape_add_nothing() {
    assert_eq!(screen(&[event("comet.sighted", json!({})), event("text.delta", json!([1]))]), "");
}

/// One of every event that people see, in an order that could happen.
fn long_conversation() -> Vec<Event> {
    let mut ask = serde_json::to_value(permission(Risk::Medium)).unwrap();
    ask["ask_id"] = ask["id"].clone();
    let mut resolved = ask.clone();
    resolved["state"] = json!("answered");
    resolved["answer"] = json!({"decision": "deny", "reason": "use git pull"});
    resolved["by"] = json!("user");
    let plan = json!([{"content": "read", "status": "completed"}, {"content": "write"}]);
    let prompt = json!([{"type": "text", "text": "fix the test\nand push"}]);
    vec![
        event("message.created", json!({"message_id": "m1", "role": "user", "parts": prompt})),
        event("run.queued", json!({"reason": "capacity", "position": 1})),
        event("run.started", json!({})),
        event("thought.delta", json!({"text": "The test is old."})),
        event("plan.updated", json!({"entries": plan})),
        delta("I read it first."),
        event("tool.started", json!({"call_id": "c", "name": "Bash", "input": {"command": "cargo test"}})),
        event("tool.finished", json!({"call_id": "c", "output": "1 failed\nhint", "is_error": true})),
        event("ask.opened", ask),
        event("ask.resolved", resolved),
        event("steer.accepted", json!({"text": "only the test"})),
        event("steer.missed", json!({"steer": 7, "next_run_id": "run_2"})),
        event("mode.changed", json!({"mode": "default", "by": "agent"})),
        event("context.updated", json!({"used": 100, "size": 1000})),
        event("context.updated", json!({"used": 870, "size": 1000})),
        event("context.updated", json!({"used": 880, "size": 1000})),
        event("context.compacted", json!({"used_before": 880})),
        delta("Fixed."),
        event("run.cancel_requested", json!({"by": "user", "reason": "Ctrl-C"})),
        finished("cancelled", "Fixed."),
        event("text.delta", json!({"text": "too late", "after_run": "run_1"})),
        event("session.closed", json!({})),
    ]
}

#[test]
fn a_conversation_with_everything_reads_well_on_one_screen() {
    insta::assert_snapshot!(screen(&long_conversation()));
}

#[test]
fn a_conversation_reads_well_at_every_width() {
    assert_view("conversation", |style, width| {
        let shared_screen = true;
        let options =
            ConversationOptions { style, shared_screen, show_prompts: true, width, answer_on_terminal: true };
        let mut conversation = ConversationRenderer::new(options);
        let pieces =
            long_conversation().iter().flat_map(|event| conversation.render_event(event)).collect::<Vec<_>>();
        pieces.into_iter().map(|piece| piece.text).collect()
    });
}

#[test]
fn a_conversation_with_everything_keeps_the_answer_apart() {
    let (answer, aside) = shown(false, &long_conversation());
    insta::assert_snapshot!(format!("stdout:\n{answer}\nstderr:\n{aside}"));
}
