//! The display of a fleet, at moments of its life.

use qd_protocol::{FleetId, Seq, WorkspaceId};
use serde_json::{Value, json};

use super::*;
use crate::render::ask::tests::permission;
use crate::render::style::visible_width;
use crate::render::view_snapshot::assert_view;

const FILE: &str = "fleet:
  task: Ship it.
  sessions:
    lead: { agent: claude, role: planner }
    dev1: { agent: codex }
    dev2: { agent: script }
    review: { agent: echo }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [dev1, dev2], split: broadcast } }
    - { when: [dev1.done, dev2.done], route_to: review }
    - { when: review.done, collect: human }
";

/// A fleet whose sessions are `ses_lead`, `ses_dev1`, …, and all lines that it printed so far.
struct FleetOnScreen {
    progress: FleetProgress,
    lines: String,
}

impl FleetOnScreen {
    fn new() -> Self {
        let spec = qd_fleetfile::parse_fleet_file(FILE, None).unwrap();
        let session = |name: &String| json!({"session_id": format!("ses_{name}"), "state": "idle"});
        let sessions = spec.sessions.keys().map(|name| (name.clone(), session(name)));
        let fleet = Fleet {
            id: FleetId::parse("fleet_1").unwrap(),
            workspace_id: WorkspaceId::parse("ws_1").unwrap(),
            state: FleetStatus::Running,
            sessions: serde_json::from_value(Value::Object(sessions.collect())).unwrap(),
            result: None,
            task: "Ship it.".to_owned(),
            problems: Vec::new(),
            created_at: Millis(0),
            updated_at: Millis(0),
        };
        Self { progress: FleetProgress::new(&fleet, &spec), lines: String::new() }
    }

    /// An event of a session, or of the fleet if the name is empty.
    fn event(&mut self, second: u64, name: &str, kind: &str, data: Value) {
        let event = Event {
            seq: Seq(1),
            ts: Millis(second * 1000),
            workspace_id: None,
            session_id: SessionId::parse(&format!("ses_{name}")).ok().filter(|_| !name.is_empty()),
            run_id: None,
            kind: kind.to_owned(),
            data,
        };
        let body = EventBody::decode(kind, event.data.to_string().as_bytes()).unwrap().unwrap();
        if let Some(progress) = self.progress.apply_event(&event, &body) {
            self.lines.push_str(&format!("{}\n", progress.line));
        }
    }

    fn finish(&mut self, second: u64, name: &str, reason: &str, text: &str) {
        let usage = json!({"input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0});
        let error = json!({"code": "agent_failed", "message": "no luck", "exit_status": null, "stderr": []});
        let error = if reason == "error" { error } else { Value::Null };
        let processes = json!({"killed": 0, "survivors": 0});
        let data = json!({"finish_reason": reason, "text": text, "error": error, "usage": usage,
                          "processes": processes});
        self.event(second, name, "run.finished", data);
    }

    /// The route from one session to others, as the fleet reports it.
    fn route(&mut self, second: u64, from: &[&str], to: &[&str]) {
        let member = |name: &&str| json!({"session": name, "runs": []});
        let (from, to): (Vec<_>, Vec<_>) =
            (from.iter().map(member).collect(), to.iter().map(member).collect());
        let data = json!({"fleet_id": "fleet_1", "route": 0, "round": 1, "from": from, "to": to});
        self.event(second, "", "fleet.routed", data);
    }

    /// The live display.
    fn screen(&self, second: u64, width: usize, height: usize) -> String {
        self.progress.lines(Millis(second * 1000), TextStyle::new(false), width, height).join("\n")
    }
}

/// The leader is done; one developer asks, the other works.
fn half_way() -> FleetOnScreen {
    let mut fleet = FleetOnScreen::new();
    fleet.event(1, "lead", "run.started", json!({}));
    let usage = json!({"input_tokens": 9, "output_tokens": 9, "cost_usd": 0.25});
    fleet.event(5, "lead", "usage.reported", usage);
    fleet.finish(9, "lead", "end_turn", "Two parts.\nBoth small.");
    fleet.route(9, &["lead"], &["dev1", "dev2"]);
    fleet.event(10, "dev1", "run.started", json!({}));
    fleet.event(11, "dev2", "run.started", json!({}));
    let mut ask = serde_json::to_value(permission(qd_protocol::policy::Risk::High)).unwrap();
    ask["ask_id"] = ask["id"].clone();
    fleet.event(20, "dev1", "ask.opened", ask);
    fleet.event(
        21,
        "dev2",
        "text.delta",
        json!({"message_id": "m", "text": "reading\n\nwriting \x1b[2Ktests"}),
    );
    fleet
}

#[test]
fn a_fleet_that_works_shows_every_session_with_time_cost_and_last_line() {
    insta::assert_snapshot!(half_way().screen(80, 100, 24));
}

#[test]
fn a_fleet_reads_well_at_every_width() {
    let fleet = half_way();
    let lines =
        |style, width: Option<usize>| fleet.progress.lines(Millis(80_000), style, width.unwrap_or(80), 24);
    assert_view("fleet_progress", |style, width| lines(style, width).join("\n"));
    let mut fleet = fleet;
    fleet.finish(75, "dev1", "error", "");
    fleet.finish(4000, "dev2", "end_turn", "all done");
    assert_view("fleet_summary", |style, _| fleet.progress.summary(style));
}

#[test]
fn drawing_neither_wraps_nor_scrolls_whatever_the_size_of_the_terminal() {
    let fleet = half_way();
    for (width, height) in (1..120).flat_map(|width| (1..12).map(move |height| (width, height))) {
        for colour in [false, true] {
            let lines = fleet.progress.lines(Millis(80_000), TextStyle::new(colour), width, height);
            assert!(lines.len() < height.max(2), "{width}x{height}: {lines:?}");
            // One column is too narrow for anything but the sign that something was cut.
            let fits = |line: &String| visible_width(line) < width.max(2);
            assert!(lines.iter().all(fits), "{width}x{height}: {lines:?}");
        }
    }
}

#[test]
fn a_small_screen_shows_the_sessions_that_need_attention() {
    insta::assert_snapshot!(half_way().screen(80, 40, 4));
}

#[test]
fn a_fleet_that_ended_is_summarised_and_every_step_was_a_line() {
    let mut fleet = half_way();
    fleet.finish(75, "dev1", "error", "");
    fleet.finish(4000, "dev2", "end_turn", "all done");
    fleet.route(4000, &["dev1", "dev2"], &["review"]);
    fleet.event(4001, "review", "run.started", json!({}));
    fleet.finish(4002, "review", "cancelled", "");
    fleet.event(
        4003,
        "",
        "fleet.finished",
        json!({"fleet_id": "fleet_1", "state": "failed", "result": null}),
    );
    let summary = fleet.progress.summary(TextStyle::new(false));
    insta::assert_snapshot!(format!("{}\n{}\n\n{summary}", fleet.lines, fleet.screen(4003, 100, 24)));
}

#[test]
fn the_clock_of_a_fleet_stops_when_it_ends() {
    let mut fleet = half_way();
    let ended = json!({"fleet_id": "fleet_1", "state": "cancelled", "result": null});
    fleet.event(65, "", "fleet.finished", ended);
    let screen = fleet.screen(4000, 80, 24);
    assert!(screen.starts_with("cancelled  1:05"), "{screen}");
}
