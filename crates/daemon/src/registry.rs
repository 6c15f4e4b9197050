//! Who is awake. A session's actor has a mailbox here while it lives; sleep is agreed under the mailbox's lock, so a
//! message either reaches the actor that is there or wakes a new one, and two actors of one session cannot exist.
//!
//! The locks come from `crate::sync`, which is the standard library's here and shuttle's in `tests/registry.rs`,
//! where this very file is run through every order that a scheduler could choose.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::task::{Context, Poll, Waker};

use crate::sync::{Arc, Mutex, MutexGuard};

/// The inbox of one actor: bounded, in order, and closed for good once its actor sleeps.
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

/// Why a mailbox did not take a message, with the message.
#[derive(Debug)]
pub(crate) enum MailboxRejection<M> {
    /// Too many wait already.
    Full(M),
    /// Its actor has gone to sleep.
    Asleep(M),
}

impl<M> ActorMailbox<M> {
    fn new(limit: usize, first: M) -> Self {
        let inner = ActorMailboxState { queue: VecDeque::from([first]), waker: None, asleep: false };
        Self { state: Mutex::new(inner), limit }
    }

    /// Puts a message behind the others.
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

    /// Moves up to `most` messages to `into`, and waits for the first if there is none.
    pub(crate) fn poll_take(&self, context: &mut Context<'_>, into: &mut Vec<M>, most: usize) -> Poll<()> {
        let mut inner = lock(&self.state);
        if inner.queue.is_empty() {
            inner.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let count = most.min(inner.queue.len());
        into.extend(inner.queue.drain(..count));
        if inner.queue.is_empty() {
            // A quiet session should cost little: a burst's room is not kept.
            inner.queue = VecDeque::new();
        }
        Poll::Ready(())
    }
}

/// The mailboxes of all that are awake.
#[derive(Debug)]
pub(crate) struct ActorRegistry<K, M> {
    mailboxes: Mutex<HashMap<K, Arc<ActorMailbox<M>>>>,
    limit: usize,
}

impl<K: Eq + Hash + Clone, M> ActorRegistry<K, M> {
    /// With room for `limit` messages in each mailbox.
    pub(crate) fn new(limit: usize) -> Self {
        Self { mailboxes: Mutex::new(HashMap::new()), limit }
    }

    /// Delivers a message, or gives it back if too many wait. If nobody is awake, `wake` is called with the mailbox that
    /// the new actor is to serve.
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
                // It fell asleep between our two looks, and left the map as it did: look again.
                Err(MailboxRejection::Asleep(back)) => message = back,
            }
        }
    }

    /// Delivers a message only if somebody is awake; gives it back otherwise.
    pub(crate) fn send_if_awake(&self, key: &K, message: M) -> Result<(), MailboxRejection<M>> {
        let mailbox = lock(&self.mailboxes).get(key).map(Arc::clone);
        match mailbox {
            Some(mailbox) => mailbox.push(message),
            None => Err(MailboxRejection::Asleep(message)),
        }
    }

    /// Lets an actor sleep, unless a message has come for it. If true, it must do nothing more.
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

    /// Takes an actor that died out of the register, whatever waits for it. Its messages are dropped, so those who
    /// wait for answers learn of it; the next message wakes a new actor.
    pub(crate) fn remove_dead(&self, key: &K, mailbox: &Arc<ActorMailbox<M>>) {
        let mut awake = lock(&self.mailboxes);
        let mut inner = lock(&mailbox.state);
        inner.asleep = true;
        inner.queue.clear();
        if awake.get(key).is_some_and(|there| Arc::ptr_eq(there, mailbox)) {
            awake.remove(key);
        }
    }

    /// Everybody who is awake now.
    pub(crate) fn awake_keys(&self) -> Vec<K> {
        lock(&self.mailboxes).keys().cloned().collect()
    }

    /// How many are awake now.
    pub(crate) fn len(&self) -> usize {
        lock(&self.mailboxes).len()
    }
}

/// A panic elsewhere leaves our data whole: every change here is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
