//! A conversation with an agent that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! Every message of ours has a name, and the agent tells what becomes of it. A turn is over when all that was sent for
//! it is settled, so that no result can be mistaken for another's, also if the agent has begun a turn by itself.

use futures_util::StreamExt;
use qd_link::{Closed, Voice};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{Outcome, Said};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{Asked, Wanted, nobody_answers};
use super::compose;
use super::ear::Ear;
use super::round::{Round, Settled};
use super::words::{self, Fate, TurnResult, Word};
use crate::drivers::floor::Open;
use crate::drivers::lines::{Lines, ignore};
use crate::drivers::telling::{Telling, said, say_late, tell_first};
use crate::turn::{Prompt, Steer, Turn};

/// A conversation.
pub(super) struct Talk<R, W> {
    lines: Lines<R, W>,
    session: String,
    ear: Ear,
    /// Whether a turn can be steered.
    steers: bool,
    /// Whether the agent tells what becomes of messages. Those that do tell it before anything else of a turn.
    tells_fates: bool,
    /// Requests of ours so far.
    requests: u64,
    /// The turn that words between turns belong to, and how they are said.
    last_run: Option<RunId>,
    voice: Option<Voice>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late: Option<Telling<'static>>,
    /// What the next turn is to tell first.
    notice: Option<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Talk<R, W> {
    /// Goes on after the opening, which may have found that the agent has forgotten what it was to remember.
    pub(super) fn new(
        lines: Lines<R, W>,
        session: String,
        ear: Ear,
        steers: bool,
        forgot: Option<String>,
    ) -> Self {
        let told =
            |why| format!("the agent could not go on with its old conversation and began a new one: {why}");
        Self {
            lines,
            session,
            ear,
            steers,
            tells_fates: false,
            requests: 0,
            last_run: None,
            voice: None,
            late: None,
            notice: forgot.map(told),
        }
    }

    /// The agent's name for it.
    pub(super) fn session(&self) -> &str {
        &self.session
    }

    /// Closes the stream to the agent and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.lines.hang_up()
    }

    /// One turn, from its prompt to the agent's last result; `None` if the agent is no more.
    pub(super) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<Option<Outcome>, Closed> {
        if turn.is_cancelled() {
            return Ok(Some(Outcome::cancelled()));
        }
        let name = match words::uuid() {
            Ok(name) => name,
            Err(cause) => return Ok(Some(Outcome::failed(no_random(cause)))),
        };
        let before = self.last_run.replace(turn.run.clone());
        let (content, left_out) = compose::content(prompt);
        self.lines.put(&words::message(&name, content));
        let mut round = Round::new(turn, name);
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.notice.take().into_iter().chain(left_out.into_iter().map(cannot)).collect();
        round.floor.telling = Some(Box::pin(tell_first(turn, self.late.take(), notices)));
        loop {
            let listening = round.floor.telling.is_none();
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = said(&mut round.floor.telling) => {
                    told?;
                    round.floor.told();
                }
                Some(answered) = round.floor.asks.next() => {
                    let (id, answer) = answered?;
                    if round.floor.close(&id).is_some() {
                        self.lines.put(&words::answer(&id, answer));
                    }
                }
                steer = turn.next_steer(), if self.steers && round.takes_steers() => {
                    self.steer(&mut round, steer);
                }
                word = next(&mut self.lines, listening) => {
                    let Some(word) = word else { return Ok(None) };
                    self.hear(&mut round, before.as_ref(), word).await?;
                    if let Some(outcome) = round.outcome() {
                        self.answer_all(&mut round);
                        return Ok(Some(outcome));
                    }
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turn before, and nobody is asked anything. Comes back when the
    /// agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &Voice) {
        self.voice = Some(voice.clone());
        loop {
            let listening = self.late.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = said(&mut self.late) => self.late = None,
                word = next(&mut self.lines, listening) => match word {
                    Some(word) => self.overhear(word),
                    None => return,
                },
            }
        }
    }

    /// Asks the agent to stop, and answers all that it waits for.
    fn cancel(&mut self, round: &mut Round<'_>) {
        round.cancelled = true;
        self.interrupt();
        // After that, so that it does not go on with a refusal.
        self.answer_all(round);
    }

    /// Nobody answers any more: what works on in the background would wait for ever.
    fn answer_all(&mut self, round: &mut Round<'_>) {
        for open in round.floor.close_all() {
            self.lines.put(&words::answer(&open.id, nobody_answers()));
        }
    }

    /// What waits is dropped as well: it would begin as soon as the agent has stopped.
    fn interrupt(&mut self) {
        self.request(json!({"subtype": "interrupt", "cancel_queued": true}));
    }

    /// Wants something of the agent. Nothing depends on its answer: the fates of messages and the results tell more.
    fn request(&mut self, what: Value) {
        self.requests += 1;
        self.lines.put(&words::request(&format!("qd-{}", self.requests), what));
    }

    /// As another message, without any priority: while a tool runs or waits for a permission, it is taken into the turn
    /// with the tool's result; while the model speaks, it follows as soon as that is over, and nothing is cut off.
    fn steer(&mut self, round: &mut Round<'_>, steer: Steer) {
        // Without a name it could not be told what becomes of it. It is missed then, and runs later.
        let Ok(name) = words::uuid() else { return };
        self.lines.put(&words::message(&name, vec![words::text_block(&steer.text)]));
        round.steered(name, steer.number);
    }

    /// What a word means to the turn. What is said before the turn has begun belongs to the turn before.
    async fn hear(
        &mut self,
        round: &mut Round<'_>,
        before: Option<&RunId>,
        word: Word,
    ) -> Result<(), Closed> {
        match word {
            Word::Fate { uuid, fate } => {
                self.tells_fates = true;
                let settled = round.fate(&uuid, fate);
                settle(round.floor.turn, settled).await?;
                // The agent may have missed a cancel that reached it before it began with this.
                if fate == Fate::Started && round.cancelled && round.sent(&uuid) {
                    self.interrupt();
                }
            }
            Word::Result(result) => {
                let said = self.ear.settle(&result);
                if !round.is_ended_by(&result, self.tells_fates) {
                    self.tell(round, before, said.into_iter().collect());
                    return Ok(());
                }
                if let Some(said) = said {
                    round.floor.turn.tell(said).await?;
                }
                let settled = round.ended(&result, self.tells_fates);
                settle(round.floor.turn, settled).await?;
                if round.has_failed() {
                    // What was to be told to a turn that has failed is better asked anew.
                    for uuid in round.waiting_steers() {
                        self.request(json!({"subtype": "cancel_async_message", "message_uuid": uuid}));
                    }
                }
            }
            Word::Wants { id, request } => self.ask(round, id, &request),
            Word::GivenUp { id } => {
                for ask in round.floor.close(&id).into_iter().flat_map(|open| open.asks) {
                    round.floor.turn.withdraw(&ask).await;
                }
            }
            // The receipt of a cancel; what it names is dropped.
            Word::Answered { answer: Ok(answer), .. } => {
                for uuid in answer["cancelled"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                    let settled = round.fate(uuid, Fate::Cancelled);
                    settle(round.floor.turn, settled).await?;
                }
            }
            word => {
                self.notice_session(&word);
                let said = match self.before_its_time(round, before) {
                    Some(_) => self.ear.hear_late(word),
                    None => self.ear.hear(word),
                };
                self.tell(round, before, said);
            }
        }
        Ok(())
    }

    fn tell(&self, round: &mut Round<'_>, before: Option<&RunId>, said: Vec<Said>) {
        match self.before_its_time(round, before) {
            Some((voice, run)) if !said.is_empty() => {
                round.floor.telling = Some(Box::pin(say_late(voice.clone(), run.clone(), said)));
            }
            _ => round.floor.tell(said),
        }
    }

    /// How and for which turn things are said that come before this one has begun.
    fn before_its_time<'a>(
        &'a self,
        round: &Round<'_>,
        before: Option<&'a RunId>,
    ) -> Option<(&'a Voice, &'a RunId)> {
        self.voice.as_ref().zip(before).filter(|_| self.tells_fates && !round.begun)
    }

    fn ask(&mut self, round: &mut Round<'_>, id: String, request: &Value) {
        let Some(wanted) = self.wanted(&id, request) else { return };
        if round.cancelled {
            self.lines.put(&words::answer(&id, nobody_answers()));
            return;
        }
        let plan = self.ear.plan_for(&wanted.tool_name);
        match Asked::of(wanted, plan) {
            Ok(asked) => {
                let open = Open { id, asks: asked.ids(), cancelled: () };
                round.floor.ask(open, Box::pin(asked.put(round.floor.turn)));
            }
            Err(cause) => self.lines.put(&words::refusal(&id, &no_random(cause).message)),
        }
    }

    /// A tool that the agent wants to use; what else it may want is refused.
    fn wanted(&mut self, id: &str, request: &Value) -> Option<Wanted> {
        let why = match request["subtype"].as_str() {
            Some("can_use_tool") => match Wanted::deserialize(request) {
                Ok(wanted) => return Some(wanted),
                Err(cause) => format!("the request cannot be read: {cause}"),
            },
            Some(subtype) => format!("{subtype} is not supported"),
            None => "a request without a subtype is not supported".to_owned(),
        };
        self.lines.put(&words::refusal(id, &why));
        None
    }

    /// What a word means while no turn runs.
    fn overhear(&mut self, word: Word) {
        let said = match word {
            Word::Fate { .. } => {
                self.tells_fates = true;
                return;
            }
            Word::Wants { id, request } => {
                if self.wanted(&id, &request).is_some() {
                    self.lines.put(&words::answer(&id, nobody_answers()));
                }
                return;
            }
            Word::Result(result) => {
                let said = self.ear.settle(&result);
                said.into_iter().chain(failure(&result)).collect()
            }
            word => {
                self.notice_session(&word);
                self.ear.hear_late(word)
            }
        };
        // Before the first turn, it belongs to nobody.
        if let Some((voice, run)) = self.voice.clone().zip(self.last_run.clone()).filter(|_| !said.is_empty())
        {
            self.late = Some(Box::pin(say_late(voice, run, said)));
        }
    }

    /// The agent may go on under another name: some of its own commands begin a new conversation.
    fn notice_session(&mut self, word: &Word) {
        if let Word::System { subtype, line } = word
            && subtype == "init"
            && let Some(session) = line["session_id"].as_str()
            && session != self.session
        {
            session.clone_into(&mut self.session);
        }
    }
}

/// The agent's next word, or `None` when there will be none. Nothing is lost if the wait is given up.
pub(super) async fn next<R, W>(lines: &mut Lines<R, W>, listening: bool) -> Option<Word>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    loop {
        let line = lines.next(listening).await?;
        match Word::read(&line) {
            Some(word) => return Some(word),
            None => ignore(&line),
        }
    }
}

async fn settle(turn: &Turn<'_>, settled: impl IntoIterator<Item = Settled>) -> Result<(), Closed> {
    for steer in settled {
        match steer {
            Settled::Taken(steer) => turn.steer_taken(steer).await?,
            Settled::Missed(steer) => turn.steer_missed(steer).await?,
        }
    }
    Ok(())
}

/// What to tell of a turn that the agent began by itself and that went wrong.
fn failure(result: &TurnResult) -> Option<Said> {
    let aborted = result.terminal_reason.as_deref().is_some_and(|reason| reason.starts_with("aborted"));
    let why = result.errors.first().or(result.result.as_ref()).filter(|_| result.is_error && !aborted)?;
    Some(Said::Notice { text: format!("the agent went on by itself and failed: {why}") })
}

fn no_random(cause: getrandom::Error) -> RunError {
    RunError::new("agent_error", format!("there are no random bytes to name a message by: {cause}"))
}
