//! An actor that falls asleep against a message that arrives, in many orders that a scheduler could choose. The code
//! under test is the daemon's own file, with shuttle's locks in place of the standard ones.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;

mod sync {
    pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};
}

#[path = "../src/registry.rs"]
#[expect(dead_code, reason = "only the agreement is tried here")]
mod registry;

use registry::{ActorMailbox, ActorRegistry};
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use sync::{Arc, Mutex};

const SCHEDULES: usize = 20_000;
const SENDERS: usize = 3;
const EACH: usize = 2;

/// What the actors of one session have done.
struct ActorLog {
    /// How many actors are awake: never more than one.
    alive: AtomicUsize,
    woken: AtomicUsize,
    read: Mutex<HashMap<usize, usize>>,
}

/// Reads messages, and sleeps when there are none, as the daemon's actor does.
async fn actor(
    registry: Arc<ActorRegistry<u8, usize>>,
    mailbox: Arc<ActorMailbox<usize>>,
    log: Arc<ActorLog>,
) {
    assert_eq!(log.alive.fetch_add(1, Ordering::SeqCst), 0, "two actors of one session");
    log.woken.fetch_add(1, Ordering::SeqCst);
    let mut first = true;
    loop {
        let mut messages = Vec::new();
        if first {
            std::future::poll_fn(|context| mailbox.poll_take(context, &mut messages, 2)).await;
            first = false;
        } else {
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            let _ready = mailbox.poll_take(&mut context, &mut messages, 2);
        }
        for message in &messages {
            *log.read.lock().unwrap().entry(*message).or_default() += 1;
        }
        shuttle::future::yield_now().await;
        if messages.is_empty() {
            // Counted as gone before it may sleep, because the next actor may be awake before this one returns.
            log.alive.fetch_sub(1, Ordering::SeqCst);
            if registry.try_sleep(&0, &mailbox) {
                return;
            }
            log.alive.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn scenario() {
    let registry = Arc::new(ActorRegistry::new(64));
    let log =
        Arc::new(ActorLog { alive: AtomicUsize::new(0), woken: AtomicUsize::new(0), read: Mutex::default() });
    let senders: Vec<_> = (0..SENDERS)
        .map(|sender| {
            let (registry, log) = (Arc::clone(&registry), Arc::clone(&log));
            shuttle::future::spawn(async move {
                let mut actors = Vec::new();
                for message in 0..EACH {
                    let wake = |mailbox| {
                        let task = actor(Arc::clone(&registry), mailbox, Arc::clone(&log));
                        actors.push(shuttle::future::spawn(task));
                    };
                    registry.send(&0, sender * EACH + message, wake).unwrap();
                    shuttle::future::yield_now().await;
                }
                for actor in actors {
                    actor.await.unwrap();
                }
            })
        })
        .collect();
    shuttle::future::block_on(async {
        for sender in senders {
            sender.await.unwrap();
        }
    });
    let read = log.read.lock().unwrap();
    assert_eq!(read.len(), SENDERS * EACH, "a message was lost");
    assert!(read.values().all(|times| *times == 1), "a message was read twice");
    assert_eq!(registry.len(), 0, "all actors sleep in the end");
}

#[test]
fn a_message_meets_an_actor_or_wakes_one_and_two_of_one_session_never_live() {
    shuttle::check_random(scenario, SCHEDULES);
}

#[test]
fn the_same_with_the_fewest_preemptions_that_find_most_races() {
    shuttle::check_pct(scenario, SCHEDULES / 2, 3);
}
