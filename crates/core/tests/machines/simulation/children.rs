//! The child sessions as far as their parent can see: each is busy until it ends, and reports that when it can.

use std::collections::BTreeMap;

use qd_protocol::SessionId;
use qd_protocol::event::{ChildResult, FinishReason};

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct SimulatedChildren {
    busy: BTreeMap<SessionId, bool>,
    /// They were told to close, and not all have.
    pub(crate) closing: bool,
}

impl SimulatedChildren {
    /// Adds a busy child.
    pub(crate) fn spawn(&mut self) -> SessionId {
        let id = SessionId::parse(&format!("c{}", self.busy.len())).unwrap();
        self.busy.insert(id.clone(), true);
        id
    }

    /// The indexes of the busy children.
    pub(crate) fn busy(&self) -> Vec<u8> {
        (0u8..).zip(self.busy.values()).filter(|(_, busy)| **busy).map(|(at, _)| at).collect()
    }

    pub(crate) fn is_busy(&self, id: &SessionId) -> bool {
        self.busy[id]
    }

    /// Ends this child.
    pub(crate) fn end(&mut self, at: u8) -> ChildResult {
        let (id, busy) = self.busy.iter_mut().nth(usize::from(at)).expect("only offered with one");
        *busy = false;
        result(id)
    }

    /// Ends all children, because they are cancelled or closed. Returns the results of those that were busy.
    pub(crate) fn end_all(&mut self) -> Vec<ChildResult> {
        self.busy().into_iter().map(|at| self.end(at)).collect()
    }

    /// The results of those of the given children that have ended.
    pub(crate) fn ended(&self, asked: &[SessionId]) -> Vec<ChildResult> {
        asked.iter().filter(|id| !self.is_busy(id)).map(result).collect()
    }
}

fn result(id: &SessionId) -> ChildResult {
    ChildResult {
        session_id: id.clone(),
        finish_reason: Some(FinishReason::EndTurn),
        text: "done".to_owned(),
    }
}
