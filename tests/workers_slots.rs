//! Limits on the number of agents and on restarts: a run without a free slot is queued and says so, and an agent that
//! crashes in a loop is not started forever.

use qd_testkit::{TestDaemon, TestEvent, TestSession, journal_rules, script::*};
use serde_json::json;

/// A daemon with two agent slots.
async fn daemon_with_two_slots() -> TestDaemon {
    TestDaemon::start_with_settings("max_agents = 2\n").await
}

/// Starts a run that works until it is steered.
pub(crate) async fn start_working(session: &TestSession) -> String {
    let run = session.prompt_script(&[say("at work "), await_steer(600_000)]).await;
    session.wait_for_run_event(&run, "text.delta").await;
    run
}

/// Waits until a run is queued because no slot is free.
pub(crate) async fn is_queued_for_capacity(session: &TestSession, run: &str) {
    let queued = session.wait_for_run_event(run, "run.queued").await;
    assert_eq!(queued.data["reason"], "capacity");
}

/// The same for a run that has never started.
async fn waits_unstarted(session: &TestSession, run: &str) {
    is_queued_for_capacity(session, run).await;
    assert_eq!(session.run(run).await["started_at"], json!(null));
}

#[tokio::test]
async fn the_third_of_two_agents_waits_and_starts_when_one_is_done() {
    let daemon = daemon_with_two_slots().await;
    let (one, two, three) =
        (daemon.session("script").await, daemon.session("script").await, daemon.session("script").await);
    let first = start_working(&one).await;
    let second = start_working(&two).await;
    let third = three.prompt_script(&[say("at last")]).await;
    waits_unstarted(&three, &third).await;
    assert!(three.show().await["busy"].as_bool().unwrap());
    one.steer("go").await;
    assert_eq!(one.wait(&first).await["finish_reason"], "end_turn");
    assert_eq!(three.wait(&third).await["text"], "at last", "an idle agent is stopped");
    assert_eq!(two.run(&second).await["state"], "running", "and a busy one does not");
    let queued = three.events_of(&third).await.iter().filter(|event| event.kind == "run.queued").count();
    assert_eq!(queued, 1, "run.queued is written once");
    assert_eq!(one.run_script(&[say("back")]).await["text"], "back", "and the stopped agent starts again");
    two.steer("go").await;
    assert_eq!(two.wait(&second).await["finish_reason"], "end_turn");
    for session in [&one, &two, &three] {
        journal_rules::check(&session.events().await);
    }
}

#[tokio::test]
async fn those_who_wait_start_in_order() {
    let daemon = daemon_with_two_slots().await;
    let (one, two) = (daemon.session("script").await, daemon.session("script").await);
    start_working(&one).await;
    start_working(&two).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let session = daemon.session("script").await;
        let run = session.prompt_script(&[say("x"), sleep(50)]).await;
        waits_unstarted(&session, &run).await;
        waiting.push((session, run));
    }
    one.steer("go").await;
    for (session, run) in &waiting {
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
    }
    let mut stream = daemon.client().stream("/v1/events?after=0&kinds=run.started").await;
    let mut seen =
        stream.until("the last start", |event| event.is_of_run(&waiting[3].1, "run.started")).await;
    let order: Vec<_> = seen.drain(2..).filter_map(|event| event.run_id).collect();
    assert_eq!(order, waiting.iter().map(|(_, run)| run.clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_run_that_waits_for_a_person_does_not_count() {
    let daemon = daemon_with_two_slots().await;
    let (asks, works_on, third, fourth) = (
        daemon.session("script").await,
        daemon.session("script").await,
        daemon.session("script").await,
        daemon.session("script").await,
    );
    let asking = asks.prompt_script(&[question("go on?", &[]), say(" done")]).await;
    let ask = asks.wait_for_ask(&asking).await;
    start_working(&works_on).await;
    let beside = start_working(&third).await;
    let over = fourth.prompt_script(&[say("last")]).await;
    waits_unstarted(&fourth, &over).await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    assert_eq!(asks.wait(&asking).await["text"], "yes done", "and it continues although no slot is free");
    third.steer("go").await;
    assert_eq!(third.wait(&beside).await["finish_reason"], "end_turn");
    assert_eq!(fourth.wait(&over).await["text"], "last");
}

#[tokio::test]
async fn an_idle_agent_that_cannot_be_stopped_does_not_count() {
    let daemon = daemon_with_two_slots().await;
    // Stopping a shell would lose its memory.
    let shell = "pty:bash --norc --noprofile";
    let (one, two) = (daemon.session(shell).await, daemon.session(shell).await);
    for session in [&one, &two] {
        let run = session.prompt("X=kept").await;
        assert_eq!(session.wait(&run).await["finish_reason"], "end_turn");
    }
    let three = daemon.session("script").await;
    assert_eq!(three.run_script(&[say("beside them")]).await["text"], "beside them");
    let run = one.prompt("echo $X").await;
    assert_eq!(one.wait(&run).await["text"], "kept");
}

#[tokio::test]
async fn a_run_that_waits_for_room_can_be_cancelled_and_survives_a_kill() {
    let mut daemon = daemon_with_two_slots().await;
    let (one, two, three, four) = (
        daemon.session("script").await,
        daemon.session("script").await,
        daemon.session("script").await,
        daemon.session("script").await,
    );
    let first = start_working(&one).await;
    start_working(&two).await;
    let third = three.prompt_script(&[say("never")]).await;
    waits_unstarted(&three, &third).await;
    let fourth = four.prompt_script(&[say("at last")]).await;
    waits_unstarted(&four, &fourth).await;
    daemon.restart().await;
    three.cancel().await;
    assert_eq!(three.wait(&third).await["finish_reason"], "cancelled");
    assert_eq!(four.run(&fourth).await["started_at"], json!(null), "two agents are alive");
    one.steer("go").await;
    assert_eq!(one.wait(&first).await["finish_reason"], "end_turn");
    assert_eq!(four.wait(&fourth).await["text"], "at last");
    for session in [&one, &two, &three, &four] {
        let events = session.events().await;
        if !std::ptr::eq(session, &two) {
            journal_rules::check(&events);
        }
    }
}

fn starts(events: &[TestEvent]) -> usize {
    events.iter().filter(|event| event.kind == "worker.started").count()
}

#[tokio::test]
async fn an_agent_that_crashes_in_a_loop_is_not_started_for_ever() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "restarts": 2 })).await;
    for _ in 0..3 {
        let ended = session.run_script(&[exit(3)]).await;
        assert_eq!((&ended["finish_reason"], &ended["error"]["exit_status"]), (&json!("error"), &json!(3)));
    }
    for _ in 0..2 {
        let ended = session.run_script(&[say("never")]).await;
        assert_eq!((&ended["finish_reason"], &ended["started_at"]), (&json!("error"), &json!(null)));
        assert_eq!(ended["error"]["code"], "restart_limit");
    }
    assert_eq!(starts(&session.events().await), 3, "no worker is started any more");
    assert_eq!(session.show().await["restarts"], 2);
    session.patch(json!({ "restarts": 5 })).await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn the_runs_that_wait_behind_the_last_crash_end_so_too() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "restarts": 1 })).await;
    session.run_script(&[exit(1)]).await;
    let crash = session.prompt_script(&[question("now?", &[]), exit(1)]).await;
    let behind = [session.prompt_script(&[say("a")]).await, session.prompt_script(&[say("b")]).await];
    let ask = session.wait_for_ask(&crash).await;
    daemon.client().answer_ask(&ask, &json!({ "value": "yes" })).await.expect(200);
    for run in &behind {
        assert_eq!(session.wait(run).await["error"]["code"], "restart_limit");
    }
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn no_restarts_means_one_life() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session_with(json!({ "agent": "script", "restarts": 0 })).await;
    assert_eq!(session.run_script(&[say("fine")]).await["text"], "fine");
    assert_eq!(session.run_script(&[exit(0)]).await["finish_reason"], "error");
    assert_eq!(session.run_script(&[say("never")]).await["error"]["code"], "restart_limit");
    session.patch(json!({ "restarts": 1 })).await;
    assert_eq!(session.run_script(&[say("again")]).await["text"], "again");
}

#[tokio::test]
async fn crashes_are_forgotten_after_their_window_and_remembered_across_a_kill() {
    let mut daemon = TestDaemon::start().await;
    let settings = json!({ "agent": "script", "restarts": 0, "restart_window_s": 2 });
    let session = daemon.session_with(settings).await;
    session.run_script(&[exit(1)]).await;
    daemon.restart().await;
    assert_eq!(session.run_script(&[say("too soon")]).await["error"]["code"], "restart_limit");
    let again = qd_testkit::poll_until("the window to pass", async || {
        let ended = session.run_script(&[say("again")]).await;
        (ended["finish_reason"] == "end_turn").then_some(ended)
    });
    assert_eq!(again.await["text"], "again");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn a_rest_and_a_cancel_are_no_crashes() {
    let daemon = TestDaemon::start_with_settings("idle_s = 0\n").await;
    let settings = json!({ "agent": "script", "restarts": 0, "cancel_grace_s": 0.1 });
    let session = daemon.session_with(settings).await;
    for _ in 0..2 {
        assert_eq!(session.run_script(&[say("x")]).await["text"], "x");
        let run = session.prompt_script(&[say("y"), ignore_cancel(), sleep_forever()]).await;
        session.wait_for_run_event(&run, "text.delta").await;
        session.cancel().await;
        assert_eq!(session.wait(&run).await["finish_reason"], "cancelled");
    }
    assert_eq!(session.run_script(&[say("still")]).await["text"], "still");
    journal_rules::check(&session.events().await);
}

#[tokio::test]
async fn restarts_that_make_no_sense_are_refused() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    for (name, value) in [
        ("restarts", json!(-1)),
        ("restarts", json!(1.5)),
        ("restarts", json!(1001)),
        ("restart_window_s", json!(-1)),
    ] {
        let answer = workspace.try_session(json!({ "agent": "script", name: value })).await;
        assert_eq!(answer.status, 400, "{name} {value}: {answer}");
    }
}

#[tokio::test]
async fn without_memory_an_idle_agent_gives_way_and_a_prompt_is_answered_at_once() {
    let daemon = TestDaemon::start_with_settings("min_free_mb = 99999999\n").await;
    let (one, two) = (daemon.session("script").await, daemon.session("script").await);
    let first = start_working(&one).await;
    let second = two.prompt_script(&[say("at last")]).await;
    waits_unstarted(&two, &second).await;
    one.steer("go").await;
    assert_eq!(one.wait(&first).await["finish_reason"], "end_turn", "one agent is always allowed");
    assert_eq!(two.wait(&second).await["text"], "at last");
    for session in [&one, &two] {
        journal_rules::check(&session.events().await);
    }
}

#[tokio::test]
async fn a_halt_over_those_who_wait_for_room_keeps_nobody_from_an_answer() {
    let daemon = TestDaemon::start_with_settings("max_agents = 1\n").await;
    let (one, two) = (daemon.session("script").await, daemon.session("script").await);
    let first = start_working(&one).await;
    let second = two.prompt_script(&[say("second")]).await;
    waits_unstarted(&two, &second).await;
    daemon.qd(&["halt", "--cancel", "enough"]).await.ok();
    assert_eq!(one.wait(&first).await["finish_reason"], "cancelled");
    let third = two.prompt_script(&[say("third")]).await;
    daemon.qd(&["unhalt"]).await.ok();
    assert_eq!(two.wait(&third).await["text"], "third");
    for session in [&one, &two] {
        journal_rules::check(&session.events().await);
    }
}
