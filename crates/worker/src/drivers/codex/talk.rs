//! A conversation with a server that is ready: turns, and the time between them. One loop puts all that can happen
//! into one order; it writes while it reads, and stops reading while its session takes nothing more.
//!
//! A turn is over when the server says so under the turn's own id, and in no other way. A cancel stays until then: the
//! server refuses one that comes before it has begun the turn, and then runs the whole of it.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use qd_link::{Closed, Voice};
use qd_protocol::RunId;
use qd_protocol::event::RunError;
use qd_protocol::link::{Outcome, Stop};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};

use super::asks::{Asked, Reply};
use super::compose;
use super::ends::Ended;
use super::opening::Opened;
use super::round::{Open, Round, until};
use super::wire::{Message, Params, Peer, Refusal};
use super::words::{Heard, News, Words};
use crate::drivers::price::Pricing;
use crate::drivers::telling::{Telling, said, say_late, tell_first};
use crate::turn::{Prompt, Steer, Turn};

/// A conversation.
pub(super) struct Talk<R, W> {
    pub(super) peer: Peer<R, W>,
    pub(super) thread: String,
    pub(super) words: Words,
    /// The turn of ours that the server works on.
    live: Option<String>,
    /// The same of agents that ours has started: a turn of each thread.
    pub(super) others: BTreeMap<String, String>,
    /// The turn that words between turns belong to.
    last_run: Option<RunId>,
    /// Words between turns that are being said; they are not lost when a turn begins.
    late: Option<Telling<'static>>,
    /// What the next turn is to tell first.
    notices: Vec<String>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Talk<R, W> {
    /// Goes on after the opening.
    pub(super) fn new(peer: Peer<R, W>, opened: Opened, pricing: Pricing) -> Self {
        let Opened { thread, model, notices } = opened;
        let words = Words::new(thread.clone(), &model, pricing);
        let others = BTreeMap::new();
        Self { peer, thread, words, live: None, others, last_run: None, late: None, notices }
    }

    /// The agent's name for it.
    pub(super) fn thread(&self) -> &str {
        &self.thread
    }

    /// Closes the stream to the server and gives the other one up.
    pub(super) fn hang_up(self) -> R {
        self.peer.hang_up()
    }

    /// One turn, from its prompt to its end; `None` if the agent is no more.
    pub(super) async fn turn(&mut self, turn: &Turn<'_>, prompt: &Prompt) -> Result<Option<Outcome>, Closed> {
        if turn.is_cancelled() {
            return Ok(Some(Outcome::of(Stop::Cancelled)));
        }
        self.last_run = Some(turn.run.clone());
        self.words.begin_turn();
        let (input, left_out) = compose::input(prompt);
        let request = self.peer.request("turn/start", json!({"threadId": self.thread, "input": input}));
        let mut round = Round::new(turn, request);
        let cannot = |name| format!("the agent cannot take the file {name}, which was left out");
        let notices = self.notices.drain(..).chain(left_out.into_iter().map(cannot)).collect();
        round.telling = Some(Box::pin(tell_first(turn, self.late.take(), notices)));
        loop {
            let listening = round.telling.is_none();
            if listening && let Some(outcome) = self.over(&mut round) {
                return Ok(Some(outcome));
            }
            tokio::select! {
                // A cancel first; what was heard before what comes next.
                biased;
                () = turn.cancelled(), if !round.cancelled => self.cancel(&mut round),
                told = said(&mut round.telling) => {
                    told?;
                    round.telling = None;
                }
                Some(answered) = round.asks.next() => {
                    let (id, reply) = answered?;
                    if round.close(&id).is_some() {
                        self.reply(&id, reply);
                    }
                }
                steer = turn.next_steer(), if round.takes_steers() => self.steer(&mut round, steer),
                message = self.peer.next(listening) => {
                    let Some(message) = message else { return Ok(None) };
                    self.hear(&mut round, message).await?;
                }
                () = until(round.settled_by) => {
                    round.settled_by = None;
                    round.clean = None;
                }
            }
        }
    }

    /// The time between turns. What is said belongs to the turns before, and nobody is asked anything. Comes back when
    /// the agent is no more; nothing is lost if the wait is given up.
    pub(super) async fn idle(&mut self, voice: &Voice) {
        loop {
            let listening = self.late.is_none();
            tokio::select! {
                biased;
                // A session that has let go of its agent hears no late words either.
                _told = said(&mut self.late) => self.late = None,
                message = self.peer.next(listening) => match message {
                    Some(message) => self.overhear(voice, message),
                    None => return,
                },
            }
        }
    }

    fn steer(&mut self, round: &mut Round<'_>, steer: Steer) {
        let Some(turn) = round.id.clone() else { return };
        let id = self.put_in(&self.thread.clone(), &turn, &steer.text);
        round.steers.push((id, steer.number));
    }

    fn put_in(&mut self, thread: &str, turn: &str, words: &str) -> u64 {
        let params = json!({"threadId": thread, "expectedTurnId": turn, "input": [compose::text(words)]});
        self.peer.request("turn/steer", params)
    }

    /// Answers what the server waits for. A no has no room for its reason; so that goes before it as words of the user,
    /// and the model reads both before it goes on.
    fn reply(&mut self, id: &Value, reply: Reply) {
        if let Some((thread, turn, reason)) = reply.reason {
            self.put_in(&thread, &turn, &format!("This was refused, for the reason: {reason}"));
        }
        self.peer.answer(id, Ok(reply.answer));
    }

    /// What a message means to the turn.
    async fn hear(&mut self, round: &mut Round<'_>, message: Message) -> Result<(), Closed> {
        match message {
            Message::Answer(id, answer) => self.answered(round, id, answer).await?,
            Message::Notice(method, params) => {
                let (heard, news) = self.words.hear(&method, &params);
                if let Some(news) = news {
                    self.learn(round, news).await;
                }
                self.tell(round, heard);
            }
            Message::Request(id, method, params) => match Asked::read(&method, &params, self.words.calls()) {
                Ok(asked) if round.cancelled => self.peer.answer(&id, Ok(asked.cancelled())),
                Ok(asked) => {
                    round.ask(Open { id, asks: asked.ids(), cancelled: asked.cancelled() }, asked);
                }
                Err(refusal) => self.peer.answer(&id, Err(refusal)),
            },
        }
        Ok(())
    }

    async fn answered(
        &mut self,
        round: &mut Round<'_>,
        id: u64,
        answer: Result<Params, Refusal>,
    ) -> Result<(), Closed> {
        if id == round.request {
            match answer {
                Ok(started) => self.named(round, &started),
                Err(refusal) => round.outcome = Some(Outcome::failed(run_error(&refusal))),
            }
        } else if Some(id) == round.interrupt {
            round.missed = answer.is_err();
        } else if Some(id) == round.list {
            let last = answer.ok().and_then(|running| self.terminate(round, &running));
            round.clean = round.clean.and(last);
        } else if Some(id) == round.clean {
            round.clean = None;
        } else if let Some(at) = round.steers.iter().position(|(steer, _)| *steer == id) {
            let (_, number) = round.steers.swap_remove(at);
            match answer {
                Ok(_) => round.turn.steer_taken(number).await?,
                Err(_) => round.turn.steer_missed(number).await?,
            }
        }
        Ok(())
    }

    /// The server has taken the prompt, and named the turn.
    fn named(&mut self, round: &mut Round<'_>, started: &Params) {
        #[derive(Deserialize)]
        struct Started {
            turn: Name,
        }
        #[derive(Deserialize)]
        struct Name {
            id: String,
        }
        let Some(Started { turn: Name { id } }) = started.read() else {
            let refusal = Refusal::invalid("the agent's answer names no turn");
            round.outcome = Some(Outcome::failed(run_error(&refusal)));
            return;
        };
        // It may have begun before: one that the agent began by itself takes the prompt in.
        round.begun = self.live.as_ref() == Some(&id);
        round.id = Some(id);
        // What has ended meanwhile may be this one.
        for ended in std::mem::take(&mut round.ended) {
            self.ended(round, ended);
        }
        if round.cancelled && round.outcome.is_none() {
            self.interrupt(round);
        }
    }

    async fn learn(&mut self, round: &mut Round<'_>, news: News) {
        match news {
            News::Started { thread, turn } => {
                self.words.belongs(&turn, &round.turn.run);
                self.begins(&thread, &turn);
                if thread != self.thread {
                    if round.cancelled {
                        self.peer.request("turn/interrupt", json!({"threadId": thread, "turnId": turn}));
                    }
                } else if round.is(&turn) {
                    round.begun = true;
                    self.edge(round, true);
                }
            }
            News::Item { turn } if round.is(&turn) => {
                round.begun = true;
                let first = !std::mem::replace(&mut round.has_items, true);
                self.edge(round, first);
            }
            News::Item { .. } => {}
            News::Completed { thread, turn } => {
                self.ends(&thread, &turn.id);
                if thread == self.thread {
                    self.ended(round, turn);
                }
            }
            News::Failing { turn, why } => {
                if round.is(&turn) {
                    round.failing = Some(why);
                }
            }
            News::Resolved(id) => {
                if let Some(open) = round.close(&id) {
                    for ask in &open.asks {
                        round.turn.withdraw(ask).await;
                    }
                }
            }
        }
    }

    /// A turn of our thread has ended: ours, or another, which means nothing to it.
    fn ended(&mut self, round: &mut Round<'_>, ended: Ended) {
        if round.id.is_none() {
            round.ended.push(ended);
        } else if round.is(&ended.id) && round.outcome.is_none() {
            let outcome = self.outcome(round, &ended);
            if round.cancelled {
                // What it started in its last moment is ended, too.
                let clean = self.clean(round);
                round.settle(outcome, clean);
            } else {
                round.outcome = Some(outcome);
            }
        }
    }

    fn outcome(&mut self, round: &mut Round<'_>, ended: &Ended) -> Outcome {
        match ended.status.as_str() {
            "completed" => Outcome { text: self.words.result(), ..Outcome::of(Stop::EndTurn) },
            "interrupted" => Outcome::of(Stop::Cancelled),
            "failed" => {
                let why = ended.error.clone().or(round.failing.take());
                let error = why.map(|why| why.run_error());
                Outcome::failed(error.unwrap_or_else(|| {
                    RunError::new("agent_error", "the turn failed, and the agent did not say why")
                }))
            }
            other => {
                let message = format!("the turn ended in a way that we do not know: {other}");
                Outcome::failed(RunError::new("agent_error", message))
            }
        }
    }

    fn tell(&mut self, round: &mut Round<'_>, heard: Heard) {
        let Heard { turn, said } = heard;
        let run = turn.and_then(|turn| self.words.run_of(&turn).cloned());
        round.tell(run.unwrap_or_else(|| round.turn.run.clone()), said);
    }

    fn begins(&mut self, thread: &str, turn: &str) {
        if thread == self.thread {
            self.live = Some(turn.to_owned());
        } else {
            self.others.insert(thread.to_owned(), turn.to_owned());
        }
    }

    fn ends(&mut self, thread: &str, turn: &str) {
        if thread == self.thread {
            self.live.take_if(|live| live == turn);
        } else if self.others.get(thread).is_some_and(|other| other == turn) {
            self.others.remove(thread);
        }
    }

    /// What a message means while no turn runs.
    fn overhear(&mut self, voice: &Voice, message: Message) {
        match message {
            Message::Answer(..) => {}
            Message::Notice(method, params) => {
                let (heard, news) = self.words.hear(&method, &params);
                match news {
                    Some(News::Started { thread, turn }) => {
                        self.begins(&thread, &turn);
                        if let Some(run) = &self.last_run {
                            self.words.belongs(&turn, run);
                        }
                    }
                    Some(News::Completed { thread, turn }) => self.ends(&thread, &turn.id),
                    _ => {}
                }
                let Heard { turn, said } = heard;
                let run = turn.and_then(|turn| self.words.run_of(&turn).cloned());
                // Before the first turn, it is the past that an agent repeats after it was resumed.
                if let Some(run) = run.or_else(|| self.last_run.clone()).filter(|_| !said.is_empty()) {
                    self.late = Some(Box::pin(say_late(voice.clone(), run, said)));
                }
            }
            Message::Request(id, method, params) => {
                let answer = Asked::read(&method, &params, self.words.calls()).map(|asked| asked.unasked());
                self.peer.answer(&id, answer);
            }
        }
    }
}

/// What went wrong, in the server's words.
pub(super) fn run_error(refusal: &Refusal) -> RunError {
    RunError::new("agent_error", refusal.message.clone())
}
