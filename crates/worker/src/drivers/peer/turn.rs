//! One turn with a worker, in one loop that puts all that can happen into one order. It writes while it reads, and stops
//! reading while its session takes nothing more.
//!
//! The frames have no names for runs. What comes after `run` belongs to it until its `terminal`; a turn that is given up
//! before that takes the connection with it, so that nothing of it can be taken for the next.

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
use crate::drivers::emit::wait_for_emit;
use crate::drivers::turn_state::{OpenAsk, TurnState};
use crate::turn::{DriverPrompt, DriverSteer, DriverTurn};

/// What is left when a turn is over.
pub(super) struct PeerTurnResult {
    pub(super) outcome: TurnOutcome,
    /// The connection, if it outlived the turn.
    pub(super) connection: Option<PeerConnection>,
    /// The conversation, where the worker gave it.
    pub(super) transcript: Vec<Value>,
}

/// What is open in one turn.
pub(super) struct PeerTurn<'t> {
    turn: &'t DriverTurn<'t>,
    connection: PeerConnection,
    connector: &'t PeerConnector,
    state: TurnState<'t, String, (), PeerAskReply>,
    decoder: PeerEventDecoder,
    /// Told to the worker, which has not shown yet that it read them.
    unconfirmed_steers: Vec<EventNumber>,
    cancelled: bool,
    /// How the turn has ended, once it has; what is being said comes before that.
    end: Option<PeerTurnEnd>,
}

/// How a turn ended.
enum PeerTurnEnd {
    /// The worker said so.
    Terminal(TurnOutcome, Vec<Value>),
    /// The connection broke.
    Broken(SocketError),
}

impl<'t> PeerTurn<'t> {
    /// Nothing has been said on this line.
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

    /// From the prompt until it is over; `messages` is the conversation that it goes on with, where the worker does not
    /// remember it.
    pub(super) async fn run(
        mut self,
        prompt: &DriverPrompt,
        messages: Vec<Value>,
    ) -> Result<PeerTurnResult, LinkClosed> {
        let left_out = prompt.files.iter().map(|file| {
            let text = format!("the worker cannot take the file {}, which was left out", file.name);
            TurnUpdate::Notice { text }
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
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !self.cancelled => self.send_cancel(),
                told = wait_for_emit(&mut self.state.emitting) => {
                    told?;
                    self.state.finish_emitting();
                }
                Some(answered) = self.state.pending_answers.next(), if open => {
                    let (id, told) = answered?;
                    if self.state.close_ask(&id).is_some() {
                        self.send_reply(id, told);
                    }
                }
                steer = turn.next_steer(), if open && !self.cancelled => self.send_steer(steer),
                came = self.connection.next_event(listening), if open => self.handle_incoming(came).await?,
            }
        }
    }

    async fn handle_incoming(
        &mut self,
        came: Result<PlainClientEvent, SocketError>,
    ) -> Result<(), LinkClosed> {
        match came {
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
                    // The answer is never missing from the text.
                    self.state.emit(vec![TurnUpdate::Text { text }]);
                }
                let (outcome, transcript) = terminal_outcome(status, result, error, transcript);
                self.end = Some(PeerTurnEnd::Terminal(outcome, transcript));
            }
        }
    }

    fn open_ask(&mut self, id: String, body: PlainApproval) {
        // A run that is to stop has leave for nothing, and nobody is asked the same thing twice.
        if self.cancelled || self.state.is_ask_open(&id) {
            return;
        }
        let ask = match asks::ask_request(body) {
            Ok(ask) => ask,
            Err(cause) => {
                tracing::error!("no random numbers, so nobody can be asked: {cause}");
                return self.send_reply(id, asks::ask_reply(AskKind::Permission, None));
            }
        };
        let (turn, kind) = (self.turn, ask.kind);
        let open = OpenAsk { id, ask_ids: vec![ask.id.clone()], cancel_answer: () };
        let asked = async move { turn.ask(ask).await.map(|answer| asks::ask_reply(kind, answer)) };
        self.state.ask(open, Box::pin(asked));
    }

    fn send_reply(&mut self, id: String, told: PeerAskReply) {
        let PeerAskReply { approved, reason } = told;
        if let Some(reason) = reason {
            let text = format!("This was refused, for the reason: {reason}");
            self.send_frame(&PlainParentFrame::Message { text });
        }
        self.send_frame(&PlainParentFrame::ApprovalReply { id, approved });
    }

    /// Tells the run something. The frames have no receipt for that; but a sign of life that was asked for after it shows
    /// that it was read, and if the run ends before that comes, it counts as missed.
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
                    // A closed connection cancels its run, so nothing of it goes on.
                    TurnOutcome::cancelled()
                } else {
                    let message = format!(
                        "the connection to the worker at {} broke in the middle of the run: {error}; how far the \
                         worker came is not known, so the prompt was not sent again",
                        self.connector
                    );
                    TurnOutcome::failed(RunError::new("agent_unreachable", message))
                };
                PeerTurnResult { outcome, connection: None, transcript: Vec::new() }
            }
        }
    }
}

/// How a run ended, and the conversation that is kept for the next connection. That of a suspended run is its session's.
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
            let words = error.or(result).filter(|words| !words.trim().is_empty());
            let message = words.unwrap_or_else(|| "the worker failed and did not say why".to_owned());
            (TurnOutcome::failed(RunError::new("agent_error", message)), transcript)
        }
    }
}
