//! Cancels a turn together with everything that it started. A cancel stays in force until the turn is over: the server
//! refuses an interrupt that comes before it has begun the turn, and then runs the whole turn.

use qd_protocol::link::TurnOutcome;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::connection::CodexParams;
use super::conversation::CodexConversation;
use super::turn::CodexTurn;

/// The method that ends all commands of a thread.
const CLEAN_METHOD: &str = "thread/backgroundTerminals/clean";

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> CodexConversation<R, W> {
    /// Asks the server to stop and answers its open asks with a cancel.
    pub(super) fn cancel(&mut self, open_turn: &mut CodexTurn<'_>) {
        open_turn.cancelled = true;
        for ask in open_turn.state.close_all_asks() {
            self.connection.respond(&ask.id, Ok(ask.cancel_answer));
        }
        self.interrupt(open_turn);
    }

    /// Interrupts the turn, if its id is known yet, and the turns of the agents that it started. Commands would keep
    /// running, so they are ended as well. Nobody waits for the response, because the server may withhold it.
    pub(super) fn interrupt(&mut self, open_turn: &mut CodexTurn<'_>) {
        for (thread, turn) in &self.subagent_turns {
            self.connection.request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
        }
        if let Some(turn) = &open_turn.id {
            let params = json!({"threadId": self.thread, "turnId": turn});
            open_turn.interrupt_request = Some(self.connection.request("turn/interrupt", params));
            open_turn.interrupt_refused = false;
            self.end_commands(open_turn);
        }
    }

    /// Ends the commands of our thread and of the agents that it started, and returns the request's id. If an earlier
    /// turn left commands running on purpose, the commands are listed first to tell them apart.
    pub(super) fn end_commands(&mut self, open_turn: &mut CodexTurn<'_>) -> u64 {
        for thread in self.subagent_turns.keys() {
            self.connection.request(CLEAN_METHOD, json!({"threadId": thread}));
        }
        let thread = json!({"threadId": self.thread});
        if !self.decoder.tool_calls().has_earlier_commands(open_turn.id.as_deref().unwrap_or_default()) {
            return self.connection.request(CLEAN_METHOD, thread);
        }
        let list = self.connection.request("thread/backgroundTerminals/list", thread);
        open_turn.list_request = Some(list);
        list
    }

    /// Ends the listed commands except those of earlier turns. Returns the id of the last request sent for that.
    pub(super) fn terminate_commands(
        &mut self,
        open_turn: &CodexTurn<'_>,
        terminals: &CodexParams,
    ) -> Option<u64> {
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
        let turn = open_turn.id.as_deref().unwrap_or_default();
        let mut last = None;
        for CodexTerminal { item_id, process_id } in
            terminals.read().map_or_else(Vec::new, |list: CodexTerminalList| list.data)
        {
            if !self.decoder.tool_calls().is_earlier_command(&item_id, turn) {
                let params = json!({"threadId": self.thread, "processId": process_id});
                last = Some(self.connection.request("thread/backgroundTerminals/terminate", params));
            }
        }
        last
    }

    /// Interrupts a cancelled turn again, because the server shows that the turn goes on. Unless `certain`, only if the
    /// last interrupt was refused.
    pub(super) fn interrupt_again(&mut self, open_turn: &mut CodexTurn<'_>, certain: bool) {
        if open_turn.cancelled && open_turn.outcome.is_none() && (certain || open_turn.interrupt_refused) {
            self.interrupt(open_turn);
        }
    }

    /// The outcome of the turn, once nothing of it is running any more.
    pub(super) fn take_outcome(&self, open_turn: &mut CodexTurn<'_>) -> Option<TurnOutcome> {
        open_turn.outcome.as_ref()?;
        if open_turn.cancelled {
            let turn = open_turn.id.as_deref().unwrap_or_default();
            let settling = open_turn.clean_request.is_some() || self.decoder.tool_calls().has_commands(turn);
            if !self.subagent_turns.is_empty() || (settling && open_turn.settle_deadline.is_some()) {
                return None;
            }
        }
        open_turn.outcome.take()
    }
}
