//! One turn with a worker, in one loop that puts all that can happen into one order. It writes while it reads, and stops
//! reading while its session takes nothing more.
//!
//! The frames have no names for runs. What comes after `run` belongs to it until its `terminal`; a turn that is given up
//! before that takes the connection with it, so that nothing of it can be taken for the next.

use futures_util::StreamExt;
use qd_link::Closed;
use qd_link::plain::client::Came;
use qd_link::socket::SocketError;
use qd_protocol::Number;
use qd_protocol::event::{AskKind, RunError};
use qd_protocol::frame::plain::{Approval, FromParent, FromWorker, Status};
use qd_protocol::link::{Outcome, Said, Stop};
use serde_json::Value;

use super::asks::{self, Told};
use super::way::{Line, Way};
use super::words::Words;
use crate::drivers::floor::{Floor, Open};
use crate::drivers::telling::said;
use crate::turn::{Prompt, Steer, Turn};

/// What is left when a turn is over.
pub(super) struct Over {
    pub(super) outcome: Outcome,
    /// The connection, if it outlived the turn.
    pub(super) line: Option<Line>,
    /// The conversation, where the worker gave it.
    pub(super) transcript: Vec<Value>,
}

/// What is open in one turn.
pub(super) struct Round<'t> {
    turn: &'t Turn<'t>,
    line: Line,
    way: &'t Way,
    floor: Floor<'t, String, (), Told>,
    words: Words,
    /// Told to the worker, which has not shown yet that it read them.
    steers: Vec<Number>,
    cancelled: bool,
    /// How the turn has ended, once it has; what is being said comes before that.
    end: Option<End>,
}

/// How a turn ended.
enum End {
    /// The worker said so.
    Terminal(Outcome, Vec<Value>),
    /// The connection broke.
    Broken(SocketError),
}

impl<'t> Round<'t> {
    /// Nothing has been said on this line.
    pub(super) fn new(turn: &'t Turn<'t>, line: Line, way: &'t Way) -> Self {
        Self {
            turn,
            line,
            way,
            floor: Floor::new(turn),
            words: Words::default(),
            steers: Vec::new(),
            cancelled: false,
            end: None,
        }
    }

    /// From the prompt until it is over; `messages` is the conversation that it goes on with, where the worker does not
    /// remember it.
    pub(super) async fn go(mut self, prompt: &Prompt, messages: Vec<Value>) -> Result<Over, Closed> {
        let left_out = prompt.files.iter().map(|file| {
            let text = format!("the worker cannot take the file {}, which was left out", file.name);
            Said::Notice { text }
        });
        self.floor.tell(left_out.collect());
        self.post(&FromParent::Run { assignment: prompt.text.clone(), reasoning_effort: None, messages });
        let turn = self.turn;
        loop {
            let listening = self.floor.telling.is_none();
            if listening && let Some(end) = self.end.take() {
                return Ok(self.over(end));
            }
            let open = self.end.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !self.cancelled => self.cancel(),
                told = said(&mut self.floor.telling) => {
                    told?;
                    self.floor.told();
                }
                Some(answered) = self.floor.asks.next(), if open => {
                    let (id, told) = answered?;
                    if self.floor.close(&id).is_some() {
                        self.reply(id, told);
                    }
                }
                steer = turn.next_steer(), if open && !self.cancelled => self.steer(steer),
                came = self.line.came(listening), if open => self.came(came).await?,
            }
        }
    }

    async fn came(&mut self, came: Result<Came, SocketError>) -> Result<(), Closed> {
        match came {
            Ok(Came::Frame(frame)) => self.hear(frame),
            Ok(Came::Alive) => {
                for steer in std::mem::take(&mut self.steers) {
                    self.turn.steer_taken(steer).await?;
                }
            }
            Err(error) => self.broke(error),
        }
        Ok(())
    }

    fn hear(&mut self, frame: FromWorker) {
        match frame {
            FromWorker::Event { event } => self.floor.tell(self.words.hear(event).into_iter().collect()),
            FromWorker::ApprovalRequest { id, body } => self.ask(id, body),
            FromWorker::Terminal { status, result, error, transcript } => {
                self.floor.close_all();
                if status == Status::Completed
                    && !self.words.has_text
                    && let Some(text) = result.clone().filter(|result| !result.is_empty())
                {
                    // The answer is never missing from the text.
                    self.floor.tell(vec![Said::Text { text }]);
                }
                let (outcome, transcript) = outcome(status, result, error, transcript);
                self.end = Some(End::Terminal(outcome, transcript));
            }
        }
    }

    fn ask(&mut self, id: String, body: Approval) {
        // A run that is to stop has leave for nothing, and nobody is asked the same thing twice.
        if self.cancelled || self.floor.is_open(&id) {
            return;
        }
        let ask = match asks::request(body) {
            Ok(ask) => ask,
            Err(cause) => {
                tracing::error!("no random numbers, so nobody can be asked: {cause}");
                return self.reply(id, asks::told(AskKind::Permission, None));
            }
        };
        let (turn, kind) = (self.turn, ask.kind);
        let open = Open { id, asks: vec![ask.id.clone()], cancelled: () };
        let asked = async move { turn.ask(ask).await.map(|answer| asks::told(kind, answer)) };
        self.floor.ask(open, Box::pin(asked));
    }

    fn reply(&mut self, id: String, told: Told) {
        let Told { approved, reason } = told;
        if let Some(reason) = reason {
            let text = format!("This was refused, for the reason: {reason}");
            self.post(&FromParent::Message { text });
        }
        self.post(&FromParent::ApprovalReply { id, approved });
    }

    /// Tells the run something. The frames have no receipt for that; but a sign of life that was asked for after it shows
    /// that it was read, and if the run ends before that comes, it counts as missed.
    fn steer(&mut self, steer: Steer) {
        self.post(&FromParent::Message { text: steer.text });
        self.steers.push(steer.number);
        if let Err(error) = self.line.post_ping() {
            self.broke(error);
        }
    }

    fn cancel(&mut self) {
        self.cancelled = true;
        self.floor.close_all();
        self.post(&FromParent::Cancel);
    }

    fn post(&mut self, frame: &FromParent) {
        if let Err(error) = self.line.post(frame) {
            self.broke(error);
        }
    }

    fn broke(&mut self, error: SocketError) {
        self.floor.close_all();
        self.end.get_or_insert(End::Broken(error));
    }

    fn over(self, end: End) -> Over {
        match end {
            End::Terminal(outcome, transcript) => Over { outcome, line: Some(self.line), transcript },
            End::Broken(error) => {
                let outcome = if self.cancelled {
                    // A closed connection cancels its run, so nothing of it goes on.
                    Outcome::cancelled()
                } else {
                    let message = format!(
                        "the connection to the worker at {} broke in the middle of the run: {error}; how far the \
                         worker came is not known, so the prompt was not sent again",
                        self.way
                    );
                    Outcome::failed(RunError::new("agent_unreachable", message))
                };
                Over { outcome, line: None, transcript: Vec::new() }
            }
        }
    }
}

/// How a run ended, and the conversation that is kept for the next connection. That of a suspended run is its session's.
fn outcome(
    status: Status,
    result: Option<String>,
    error: Option<String>,
    transcript: Vec<Value>,
) -> (Outcome, Vec<Value>) {
    match status {
        Status::Completed => (Outcome { text: result, ..Outcome::of(Stop::EndTurn) }, transcript),
        Status::Cancelled => (Outcome::cancelled(), transcript),
        Status::Suspended => (Outcome { text: result, ..Outcome::suspended(transcript) }, Vec::new()),
        Status::Error => {
            let words = error.or(result).filter(|words| !words.trim().is_empty());
            let message = words.unwrap_or_else(|| "the worker failed and did not say why".to_owned());
            (Outcome::failed(RunError::new("agent_error", message)), transcript)
        }
    }
}
