//! The storms of `./check`: short, with few clients, so that they end soon on a busy machine. `tests/storm` says what a
//! storm is, and runs long ones. `QD_SEED` repeats a seed.

use std::time::Duration;

use crate::storm::record::StormReport;
use crate::storm::{StormFaultLevel, StormFeatures, StormOptions, run_storm};

async fn short_storm(seed: u64, faults: StormFaultLevel) -> StormReport {
    let seed = std::env::var("QD_SEED").map_or(seed, |text| text.parse().expect("QD_SEED is a number"));
    let (duration, features) = (Duration::from_secs(5), StormFeatures::ALL);
    let options = StormOptions { seed, duration, faults, features, clients: 4, sessions: 8 };
    run_storm(options).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_calm_storm_of_every_feature_breaks_no_promise() {
    let report = short_storm(1, StormFaultLevel::None).await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_killed_daemons_breaks_no_promise() {
    let report = short_storm(2, StormFaultLevel::Daemon).await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_every_fault_breaks_no_promise() {
    let report = short_storm(3, StormFaultLevel::All).await;
    println!("{}", report.summary());
    assert!(report.violations.is_empty(), "{report}");
}
