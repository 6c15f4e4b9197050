//! The shell around one session's machine: dull on purpose. It takes what has come, lets the machine judge it,
//! appends once, waits, and only then answers and acts. If the append fails it forgets its state, reads it again
//! and says so; nobody has seen anything.

mod agent;
mod batch;
mod below;
mod effects;
mod load;
mod preparing;
mod reply;

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use qd_core::session::{Command, Input, Link, Phase, State, World, deadline, step};
use qd_journal::SessionKey;
use qd_link::{Heard, Numbered};
use qd_protocol::frame::v1::Seat;
use qd_protocol::link::{Gone, Up, UpNumber};
use qd_protocol::{ApiError, Body, Millis, RunId};
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use tokio::time::Instant;

pub(crate) use reply::{Answer, Done, run_id_conflict};

use crate::daemon::{Daemon, SessionRef};
use crate::registry::Mailbox;
use crate::workers::{Had, Need};
use agent::Agent;
use batch::{Batch, Held};
pub(crate) use batch::{Begun, Birth, row_change, session_row, unwritable};
pub(crate) use load::{recorded, snapshot, whole};
use preparing::{Preparing, Readied};

/// How many things are judged before the next append.
const BATCH_MAX: usize = 256;
/// How long a session without a worker stays awake.
const NAP: Duration = Duration::from_secs(10);
/// How long to wait before what the agent said is tried again on a journal that did not take it.
const RETRY: Duration = Duration::from_millis(250);

/// What can be in a session's mailbox.
pub(crate) enum Mail {
    /// Somebody wants something and waits for the answer.
    Request(Box<Request>),
    /// Something has changed for the better: see what can go on.
    Wake,
    /// Somebody else needs the room: an agent that has nothing to do is put to rest.
    GiveWay,
    /// The workers end with the daemon.
    EndAgent,
    /// Somebody wants to know what it does, after everything before is committed.
    Probe(oneshot::Sender<Probe>),
    /// The daemon ends.
    Stop,
}

/// A command with whoever waits for its answer.
pub(crate) struct Request {
    pub(crate) command: Command,
    /// The client's name for it, remembered with its answer.
    pub(crate) key: Option<IdempotencyKey>,
    /// A session below that is created with it.
    pub(crate) birth: Option<Box<Birth>>,
    pub(crate) reply: oneshot::Sender<Result<Done, ApiError>>,
}

/// An `Idempotency-Key` and what came with it.
#[derive(Debug, Clone)]
pub(crate) struct IdempotencyKey {
    pub(crate) key: String,
    pub(crate) fingerprint: [u8; 32],
}

impl IdempotencyKey {
    /// What makes an id of it, for a request that has a key and no id: the same request is the same thing by either name.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::new().chain_update(self.fingerprint).chain_update(&self.key).finalize().into()
    }
}

/// What a session does.
#[derive(Debug, Clone, Default)]
pub(crate) struct Probe {
    /// Whether a run has not ended.
    pub(crate) busy: bool,
    /// Runs that wait, with their places from 1.
    pub(crate) waiting: Vec<(u32, RunId)>,
}

/// Lives until the session sleeps, the daemon ends or the journal is gone.
pub(crate) async fn live(daemon: Arc<Daemon>, session: Arc<SessionRef>, mailbox: Arc<Mailbox<Mail>>) {
    // Also if it panics: the next message must wake a new actor, not wait for a dead one.
    let _grave =
        Grave { daemon: Arc::clone(&daemon), session: Arc::clone(&session), mailbox: Arc::clone(&mailbox) };
    match Box::pin(load::load(&daemon, &session)).await {
        Ok((state, line)) => {
            let prompts = Held::default();
            let agent = Agent::default();
            let mut actor = Actor {
                daemon,
                session,
                mailbox,
                state,
                line,
                agent,
                preparing: None,
                rest_after: None,
                prompts,
                redo: None,
                purged: false,
            };
            actor.run().await;
        }
        Err(error) => {
            tracing::error!(session = %session.id, %error, "a session could not be read");
            refuse_all(&mailbox, error);
        }
    }
}

struct Grave {
    daemon: Arc<Daemon>,
    session: Arc<SessionRef>,
    mailbox: Arc<Mailbox<Mail>>,
}

impl Drop for Grave {
    fn drop(&mut self) {
        self.daemon.bury(&self.session.id, &self.mailbox);
    }
}

/// Answers everybody who waits for a session that could not be read.
fn refuse_all(mailbox: &Mailbox<Mail>, error: ApiError) {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let mut mail = Vec::new();
    while mailbox.poll_take(&mut context, &mut mail, BATCH_MAX) == Poll::Ready(()) {}
    for letter in mail {
        if let Mail::Request(request) = letter {
            // Whoever has gone away does not need the answer.
            let _gone = request.reply.send(Err(error.clone()));
        }
    }
}

struct Actor {
    daemon: Arc<Daemon>,
    session: Arc<SessionRef>,
    mailbox: Arc<Mailbox<Mail>>,
    state: Box<State>,
    /// Its own key and those of the sessions above it: whose budgets count.
    line: Vec<SessionKey>,
    agent: Agent,
    /// What is being made ready for an agent that is on its way.
    preparing: Option<Box<Preparing>>,
    /// After how long it is put to rest when it has nothing to do; `None` if its memory would be lost.
    rest_after: Option<Duration>,
    /// Prompts that were accepted and not given to the agent, as far as they are small.
    prompts: Held,
    /// What the agent said and the journal did not take.
    redo: Option<Box<Redo>>,
    /// Whether its events are deleted.
    purged: bool,
}

/// What must be judged again before anything else is heard.
#[derive(Default)]
struct Redo {
    said: Vec<Numbered>,
    attached: Option<Input>,
    gone: Option<Gone>,
    wake: bool,
}

/// What an actor has to deal with next.
enum Next {
    Mail(Vec<Mail>),
    Heard(Heard),
    Prepared(Readied),
    Redo,
    Tick,
    /// A worker that was told to end has not.
    Patience,
    Idle,
}

impl Actor {
    async fn run(&mut self) {
        let mut redo = Redo { wake: true, ..Redo::default() };
        if let Some(had) = self.had() {
            self.rest_after = self.may_rest_after();
            self.agent.attaching(self.daemon.workers.attach(had));
        } else if self.state.active().is_some() {
            // Of a daemon that kept its agents inside itself: they died with it.
            redo.gone = Some(Gone::Lost);
        }
        self.redo = Some(Box::new(redo));
        Box::pin(self.retry()).await;
        loop {
            match self.next().await {
                Next::Mail(mail) => {
                    if Box::pin(self.read(mail)).await.is_break() {
                        return;
                    }
                }
                Next::Heard(heard) => Box::pin(self.hear(heard)).await,
                Next::Prepared(readied) => Box::pin(self.prepared(readied)).await,
                Next::Redo => Box::pin(self.retry()).await,
                Next::Tick => {
                    let mut batch = Batch::default();
                    self.judge(&mut batch, Input::Tick);
                    Box::pin(self.commit(batch)).await;
                }
                Next::Patience => {
                    self.daemon.workers.kill(&self.session.id);
                    self.agent.wait_on();
                }
                Next::Idle if self.is_needless() => {
                    self.agent.rest();
                    self.tell_need();
                }
                Next::Idle => {
                    if self.daemon.let_sleep(&self.session.id, &self.mailbox) {
                        return;
                    }
                }
            }
            // Whoever always finds something to do lets others have their turn.
            tokio::task::coop::consume_budget().await;
            if self.purged {
                // Whoever looked it up just before is told that it is gone; a purged session must not write again.
                refuse_all(&self.mailbox, ApiError::not_found("session", &self.session.id));
                return;
            }
        }
    }

    /// Waits for whatever comes first. Mail before the agent: a cancel overtakes what it cancels.
    async fn next(&mut self) -> Next {
        let mut mail = Vec::new();
        let mailbox = &self.mailbox;
        let letters = std::future::poll_fn(|context| mailbox.poll_take(context, &mut mail, BATCH_MAX));
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let unheard = self.agent.catches_up_until().map(left).unwrap_or_default();
        let due = deadline(&self.state, self.link());
        let due = due.map(|at| Duration::from_millis(at.since(Millis::now())).max(unheard));
        let patience = self.agent.patience().map(left);
        let (pause, after) = match (due, patience) {
            _ if self.redo.is_some() => (RETRY, Next::Redo),
            (due, Some(patience)) if due.is_none_or(|due| patience < due) => (patience, Next::Patience),
            // A claim on its mail may be due much later than its agent's rest.
            (Some(due), _) if !self.rests_before(due) => (due, Next::Tick),
            // What its turns left running keeps a session awake: somebody has to hold its worker.
            _ if self.is_needless() => (self.rest_after.unwrap_or(Duration::MAX), Next::Idle),
            _ if self.is_quiet() && !self.agent.is_there() => (self.daemon.idle.min(NAP), Next::Idle),
            _ => (Duration::MAX, Next::Tick),
        };
        let listens = self.redo.is_none();
        let preparing = &mut self.preparing;
        let readied = async {
            match preparing {
                Some(preparing) => preparing.done().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = letters => {}
            heard = self.agent.hear(), if listens => return Next::Heard(heard),
            readied = readied, if listens => return Next::Prepared(readied),
            () = tokio::time::sleep(pause), if pause != Duration::MAX => return after,
        }
        Next::Mail(mail)
    }

    /// Nothing runs, nothing is about to, and nothing is owed.
    fn is_quiet(&self) -> bool {
        let waits = !self.state.busy() || (self.daemon.halted() && self.state.active().is_none());
        self.redo.is_none() && waits && self.preparing.is_none() && !self.agent.is_changing()
    }

    /// Whether there is an agent to talk to. One that something is being made ready for is on its way.
    fn link(&self) -> Link {
        if self.preparing.is_some() { Link::Starting } else { self.agent.state() }
    }

    /// Whether there is an agent that has nothing to do, between runs or while its run waits for other sessions, and
    /// that loses nothing by being put to rest.
    fn is_needless(&self) -> bool {
        let waits = self.state.suspended().is_some() && self.redo.is_none() && !self.agent.is_changing();
        self.rest_after.is_some() && self.agent.is_idle() && (waits || self.is_quiet())
    }

    /// Whether there is an agent to be put to rest before a time is over.
    fn rests_before(&self, due: Duration) -> bool {
        self.is_needless() && self.rest_after.is_some_and(|rest| rest < due)
    }

    /// What the agent's manifest and the settings say of its rest.
    fn may_rest_after(&self) -> Option<Duration> {
        let project = self.daemon.places.get(&self.session.workspace).map(|place| place.path.clone());
        let project = project.unwrap_or_default();
        self.daemon.workers.rest_after(&self.state.settings.agent, &project, self.daemon.idle)
    }

    fn world(&self) -> World {
        World {
            now: Millis::now(),
            // Whoever is about to end with its workers starts none any more.
            halted: self.daemon.halted() || self.daemon.is_ending(),
            over_budget: self.daemon.budgets.any_spent(&self.line),
            link: self.link(),
            room: self.daemon.room.has(&self.session.id),
        }
    }

    /// The worker that the journal says we have.
    fn had(&self) -> Option<Had> {
        Some(Had {
            session: self.state.id.clone(),
            worker: self.state.worker.clone()?,
            agent: self.state.settings.agent.clone(),
            since: self.state.worker_since,
            taken: self.state.taken,
        })
    }

    /// Says what our agent is to the limit on them, or that we wait for room. Who waits for a person or for other
    /// sessions does not count.
    fn tell_need(&self) {
        match self.state.phase() {
            // Who may not start anyway holds up nobody.
            Phase::Queued if !self.daemon.halted() => {
                self.daemon.make_room(|room| room.wait(&self.session.id))
            }
            _ => self.daemon.make_room(|room| room.leave(&self.session.id)),
        }
        let need = match self.state.phase() {
            _ if self.preparing.is_some() => Need::Busy,
            _ if !self.agent.is_live() => Need::Nothing,
            _ if self.is_needless() => Need::Idle,
            Phase::Waiting => Need::Nothing,
            _ => Need::Busy,
        };
        self.daemon.make_room(|room| room.set(&self.session.id, need));
    }

    fn judge(&mut self, batch: &mut Batch, input: Input) {
        let world = self.world();
        let decided = step(&mut self.state, input, &world);
        batch.add(decided, &self.state);
    }

    /// Judges mail. A keyed request ends its batch, since an append remembers one answer.
    async fn read(&mut self, mail: Vec<Mail>) -> std::ops::ControlFlow<()> {
        let mut batch = Batch::default();
        let mut probes = Vec::new();
        for letter in mail {
            match letter {
                Mail::Request(request) => {
                    let Request { command, key, birth, reply } = *request;
                    self.note(&command);
                    let has_key = key.is_some();
                    self.judge(&mut batch, Input::Command(command));
                    batch.attach(reply, key, birth);
                    if has_key {
                        self.commit(std::mem::take(&mut batch)).await;
                    }
                }
                Mail::Wake => self.judge(&mut batch, Input::Wake),
                Mail::Probe(reply) => probes.push(reply),
                Mail::GiveWay if self.is_needless() => self.agent.rest(),
                Mail::GiveWay => {}
                Mail::EndAgent if self.preparing.is_some() => self.end_agent(Gone::Stopped),
                Mail::EndAgent => self.agent.close(),
                Mail::Stop => {
                    self.commit(batch).await;
                    self.agent.detach();
                    return std::ops::ControlFlow::Break(());
                }
            }
        }
        self.commit(batch).await;
        for reply in probes {
            let halted = self.daemon.halted();
            let waiting = self.state.waiting(halted).map(|(place, run)| (place, run.id.clone())).collect();
            // Whoever has gone away does not need the answer.
            let _gone = reply.send(Probe { busy: self.state.busy(), waiting });
        }
        std::ops::ControlFlow::Continue(())
    }

    /// Keeps in mind what a command brings that the state does not hold.
    fn note(&mut self, command: &Command) {
        match command {
            Command::Accept(prompt) => self.prompts.keep(prompt),
            Command::Update(change) if change.model.is_some() && self.state.closing.is_none() => {
                self.agent.outdate()
            }
            _ => {}
        }
    }

    async fn hear(&mut self, heard: Heard) {
        let mut batch = Batch::default();
        match heard {
            Heard::Said(said) => {
                for thing in said {
                    self.hear_one(&mut batch, thing);
                }
            }
            Heard::Lost => {
                self.agent.lost();
                self.judge(&mut batch, Input::Lost);
            }
            Heard::Attached { applied, seat, pid, run_time_ms, model, again } => {
                self.daemon.workers.met(&self.session.id, pid);
                let again = self.agent.attached(seat, again);
                // It may have been changed by a daemon that did not live to see it through.
                if again && matches!(seat, Seat::Ready { .. }) && model != self.state.settings.model {
                    self.agent.outdate();
                }
                let attached = Input::Attached { applied, again, run_time_ms };
                self.judge(&mut batch, attached.clone());
                batch.attached = Some(attached);
            }
            Heard::Gone(gone) => {
                // One that a daemon died before it could start is no crash of anybody's.
                let never_was = self.agent.was_never_met() && self.state.turn().is_none();
                let gone = if never_was { Gone::Stopped } else { gone };
                self.agent.gone();
                // It was for this worker, and the next one begins anew.
                self.preparing = None;
                batch.gone = Some(gone.clone());
                self.judge(&mut batch, Input::Gone(gone));
            }
        }
        self.commit(batch).await;
    }

    fn hear_one(&mut self, batch: &mut Batch, thing: Numbered) {
        let Numbered { number, up } = thing;
        match &up {
            Up::Ready { steers, .. } => self.agent.ready(*steers),
            Up::Rested => self.agent.rested(),
            Up::Terminal { outcome, .. } if outcome.agent_ends => self.agent.ending(),
            Up::Gone(_) => self.agent.over(),
            _ => {}
        }
        let rested = matches!(up, Up::Rested);
        self.judge(batch, Input::Heard(number, up));
        if rested {
            // A prompt may have met the stopping, and waits.
            self.judge(batch, Input::Wake);
        }
    }

    /// Judges again what a failed append had decided and nobody has seen.
    async fn retry(&mut self) {
        let Some(redo) = self.redo.take() else { return };
        let mut batch = Batch::default();
        for thing in redo.said {
            self.hear_one(&mut batch, thing);
        }
        if let Some(attached) = redo.attached {
            batch.attached = Some(attached.clone());
            self.judge(&mut batch, attached);
        }
        if let Some(gone) = redo.gone {
            batch.gone = Some(gone.clone());
            self.judge(&mut batch, Input::Gone(gone));
        }
        if redo.wake {
            batch.wake = true;
            self.judge(&mut batch, Input::Wake);
        }
        self.commit(batch).await;
    }

    /// Appends what was decided. Then, and only then, answers and acts.
    async fn commit(&mut self, mut batch: Batch) {
        let line = &self.line;
        match batch.append(&self.daemon, &self.session, &self.state, line).await {
            Ok(first) => {
                // Only what made an event: the number of what did not is nowhere in the journal, and a daemon that
                // came after us would ask for it.
                // What a closed session hears makes none any more, and nobody comes after it.
                let taken = if self.state.closed { UpNumber(u64::MAX) } else { self.state.taken };
                self.agent.acknowledge(taken);
                self.part(batch.gone.is_some());
                self.daemon.stats.count(&self.state.settings.agent, batch.bodies());
                if batch.bodies().any(|body| matches!(body, Body::SessionClosed(_))) {
                    self.forget_env();
                    crate::maildir::tidy(&self.daemon.home, &self.session.id);
                }
                let limits = batch.attached.is_some()
                    || batch.bodies().any(|body| matches!(body, Body::SessionUpdated(_)));
                for outcome in batch.outcomes(first) {
                    self.carry_out(outcome).await;
                }
                if limits {
                    self.tell_limits().await;
                }
                self.prompts.forget_ended(&self.state);
                self.agent.refresh(&self.state);
                self.tell_need();
            }
            Err(error) => self.undo(batch, error).await,
        }
    }

    /// Lets go of a worker whose end is in the journal.
    fn part(&mut self, is_lost: bool) {
        let over = self.agent.take_over();
        if is_lost {
            // One that cannot be understood may still be there.
            self.daemon.workers.kill(&self.session.id);
        }
        if is_lost || over.is_some() {
            self.daemon.workers.forget(&self.session.id);
        }
        if let Some(link) = over {
            // It waits for our last word before it goes.
            self.daemon.spawn(async move { link.detach().await });
        }
    }

    /// Nothing of the batch is true: who waits is told, the state is read again, and what cannot be asked for again
    /// is kept to be judged again.
    async fn undo(&mut self, batch: Batch, error: ApiError) {
        tracing::warn!(session = %self.session.id, %error, "an append failed; the session is read again");
        let earlier = self.redo.take().unwrap_or_default();
        let redo = Redo {
            said: self.agent.unacknowledged(),
            attached: batch.attached.clone().or(earlier.attached),
            gone: batch.gone.clone().or(earlier.gone),
            // Whatever it was that woke us has to be looked at again.
            wake: true,
        };
        batch.fail(error);
        loop {
            match load::load(&self.daemon, &self.session).await {
                Ok((state, _)) => {
                    self.state = state;
                    break;
                }
                Err(_) if self.daemon.is_stopping() => return,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
        // Also if it is empty: it holds back a tick whose deadline has passed until the journal had a moment.
        self.redo = Some(Box::new(redo));
    }
}
