//! The life of one agent: started, ready, in and out of turns, gone. It runs as one task on its end of a local link and
//! takes commands while a turn runs, so that a cancel, a steer, an answer or a kill reaches the turn at once.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_link::{AgentEnd, Closed, SeatState};
use qd_protocol::RunId;
use qd_protocol::event::{Processes, RunError};
use qd_protocol::limits::CANCEL_GRACE_S;
use qd_protocol::link::{Down, Gone, Outcome, Said, Stop, TurnLimits, Up};
use qd_protocol::worker::AgentSpec;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::below::{Below, KeeperGone};
use crate::drivers::Agent;
use crate::kinds::Kind;
use crate::meter::Meter;
use crate::turn::{End, Inbox, Prompt, Steer, Turn};

/// How long what a turn started has to end by itself, once the turn is over and was to be stopped.
const SWEEP_GRACE: Duration = Duration::from_secs(1);

/// Around an agent: what it may need of its worker.
#[derive(Debug)]
pub(crate) struct Around {
    /// What it starts; `None` for an agent that starts nothing.
    pub(crate) below: Option<Arc<Below>>,
    /// Whether a daemon is attached; `None` if there can be none, and so nobody but the agent counts.
    pub(crate) seat: Option<watch::Receiver<SeatState>>,
    /// How its worker asks it to rest.
    pub(crate) leash: Arc<Leash>,
}

/// What a worker and its agent's task tell each other past the link.
#[derive(Debug, Default)]
pub(crate) struct Leash {
    rest: Notify,
    rested: Notify,
    keeper_gone: Notify,
    /// What the turn under way has used.
    meter: Mutex<Option<Arc<Meter>>>,
}

impl Leash {
    /// Asks an agent without a turn to stop, and waits for it; not longer than `limit`.
    pub(crate) async fn rest(&self, limit: Duration) {
        self.rest.notify_one();
        // One that takes longer is ended with everything else.
        let _rested = tokio::time::timeout(limit, self.rested.notified()).await;
    }

    /// How long the turn under way has run.
    pub(crate) fn run_time(&self) -> Option<Duration> {
        self.meter().as_ref().map(|meter| meter.spent())
    }

    fn meter(&self) -> MutexGuard<'_, Option<Arc<Meter>>> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The agent has stopped: the worker takes the rest from here, and its task with it.
    async fn hand_over<T>(&self) -> T {
        self.rested.notify_one();
        std::future::pending().await
    }

    /// Resolves when the agent's task found that its keeper is of no use.
    pub(crate) async fn keeper_gone(&self) {
        self.keeper_gone.notified().await;
    }
}

/// The life of one agent, from its start to its end. When it comes back, nothing of the agent and its last turn is left;
/// it does not while there is something that earlier turns left on purpose and a worker to hold it, nor when the keeper
/// is gone: then its worker ends it.
pub(crate) async fn live(kind: Kind, spec: Box<AgentSpec>, around: Around, end: AgentEnd) -> Gone {
    let Around { below, seat, leash } = around;
    let mut life = Life { spec, below, seat, end, last_run: None };
    match life.run(kind, &leash).await {
        Ok(gone) => gone,
        Err(Broken::Closed(Closed)) => Gone::Stopped,
        Err(Broken::KeeperGone(KeeperGone)) => {
            // Only the worker can find what the keeper lost; it ends this task when it has.
            leash.keeper_gone.notify_one();
            std::future::pending().await
        }
    }
}

/// Why a life cannot go on as it should.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Closed(#[from] Closed),
    #[error(transparent)]
    KeeperGone(#[from] KeeperGone),
}

/// How a turn came to its end.
#[derive(Debug)]
enum Ended {
    /// By itself, or because it was asked to.
    Itself(End),
    /// It was given no more time.
    Killed,
}

#[derive(Debug)]
struct Life {
    spec: Box<AgentSpec>,
    below: Option<Arc<Below>>,
    seat: Option<watch::Receiver<SeatState>>,
    end: AgentEnd,
    /// The turn that a word between turns belongs to.
    last_run: Option<RunId>,
}

/// What came of a start.
enum Begun {
    Ready(Agent),
    Gone(Gone),
}

/// What follows the end of an agent between its turns.
#[derive(Debug)]
enum Next {
    Gone(Gone),
    /// A prompt that wants another.
    Prompt(Box<Down>),
}

impl Life {
    async fn run(&mut self, kind: Kind, leash: &Leash) -> Result<Gone, Broken> {
        let mut waiting: Option<Box<Down>> = None;
        // Everything that is not idling is boxed: ten thousand idle agents should cost a few megabytes.
        loop {
            let mut agent = match Box::pin(self.begin(kind.clone(), waiting.as_deref())).await? {
                Begun::Ready(agent) => agent,
                Begun::Gone(gone) => return Ok(gone),
            };
            let voice = self.end.voice();
            let error = loop {
                let down = match waiting.take() {
                    Some(prompt) => prompt,
                    None => tokio::select! {
                        // Commands first: a prompt that is there makes an agent that should rest go on.
                        biased;
                        down = self.end.command() => Box::new(down.ok_or(Closed)?),
                        error = agent.idle(&voice) => break Box::new(error),
                        () = leash.rest.notified() => {
                            Box::pin(agent.stop()).await;
                            return leash.hand_over().await;
                        }
                    },
                };
                if let Some(gone) = Box::pin(self.obey(&mut agent, leash, down)).await? {
                    return Ok(gone);
                }
            };
            drop(agent);
            match Box::pin(self.die_idle(error, leash)).await? {
                Next::Gone(gone) => return Ok(gone),
                Next::Prompt(prompt) => waiting = Some(prompt),
            }
        }
    }

    /// Starts the agent; for this prompt, if it is one that found the last agent dead.
    async fn begin(&mut self, kind: Kind, prompt: Option<&Down>) -> Result<Begun, Broken> {
        let agent = match Agent::start(kind, &self.spec, self.below.as_ref()).await {
            Ok(agent) => agent,
            Err(error) => return self.fail_to_start(error, prompt).await.map(Begun::Gone),
        };
        let ready = agent.ready(&self.spec);
        if let Up::Ready { agent_session_id, .. } = &ready {
            self.spec.agent_session_id.clone_from(agent_session_id);
        }
        self.end.say(ready).await?;
        Ok(Begun::Ready(agent))
    }

    /// An agent may go on under another name, after a command of its own: then that is the conversation to go on with.
    async fn renamed(&mut self, ready: Up) -> Result<(), Closed> {
        match &ready {
            Up::Ready { agent_session_id, .. } if *agent_session_id != self.spec.agent_session_id => {
                self.spec.agent_session_id.clone_from(agent_session_id);
                self.end.say(ready).await
            }
            _ => Ok(()),
        }
    }

    /// Does what an idle agent is told: a prompt is a turn, and anything else came too late for its own.
    async fn obey(
        &mut self,
        agent: &mut Agent,
        leash: &Leash,
        down: Box<Down>,
    ) -> Result<Option<Gone>, Broken> {
        match *down {
            Down::Prompt { run, prompt, files, messages, limits, .. } => {
                self.last_run = Some(run.clone());
                let inbox = Inbox::default();
                *leash.meter() = Some(Arc::clone(&inbox.meter));
                let prompt = Prompt { run, text: prompt, files, messages, limits };
                let ended = self.turn(agent, prompt, inbox).await;
                *leash.meter() = None;
                let ended = ended?;
                let ready = agent.ready(&self.spec);
                if ended.is_none() {
                    self.renamed(ready).await?;
                }
                Ok(ended)
            }
            other => {
                self.come_too_late(other).await?;
                Ok(None)
            }
        }
    }

    /// One turn, from its prompt to its terminal. Gives how the agent went if it did not outlive its turn.
    async fn turn(
        &mut self,
        agent: &mut Agent,
        prompt: Prompt,
        inbox: Inbox,
    ) -> Result<Option<Gone>, Broken> {
        if let Some(below) = &self.below {
            below.begin_turn().await?;
        }
        let (ended, limit) = self.work(agent, &prompt, &inbox).await?;
        let stopping = inbox.is_cancelled();
        let run = &prompt.run;
        match ended {
            Ended::Itself(End::Stopped(mut outcome)) if stopping => {
                let (processes, left) = self.sweep_turn(&prompt, &inbox).await?;
                outcome.processes = processes;
                outcome.agent_ends = left.is_some();
                outcome.stop = limit.unwrap_or(outcome.stop);
                self.terminal(&inbox, run, outcome).await?;
                match left {
                    Some(left) => self.over(Gone::Stopped, left).await.map(Some),
                    None => Ok(None),
                }
            }
            Ended::Itself(End::Stopped(outcome)) => {
                if let Some(below) = &self.below {
                    below.end_turn().await?;
                }
                self.terminal(&inbox, run, outcome).await?;
                Ok(None)
            }
            // Some agents stop by ending themselves. They did as they were told, so it is no failure.
            Ended::Itself(End::Exited(_)) if stopping => self.kill(&inbox, run, limit).await.map(Some),
            Ended::Itself(End::Exited(error)) => self.fail(&inbox, run, error).await.map(Some),
            Ended::Killed => self.kill(&inbox, run, limit).await.map(Some),
        }
    }

    /// Runs the turn until it ends or is given no more time; also tells which of its limits stopped it.
    async fn work(
        &mut self,
        agent: &mut Agent,
        prompt: &Prompt,
        inbox: &Inbox,
    ) -> Result<(Ended, Option<Stop>), Broken> {
        let Self { seat, end, .. } = self;
        let turn = Turn::new(prompt.run.clone(), end.voice(), inbox);
        let mut work = Box::pin(agent.turn(&turn, prompt));
        inbox.meter.allow(&prompt.limits);
        let mut over = pin!(over_limit(&inbox.meter, &prompt.run, seat.clone()));
        let mut limit = None;
        let mut out_of_grace = pin!(tokio::time::sleep(Duration::MAX));
        loop {
            tokio::select! {
                // Commands first: a cancel that is there when the work ends has won.
                biased;
                down = end.command() => {
                    if interrupt(end, inbox, &prompt.run, down.ok_or(Closed)?).await? {
                        return Ok((Ended::Killed, limit));
                    }
                }
                stop = &mut over, if limit.is_none() => {
                    limit = Some(stop);
                    inbox.cancel();
                    out_of_grace.as_mut().reset(Instant::now() + grace(&prompt.limits));
                }
                () = &mut out_of_grace, if limit.is_some() => return Ok((Ended::Killed, limit)),
                ended = &mut work => return Ok((Ended::Itself(ended?), limit)),
            }
        }
    }

    /// Ends what a stopped turn started. A kill meanwhile leaves it no grace and takes the agent as well: then the second
    /// value tells whether earlier turns have left something.
    async fn sweep_turn(
        &mut self,
        prompt: &Prompt,
        inbox: &Inbox,
    ) -> Result<(Processes, Option<bool>), Broken> {
        let Self { below, end, .. } = self;
        let Some(below) = below else { return Ok((Processes::default(), None)) };
        let mut sweep = pin!(below.sweep_turn(SWEEP_GRACE.min(grace(&prompt.limits))));
        loop {
            tokio::select! {
                swept = &mut sweep => {
                    let processes = swept?;
                    below.end_turn().await?;
                    return Ok((processes, None));
                }
                down = end.command() => {
                    if interrupt(end, inbox, &prompt.run, down.ok_or(Closed)?).await? {
                        let (turn, (all, left)) = tokio::try_join!(sweep, below.end_agent(Duration::ZERO))?;
                        return Ok((both(turn, all), Some(left)));
                    }
                }
            }
        }
    }

    /// Ends the agent and what its turn started, and says the end of its turn.
    async fn kill(&mut self, inbox: &Inbox, run: &RunId, limit: Option<Stop>) -> Result<Gone, Broken> {
        let (processes, left) = self.end_agent(Duration::ZERO).await?;
        let stop = limit.unwrap_or(Stop::Cancelled);
        let outcome = Outcome { processes, agent_ends: true, ..Outcome::of(stop) };
        self.terminal(inbox, run, outcome).await?;
        self.over(Gone::Stopped, left).await
    }

    /// The end of an agent that ended by itself in its turn. What it started goes first: whoever hears of the end may
    /// start it again.
    async fn fail(&mut self, inbox: &Inbox, run: &RunId, mut error: RunError) -> Result<Gone, Broken> {
        let (processes, left) = self.end_agent(SWEEP_GRACE).await?;
        if left {
            let outcome = Outcome { processes, agent_ends: true, ..Outcome::failed(error.clone()) };
            self.terminal(inbox, run, outcome).await?;
        } else if processes.survivors > 0 {
            // The last word of an agent is the end of its turn as well, and has no other place for this.
            let Processes { survivors, .. } = processes;
            error.message.push_str(&format!("; {survivors} of its processes could not be ended"));
        }
        self.over(Gone::Failed(error), left).await
    }

    /// The end of an agent that never was ready; the prompt is one that was to wake it.
    async fn fail_to_start(&mut self, error: RunError, prompt: Option<&Down>) -> Result<Gone, Broken> {
        let (_, left) = self.end_agent(SWEEP_GRACE).await?;
        match prompt {
            Some(Down::Prompt { run, .. }) if left => {
                let outcome = Outcome { agent_ends: true, ..Outcome::failed(error.clone()) };
                self.end.say(Up::Terminal { run: run.clone(), outcome }).await?;
                self.over(Gone::Failed(error), left).await
            }
            // A run that waits for its agent can be told in no other way.
            _ => Ok(Gone::Failed(error)),
        }
    }

    /// The end of an agent between its turns. If they have left something, that needs somebody to hold it, and the next
    /// prompt starts the agent again.
    async fn die_idle(&mut self, error: Box<RunError>, leash: &Leash) -> Result<Next, Broken> {
        let (_, left) = self.end_agent(SWEEP_GRACE).await?;
        if !left {
            return Ok(Next::Gone(Gone::Failed(*error)));
        }
        if let Some(run) = self.last_run.clone() {
            let text = format!("{}; the next prompt starts it again", error.message);
            self.end.say(Up::Said { run, what: Said::Notice { text } }).await?;
        }
        loop {
            tokio::select! {
                biased;
                down = self.end.command() => match down.ok_or(Closed)? {
                    prompt @ Down::Prompt { .. } => return Ok(Next::Prompt(Box::new(prompt))),
                    other => self.come_too_late(other).await?,
                },
                () = leash.rest.notified() => return leash.hand_over().await,
            }
        }
    }

    /// The agent is no more. What earlier turns left on purpose lives as long as the session, and so does its worker:
    /// then this is a rest, and only another agent ends it.
    async fn over(&mut self, gone: Gone, left: bool) -> Result<Gone, Broken> {
        if !left {
            return Ok(gone);
        }
        self.end.say(Up::Rested).await?;
        loop {
            let down = self.end.command().await.ok_or(Closed)?;
            self.come_too_late(down).await?;
        }
    }

    async fn come_too_late(&self, down: Down) -> Result<(), Closed> {
        match down {
            Down::Steer { number, .. } => self.end.say(Up::SteerMissed { steer: number }).await,
            Down::Prompt { run, .. } => {
                let error = RunError::new("agent_exited", "the agent was about to end");
                let outcome = Outcome { agent_ends: true, ..Outcome::failed(error) };
                self.end.say(Up::Terminal { run, outcome }).await?;
                self.end.say(Up::Rested).await
            }
            Down::Cancel { .. } | Down::Kill { .. } | Down::Answer { .. } => Ok(()),
        }
    }

    /// Ends the agent and its turn; tells whether earlier turns have left something that somebody can hold.
    async fn end_agent(&self, grace: Duration) -> Result<(Processes, bool), KeeperGone> {
        match &self.below {
            Some(below) => {
                let (processes, left) = below.end_agent(grace).await?;
                Ok((processes, left && self.seat.is_some()))
            }
            None => Ok((Processes::default(), false)),
        }
    }

    async fn terminal(&self, inbox: &Inbox, run: &RunId, outcome: Outcome) -> Result<(), Closed> {
        for steer in inbox.missed() {
            self.end.say(Up::SteerMissed { steer }).await?;
        }
        self.end.say(Up::Terminal { run: run.clone(), outcome }).await
    }
}

/// Applies a command to the running turn; true if the turn is to be given no more time.
async fn interrupt(end: &AgentEnd, inbox: &Inbox, current: &RunId, down: Down) -> Result<bool, Closed> {
    match down {
        Down::Kill { run, .. } => return Ok(run == *current),
        Down::Cancel { run, .. } if run == *current => inbox.cancel(),
        Down::Cancel { .. } => {}
        Down::Steer { number, run, text } => {
            if run != *current || !inbox.put_steer(Steer { number, text }) {
                end.say(Up::SteerMissed { steer: number }).await?;
            }
        }
        Down::Answer { ask, answer, .. } => inbox.put_reply(&ask, answer),
        // A session has one turn at a time. Should that ever be wrong, the second must not wait for ever.
        Down::Prompt { run, .. } => {
            let busy =
                RunError::new("agent_busy", "the agent was given a prompt in the middle of another turn");
            end.say(Up::Terminal { run, outcome: Outcome::failed(busy) }).await?;
        }
    }
    Ok(false)
}

/// Waits until the turn is over one of its limits and no daemon is there to say so.
async fn over_limit(meter: &Meter, run: &RunId, seat: Option<watch::Receiver<SeatState>>) -> Stop {
    let Some(mut seat) = seat else { return std::future::pending().await };
    let mut known = None;
    loop {
        let SeatState { attached, limits, .. } = seat.borrow_and_update().clone();
        // The daemon's last word on what is left, if it has said more than it did with the prompt.
        if let Some((of, left)) = limits.as_ref().filter(|_| limits != known)
            && of == run
        {
            meter.allow(left);
        }
        known = limits;
        tokio::select! {
            stop = meter.exceeded(), if !attached => return stop,
            changed = seat.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
        }
    }
}

fn grace(limits: &TurnLimits) -> Duration {
    limits.grace_ms.map_or(Duration::from_secs(CANCEL_GRACE_S), Duration::from_millis)
}

/// What two sweeps did of which one overtook the other: both count most of the same processes.
fn both(one: Processes, other: Processes) -> Processes {
    Processes { killed: one.killed.max(other.killed), survivors: one.survivors.max(other.survivors) }
}

#[cfg(test)]
mod tests;
