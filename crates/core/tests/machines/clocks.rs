//! Which clock a limit is counted with: never the wall clock, not even after a reboot, and suspended time counts only for
//! claims on mail.

use qd_core::session::{AgentAvailability, MailSubmission, SessionCommand, SessionInput, SessionState};
use qd_protocol::event::{AskKind, ChildResult};
use qd_protocol::link::{AgentExitReason, TurnStopReason};
use qd_protocol::mail::{MailDelivery, MailKind};
use qd_protocol::{ClockReading, EventNumber, FinishReason, MachineUptime, MailId, Millis, SessionId};

use crate::harness::{SessionHarness, clocks_at, finishes, kinds};

const HOUR: u64 = 3_600_000;

/// The clocks `awake` milliseconds after a second boot, with any wall clock.
fn rebooted(wall: u64, awake: i64) -> ClockReading {
    let uptime = MachineUptime { boot: 2, awake_ms: awake, total_ms: awake };
    ClockReading { wall: Millis(wall), uptime: Some(uptime) }
}

/// The same clocks after `ms` milliseconds in which the machine was suspended.
fn suspended(now: ClockReading, ms: u32) -> ClockReading {
    let uptime =
        now.uptime.map(|uptime| MachineUptime { total_ms: uptime.total_ms + i64::from(ms), ..uptime });
    ClockReading { wall: now.wall.plus(ms.into()), uptime }
}

fn with_timeout(seconds: f64) -> SessionHarness {
    let mut harness = SessionHarness::new();
    harness.state.settings.limits.run_timeout_s = Some(seconds);
    harness
}

fn claim_held_mail(harness: &mut SessionHarness) {
    harness.command(SessionCommand::AcceptMail(MailSubmission {
        id: MailId::parse("m").unwrap(),
        from: "user".to_owned(),
        from_session: None,
        kind: MailKind::Task,
        text: "hello".to_owned(),
        in_reply_to: None,
        correlation_id: None,
        deliver: Some(MailDelivery::Hold),
        run: None,
        fingerprint: String::new(),
    }));
    let claimed = harness.command(SessionCommand::ClaimMail { max: 1, lease_ms: 60_000 });
    assert_eq!(kinds(&claimed), ["mail.claimed"]);
}

#[test]
fn suspended_time_counts_for_a_claim_and_not_for_a_run() {
    let mut harness = with_timeout(10.0);
    harness.prompt("a");
    harness.context.now = suspended(clocks_at(4_000), 7_200_000);
    assert_eq!(harness.deadline(), Some(6_000));
    assert!(harness.input(SessionInput::Tick).events.is_empty());

    let mut harness = SessionHarness::new();
    claim_held_mail(&mut harness);
    harness.context.now = suspended(clocks_at(4_000), 50_000);
    assert_eq!(harness.deadline(), Some(6_000));
    harness.context.now = suspended(clocks_at(4_000), 56_000);
    assert_eq!(kinds(&harness.input(SessionInput::Tick)), ["mail.returned"]);
}

#[test]
fn a_claim_ends_by_the_wall_clock_after_a_reboot_and_at_the_latest_one_lease_after_it() {
    for (wall, remaining) in [(0, 50_000), (30_000, 30_000), (9 * HOUR, 0)] {
        let mut harness = SessionHarness::new();
        claim_held_mail(&mut harness);
        harness.context.now = rebooted(wall, 10_000);
        assert_eq!(harness.deadline(), Some(remaining), "the wall clock shows {wall}");
        // The first event of the new boot changes nothing about it, except that nobody can set the clock any more.
        harness.command(SessionCommand::AddChild { child: SessionId::parse("x").unwrap() });
        harness.context.now.wall = Millis(5);
        assert_eq!(harness.deadline(), Some(remaining), "the wall clock showed {wall}");
    }
}

#[test]
fn a_suspended_run_has_used_as_much_of_its_time_after_a_reboot_as_before() {
    for wall in [0, 60_000, 9 * HOUR] {
        let mut harness = with_timeout(10.0);
        harness.prompt("a");
        let child = SessionId::parse("x").unwrap();
        harness.command(SessionCommand::AddChild { child: child.clone() });
        harness.context.now = clocks_at(4_000);
        harness.end("a", TurnStopReason::Suspended);
        harness.context.now = rebooted(wall, 20_000);
        harness.command(SessionCommand::ChildEnded(ChildResult {
            session_id: child,
            finish_reason: Some(FinishReason::EndTurn),
            text: String::new(),
        }));
        assert_eq!(harness.deadline(), Some(6_000), "the wall clock shows {wall}");
        harness.context.now.wall = Millis(3 * HOUR);
        assert_eq!(harness.deadline(), Some(6_000));
        let started_at = harness.state.active_run().unwrap().1.started_at;
        assert_eq!(started_at.wall, Millis(0), "people see when it started");
    }
}

#[test]
fn a_grace_that_a_reboot_interrupts_ends_one_grace_after_it_at_the_latest() {
    for wall in [0, 9 * HOUR] {
        let mut harness = SessionHarness::new();
        harness.state.settings.limits.cancel_grace_s = Some(5.0);
        harness.prompt("a");
        harness.context.now = clocks_at(100_000);
        harness.cancel();
        harness.context.now = rebooted(wall, 2_000);
        assert_eq!(harness.deadline(), Some(3_000));
        harness.context.now = rebooted(wall, 5_000);
        assert_eq!(kinds(&harness.input(SessionInput::Tick)), ["run.kill_requested"]);
    }
}

#[test]
fn a_worker_on_another_machine_tells_how_long_its_turn_ran_while_this_one_was_off() {
    let mut harness = with_timeout(600.0);
    harness.prompt("a");
    harness.context.agent = AgentAvailability::Lost;
    harness.context.now = rebooted(0, 10_000);
    harness.context.agent = AgentAvailability::Ready { steerable: true };
    harness.input(SessionInput::WorkerAttached {
        applied: EventNumber(99),
        reattached: true,
        run_time_ms: Some(590_000),
    });
    assert_eq!(harness.deadline(), Some(10_000));
}

#[test]
fn a_crash_is_forgotten_after_its_window_whatever_the_wall_clock_shows() {
    for (wall, awake, is_forgotten) in [(0, 61_000, true), (9 * HOUR, 59_000, false)] {
        let mut harness = SessionHarness::without_worker();
        harness.state.settings.limits.restarts = Some(0);
        harness.state.settings.limits.restart_window_s = Some(60.0);
        harness.prompt("a");
        harness.input(SessionInput::WorkerGone(AgentExitReason::Lost));
        harness.context.now = ClockReading { wall: Millis(wall), ..clocks_at(awake) };
        harness.context.agent = AgentAvailability::Absent;
        assert_eq!(finishes(&harness.prompt("b")).is_empty(), is_forgotten);
    }
}

#[test]
fn a_run_of_an_earlier_release_is_counted_by_the_wall_clock_until_the_next_event() {
    let mut harness = with_timeout(10.0);
    harness.context.now = Millis(1_000).into();
    harness.state.last_uptime = None;
    harness.prompt("a");
    let snapshot = serde_json::to_string(&harness.state).unwrap();
    assert!(!snapshot.contains("last_uptime") && snapshot.contains(r#""at":"1970-01-01T00:00:01.000Z""#));
    harness.state = serde_json::from_str::<SessionState>(&snapshot).unwrap();
    harness.context.now = clocks_at(5_000);
    assert_eq!(harness.deadline(), Some(6_000));
    harness.ask("a", "q", AskKind::Permission);
    harness.cancel();
    harness.context.now.wall = Millis(9 * HOUR);
    let (_, started) = harness.state.active_run().unwrap();
    assert_eq!(started.run_time(harness.context.now), 4_000);
}
