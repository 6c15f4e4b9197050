//! What has arrived for one run: steers, and answers to its asks. It is bounded, and adding to it never waits, so a
//! cancel behind it is always read.

use std::collections::{BTreeMap, VecDeque};

use parking_lot::{Mutex, MutexGuard};
use qd_protocol::limits::QUEUE_MAX;
use qd_protocol::{AskId, EventNumber};
use tokio::sync::{Notify, Semaphore, oneshot};

/// How many requests for approval of one run may wait for their answers. Another one is sent when one of them has its
/// answer.
pub const PENDING_ASKS_MAX: usize = 64;
/// How many bytes of steers may wait for a run.
const STEER_BYTES_MAX: usize = 8 << 20;

/// A message to a run that is already under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RunSteer {
    pub(crate) text: String,
    /// The steer's number, if the peer wants to know whether the run took it.
    pub(crate) number: Option<EventNumber>,
}

#[derive(Debug)]
pub(crate) struct RunInbox {
    state: Mutex<RunInboxState>,
    steer_arrived: Notify,
    /// One permit for each ask that may be open.
    ask_permits: Semaphore,
}

impl Default for RunInbox {
    fn default() -> Self {
        let (state, steer_arrived) = (Mutex::default(), Notify::default());
        Self { state, steer_arrived, ask_permits: Semaphore::new(PENDING_ASKS_MAX) }
    }
}

#[derive(Debug, Default)]
struct RunInboxState {
    /// In order of arrival.
    steers: VecDeque<RunSteer>,
    /// The size of their texts.
    steer_bytes: usize,
    /// Asks without an answer.
    open_asks: BTreeMap<AskId, oneshot::Sender<Option<bool>>>,
}

impl RunInbox {
    /// Keeps a steer until the run takes it. Returns false if too much waits already.
    #[must_use]
    pub(crate) fn push_steer(&self, steer: RunSteer) -> bool {
        let mut state = self.lock();
        let full = state.steers.len() >= QUEUE_MAX || state.steer_bytes >= STEER_BYTES_MAX;
        if !full {
            state.steer_bytes += steer.text.len();
            state.steers.push_back(steer);
            drop(state);
            self.steer_arrived.notify_one();
        }
        !full
    }

    /// Waits for the next steer. Cancelling the wait loses nothing.
    pub(crate) async fn wait_for_steer(&self) -> RunSteer {
        loop {
            // Registered before the check, so that a steer in between is not missed.
            let arrival = self.steer_arrived.notified();
            if let Some(steer) = self.pop_steer() {
                return steer;
            }
            arrival.await;
        }
    }

    /// The numbers of the steers that the run did not take.
    pub(crate) fn take_missed_steers(&self) -> Vec<EventNumber> {
        let mut state = self.lock();
        state.steer_bytes = 0;
        state.steers.drain(..).filter_map(|steer| steer.number).collect()
    }

    /// Delivers an answer to the waiting ask, or `None` if there will be no answer. Only the first answer counts, and
    /// an answer that nobody waits for is dropped.
    pub(crate) fn resolve_ask(&self, ask: &AskId, allowed: Option<bool>) {
        let sender = self.lock().open_asks.remove(ask);
        if let Some(sender) = sender {
            // The run may no longer wait for the answer.
            let _taken = sender.send(allowed);
        }
    }

    /// Registers an ask, once there is room for it, and returns a future of its answer. Dropping the future forgets the
    /// ask.
    pub(crate) async fn open_ask(&self, ask: AskId) -> impl Future<Output = Option<bool>> {
        // An error would mean that the semaphore is closed, which nobody does.
        let permit = self.ask_permits.acquire().await.ok();
        let (sender, receiver) = oneshot::channel();
        self.lock().open_asks.insert(ask.clone(), sender);
        let guard = OpenAskGuard { inbox: self, ask };
        async move {
            let allowed = receiver.await.ok().flatten();
            drop((guard, permit));
            allowed
        }
    }

    fn pop_steer(&self) -> Option<RunSteer> {
        let mut state = self.lock();
        let steer = state.steers.pop_front()?;
        state.steer_bytes -= steer.text.len();
        Some(steer)
    }

    fn lock(&self) -> MutexGuard<'_, RunInboxState> {
        self.state.lock()
    }
}

/// Removes its ask when the run stops waiting.
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
    use futures_util::FutureExt as _;

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
        let accepted =
            std::iter::repeat_with(|| inbox.push_steer(steer("x"))).take_while(|accepted| *accepted).count();
        assert_eq!(accepted, QUEUE_MAX);
        let inbox = RunInbox::default();
        let large = "x".repeat(STEER_BYTES_MAX / 2);
        let accepted = std::iter::repeat_with(|| inbox.push_steer(steer(&large)))
            .take_while(|accepted| *accepted)
            .count();
        assert_eq!(accepted, 2);
    }

    #[tokio::test]
    async fn only_the_first_answer_with_the_right_id_counts() {
        let inbox = RunInbox::default();
        let reply = inbox.open_ask(ask("a")).await;
        inbox.resolve_ask(&ask("b"), Some(false));
        inbox.resolve_ask(&ask("a"), Some(true));
        inbox.resolve_ask(&ask("a"), Some(false));
        assert_eq!(reply.await, Some(true));
        assert!(inbox.lock().open_asks.is_empty());
    }

    #[tokio::test]
    async fn an_ask_is_forgotten_with_its_wait() {
        let inbox = RunInbox::default();
        drop(inbox.open_ask(ask("a")).await);
        assert!(inbox.lock().open_asks.is_empty());
    }

    #[tokio::test]
    async fn an_ask_beyond_the_limit_waits_until_another_has_its_answer() {
        let inbox = RunInbox::default();
        let mut open = Vec::new();
        for n in 0..PENDING_ASKS_MAX {
            open.push(Box::pin(inbox.open_ask(ask(&format!("a{n}"))).await));
        }
        let mut next = Box::pin(inbox.open_ask(ask("next")));
        assert!(next.as_mut().now_or_never().is_none());
        inbox.resolve_ask(&ask("a0"), Some(true));
        assert!(next.as_mut().now_or_never().is_none(), "the run has not taken the answer yet");
        assert_eq!(open.remove(0).await, Some(true));
        let reply = next.await;
        inbox.resolve_ask(&ask("next"), Some(true));
        assert_eq!(reply.await, Some(true));
    }
}
