//! What has come down for one run: words on its way, and answers to what it asked. Bounded; who puts something in
//! never waits, so that a cancel behind it is always heard.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::{AskId, EventNumber};
use tokio::sync::{Notify, oneshot};

use crate::update_window::{PENDING_ASKS_MAX, WINDOW_BYTES};

/// Something a run is told on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunSteer {
    /// The words.
    pub(crate) text: String,
    /// Its name, where the peer wants to know what became of it.
    pub(crate) number: Option<EventNumber>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct RunInbox {
    state: Mutex<RunInboxState>,
    steer_arrived: Notify,
}

#[derive(Debug, Default)]
struct RunInboxState {
    /// In order of arrival.
    steers: VecDeque<RunSteer>,
    /// Of their texts.
    steer_bytes: usize,
    /// Those that nobody has answered.
    open_asks: BTreeMap<AskId, oneshot::Sender<Option<bool>>>,
}

impl RunInbox {
    /// Keeps a steer until the run wants it; false if too much waits already.
    #[must_use]
    pub(crate) fn push_steer(&self, steer: RunSteer) -> bool {
        let mut state = self.lock();
        let full = state.steers.len() >= QUEUE_MAX || state.steer_bytes >= WINDOW_BYTES;
        if !full {
            state.steer_bytes += steer.text.len();
            state.steers.push_back(steer);
            drop(state);
            self.steer_arrived.notify_one();
        }
        !full
    }

    /// The next steer. Nothing is lost if the wait is given up.
    pub(crate) async fn wait_for_steer(&self) -> RunSteer {
        loop {
            // Made before the look: what comes in between wakes it.
            let steered = self.steer_arrived.notified();
            if let Some(steer) = self.pop_steer() {
                return steer;
            }
            steered.await;
        }
    }

    /// The steers that the run did not take, by name.
    pub(crate) fn take_missed_steers(&self) -> Vec<EventNumber> {
        let mut state = self.lock();
        state.steer_bytes = 0;
        state.steers.drain(..).filter_map(|steer| steer.number).collect()
    }

    /// Gives an answer, or that there will be none, to whoever waits for it. One that nobody waits for is dropped, and
    /// so is every one but the first.
    pub(crate) fn resolve_ask(&self, ask: &AskId, allowed: Option<bool>) {
        let waiting = self.lock().open_asks.remove(ask);
        if let Some(waiting) = waiting {
            // The wait may have been given up.
            let _taken = waiting.send(allowed);
        }
    }

    /// Waits for the answer to this ask, from now on; none if too many wait already. The ask is forgotten with the wait.
    pub(crate) fn open_ask(&self, ask: AskId) -> Option<impl Future<Output = Option<bool>>> {
        let mut state = self.lock();
        if state.open_asks.len() >= PENDING_ASKS_MAX {
            return None;
        }
        let (sender, receiver) = oneshot::channel();
        state.open_asks.insert(ask.clone(), sender);
        drop(state);
        let waiting = OpenAskGuard { inbox: self, ask };
        Some(async move {
            let allowed = receiver.await.ok().flatten();
            drop(waiting);
            allowed
        })
    }

    fn pop_steer(&self) -> Option<RunSteer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.steer_bytes -= steer.text.len();
        Some(steer)
    }

    fn lock(&self) -> MutexGuard<'_, RunInboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes its ask out when nobody waits any more.
struct OpenAskGuard<'a> {
    inbox: &'a RunInbox,
    ask: AskId,
}

impl Drop for OpenAskGuard<'_> {
    fn drop(&mut self) {
        self.inbox.lock().open_asks.remove(&self.ask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(name: &str) -> AskId {
        AskId::parse(name).unwrap()
    }

    fn steer(text: &str) -> RunSteer {
        RunSteer { text: text.to_owned(), number: None }
    }

    #[tokio::test]
    async fn steers_come_in_order_and_a_given_up_wait_loses_none() {
        let inbox = RunInbox::default();
        assert!(tokio::time::timeout(std::time::Duration::ZERO, inbox.wait_for_steer()).await.is_err());
        assert!(inbox.push_steer(steer("one")) && inbox.push_steer(steer("two")));
        assert_eq!(inbox.wait_for_steer().await.text, "one");
        assert_eq!(inbox.wait_for_steer().await.text, "two");
    }

    #[test]
    fn steers_that_nobody_takes_cost_bounded_memory() {
        let inbox = RunInbox::default();
        let taken =
            std::iter::repeat_with(|| inbox.push_steer(steer("x"))).take_while(|taken| *taken).count();
        assert_eq!(taken, QUEUE_MAX);
        let inbox = RunInbox::default();
        let large = "x".repeat(WINDOW_BYTES / 2);
        let taken =
            std::iter::repeat_with(|| inbox.push_steer(steer(&large))).take_while(|taken| *taken).count();
        assert_eq!(taken, 2);
    }

    #[tokio::test]
    async fn only_the_first_answer_with_the_right_id_counts() {
        let inbox = RunInbox::default();
        let reply = inbox.open_ask(ask("a")).unwrap();
        inbox.resolve_ask(&ask("b"), Some(false));
        inbox.resolve_ask(&ask("a"), Some(true));
        inbox.resolve_ask(&ask("a"), Some(false));
        assert_eq!(reply.await, Some(true));
        assert!(inbox.lock().open_asks.is_empty());
    }

    #[test]
    fn an_ask_is_forgotten_with_its_wait() {
        let inbox = RunInbox::default();
        drop(inbox.open_ask(ask("a")));
        assert!(inbox.lock().open_asks.is_empty());
        let many: Vec<_> =
            (0..PENDING_ASKS_MAX).map(|n| inbox.open_ask(ask(&format!("a{n}"))).unwrap()).collect();
        assert!(inbox.open_ask(ask("b")).is_none());
        drop(many);
    }
}
