//! A storm: every feature at once over the real binary, with random clients and random faults, from one seed. Clients
//! remember everything that they were told; at the end all faults are healed, and what was told is compared with the
//! journal, the lists, the logs, the processes and the files. `tests/short_storms.rs` has the
//! storms of `./check`; `main.rs` runs long ones by hand.
//!
//! - [`record`]: what the clients were told, and the violations found so far.
//! - [`deck`]: the daemon, the other machines, the network between them; started, broken and healed.
//! - [`clients`], [`prompts`], [`fleet_files`]: what random clients do.
//! - [`readers`]: readers of event streams.
//! - [`faults`]: what breaks.
//! - [`settle`]: the end: everything is healed, and all work must come to an end.
//! - [`checker`]: the comparison; [`ask_checks`], [`sandbox_checks`], [`setting_checks`], [`quota_checks`],
//!   [`stream_checks`], [`process_checks`], [`file_checks`]: its parts.

mod ask_checks;
mod checker;
pub(crate) mod clients;
pub(crate) mod deck;
mod faults;
mod file_checks;
mod fleet_files;
mod process_checks;
mod prompts;
mod quota_checks;
pub(crate) mod readers;
pub(crate) mod record;
mod sandbox_checks;
mod setting_checks;
mod settle;
mod stream_checks;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use qd_testkit::SeededRandom;
use tokio::task::JoinSet;

use self::deck::StormDeck;
use self::record::StormReport;

/// Which faults a storm may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StormFaultLevel {
    None,
    /// Only `kill -9` of the daemon.
    Daemon,
    All,
}

/// What a storm uses and breaks. Switching some of it off narrows down the cause of a violation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StormFeatures {
    /// Several prompts at once for a worktree session that has no worktree yet.
    pub(crate) first_prompts_together: bool,
    /// Runs that suspend themselves and wait for children.
    pub(crate) suspend: bool,
    /// Few slots for agents, and agents that are stopped soon when they are idle.
    pub(crate) little_room: bool,
    /// Processes that outlive their turn on purpose.
    pub(crate) leftovers: bool,
    /// Cancels. Without them only the end of the storm cancels.
    pub(crate) cancels: bool,
    /// Sessions that are closed or purged in the middle of everything.
    pub(crate) closes: bool,
    pub(crate) fleets: bool,
    pub(crate) mail: bool,
    pub(crate) halts: bool,
    pub(crate) worktrees: bool,
    /// Sessions on a joined machine and on a worker with a URL.
    pub(crate) other_machines: bool,
    /// Sessions that are confined in every way, and otherwise after a change.
    pub(crate) sandboxes: bool,
    /// Modes, which users set and agents switch.
    pub(crate) modes: bool,
    /// Agents that report that their quota is exhausted.
    pub(crate) quotas: bool,
    /// Clients whose tokens have roles, expire and are revoked.
    pub(crate) tokens: bool,
    /// Agents that ask or say more than a session may.
    pub(crate) session_limits: bool,
    /// Faults: writes and syncs that fail.
    pub(crate) broken_disks: bool,
    /// Faults: the wall clock jumps.
    pub(crate) clock_jumps: bool,
    /// Faults: a worker's socket is deleted, so nobody can reach it although it lives.
    pub(crate) deleted_sockets: bool,
    /// Faults: processes are stopped for a while.
    pub(crate) stops: bool,
    /// Faults: workers, keepers and agents are killed.
    pub(crate) killed_workers: bool,
    /// Faults: connections over TCP are held or cut.
    pub(crate) broken_network: bool,
}

impl StormFeatures {
    /// Everything.
    pub(crate) const ALL: Self = Self {
        first_prompts_together: true,
        suspend: true,
        little_room: true,
        leftovers: true,
        cancels: true,
        closes: true,
        fleets: true,
        mail: true,
        halts: true,
        worktrees: true,
        other_machines: true,
        sandboxes: true,
        modes: true,
        quotas: true,
        tokens: true,
        session_limits: true,
        broken_disks: true,
        clock_jumps: true,
        deleted_sockets: true,
        stops: true,
        killed_workers: true,
        broken_network: true,
    };
}

#[derive(Debug, Clone)]
pub(crate) struct StormOptions {
    pub(crate) seed: u64,
    /// How long clients work and things break, before everything is healed.
    pub(crate) duration: Duration,
    pub(crate) faults: StormFaultLevel,
    pub(crate) features: StormFeatures,
    pub(crate) clients: usize,
    /// How many sessions are open at once, at most, not counting those of fleets and children.
    pub(crate) sessions: usize,
}

/// Runs one storm to its end, and returns what it found.
pub(crate) async fn run_storm(options: StormOptions) -> StormReport {
    let mut random = SeededRandom::new(options.seed);
    let deck = Arc::new(StormDeck::start(options.clone()).await);
    let mut tasks = JoinSet::new();
    let mut readers = JoinSet::new();
    readers.spawn(readers::watch(deck.clone()));
    for kind in readers::StormReaderKind::ALL {
        readers.spawn(readers::read(deck.clone(), kind, SeededRandom::new(random.next_number())));
    }
    for _ in 0..options.clients {
        tasks.spawn(clients::act(deck.clone(), SeededRandom::new(random.next_number())));
    }
    for _ in 0..2 {
        tasks.spawn(clients::answer_asks(deck.clone(), SeededRandom::new(random.next_number())));
    }
    if options.features.tokens {
        tasks.spawn(clients::use_tokens(deck.clone(), SeededRandom::new(random.next_number())));
    }
    tasks.spawn(faults::break_things(deck.clone(), SeededRandom::new(random.next_number())));
    tokio::time::sleep(options.duration).await;
    deck.ending.store(true, Ordering::Relaxed);
    join(&deck, "a client", tasks).await;
    settle::settle(&deck).await;
    checker::check(&deck, readers).await;
    deck.report().await
}

/// Waits for tasks. One that panicked found something that no rule of the storm covers.
async fn join<T: 'static>(deck: &StormDeck, what: &str, mut tasks: JoinSet<T>) -> Vec<T> {
    let mut results = Vec::new();
    while let Some(result) = tasks.join_next().await {
        match result {
            Ok(result) => results.push(result),
            Err(error) => deck.violation(None, format!("{what} panicked: {error}")),
        }
    }
    results
}
