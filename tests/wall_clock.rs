//! Somebody sets the wall clock: no limit and no lease of a running daemon changes, nor of one that was killed before and
//! started after.

use qd_testkit::faulty_libc::FaultyLibc;
use qd_testkit::{TestDaemon, TestHome, TestSession, script::*};
use serde_json::{Value, json};

const HOUR_MS: i64 = 3_600_000;
const FORWARD_MS: i64 = 2 * HOUR_MS;
const BACK_MS: i64 = -3 * HOUR_MS;

/// A daemon whose wall clock can be set.
struct ClockTest {
    faults: FaultyLibc,
    daemon: TestDaemon,
}

impl ClockTest {
    async fn start() -> Self {
        let faults = FaultyLibc::new();
        let daemon = TestDaemon::start_in(TestHome::new(), |options| {
            options.faulty_libc(&faults);
        })
        .await;
        Self { faults, daemon }
    }

    /// Sets the clock. With `restarts`, a daemon that was killed before does not see the change happen.
    async fn set_clock(&mut self, shift_ms: i64, restarts: bool) {
        if restarts {
            self.daemon.kill9().await;
        }
        self.faults.shift_clock(shift_ms);
        if restarts {
            self.daemon.start_again().await;
        }
    }
}

/// A run of a new session that has produced output.
async fn busy_run(daemon: &TestDaemon, limits: Value, script: &[Value]) -> (TestSession, String) {
    let mut settings = limits;
    settings["agent"] = "script".into();
    let session = daemon.session_with(settings).await;
    let run = session.prompt_script(script).await;
    session.wait_for_run_event(&run, "text.delta").await;
    (session, run)
}

#[tokio::test]
async fn a_clock_that_is_set_forward_does_not_end_a_run() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let script = [say_times("x", 40, 50)];
        let (session, run) = busy_run(&test.daemon, json!({ "run_timeout_s": 600 }), &script).await;
        test.set_clock(FORWARD_MS, restarts).await;
        let ended = session.wait(&run).await;
        assert_eq!(ended["finish_reason"], "end_turn", "restarts: {restarts}; {ended}");
    }
}

#[tokio::test]
async fn a_clock_that_is_set_back_keeps_no_timeout_from_ending_a_run() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let script = [say("x"), sleep_forever()];
        let (session, run) = busy_run(&test.daemon, json!({ "run_timeout_s": 3 }), &script).await;
        test.set_clock(BACK_MS, restarts).await;
        let ended = session.wait(&run).await;
        assert_eq!(ended["finish_reason"], "timeout", "restarts: {restarts}; {ended}");
    }
}

#[tokio::test]
async fn a_clock_that_is_set_back_during_the_grace_of_a_cancel_does_not_save_the_turn() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let script = [ignore_cancel(), say("x"), sleep_forever()];
        let (session, run) = busy_run(&test.daemon, json!({ "cancel_grace_s": 3 }), &script).await;
        session.cancel().await;
        test.set_clock(BACK_MS, restarts).await;
        let ended = session.wait(&run).await;
        assert_eq!(ended["finish_reason"], "cancelled", "restarts: {restarts}; {ended}");
        let kinds = session.events_of(&run).await;
        assert!(kinds.iter().any(|event| event.kind == "run.kill_requested"), "restarts: {restarts}");
    }
}

#[tokio::test]
async fn waiting_for_a_person_is_not_run_time_whatever_the_clock_does_meanwhile() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let settings = json!({ "agent": "script", "run_timeout_s": 600, "policy": "ask" });
        let session = test.daemon.session_with(settings).await;
        let run = session.prompt_script(&[ask_bash("make"), say_times("x", 20, 50)]).await;
        let ask = session.wait_for_ask(&run).await;
        test.set_clock(BACK_MS, restarts).await;
        let answer = json!({ "decision": "allow_once" });
        session.client.answer_ask(&ask, &answer).await.expect(200);
        session.wait_for_run_event(&run, "text.delta").await;
        // Forward again, to where it was: what counts as waiting must not have changed.
        test.set_clock(0, restarts).await;
        assert_eq!(session.wait(&run).await["finish_reason"], "end_turn", "restarts: {restarts}");
    }
}

#[tokio::test]
async fn a_clock_that_is_set_changes_no_timeout_of_a_fleet() {
    for (shift_ms, timeout, state) in [(FORWARD_MS, "600s", "done"), (BACK_MS, "3s", "failed")] {
        for restarts in [false, true] {
            let mut test = ClockTest::start().await;
            let task = if state == "done" { vec![say_times("x", 40, 50)] } else { vec![sleep_forever()] };
            let file = format!(
                "fleet:\n  timeout: {timeout}\n  task: {}\n  sessions: {{ a: {{ agent: script }} }}\n  start: a\n",
                json!(steps(&task))
            );
            let fleet = test.daemon.workspace().await.fleet(&file).await;
            test.set_clock(shift_ms, restarts).await;
            let ended = fleet.wait_for_end().await;
            assert_eq!(ended["state"], state, "restarts: {restarts}; {ended}");
        }
    }
}

#[tokio::test]
async fn a_clock_that_is_set_neither_ends_nor_prolongs_a_claim_on_mail() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let session = test.daemon.session("echo").await;
        let held = json!({ "text": "hello", "deliver": "hold" });
        let claim = |limit_s: u64| json!({ "max": 1, "limit_s": limit_s });
        session.client.post(&session.path("/mail"), &held).await.expect(202);
        let claimed = session.client.post(&session.path("/mail/claim"), &claim(600)).await.list();
        test.set_clock(FORWARD_MS, restarts).await;
        let acknowledge = session.path(&format!("/mail/{}/ack", claimed[0]["id"].as_str().unwrap()));
        let by = json!({ "claim": claimed[0]["claim"] });
        session.client.post(&acknowledge, &by).await.expect(200);

        session.client.post(&session.path("/mail"), &held).await.expect(202);
        assert_eq!(session.client.post(&session.path("/mail/claim"), &claim(2)).await.list().len(), 1);
        test.set_clock(BACK_MS, restarts).await;
        session.wait_for_event("the return of the mail", |event| event.kind == "mail.returned").await;
    }
}

#[tokio::test]
async fn a_clock_that_is_set_days_forward_makes_no_repeated_request_a_new_one() {
    for restarts in [false, true] {
        let mut test = ClockTest::start().await;
        let workspace = test.daemon.workspace().await.id;
        let path = format!("/v1/workspaces/{workspace}/sessions");
        let create = async |daemon: &TestDaemon| {
            let client = daemon.client().with_header("idempotency-key", "once");
            client.post(&path, &json!({ "agent": "echo" })).await.expect(201)
        };
        let first = create(&test.daemon).await;
        test.set_clock(72 * HOUR_MS, restarts).await;
        assert_eq!(create(&test.daemon).await["id"], first["id"], "restarts: {restarts}");
    }
}
