//! Long storms and the soak, by hand:
//!
//! ```sh
//! cargo test --profile suites -p quarterdeck --test storm -- --seed 7 --seconds 60 --faults all
//! cargo test --profile suites -p quarterdeck --test storm -- --soak --seconds 120
//! ```
//!
//! It prints one line of summary, and exits with 1 if anything was violated.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this program talks to a person")]

#[path = "mod.rs"]
mod storm;

mod soak;

use std::process::ExitCode;
use std::time::Duration;

use qd_testkit::SeededRandom;

use crate::storm::{StormFaultLevel, StormFeatures, StormOptions, run_storm};

const USAGE: &str = "\
usage: storm [--seed N] [--seconds N] [--faults none|daemon|all] [--clients N] [--sessions N]
             [--without FEATURE]... [--times N]
       storm --soak [--seconds N] [--agents N]

--times N repeats with the next seeds until something is violated. FEATURE is a field of StormFeatures.";

struct StormArguments {
    storm: StormOptions,
    times: u64,
    soak: bool,
    agents: usize,
}

fn parse_arguments(mut args: impl Iterator<Item = String>) -> Result<StormArguments, String> {
    let mut parsed = StormArguments {
        storm: StormOptions {
            seed: SeededRandom::choose_seed(),
            duration: Duration::from_secs(30),
            faults: StormFaultLevel::All,
            features: StormFeatures::ALL,
            clients: 6,
            sessions: 12,
        },
        times: 1,
        soak: false,
        agents: 50,
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number"));
        let count = |text: String| text.parse::<usize>().map_err(|_| format!("{text:?} is not a number"));
        match arg.as_str() {
            "--seed" => parsed.storm.seed = number(value()?)?,
            "--seconds" => parsed.storm.duration = Duration::from_secs(number(value()?)?),
            "--clients" => parsed.storm.clients = count(value()?)?,
            "--sessions" => parsed.storm.sessions = count(value()?)?,
            "--agents" => parsed.agents = count(value()?)?,
            "--times" => parsed.times = number(value()?)?,
            "--without" => turn_off(&mut parsed.storm.features, &value()?)?,
            "--soak" => parsed.soak = true,
            "--faults" => {
                parsed.storm.faults = match value()?.as_str() {
                    "none" => StormFaultLevel::None,
                    "daemon" => StormFaultLevel::Daemon,
                    "all" => StormFaultLevel::All,
                    other => return Err(format!("{other:?} is none of none, daemon and all")),
                }
            }
            // What cargo passes to every test program.
            "--nocapture" => {}
            _ => return Err(format!("unknown argument {arg:?}")),
        }
    }
    Ok(parsed)
}

/// Turns one feature off, by the name of its field.
fn turn_off(features: &mut StormFeatures, name: &str) -> Result<(), String> {
    let switch = match name {
        "first_prompts_together" => &mut features.first_prompts_together,
        "suspend" => &mut features.suspend,
        "little_room" => &mut features.little_room,
        "leftovers" => &mut features.leftovers,
        "cancels" => &mut features.cancels,
        "closes" => &mut features.closes,
        "fleets" => &mut features.fleets,
        "mail" => &mut features.mail,
        "halts" => &mut features.halts,
        "worktrees" => &mut features.worktrees,
        "other_machines" => &mut features.other_machines,
        "sandboxes" => &mut features.sandboxes,
        "modes" => &mut features.modes,
        "quotas" => &mut features.quotas,
        "tokens" => &mut features.tokens,
        "session_limits" => &mut features.session_limits,
        "broken_disks" => &mut features.broken_disks,
        "clock_jumps" => &mut features.clock_jumps,
        "deleted_sockets" => &mut features.deleted_sockets,
        "stops" => &mut features.stops,
        "killed_workers" => &mut features.killed_workers,
        "broken_network" => &mut features.broken_network,
        _ => return Err(format!("there is no feature {name:?}")),
    };
    *switch = false;
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let arguments = match parse_arguments(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("{problem}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if arguments.soak {
        let report = soak::run_soak(arguments.agents, arguments.storm.duration).await;
        println!("{report}");
        return if report.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    for time in 0..arguments.times {
        let options = StormOptions { seed: arguments.storm.seed + time, ..arguments.storm.clone() };
        let report = run_storm(options).await;
        if report.violations.is_empty() {
            println!("{}", report.summary());
        } else {
            println!("{report}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
