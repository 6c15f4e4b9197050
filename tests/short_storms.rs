//! The storms of `./check`: short, with few clients, so that they end soon on a busy machine. `tests/storm` says what a
//! storm is, and runs long ones. `QD_SEED` repeats a seed.

use std::time::Duration;

use crate::storm::record::StormReport;
use crate::storm::{StormFaultLevel, StormFeatures, StormOptions, run_storm};

/// What today's code stands. Each switch that is off keeps out a bug that is known; whoever mends one turns it on.
const SOUND: StormFeatures = StormFeatures {
    // A suspended run for which there is no room is never resumed: the storm with much room has suspensions.
    suspend: false,
    // Two messages in one batch of a session's actor launch the agent twice; the second start of a worktree session
    // replaces the first and finds no worker.
    worktrees: false,
    // A cancel that meets the end of the turn ends no processes.
    cancelled_processes: false,
    // A steer that the agent reports as missed after the cancel runs anyway.
    cancelled_steers: false,
    // A halt that cancels gives up with 404 at the first session that is purged meanwhile.
    halts_beside_purges: false,
    // A turn whose updates meet a full disk never ends.
    broken_disks: false,
    // Deadlines follow the wall clock.
    clock_jumps: false,
    // A worker that lives and cannot be reached keeps its session waiting for ever.
    deleted_sockets: false,
    ..StormFeatures::ALL
};

async fn short_storm(seed: u64, faults: StormFaultLevel, features: StormFeatures) -> StormReport {
    let seed = std::env::var("QD_SEED").map_or(seed, |text| text.parse().expect("QD_SEED is a number"));
    let options =
        StormOptions { seed, duration: Duration::from_secs(5), faults, features, clients: 4, sessions: 8 };
    run_storm(options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_calm_storm_of_every_feature_breaks_no_promise() {
    let report =
        short_storm(1, StormFaultLevel::None, StormFeatures { suspend: true, little_room: false, ..SOUND })
            .await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_killed_daemons_breaks_no_promise() {
    let report = short_storm(2, StormFaultLevel::Daemon, SOUND).await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_every_fault_breaks_no_promise() {
    let report = short_storm(3, StormFaultLevel::All, SOUND).await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}
