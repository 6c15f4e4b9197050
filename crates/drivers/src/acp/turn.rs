//! The state of one turn: pending output, open asks, steers passed on to the agent, and whether it was asked to stop.
//! This module keeps the state and decides when to cancel again; the loop in `conversation` does everything else.

use std::collections::VecDeque;
use std::time::Duration;

use agent_client_protocol::v1::schema::PromptRequest;
use agent_client_protocol::{Error, RawJsonRpcId};
use qd_protocol::EventNumber;
use qd_protocol::event::RunError;
use serde_json::Value;
use tokio::time::Instant;

use super::asks::AcpAskOutcome;
use super::settings_guard::AcpSettingRequest;
use crate::turn::{DriverSteer, DriverTurn};
use crate::turn_state::TurnState;

/// The shortest interval between two cancels sent to an agent that keeps working.
const CANCEL_INTERVAL: Duration = Duration::from_millis(250);

/// The state of one turn.
pub(super) struct AcpTurn<'t> {
    pub(super) state: TurnState<'t, RawJsonRpcId, Result<Value, Error>, AcpAskOutcome>,
    /// Unanswered prompt requests: the turn's prompt, and steers sent as prompts. The turn ends when all are answered.
    pub(super) open_prompts: Vec<RawJsonRpcId>,
    /// Steers sent as requests that the agent has not answered.
    pub(super) pending_steers: Vec<(RawJsonRpcId, EventNumber)>,
    /// Steers that wait until the agent pulls them.
    pub(super) pullable_steers: VecDeque<DriverSteer>,
    /// The main arguments of everything allowed in this turn. An agent that asks for permission and then requests the
    /// same operation from the client is not asked about twice.
    pub(super) allowed_arguments: Vec<String>,
    pub(super) tool_refused: bool,
    /// The prompt, as long as the settings of the agent are being put right for the turn.
    pub(super) prompt_after_settings: Option<AcpPendingPrompt>,
    /// Why the turn is stopped: the agent no longer asks before it acts.
    pub(super) policy_error: Option<RunError>,
    /// The prompt, if it is to be sent again should the agent apply the stop of an earlier run to it.
    pub(super) prompt_to_repeat: Option<PromptRequest>,
    pub(super) cancelled: bool,
    /// Whether more than one cancel was sent. The agent may have ended the turn because of the first.
    pub(super) cancelled_again: bool,
    last_cancel_sent: Option<Instant>,
    /// Whether a cancel was sent after the first sign that the agent has begun this turn.
    cancelled_since_start: bool,
}

/// A prompt that is sent when the agent has granted the requests for its settings.
#[derive(Debug)]
pub(super) struct AcpPendingPrompt {
    /// The id of the first request, which was sent. The others are sent one after the other.
    pub(super) id: RawJsonRpcId,
    pub(super) settings: VecDeque<AcpSettingRequest>,
    pub(super) prompt: PromptRequest,
}

impl<'t> AcpTurn<'t> {
    /// A turn whose prompt has not been sent.
    pub(super) fn new(turn: &'t DriverTurn<'t>) -> Self {
        Self {
            state: TurnState::new(turn),
            open_prompts: Vec::new(),
            pending_steers: Vec::new(),
            pullable_steers: VecDeque::new(),
            allowed_arguments: Vec::new(),
            tool_refused: false,
            prompt_after_settings: None,
            policy_error: None,
            prompt_to_repeat: None,
            cancelled: false,
            cancelled_again: false,
            last_cancel_sent: None,
            cancelled_since_start: false,
        }
    }

    /// Whether the prompt waits for the response with this id.
    pub(super) fn awaits_setting(&self, id: &RawJsonRpcId) -> bool {
        self.prompt_after_settings.as_ref().is_some_and(|pending| pending.id == *id)
    }

    /// Records that a cancel was sent.
    pub(super) fn mark_cancelled(&mut self) {
        self.cancelled = true;
        self.last_cancel_sent = Some(Instant::now());
    }

    /// Whether to send another cancel to an agent that has just shown activity after a cancel. The first cancel may
    /// have reached the agent before its turn had begun and been ignored; only activity shows that the turn has begun.
    pub(super) fn should_cancel_again(&mut self) -> bool {
        let Some(last_sent) = self.last_cancel_sent else { return false };
        if self.cancelled_since_start && last_sent.elapsed() < CANCEL_INTERVAL {
            return false;
        }
        self.cancelled_since_start = true;
        self.cancelled_again = true;
        self.last_cancel_sent = Some(Instant::now());
        true
    }
}
