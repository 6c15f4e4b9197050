//! The link in a network that fails in random ways: a worker and a daemon under turmoil, the daemon killed and
//! restarted with its journal, packets lost and held, workers that die and leave a spool. At the end every update is
//! in the journal once and in order, and every command was applied once. `QD_SEED` repeats one seed.

#![expect(clippy::unwrap_used, reason = "this is all test")]

mod simulated_hosts;

use std::time::Duration;

use crate::simulated_hosts::{SimulatedHosts, SimulationRandom};

const SEEDS: u64 = 1000;
/// How long faults are injected.
const STORM: Duration = Duration::from_secs(10);
/// How long the hosts may take to recover afterwards. A dead connection is only given up after fifteen seconds.
const CALM: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(20);

/// How many times each fault was injected.
#[derive(Debug, Default)]
struct FaultCounts {
    crashes: usize,
    partitions: usize,
    holds: usize,
    deaths: usize,
}

#[derive(Debug, Clone, Copy)]
enum NetworkFault {
    Crash,
    Partition,
    Hold,
}

#[test]
fn nothing_is_lost_doubled_or_swapped_in_a_thousand_storms() {
    let seeds = match std::env::var("QD_SEED") {
        Ok(seed) => {
            let seed = seed.parse().unwrap();
            seed..seed + 1
        }
        Err(_) => 0..SEEDS,
    };
    let mut fault_counts = FaultCounts::default();
    let count = seeds.end - seeds.start;
    for seed in seeds {
        if let Err(violation) = run_seed(seed, &mut fault_counts) {
            panic!("{violation}\nto repeat it: QD_SEED={seed} cargo test -p qd-link --test simulation");
        }
    }
    println!("{count} seeds: {fault_counts:?}");
}

/// Runs one seed.
fn run_seed(seed: u64, fault_counts: &mut FaultCounts) -> Result<(), String> {
    let mut random = SimulationRandom::new(seed);
    let hosts = SimulatedHosts::new(random.fork());
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .simulation_duration(STORM + CALM + TICK)
        .max_message_latency(Duration::from_millis(100))
        .build();
    let worker = hosts.clone();
    sim.host("worker", move || worker.clone().worker());
    let daemon = hosts.clone();
    sim.host("daemon", move || daemon.clone().daemon());

    // In every fifth seed the worker dies and does not come back.
    let worker_dies_at = seed.is_multiple_of(5).then(|| Duration::from_millis(random.below(8000)));
    let mut active_fault = None;
    while sim.elapsed() < STORM + CALM && !hosts.is_done() {
        let now = sim.elapsed();
        if let Some((fault, until)) = active_fault
            && until <= now
        {
            match fault {
                NetworkFault::Crash => sim.bounce("daemon"),
                NetworkFault::Partition => sim.repair("worker", "daemon"),
                NetworkFault::Hold => sim.release("worker", "daemon"),
            }
            active_fault = None;
        }
        if worker_dies_at.is_some_and(|worker_dies_at| worker_dies_at <= now) && !hosts.is_worker_dead() {
            sim.crash("worker");
            hosts.worker_died();
            fault_counts.deaths += 1;
        }
        if active_fault.is_none() && now < STORM && random.below(20) == 0 {
            let (fault, longest) = match random.below(3) {
                0 => {
                    sim.crash("daemon");
                    fault_counts.crashes += 1;
                    (NetworkFault::Crash, 1000)
                }
                1 => {
                    sim.partition("worker", "daemon");
                    fault_counts.partitions += 1;
                    (NetworkFault::Partition, 3000)
                }
                _ => {
                    sim.hold("worker", "daemon");
                    fault_counts.holds += 1;
                    (NetworkFault::Hold, 3000)
                }
            };
            active_fault = Some((fault, now + Duration::from_millis(20 + random.below(longest))));
        }
        sim.step().map_err(|error| error.to_string())?;
    }
    hosts.verdict()
}
