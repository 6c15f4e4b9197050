//! What breaks in a storm, one thing after another: processes are killed, stopped and told to end, disks and clocks
//! fail, connections are held and cut, sockets vanish. Every fault but a kill ends by itself after a while.

use std::sync::Arc;
use std::time::Duration;

use qd_testkit::SeededRandom;
use qd_testkit::faulty_libc::{EIO, ENOSPC};
use qd_testkit::home::signal;
use rustix::process::Signal;

use super::deck::StormDeck;
use super::{StormFaultLevel, StormFeatures};

/// One kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StormFault {
    KillDaemon,
    TerminateDaemon,
    StopDaemon,
    SignalRole(&'static str, Signal),
    SignalMachine(Signal),
    FailWrites(i32),
    FailSyncs,
    SlowSyncs,
    ShiftClock,
    HoldNetwork,
    CutNetwork,
    DeleteSocket,
}

fn possible_faults(level: StormFaultLevel, features: &StormFeatures) -> Vec<StormFault> {
    use StormFault::*;
    let mut faults = Vec::new();
    if level == StormFaultLevel::None {
        return faults;
    }
    faults.extend([KillDaemon; 3]);
    if level == StormFaultLevel::Daemon {
        return faults;
    }
    faults.push(TerminateDaemon);
    if features.stops {
        faults.extend([
            StopDaemon,
            SignalRole("__worker", Signal::STOP),
            SignalRole("__keeper", Signal::STOP),
        ]);
        faults.extend([SignalRole("__script", Signal::STOP), SignalMachine(Signal::STOP)]);
    }
    if features.killed_workers {
        for role in ["__worker", "__keeper", "__script"] {
            faults.extend([SignalRole(role, Signal::KILL), SignalRole(role, Signal::TERM)]);
        }
        faults.extend([SignalMachine(Signal::KILL), SignalMachine(Signal::TERM)]);
    }
    if features.broken_disks {
        faults.extend([FailWrites(ENOSPC), FailWrites(EIO), FailSyncs, SlowSyncs]);
    }
    if features.clock_jumps {
        faults.extend([ShiftClock; 2]);
    }
    if features.broken_network {
        faults.extend([HoldNetwork, CutNetwork]);
    }
    if features.deleted_sockets {
        faults.push(DeleteSocket);
    }
    faults
}

/// Breaks one thing after another until the storm ends.
pub(crate) async fn break_things(deck: Arc<StormDeck>, mut random: SeededRandom) {
    let faults = possible_faults(deck.options.faults, &deck.options.features);
    while !faults.is_empty() && !deck.is_ending() {
        tokio::time::sleep(Duration::from_millis(100 + random.below(900))).await;
        if deck.is_ending() {
            break;
        }
        let fault = *random.pick(&faults);
        deck.note_fault(format!("{fault:?}"));
        break_one(&deck, fault, &mut random).await;
        deck.note_fault("over".to_owned());
    }
}

async fn break_one(deck: &StormDeck, fault: StormFault, random: &mut SeededRandom) {
    let a_while = Duration::from_millis(100 + random.below(1500));
    let count = |what| deck.record(|record| record.count(what));
    match fault {
        StormFault::KillDaemon => {
            count("kill daemon");
            deck.restart(Signal::KILL, Duration::from_millis(random.below(400))).await;
        }
        StormFault::TerminateDaemon => {
            count("kill daemon by SIGTERM");
            deck.restart(Signal::TERM, Duration::from_millis(random.below(400))).await;
        }
        StormFault::StopDaemon => {
            let daemon = deck.daemon.lock().await;
            count("stop daemon");
            signal(daemon.pid(), Signal::STOP);
            tokio::time::sleep(a_while).await;
            signal(daemon.pid(), Signal::CONT);
        }
        StormFault::SignalRole(role, with) => {
            let processes = deck.daemon.lock().await.home.processes_with_role(role);
            if processes.is_empty() {
                return;
            }
            let process = random.pick(&processes).clone();
            count(match (role, with) {
                ("__worker", Signal::KILL) => "kill worker",
                ("__worker", Signal::TERM) => "kill worker by SIGTERM",
                ("__keeper", Signal::KILL) => "kill keeper",
                ("__keeper", Signal::TERM) => "kill keeper by SIGTERM",
                (_, Signal::KILL) => "kill agent",
                (_, Signal::TERM) => "kill agent by SIGTERM",
                _ => "stop process",
            });
            deck.note_fault(format!("process {} of {}", process.pid, process.parent));
            signal(process.pid, with);
            if with == Signal::STOP {
                tokio::time::sleep(a_while).await;
                signal(process.pid, Signal::CONT);
            }
        }
        StormFault::SignalMachine(with) => {
            let machines = deck.machines.lock().await;
            let pids: Vec<u32> = machines.iter().filter_map(super::deck::OtherMachine::pid).collect();
            drop(machines);
            if pids.is_empty() {
                return;
            }
            let pid = *random.pick(&pids);
            signal(pid, with);
            count(if with == Signal::STOP { "stop machine" } else { "kill machine" });
            tokio::time::sleep(a_while).await;
            signal(pid, Signal::CONT);
            if with != Signal::STOP {
                deck.restart_machines().await;
            }
        }
        StormFault::FailWrites(errno) => {
            count("broken disk");
            deck.libc.fail_writes(errno);
            tokio::time::sleep(a_while).await;
            deck.libc.heal();
        }
        StormFault::FailSyncs => {
            count("failed syncs");
            deck.libc.fail_next_syncs(1 + i64::try_from(random.below(3)).unwrap_or_default());
        }
        StormFault::SlowSyncs => {
            count("slow syncs");
            deck.libc.delay_syncs(40);
            tokio::time::sleep(a_while).await;
            deck.libc.heal();
        }
        StormFault::ShiftClock => {
            count("clock jumps");
            let minutes = [-60 * 24 * 3, -61, -1, 0, 1, 61, 60 * 24 * 3];
            deck.libc.shift_clock(random.pick(&minutes) * 60_000);
        }
        StormFault::HoldNetwork | StormFault::CutNetwork => {
            count("broken network");
            if fault == StormFault::HoldNetwork {
                deck.proxy.hold()
            } else {
                deck.proxy.cut()
            }
            tokio::time::sleep(a_while).await;
            deck.proxy.pass();
        }
        StormFault::DeleteSocket => {
            let sockets = std::fs::read_dir(deck.home.join("workers")).into_iter().flatten().flatten();
            let sockets: Vec<_> = sockets
                .map(|entry| entry.path())
                .filter(|path| path.extension().is_some_and(|e| e == "sock"))
                .collect();
            if !sockets.is_empty() && std::fs::remove_file(random.pick(&sockets)).is_ok() {
                count("deleted sockets");
            }
        }
    }
}
