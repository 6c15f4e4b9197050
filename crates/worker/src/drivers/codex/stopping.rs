//! How a turn is stopped, together with all that it started. A cancel stays until the turn is over: the server refuses one
//! that comes before it has begun the turn, and then runs the whole of it.

use qd_protocol::link::Outcome;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::round::Round;
use super::talk::Talk;
use super::wire::Params;

/// The method that ends the commands of a thread, all of them.
const CLEAN: &str = "thread/backgroundTerminals/clean";

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Talk<R, W> {
    /// Asks the server to stop, and answers all that it waits for.
    pub(super) fn cancel(&mut self, round: &mut Round<'_>) {
        round.cancelled = true;
        round.asks.clear();
        for open in round.open.drain(..) {
            self.peer.answer(&open.id, Ok(open.cancelled));
        }
        self.interrupt(round);
    }

    /// Stops the turn, if the server has named it yet, and the turns of the agents that it started. Commands go on
    /// unless they are ended as well. The answer is waited for by nobody: the server may keep it to itself.
    pub(super) fn interrupt(&mut self, round: &mut Round<'_>) {
        for (thread, turn) in &self.others {
            self.peer.request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
        }
        if let Some(turn) = &round.id {
            let params = json!({"threadId": self.thread, "turnId": turn});
            round.interrupt = Some(self.peer.request("turn/interrupt", params));
            round.missed = false;
            self.clean(round);
        }
    }

    /// Ends the commands of our thread and of the agents that it started. If an earlier turn has left some running on
    /// purpose, they are told apart first.
    pub(super) fn clean(&mut self, round: &mut Round<'_>) -> u64 {
        for thread in self.others.keys() {
            self.peer.request(CLEAN, json!({"threadId": thread}));
        }
        let thread = json!({"threadId": self.thread});
        if !self.words.calls().has_left(round.id.as_deref().unwrap_or_default()) {
            return self.peer.request(CLEAN, thread);
        }
        let list = self.peer.request("thread/backgroundTerminals/list", thread);
        round.list = Some(list);
        list
    }

    /// Ends those of the commands that no earlier turn has left; gives the last request for that.
    pub(super) fn terminate(&mut self, round: &Round<'_>, running: &Params) -> Option<u64> {
        #[derive(Deserialize)]
        struct Running {
            data: Vec<Command>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Command {
            item_id: String,
            process_id: String,
        }
        let turn = round.id.as_deref().unwrap_or_default();
        let mut last = None;
        for Command { item_id, process_id } in running.read().map_or_else(Vec::new, |it: Running| it.data) {
            if !self.words.calls().was_left(&item_id, turn) {
                let params = json!({"threadId": self.thread, "processId": process_id});
                last = Some(self.peer.request("thread/backgroundTerminals/terminate", params));
            }
        }
        last
    }

    /// The server goes on with the turn; if it should not, it is told so again.
    pub(super) fn edge(&mut self, round: &mut Round<'_>, certain: bool) {
        if round.cancelled && round.outcome.is_none() && (certain || round.missed) {
            self.interrupt(round);
        }
    }

    /// The outcome of a turn of which nothing goes on any more.
    pub(super) fn over(&self, round: &mut Round<'_>) -> Option<Outcome> {
        round.outcome.as_ref()?;
        if round.cancelled {
            let turn = round.id.as_deref().unwrap_or_default();
            let settling = round.clean.is_some() || self.words.calls().has_commands(turn);
            if !self.others.is_empty() || (settling && round.settled_by.is_some()) {
                return None;
            }
        }
        round.outcome.take()
    }
}
