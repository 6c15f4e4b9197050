//! What has come down for one run: words on its way, and answers to what it asked. Bounded; who puts something in
//! never waits, so that a cancel behind it is always heard.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::{AskId, Number};
use tokio::sync::{Notify, oneshot};

use crate::up::{ASK_ROOM, WINDOW_BYTES};

/// Something a run is told on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Steer {
    /// The words.
    pub(crate) text: String,
    /// Its name, where the peer wants to know what became of it.
    pub(crate) number: Option<Number>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    steered: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// In order of arrival.
    steers: VecDeque<Steer>,
    /// Of their texts.
    bytes: usize,
    /// Those that nobody has answered.
    asks: BTreeMap<AskId, oneshot::Sender<Option<bool>>>,
}

impl Inbox {
    /// Keeps a steer until the run wants it; false if too much waits already.
    #[must_use]
    pub(crate) fn put_steer(&self, steer: Steer) -> bool {
        let mut state = self.lock();
        let full = state.steers.len() >= QUEUE_MAX || state.bytes >= WINDOW_BYTES;
        if !full {
            state.bytes += steer.text.len();
            state.steers.push_back(steer);
            drop(state);
            self.steered.notify_one();
        }
        !full
    }

    /// The next steer. Nothing is lost if the wait is given up.
    pub(crate) async fn steer(&self) -> Steer {
        loop {
            // Made before the look: what comes in between wakes it.
            let steered = self.steered.notified();
            if let Some(steer) = self.next_steer() {
                return steer;
            }
            steered.await;
        }
    }

    /// The steers that the run did not take, by name.
    pub(crate) fn missed(&self) -> Vec<Number> {
        let mut state = self.lock();
        state.bytes = 0;
        state.steers.drain(..).filter_map(|steer| steer.number).collect()
    }

    /// Gives an answer, or that there will be none, to whoever waits for it. One that nobody waits for is dropped, and
    /// so is every one but the first.
    pub(crate) fn answer(&self, ask: &AskId, allowed: Option<bool>) {
        let waiting = self.lock().asks.remove(ask);
        if let Some(waiting) = waiting {
            // The wait may have been given up.
            let _taken = waiting.send(allowed);
        }
    }

    /// Waits for the answer to this ask, from now on; none if too many wait already. The ask is forgotten with the wait.
    pub(crate) fn open(&self, ask: AskId) -> Option<impl Future<Output = Option<bool>>> {
        let mut state = self.lock();
        if state.asks.len() >= ASK_ROOM {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        state.asks.insert(ask.clone(), sender);
        drop(state);
        let waiting = Waiting { inbox: self, ask };
        Some(async move {
            let allowed = receiver.await.ok().flatten();
            drop(waiting);
            allowed
        })
    }

    fn next_steer(&self) -> Option<Steer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.bytes -= steer.text.len();
        Some(steer)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes its ask out when nobody waits any more.
struct Waiting<'a> {
    inbox: &'a Inbox,
    ask: AskId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.inbox.lock().asks.remove(&self.ask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(name: &str) -> AskId {
        AskId::parse(name).unwrap()
    }

    fn steer(text: &str) -> Steer {
        Steer { text: text.to_owned(), number: None }
    }

    #[tokio::test]
    async fn steers_come_in_order_and_a_given_up_wait_loses_none() {
        let inbox = Inbox::default();
        assert!(tokio::time::timeout(std::time::Duration::ZERO, inbox.steer()).await.is_err());
        assert!(inbox.put_steer(steer("one")) && inbox.put_steer(steer("two")));
        assert_eq!(inbox.steer().await.text, "one");
        assert_eq!(inbox.steer().await.text, "two");
    }

    #[test]
    fn steers_that_nobody_takes_cost_bounded_memory() {
        let inbox = Inbox::default();
        let taken = std::iter::repeat_with(|| inbox.put_steer(steer("x"))).take_while(|taken| *taken).count();
        assert_eq!(taken, QUEUE_MAX);
        let inbox = Inbox::default();
        let large = "x".repeat(WINDOW_BYTES / 2);
        let taken =
            std::iter::repeat_with(|| inbox.put_steer(steer(&large))).take_while(|taken| *taken).count();
        assert_eq!(taken, 2);
    }

    #[tokio::test]
    async fn only_the_first_answer_with_the_right_id_counts() {
        let inbox = Inbox::default();
        let reply = inbox.open(ask("a")).unwrap();
        inbox.answer(&ask("b"), Some(false));
        inbox.answer(&ask("a"), Some(true));
        inbox.answer(&ask("a"), Some(false));
        assert_eq!(reply.await, Some(true));
        assert!(inbox.lock().asks.is_empty());
    }

    #[test]
    fn an_ask_is_forgotten_with_its_wait() {
        let inbox = Inbox::default();
        drop(inbox.open(ask("a")));
        assert!(inbox.lock().asks.is_empty());
        let many: Vec<_> = (0..ASK_ROOM).map(|n| inbox.open(ask(&format!("a{n}"))).unwrap()).collect();
        assert!(inbox.open(ask("b")).is_none());
        drop(many);
    }
}
