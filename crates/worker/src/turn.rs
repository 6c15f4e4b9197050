//! One turn, as an agent sees it: what it may say, and what it can wait for. The task that owns the agent puts the
//! turn's commands into [`Inbox`] while the turn runs; agents never see a link's commands themselves.

use std::collections::VecDeque;
use std::mem::take;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_link::{AgentSpec, Closed, Voice};
use qd_protocol::event::{Answer, Processes, RunError};
use qd_protocol::limits::{HEAD_MAX, QUEUE_MAX};
use qd_protocol::link::{AskRequest, Outcome, Reply, Said, Stop, Up};
use qd_protocol::text::{Blob, head};
use qd_protocol::{AskId, Number, RunId};
use tokio::sync::Notify;

/// Steers that may wait in one turn; what comes on top is missed at once and runs later as a prompt.
const STEERS_MAX: usize = QUEUE_MAX;

/// How a turn ended by itself.
#[derive(Debug)]
pub(crate) enum End {
    /// It stopped, and the agent takes the next.
    Stopped(Outcome),
    /// The whole agent ended in the middle of it, with this status.
    Exited(i32),
}

/// An outcome with nothing more to say.
pub(crate) fn outcome(stop: Stop) -> Outcome {
    Outcome { stop, text: None, error: None, processes: Processes::default() }
}

/// The outcome of a turn that went wrong.
pub(crate) fn failed(error: RunError) -> Outcome {
    Outcome { error: Some(error), ..outcome(Stop::Error) }
}

/// An error whose message fits the event that carries it, whatever the agent put into it.
pub(crate) fn error(code: &str, message: &str) -> RunError {
    let short = head(message, HEAD_MAX);
    if short.len() == message.len() {
        RunError::new(code, message)
    } else {
        RunError::new(code, format!("{short}… (cut: {} bytes in all)", message.len()))
    }
}

/// The whole of a text of which only the head may have come with the command.
pub(crate) async fn whole(blobs: &Path, head: String, blob: Option<&Blob>) -> Result<String, RunError> {
    let Some(blob) = blob else { return Ok(head) };
    let path = blobs.join(&blob.sha256);
    tokio::fs::read_to_string(&path)
        .await
        .map_err(|cause| error("prompt_unreadable", &format!("cannot read {}: {cause}", path.display())))
}

/// What a turn can do.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    pub(crate) run: RunId,
    pub(crate) spec: &'a AgentSpec,
    pub(crate) voice: Voice,
    pub(crate) inbox: &'a Inbox,
}

impl Turn<'_> {
    /// A piece of the answer.
    pub(crate) async fn say(&self, text: impl Into<String>) -> Result<(), Closed> {
        self.tell(Said::Text { text: text.into() }).await
    }

    /// Anything that needs no answer.
    pub(crate) async fn tell(&self, what: Said) -> Result<(), Closed> {
        self.voice.say(Up::Said { run: self.run.clone(), what }).await
    }

    /// Asks and waits; `None` if nobody will answer.
    pub(crate) async fn ask(&self, ask: AskRequest) -> Result<Option<Answer>, Closed> {
        let id = ask.id.clone();
        // Before it is asked: the answer may be there at once.
        self.inbox.lock().asked = Some((id.clone(), None));
        self.voice.say(Up::Ask { run: self.run.clone(), ask }).await?;
        match self.inbox.reply().await {
            Reply::Answered(answer) => {
                self.voice.say(Up::AskDelivered { ask: id }).await?;
                Ok(Some(answer))
            }
            Reply::Withdrawn => Ok(None),
        }
    }

    /// The next steer, one that waits already or one that comes in time. It counts as taken.
    pub(crate) async fn steer(&self, wait: Duration) -> Result<Option<Steer>, Closed> {
        let Ok(steer) = tokio::time::timeout(wait, self.inbox.steer()).await else { return Ok(None) };
        self.voice.say(Up::SteerTaken { steer: steer.number }).await?;
        Ok(Some(steer))
    }

    /// From here on only a kill stops this turn.
    pub(crate) fn ignore_cancel(&self) {
        self.inbox.lock().ignores_cancel = true;
    }

    /// Whether a polite cancel has no effect any more.
    pub(crate) fn ignores_cancel(&self) -> bool {
        self.inbox.lock().ignores_cancel
    }

    /// Something to be said when the turn is over and it should no longer be.
    pub(crate) fn say_late(&self, text: String) {
        self.inbox.lock().late.push(text);
    }
}

/// Something a turn was told on its way.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Steer {
    /// Its name.
    pub(crate) number: Number,
    /// The words, or their head.
    pub(crate) text: String,
    /// The file that has the whole of it.
    pub(crate) blob: Option<Blob>,
}

/// What has come down for a turn, and what its end must know. Both sides are one task; the lock only satisfies the
/// compiler's idea of a task that may move between threads.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    steers: VecDeque<Steer>,
    /// The ask that the turn waits for, and its reply.
    asked: Option<(AskId, Option<Reply>)>,
    ignores_cancel: bool,
    late: Vec<String>,
}

impl Inbox {
    /// Keeps a steer for when the turn wants one; gives it back if too many wait.
    #[must_use]
    pub(crate) fn put_steer(&self, steer: Steer) -> Option<Steer> {
        let mut state = self.lock();
        if state.steers.len() >= STEERS_MAX {
            return Some(steer);
        }
        state.steers.push_back(steer);
        drop(state);
        self.changed.notify_one();
        None
    }

    /// Gives a reply to whoever waits for it. One that nobody waits for is dropped.
    pub(crate) fn put_reply(&self, ask: &AskId, reply: Reply) {
        if let Some((id, slot @ None)) = &mut self.lock().asked
            && id == ask
        {
            *slot = Some(reply);
            self.changed.notify_one();
        }
    }

    /// Whether a polite cancel stops the turn.
    pub(crate) fn heeds_cancel(&self) -> bool {
        !self.lock().ignores_cancel
    }

    /// The steers that the turn never asked for, by number.
    pub(crate) fn missed(&self) -> Vec<Number> {
        self.lock().steers.drain(..).map(|steer| steer.number).collect()
    }

    /// What is to be said after the end.
    pub(crate) fn late(&self) -> Vec<String> {
        take(&mut self.lock().late)
    }

    async fn reply(&self) -> Reply {
        loop {
            if let Some((_, Some(reply))) = self.lock().asked.take_if(|(_, reply)| reply.is_some()) {
                return reply;
            }
            self.changed.notified().await;
        }
    }

    async fn steer(&self) -> Steer {
        loop {
            if let Some(steer) = self.lock().steers.pop_front() {
                return steer;
            }
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
