//! What earlier releases wrote into the journal, the spool and the link, read by this one: events, updates, frames and
//! records keep the names of their fields. The fixture is described in `tests/fixtures/make_home.py`; `FRAMES` has those
//! frames that its recording does not have, as release 0.1.0 writes them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use qd_protocol::EventBody;
use qd_protocol::frame::{join, terminal, v1};
use qd_protocol::link::AgentUpdate;
use qd_protocol::worker::WorkerRecord;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn fixture(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/home-0.1.0").join(file);
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn expect_unchanged<T: Serialize + DeserializeOwned>(value: &Value) {
    let read: T = serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"));
    assert_eq!(serde_json::to_value(read).unwrap(), *value);
}

#[test]
fn events_keep_their_form() {
    let (mut kinds, lines) = (std::collections::BTreeSet::new(), fixture("stored.jsonl"));
    for line in lines.iter().filter(|line| line["table"] == "events") {
        let (kind, data) = (line["column"].as_str().unwrap(), &line["value"]);
        let body = EventBody::decode(kind, data.to_string().as_bytes()).unwrap().expect("a known kind");
        assert_eq!(body.kind(), kind);
        assert_eq!(serde_json::from_slice::<Value>(&body.encode(None).unwrap()).unwrap(), *data, "{kind}");
        kinds.insert(kind);
    }
    assert!(kinds.len() > 25, "the fixture has only {kinds:?}");
}

#[test]
fn updates_in_a_spool_and_records_of_workers_keep_their_form() {
    let lines = fixture("stored.jsonl");
    let of_table = |table: &'static str| lines.iter().filter(move |line| line["table"] == table);
    assert!(of_table("spool").count() > 0 && of_table("workers").count() > 0);
    of_table("spool").for_each(|line| expect_unchanged::<AgentUpdate>(&line["value"]));
    of_table("workers").for_each(|line| expect_unchanged::<WorkerRecord>(&line["value"]));
}

#[test]
fn recorded_frames_keep_their_form() {
    let lines = fixture("link.jsonl");
    assert!(lines.len() > 10);
    for line in lines {
        match line["from"].as_str().unwrap() {
            "daemon" => expect_unchanged::<v1::DaemonLinkFrame>(&line["frame"]),
            _ => expect_unchanged::<v1::WorkerLinkFrame>(&line["frame"]),
        }
    }
}

#[test]
fn frames_that_no_recording_has_keep_their_form() {
    let limits = json!({ "timeout_ms": 1, "max_turns": 2, "budget_usd": 0.5, "grace_ms": 3 });
    let spec = json!({
        "session": "ses_1", "worker": "wrk_1", "agent": "script", "cwd": "/",
        "env": { "A": "b" }, "after": 7, "mark": "m",
    });
    for frame in [
        json!({ "do": { "prompt": {
            "number": 1, "run": "r", "prompt": "p", "limits": limits,
            "files": [{ "name": "n", "mime": "text/plain", "data": "" }], "messages": [{ "role": "user" }],
        }}}),
        json!({ "do": { "steer": { "number": 1, "run": "r", "text": "t" } } }),
        json!({ "do": { "cancel": { "number": 1, "run": "r" } } }),
        json!({ "do": { "kill": { "number": 1, "run": "r" } } }),
        json!({ "do": { "answer": { "number": 1, "ask": "ask_1", "answer": "withdrawn" } } }),
        json!({ "limits": { "run": "r", "limits": limits } }),
        json!({ "start": spec }),
        json!("rest"),
        json!("close"),
    ] {
        expect_unchanged::<v1::DaemonLinkFrame>(&frame);
    }
    let run = "r";
    for update in [
        json!({ "ready": { "agent_session_id": null, "steers": false } }),
        json!({ "said": { "run": run, "what": { "thought": { "text": "t" } } } }),
        json!({ "said": { "run": run, "what": { "tool_started": { "call_id": "c", "name": "n", "input": {} } } } }),
        json!({ "said": { "run": run, "what": { "tool_output": { "call_id": "c", "text": "t" } } } }),
        json!({ "said": { "run": run, "what": { "plan": { "entries": [] } } } }),
        json!({ "said": { "run": run, "what": { "notice": { "text": "t" } } } }),
        json!({ "said": { "run": run, "what": "turn" } }),
        json!({ "ask_withdrawn": { "ask": "ask_1" } }),
        json!({ "steer_taken": { "steer": 1 } }),
        json!({ "steer_missed": { "steer": 1 } }),
        json!("rested"),
        json!({ "gone": "lost" }),
        json!({ "gone": "stopped" }),
    ] {
        expect_unchanged::<AgentUpdate>(&update);
        expect_unchanged::<v1::WorkerLinkFrame>(&json!({ "said": { "first": 1, "ups": [update] } }));
    }
    for seat in [
        json!("empty"),
        json!("starting"),
        json!({ "ready": { "steers": true } }),
        json!("resting"),
        json!("gone"),
    ] {
        expect_unchanged::<v1::AgentPresence>(&seat);
    }
    expect_unchanged::<v1::WorkerLinkFrame>(&json!({ "refused": { "code": "busy", "message": "m" } }));

    let seat = json!({ "session": "ses_1", "worker": "wrk_1" });
    let hello = json!({
        "versions": { "min": 1, "max": 1 }, "software": "s", "host": "h", "name": "n", "labels": ["gpu"],
        "agents": [], "seats": [seat],
    });
    expect_unchanged::<join::WorkerJoinFrame>(&json!({ "hello": hello }));
    let refused = json!({ "session": "ses_1", "worker": "wrk_1", "code": "c", "message": "m" });
    expect_unchanged::<join::WorkerJoinFrame>(&json!({ "refused": refused }));
    for frame in [
        json!({ "welcome": { "name": "n" } }),
        json!({ "refused": { "code": "c", "message": "m" } }),
        json!({ "open": { "spec": spec, "secret": "s" } }),
        json!({ "dial": seat }),
        json!({ "close": seat }),
    ] {
        expect_unchanged::<join::DaemonJoinFrame>(&frame);
    }
    expect_unchanged::<terminal::DaemonTerminalFrame>(
        &json!({ "look": { "session": "ses_1", "worker": "wrk_1", "nonce": "n" } }),
    );
    expect_unchanged::<terminal::DaemonTerminalFrame>(&json!({ "proof": "p" }));
    expect_unchanged::<terminal::WorkerTerminalFrame>(&json!({ "hello": { "nonce": "n", "proof": "p" } }));
    expect_unchanged::<terminal::WorkerTerminalFrame>(&json!("here"));
    expect_unchanged::<terminal::ViewerFrame>(&json!({ "size": { "cols": 80, "rows": 24 } }));
    expect_unchanged::<terminal::ViewerNotice>(&json!("over"));
}
