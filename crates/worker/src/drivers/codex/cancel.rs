//! How a turn is stopped, together with all that it started. A cancel stays until the turn is over: the server refuses one
//! that comes before it has begun the turn, and then runs the whole of it.

use qd_protocol::link::TurnOutcome;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::connection::CodexParams;
use super::conversation::CodexConversation;
use super::turn::CodexTurn;

/// The method that ends the commands of a thread, all of them.
const CLEAN_METHOD: &str = "thread/backgroundTerminals/clean";

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConversation<R, W> {
    /// Asks the server to stop, and answers all that it waits for.
    pub(super) fn cancel(&mut self, round: &mut CodexTurn<'_>) {
        round.cancelled = true;
        round.pending_answers.clear();
        for open in round.open_asks.drain(..) {
            self.connection.respond(&open.id, Ok(open.cancel_answer));
        }
        self.interrupt(round);
    }

    /// Stops the turn, if the server has named it yet, and the turns of the agents that it started. Commands go on
    /// unless they are ended as well. The answer is waited for by nobody: the server may keep it to itself.
    pub(super) fn interrupt(&mut self, round: &mut CodexTurn<'_>) {
        for (thread, turn) in &self.subagent_turns {
            self.connection.request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
        }
        if let Some(turn) = &round.id {
            let params = json!({"threadId": self.thread, "turnId": turn});
            round.interrupt_request = Some(self.connection.request("turn/interrupt", params));
            round.interrupt_refused = false;
            self.end_commands(round);
        }
    }

    /// Ends the commands of our thread and of the agents that it started. If an earlier turn has left some running on
    /// purpose, they are told apart first.
    pub(super) fn end_commands(&mut self, round: &mut CodexTurn<'_>) -> u64 {
        for thread in self.subagent_turns.keys() {
            self.connection.request(CLEAN_METHOD, json!({"threadId": thread}));
        }
        let thread = json!({"threadId": self.thread});
        if !self.decoder.tool_calls().has_earlier_commands(round.id.as_deref().unwrap_or_default()) {
            return self.connection.request(CLEAN_METHOD, thread);
        }
        let list = self.connection.request("thread/backgroundTerminals/list", thread);
        round.list_request = Some(list);
        list
    }

    /// Ends those of the commands that no earlier turn has left; gives the last request for that.
    pub(super) fn terminate_commands(&mut self, round: &CodexTurn<'_>, running: &CodexParams) -> Option<u64> {
        #[derive(Deserialize)]
        struct CodexTerminalList {
            data: Vec<CodexTerminal>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct CodexTerminal {
            item_id: String,
            process_id: String,
        }
        let turn = round.id.as_deref().unwrap_or_default();
        let mut last = None;
        for CodexTerminal { item_id, process_id } in
            running.read().map_or_else(Vec::new, |it: CodexTerminalList| it.data)
        {
            if !self.decoder.tool_calls().is_earlier_command(&item_id, turn) {
                let params = json!({"threadId": self.thread, "processId": process_id});
                last = Some(self.connection.request("thread/backgroundTerminals/terminate", params));
            }
        }
        last
    }

    /// The server goes on with the turn; if it should not, it is told so again.
    pub(super) fn interrupt_again(&mut self, round: &mut CodexTurn<'_>, certain: bool) {
        if round.cancelled && round.outcome.is_none() && (certain || round.interrupt_refused) {
            self.interrupt(round);
        }
    }

    /// The outcome of a turn of which nothing goes on any more.
    pub(super) fn take_outcome(&self, round: &mut CodexTurn<'_>) -> Option<TurnOutcome> {
        round.outcome.as_ref()?;
        if round.cancelled {
            let turn = round.id.as_deref().unwrap_or_default();
            let settling = round.clean_request.is_some() || self.decoder.tool_calls().has_commands(turn);
            if !self.subagent_turns.is_empty() || (settling && round.settle_deadline.is_some()) {
                return None;
            }
        }
        round.outcome.take()
    }
}
