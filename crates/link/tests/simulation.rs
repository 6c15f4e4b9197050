//! The link in a network that fails in every way a seed can think of: one worker and one daemon under turmoil, the
//! daemon killed and started again with its journal, packets lost and held, workers that die and leave a spool. At the
//! end every word is in the journal once and in order, and every command was applied once. `QD_SEED` repeats one seed.

#![expect(clippy::unwrap_used, reason = "this is all test")]

mod simulated_hosts;

use std::time::Duration;

use crate::simulated_hosts::{SimulatedHosts, SimulationRandom};

const SEEDS: u64 = 1000;
/// How long things go wrong.
const STORM: Duration = Duration::from_secs(10);
/// How long after that all has to be well: a connection that is silently dead is given up after fifteen seconds.
const CALM: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(20);

/// What was done to the harbours.
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
    let mut troubles = FaultCounts::default();
    let count = seeds.end - seeds.start;
    for seed in seeds {
        if let Err(fault) = sail(seed, &mut troubles) {
            panic!("{fault}\nto repeat it: QD_SEED={seed} cargo test -p qd-link --test simulation");
        }
    }
    println!("{count} seeds: {troubles:?}");
}

/// One seed, from the first word to the last.
fn sail(seed: u64, troubles: &mut FaultCounts) -> Result<(), String> {
    let mut chance = SimulationRandom::new(seed);
    let harbour = SimulatedHosts::new(chance.fork());
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(TICK)
        .simulation_duration(STORM + CALM + TICK)
        .max_message_latency(Duration::from_millis(100))
        .build();
    let worker = harbour.clone();
    sim.host("worker", move || worker.clone().worker());
    let daemon = harbour.clone();
    sim.host("daemon", move || daemon.clone().daemon());

    // In every fifth the worker dies and does not come back.
    let dies = seed.is_multiple_of(5).then(|| Duration::from_millis(chance.below(8000)));
    let mut trouble = None;
    while sim.elapsed() < STORM + CALM && !harbour.is_done() {
        let now = sim.elapsed();
        if let Some((what, until)) = trouble
            && until <= now
        {
            match what {
                NetworkFault::Crash => sim.bounce("daemon"),
                NetworkFault::Partition => sim.repair("worker", "daemon"),
                NetworkFault::Hold => sim.release("worker", "daemon"),
            }
            trouble = None;
        }
        if dies.is_some_and(|dies| dies <= now) && !harbour.is_worker_dead() {
            sim.crash("worker");
            harbour.worker_died();
            troubles.deaths += 1;
        }
        if trouble.is_none() && now < STORM && chance.below(20) == 0 {
            let (what, longest) = match chance.below(3) {
                0 => {
                    sim.crash("daemon");
                    troubles.crashes += 1;
                    (NetworkFault::Crash, 1000)
                }
                1 => {
                    sim.partition("worker", "daemon");
                    troubles.partitions += 1;
                    (NetworkFault::Partition, 3000)
                }
                _ => {
                    sim.hold("worker", "daemon");
                    troubles.holds += 1;
                    (NetworkFault::Hold, 3000)
                }
            };
            trouble = Some((what, now + Duration::from_millis(20 + chance.below(longest))));
        }
        sim.step().map_err(|error| error.to_string())?;
    }
    harbour.verdict()
}
