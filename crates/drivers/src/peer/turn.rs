//! One turn with a foreign worker, in one loop that puts all events in one order. The loop writes while it reads, and
//! stops reading while its session accepts no more updates.
//!
//! The frames carry no run ids. Everything after `run` belongs to that run until its `terminal`. A turn that is dropped
//! before that drops the connection with it, so that none of its frames can be mistaken for the next run's.

use futures_util::StreamExt;
use qd_link::LinkClosed;
use qd_link::plain::client::PlainClientEvent;
use qd_link::socket::SocketError;
use qd_protocol::EventNumber;
use qd_protocol::event::{AskKind, RunError};
use qd_protocol::frame::plain::{PlainApproval, PlainParentFrame, PlainRunStatus, PlainWorkerFrame};
use qd_protocol::link::{TurnOutcome, TurnStopReason, TurnUpdate};
use serde_json::Value;

use super::asks::{self, PeerAskReply};
use super::connector::{PeerConnection, PeerConnector};
use super::event_decoder::PeerEventDecoder;
use crate::emit::wait_for_emit;
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};
use crate::turn_state::{OpenAsk, TurnState};

/// What remains when a turn is over.
pub(super) struct PeerTurnResult {
    pub(super) outcome: TurnOutcome,
    /// The connection, if it outlived the turn.
    pub(super) connection: Option<PeerConnection>,
    /// The conversation, if the worker sent it.
    pub(super) transcript: Vec<Value>,
}

/// The state of one turn.
pub(super) struct PeerTurn<'t> {
    turn: &'t DriverTurn<'t>,
    connection: PeerConnection,
    connector: &'t PeerConnector,
    state: TurnState<'t, String, (), PeerAskReply>,
    decoder: PeerEventDecoder,
    /// Steers sent to the worker, which has not confirmed yet that it read them.
    unconfirmed_steers: Vec<EventNumber>,
    cancelled: bool,
    /// How the turn ended. Updates that are being sent go out before the end is reported.
    end: Option<PeerTurnEnd>,
}

enum PeerTurnEnd {
    /// The worker reported the end of the run.
    Terminal(TurnOutcome, Vec<Value>),
    Broken(SocketError),
}

impl<'t> PeerTurn<'t> {
    pub(super) fn new(
        turn: &'t DriverTurn<'t>,
        connection: PeerConnection,
        connector: &'t PeerConnector,
    ) -> Self {
        Self {
            turn,
            connection,
            connector,
            state: TurnState::new(turn),
            decoder: PeerEventDecoder::default(),
            unconfirmed_steers: Vec::new(),
            cancelled: false,
            end: None,
        }
    }

    /// Runs the turn from the prompt to its end. `messages` is the earlier conversation, if the worker does not
    /// remember it.
    pub(super) async fn run(
        mut self,
        prompt: &DriverPrompt,
        messages: Vec<Value>,
    ) -> Result<PeerTurnResult, LinkClosed> {
        let left_out = prompt.files.iter().map(|file| {
            let text = format!("the worker cannot take the file {}, which was left out", file.name);
            TurnUpdate::notice(text)
        });
        self.state.emit(left_out.collect());
        self.send_frame(&PlainParentFrame::Run {
            assignment: prompt.text.clone(),
            reasoning_effort: None,
            messages,
        });
        let turn = self.turn;
        loop {
            let listening = self.state.emitting.is_none();
            if listening && let Some(end) = self.end.take() {
                return Ok(self.into_result(end));
            }
            let open = self.end.is_none();
            tokio::select! {
                // A cancel first; then updates that have arrived before new ones.
                biased;
                () = turn.cancelled(), if !self.cancelled => self.send_cancel(),
                emitted = wait_for_emit(&mut self.state.emitting) => {
                    emitted?;
                    self.state.finish_emitting();
                }
                Some(answer) = self.state.pending_answers.next(), if open => {
                    let (id, reply) = answer?;
                    if self.state.close_ask(&id).is_some() {
                        self.send_reply(id, reply);
                    }
                }
                steer = turn.next_steer(), if open && !self.cancelled => self.send_steer(steer),
                event = self.connection.next_event(listening), if open => self.handle_incoming(event).await?,
            }
        }
    }

    async fn handle_incoming(
        &mut self,
        event: Result<PlainClientEvent, SocketError>,
    ) -> Result<(), LinkClosed> {
        match event {
            Ok(PlainClientEvent::Frame(frame)) => self.handle_frame(frame),
            Ok(PlainClientEvent::Alive) => {
                for steer in std::mem::take(&mut self.unconfirmed_steers) {
                    self.turn.report_steer_taken(steer).await?;
                }
            }
            Err(error) => self.mark_broken(error),
        }
        Ok(())
    }

    fn handle_frame(&mut self, frame: PlainWorkerFrame) {
        match frame {
            PlainWorkerFrame::Event { event } => {
                self.state.emit(self.decoder.decode(event).into_iter().collect())
            }
            PlainWorkerFrame::ApprovalRequest { id, body } => self.open_ask(id, body),
            PlainWorkerFrame::Terminal { status, result, error, transcript } => {
                self.state.close_all_asks();
                if status == PlainRunStatus::Completed
                    && !self.decoder.has_text
                    && let Some(text) = result.clone().filter(|result| !result.is_empty())
                {
                    // The text of a run always contains the answer, even if the worker did not stream it.
                    self.state.emit(vec![TurnUpdate::Text { text }]);
                }
                let (outcome, transcript) = terminal_outcome(status, result, error, transcript);
                self.end = Some(PeerTurnEnd::Terminal(outcome, transcript));
            }
        }
    }

    fn open_ask(&mut self, id: String, body: PlainApproval) {
        // A cancelled run is allowed nothing. A repeated request is not asked twice.
        if self.cancelled || self.state.is_ask_open(&id) {
            return;
        }
        let ask = match asks::ask_request(body) {
            Ok(ask) => ask,
            Err(cause) => {
                tracing::error!(
                    "cannot ask for approval because the system provides no random numbers: {cause}"
                );
                return self.send_reply(id, asks::ask_reply(AskKind::Permission, None));
            }
        };
        let (turn, kind) = (self.turn, ask.kind);
        let open = OpenAsk { id, ask_ids: vec![ask.id.clone()], cancel_answer: () };
        let answer = async move { turn.ask(ask).await.map(|answer| asks::ask_reply(kind, answer)) };
        self.state.ask(open, Box::pin(answer));
    }

    fn send_reply(&mut self, id: String, reply: PeerAskReply) {
        let PeerAskReply { approved, reason } = reply;
        if let Some(reason) = reason {
            let text = format!("This was refused, for the reason: {reason}");
            self.send_frame(&PlainParentFrame::Message { text });
        }
        self.send_frame(&PlainParentFrame::ApprovalReply { id, approved });
    }

    /// Sends a steer as a message. The frames have no receipt for it, but the pong to a ping sent right after it shows
    /// that the worker read it. If the run ends before the pong, the steer counts as missed.
    fn send_steer(&mut self, steer: DriverSteer) {
        self.send_frame(&PlainParentFrame::Message { text: steer.text });
        self.unconfirmed_steers.push(steer.number);
        if let Err(error) = self.connection.queue_ping() {
            self.mark_broken(error);
        }
    }

    fn send_cancel(&mut self) {
        self.cancelled = true;
        self.state.close_all_asks();
        self.send_frame(&PlainParentFrame::Cancel);
    }

    fn send_frame(&mut self, frame: &PlainParentFrame) {
        if let Err(error) = self.connection.queue_frame(frame) {
            self.mark_broken(error);
        }
    }

    fn mark_broken(&mut self, error: SocketError) {
        self.state.close_all_asks();
        self.end.get_or_insert(PeerTurnEnd::Broken(error));
    }

    fn into_result(self, end: PeerTurnEnd) -> PeerTurnResult {
        match end {
            PeerTurnEnd::Terminal(outcome, transcript) => {
                PeerTurnResult { outcome, connection: Some(self.connection), transcript }
            }
            PeerTurnEnd::Broken(error) => {
                let outcome = if self.cancelled {
                    // The worker cancels the run of a closed connection, so nothing of it goes on.
                    TurnOutcome::cancelled()
                } else {
                    let message = format!(
                        "the connection to the worker at {} broke in the middle of the run: {error}; how far the \
                         worker got is unknown, so the prompt was not sent again",
                        self.connector
                    );
                    TurnOutcome::failed(RunError::new("agent_unreachable", message))
                };
                PeerTurnResult { outcome, connection: None, transcript: Vec::new() }
            }
        }
    }
}

/// The outcome of a run, and the conversation to keep for the next connection. A suspended run's transcript is stored
/// in the session instead.
fn terminal_outcome(
    status: PlainRunStatus,
    result: Option<String>,
    error: Option<String>,
    transcript: Vec<Value>,
) -> (TurnOutcome, Vec<Value>) {
    match status {
        PlainRunStatus::Completed => {
            (TurnOutcome { text: result, ..TurnOutcome::of(TurnStopReason::EndTurn) }, transcript)
        }
        PlainRunStatus::Cancelled => (TurnOutcome::cancelled(), transcript),
        PlainRunStatus::Suspended => {
            (TurnOutcome { text: result, ..TurnOutcome::suspended(transcript) }, Vec::new())
        }
        PlainRunStatus::Error => {
            let text = error.or(result).filter(|text| !text.trim().is_empty());
            let message = text.unwrap_or_else(|| "the worker failed and did not say why".to_owned());
            (TurnOutcome::failed(RunError::new("agent_error", message)), transcript)
        }
    }
}
