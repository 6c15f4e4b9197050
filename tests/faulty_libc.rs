//! The tool that other suites use to break disks and clocks works on the real binary: the daemon and its workers obey
//! it, agents do not.

use qd_testkit::faulty_libc::{EIO, ENOSPC, FaultyLibc};
use qd_testkit::{TestDaemon, TestHome, poll_until, script::*};
use serde_json::json;

const HOUR_MS: i64 = 3_600_000;

async fn start(faults: &FaultyLibc, home: TestHome) -> TestDaemon {
    TestDaemon::start_in(home, |options| {
        options.faulty_libc(faults);
    })
    .await
}

/// The hour and minute of a timestamp of the API, in minutes since the epoch of its day.
fn minutes(timestamp: &serde_json::Value) -> i64 {
    let text = timestamp.as_str().unwrap();
    let (hour, minute) = (&text[11..13], &text[14..16]);
    hour.parse::<i64>().unwrap() * 60 + minute.parse::<i64>().unwrap()
}

#[tokio::test]
async fn a_shifted_clock_shows_in_timestamps_of_the_daemon_and_not_in_agents() {
    let faults = FaultyLibc::new();
    let daemon = start(&faults, TestHome::new()).await;
    let before = daemon.session("script").await;
    faults.shift_clock(2 * HOUR_MS);
    let after = daemon.session("script").await;
    let (before, shown) = (before.show().await, after.show().await);
    let difference = minutes(&shown["created_at"]) - minutes(&before["created_at"]);
    assert!((120..125).contains(&difference.rem_euclid(24 * 60)), "{before} and {shown}");
    faults.shift_clock(-2 * HOUR_MS);
    let earlier = daemon.session("echo").await.show().await;
    let difference = minutes(&before["created_at"]) - minutes(&earlier["created_at"]);
    assert!((115..=120).contains(&difference.rem_euclid(24 * 60)), "{before} and {earlier}");

    // The worker obeys, its keeper and agent do not.
    after.wait(&after.prompt_script(&[say("hi")]).await).await;
    let has_faults = |role: &str| {
        let found = daemon.home.processes_with_role(role);
        let environ = std::fs::read(format!("/proc/{}/environ", found[0].pid)).unwrap();
        String::from_utf8_lossy(&environ).contains("LD_PRELOAD")
    };
    assert!(has_faults("__worker"));
    assert!(!has_faults("__keeper") && !has_faults("__script"));
}

#[tokio::test]
async fn a_full_disk_is_503_until_it_is_healed() {
    let home = TestHome::new();
    let faults = FaultyLibc::below(&home.path());
    let daemon = start(&faults, home).await;
    let session = daemon.session("echo").await;
    for errno in [ENOSPC, EIO] {
        let before = faults.failed_writes();
        faults.fail_writes(errno);
        let refused = session.try_prompt("hello").await;
        assert_eq!(refused.status, 503, "{refused}");
        assert!(faults.failed_writes() > before);
        faults.heal();
        // The journal may be about to open its files again, which the broken disk has let fail.
        let accepted = poll_until("a disk that works again", async || {
            let response = session.try_prompt("hello").await;
            (response.status == 202).then(|| response.json())
        })
        .await;
        let run = accepted["run_id"].as_str().unwrap();
        assert_eq!(session.wait(run).await["finish_reason"], "end_turn");
    }
}

#[tokio::test]
async fn failing_syncs_are_503_and_can_be_counted() {
    let home = TestHome::new();
    let faults = FaultyLibc::below(&home.path());
    let daemon = start(&faults, home).await;
    let session = daemon.session("echo").await;
    faults.only_in("serve");
    faults.fail_next_syncs(1);
    let refused = session.try_prompt("hello").await;
    assert_eq!(refused.status, 503, "{refused}");
    assert_eq!(faults.failed_syncs(), 1);
    faults.only_in("__worker");
    faults.fail_syncs();
    let accepted = session.post_run(&json!({ "prompt": "hello" })).await;
    assert_eq!(accepted.status, 202, "only workers fail now: {accepted}");
}
