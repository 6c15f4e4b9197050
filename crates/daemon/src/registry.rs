//! The registry of awake actors. An actor has a mailbox here while it lives. Going to sleep is decided under the
//! mailbox's lock, so a message either reaches the living actor or wakes a new one, and two actors of one session
//! cannot exist.
//!
//! The locks come from `crate::sync`: the standard library's here, shuttle's in `tests/registry.rs`, which runs this
//! file through every order that a scheduler could choose.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::task::{Context, Poll, Waker};

use crate::sync::{Arc, Mutex, MutexGuard};

/// The mailbox of one actor: bounded, ordered, and closed for good once its actor sleeps.
#[derive(Debug)]
pub(crate) struct ActorMailbox<M> {
    state: Mutex<ActorMailboxState<M>>,
    limit: usize,
}

#[derive(Debug)]
struct ActorMailboxState<M> {
    queue: VecDeque<M>,
    waker: Option<Waker>,
    asleep: bool,
}

/// Why a mailbox did not take a message. It returns the message.
#[derive(Debug)]
pub(crate) enum MailboxRejection<M> {
    /// The mailbox holds as many messages as it may.
    Full(M),
    /// The actor has gone to sleep.
    Asleep(M),
}

impl<M> ActorMailbox<M> {
    fn new(limit: usize, first: M) -> Self {
        let inner = ActorMailboxState { queue: VecDeque::from([first]), waker: None, asleep: false };
        Self { state: Mutex::new(inner), limit }
    }

    /// Appends a message to the queue.
    pub(crate) fn push(&self, message: M) -> Result<(), MailboxRejection<M>> {
        let waker = {
            let mut inner = lock(&self.state);
            if inner.asleep {
                return Err(MailboxRejection::Asleep(message));
            }
            if inner.queue.len() >= self.limit {
                return Err(MailboxRejection::Full(message));
            }
            inner.queue.push_back(message);
            inner.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Moves up to `most` messages to `into`, or waits for the first if there is none.
    pub(crate) fn poll_take(&self, context: &mut Context<'_>, into: &mut Vec<M>, most: usize) -> Poll<()> {
        let mut inner = lock(&self.state);
        if inner.queue.is_empty() {
            inner.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let count = most.min(inner.queue.len());
        into.extend(inner.queue.drain(..count));
        if inner.queue.is_empty() {
            // The capacity of a burst is released, because a quiet session should cost little.
            inner.queue = VecDeque::new();
        }
        Poll::Ready(())
    }
}

/// The mailboxes of all awake actors.
#[derive(Debug)]
pub(crate) struct ActorRegistry<K, M> {
    mailboxes: Mutex<HashMap<K, Arc<ActorMailbox<M>>>>,
    limit: usize,
}

impl<K: Eq + Hash + Clone, M> ActorRegistry<K, M> {
    /// Each mailbox holds up to `limit` messages.
    pub(crate) fn new(limit: usize) -> Self {
        Self { mailboxes: Mutex::new(HashMap::new()), limit }
    }

    /// Delivers a message, or returns it if the mailbox is full. If no actor is awake, `wake` is called with the
    /// mailbox that the new actor is to serve.
    pub(crate) fn send(&self, key: &K, message: M, wake: impl FnOnce(Arc<ActorMailbox<M>>)) -> Result<(), M> {
        let mut message = message;
        loop {
            let mailbox = {
                let mut awake = lock(&self.mailboxes);
                match awake.get(key) {
                    Some(mailbox) => Arc::clone(mailbox),
                    None => {
                        let mailbox = Arc::new(ActorMailbox::new(self.limit, message));
                        awake.insert(key.clone(), Arc::clone(&mailbox));
                        drop(awake);
                        wake(mailbox);
                        return Ok(());
                    }
                }
            };
            match mailbox.push(message) {
                Ok(()) => return Ok(()),
                Err(MailboxRejection::Full(back)) => return Err(back),
                // The actor fell asleep after we found its mailbox, and removed itself from the map: try again.
                Err(MailboxRejection::Asleep(back)) => message = back,
            }
        }
    }

    /// Delivers a message only if the actor is awake; returns it otherwise.
    pub(crate) fn send_if_awake(&self, key: &K, message: M) -> Result<(), MailboxRejection<M>> {
        let mailbox = lock(&self.mailboxes).get(key).map(Arc::clone);
        match mailbox {
            Some(mailbox) => mailbox.push(message),
            None => Err(MailboxRejection::Asleep(message)),
        }
    }

    /// Puts an actor to sleep, unless a message is waiting for it. If this returns true, the actor must do nothing
    /// more.
    pub(crate) fn try_sleep(&self, key: &K, mailbox: &Arc<ActorMailbox<M>>) -> bool {
        let mut awake = lock(&self.mailboxes);
        let mut inner = lock(&mailbox.state);
        if !inner.queue.is_empty() {
            return false;
        }
        inner.asleep = true;
        awake.remove(key);
        true
    }

    /// Removes an actor that died, even if messages wait for it. They are dropped, so callers that wait for answers
    /// learn of it; the next message wakes a new actor.
    pub(crate) fn remove_dead(&self, key: &K, mailbox: &Arc<ActorMailbox<M>>) {
        let mut awake = lock(&self.mailboxes);
        let mut inner = lock(&mailbox.state);
        inner.asleep = true;
        inner.queue.clear();
        if awake.get(key).is_some_and(|current| Arc::ptr_eq(current, mailbox)) {
            awake.remove(key);
        }
    }

    /// Whether messages for this key go to this mailbox. No other actor can exist for the key while they do.
    pub(crate) fn is_registered(&self, key: &K, mailbox: &Arc<ActorMailbox<M>>) -> bool {
        lock(&self.mailboxes).get(key).is_some_and(|current| Arc::ptr_eq(current, mailbox))
    }

    pub(crate) fn awake_keys(&self) -> Vec<K> {
        lock(&self.mailboxes).keys().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.mailboxes).len()
    }
}

/// The only lock of the workspace that can be poisoned: shuttle has the standard library's locks and not those of
/// parking_lot. A poisoned lock is fine to use, because every change here leaves the data whole if it panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
