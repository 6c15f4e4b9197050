//! Reports of a busy day and of an empty one, and what counts as seen.

use super::*;
use crate::render::ask::tests::permission;
use crate::render::session_cells::tests::{ended_session, waiting_session, worktree};
use qd_protocol::api::{ActiveRun, SessionStatus};
use qd_protocol::{AskId, RunId};
use serde_json::json;

const NOW: Millis = Millis(100 * 60 * 60 * 1000);

fn minutes_ago(minutes: u64) -> Millis {
    Millis(NOW.0 - minutes * 60_000)
}

fn period(since: Millis) -> ReportPeriod {
    ReportPeriod {
        since,
        after: since,
        seen: HashSet::new(),
        description: "since your last look, 8h00m ago".to_owned(),
    }
}

fn running(id: &str, minutes: u64) -> Session {
    let run = ActiveRun {
        id: RunId::parse("run_active").unwrap(),
        accepted_at: minutes_ago(minutes + 1),
        started_at: Some(minutes_ago(minutes)),
    };
    Session { state: SessionStatus::Running, queued: 0, active_run: Some(run), ..waiting_session(id) }
}

fn fleet(id: &str, state: &str, member: &str) -> Fleet {
    serde_json::from_value(json!({
        "id": id, "workspace_id": "ws_1", "state": state, "result": null,
        "task": "Port the parser.\nKeep the tests.",
        "sessions": {"lead": {"session_id": member, "state": "idle"}},
        "created_at": minutes_ago(50), "updated_at": minutes_ago(10)
    }))
    .unwrap()
}

fn in_fleet(session: Session, fleet: &str) -> Session {
    let fleet = serde_json::from_value(json!({"fleet_id": fleet, "name": "lead"})).unwrap();
    Session { fleet: Some(fleet), ..session }
}

/// Every section has entries: wide characters, a long agent name and a fleet among them.
fn busy_day() -> StatusFacts {
    let mut risky = permission(Risk::High);
    risky.session_id = SessionId::parse("ses_asking0000000000").ok();
    risky.input = json!({"command": "git push --force origin main && ./deploy.sh --production --now"});
    risky.opened_at = minutes_ago(61);
    let mut question = permission(Risk::Low);
    question.id = AskId::parse("ask_7f3k9m2c").unwrap();
    (question.kind, question.tool) = (AskKind::Question, None);
    question.prompt = "Which port?".to_owned();
    (question.session_id, question.fleet_id) = (None, FleetId::parse("flt_asks000000000000").ok());
    question.opened_at = minutes_ago(2);
    let long_name = "acp:node /opt/agents/my-own-agent.js --fast".to_owned();
    let mut sessions = vec![
        Session {
            title: Some("修复登录页面的测试".to_owned()), ..waiting_session("ses_asking0000000000")
        },
        Session { agent: long_name, ..running("ses_running000000000", 12) },
        in_fleet(running("ses_member0000000000", 20), "flt_works00000000000"),
        Session {
            worktree: Some("/w".to_owned()),
            ..ended_session("ses_changed000000000", FinishReason::EndTurn, minutes_ago(30).0)
        },
        ended_session("ses_done000000000000", FinishReason::EndTurn, minutes_ago(40).0),
        ended_session("ses_seen000000000000", FinishReason::EndTurn, minutes_ago(600).0),
    ];
    for n in 0..4 {
        let reason =
            [FinishReason::Error, FinishReason::Timeout, FinishReason::Cancelled, FinishReason::Refused][n];
        sessions.push(ended_session(
            &format!("ses_ended{n}00000000000"),
            reason,
            minutes_ago(50 + n as u64).0,
        ));
    }
    StatusFacts {
        ids: ShownIds::default(),
        sessions,
        fleets: vec![
            fleet("flt_works00000000000", "running", "ses_member0000000000"),
            fleet("flt_asks000000000000", "waiting", "ses_gone000000000000"),
            fleet("flt_failed0000000000", "failed", "ses_gone000000000000"),
        ],
        asks: vec![risky, question],
        halt: None,
        unmerged_work: UnmergedWork::of(&[worktree("ses_changed000000000", "ahead", Some(12))]),
    }
}

#[test]
fn a_report_fits_the_terminal_and_every_line_ends_with_a_command() {
    let report = StatusReport::new(&busy_day(), &period(minutes_ago(480)));
    for width in [80, 140] {
        let shown = report.render(TextStyle::new(false), Some(width), NOW);
        assert!(shown.lines().all(|line| text::display_width(line) <= width), "{shown}");
        assert!(shown.lines().count() <= 23, "it fits on a screen: {shown}");
        insta::assert_snapshot!(format!("status_at_{width}_columns"), shown);
    }
    insta::assert_snapshot!("status_in_colour", report.render(TextStyle::new(true), Some(140), NOW));
}

#[test]
fn commands_have_the_ids_as_they_are_shown_and_json_whole_ones() {
    let mut facts = busy_day();
    let whole = StatusReport::new(&facts, &period(minutes_ago(480)));
    assert!(whole.listed_work().contains(&"ses_running000000000".to_owned()));
    assert!(whole.listed_asks().contains(&"ask_7f3k9m2c".to_owned()));
    let short = [("ses_running000000000", "runn"), ("ask_7f3k9m2c", "7f3k")];
    facts.ids = ShownIds::shortened(short.map(|(whole, short)| (whole.to_owned(), short.to_owned())).into());
    let report = StatusReport::new(&facts, &period(minutes_ago(480)));
    let shown = report.render(TextStyle::new(false), None, NOW);
    assert!(shown.contains("qd attach runn\n") && shown.contains("qd answer 7f3k VALUE\n"), "{shown}");
    let json = serde_json::to_value(&report).unwrap();
    assert!(json["working"].as_array().unwrap().iter().any(|entry| entry["id"] == "ses_running000000000"));
}

#[test]
fn a_halt_is_shown_first_and_empty_sections_have_no_lines() {
    let halt = HaltStatus {
        halted: true,
        reason: Some("the bill is too high".to_owned()),
        cancel: false,
        since: Some(minutes_ago(5)),
    };
    let facts = StatusFacts { halt: Some(halt), ..StatusFacts::default() };
    let shown = StatusReport::new(&facts, &period(minutes_ago(480))).render(TextStyle::new(false), None, NOW);
    assert_eq!(
        shown,
        "HALTED: the bill is too high  nothing starts until `qd unhalt`\n\n\
         NEEDS YOU (0)\n\nWORKING (0)\n\nFINISHED (0) since your last look, 8h00m ago\n"
    );
}

#[test]
fn what_was_seen_is_not_shown_again_even_if_it_ended_at_the_same_moment() {
    let facts = StatusFacts {
        sessions: vec![
            ended_session("ses_1", FinishReason::EndTurn, 500),
            ended_session("ses_2", FinishReason::EndTurn, 500),
        ],
        ..StatusFacts::default()
    };
    let seen = HashSet::from(["run_of_ses_1".to_owned()]);
    let report = StatusReport::new(&facts, &ReportPeriod { seen, ..period(Millis(400)) });
    let ids: Vec<&str> = report.finished.iter().map(|entry| entry.id.as_str()).collect();
    assert_eq!(ids, ["ses_2"]);
    assert!(StatusReport::new(&facts, &period(Millis(500))).finished.is_empty());
    assert_eq!(facts.ended_since(Millis(499)).len(), 2);
    assert_eq!(facts.ended_since(Millis(500)).len(), 0);
}

#[test]
fn a_session_below_another_is_shown_with_it_but_its_asks_are_not_hidden() {
    let child = Session { parent: SessionId::parse("ses_1").ok(), ..waiting_session("ses_2") };
    let mut ask = permission(Risk::Low);
    ask.session_id = Some(child.id.clone());
    let facts = StatusFacts {
        sessions: vec![running("ses_1", 5), Session { queued: 0, ..child }],
        asks: vec![ask],
        ..StatusFacts::default()
    };
    let report = StatusReport::new(&facts, &period(Millis(0)));
    assert_eq!(report.working.len(), 1, "{report:?}");
    assert_eq!(report.needs_you[0].next, "qd allow ask_1");
}
