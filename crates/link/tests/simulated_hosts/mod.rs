//! What the two hosts of the simulation do, and the memory that outlives them: the daemon's journal, the worker's spool,
//! and what the agent said and was told, by which they are judged.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use qd_link::socket::{ByteStream, Socket};
use qd_link::{
    AgentEndpoint, AgentLink, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, Spool, WorkerConnector,
    WorkerEndpoint, WorkerEndpointOptions, WorkerUnreachable, host_agent, read_hello,
};
use qd_protocol::event::AskKind;
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, AskRequest, TurnUpdate, UpdateNumber};
use qd_protocol::worker::Secret;
use qd_protocol::{AskId, EventNumber, RunId, SessionId, WorkerId};
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_tungstenite::tungstenite::protocol::Role;
use turmoil::net::{TcpListener, TcpStream};

const PORT: u16 = 7000;
/// Words that the agent says.
const WORDS: usize = 150;
/// Commands that the daemon gives.
const COMMANDS: u64 = 40;

/// A small generator of numbers that only look random.
#[derive(Debug, Clone)]
pub(crate) struct SimulationRandom(u64);

impl SimulationRandom {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn fork(&mut self) -> Self {
        Self(self.below(u64::MAX))
    }

    /// One of the numbers below this one.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// See the module. Its clones are the same.
#[derive(Clone)]
pub(crate) struct SimulatedHosts {
    state: Arc<Mutex<SimulatedHostsState>>,
    spool: SharedSpool,
}

struct SimulatedHostsState {
    chance: SimulationRandom,
    journal: SimulatedJournal,
    /// What the agent was told, in the order it was.
    applied: Vec<AgentCommand>,
    worker_is_dead: bool,
    faults: Vec<String>,
}

/// What a daemon remembers when it is killed.
#[derive(Default)]
struct SimulatedJournal {
    taken: u64,
    text: String,
    asks: Vec<AskId>,
    commands: Vec<AgentCommand>,
    is_over: bool,
}

impl SimulatedHosts {
    pub(crate) fn new(chance: SimulationRandom) -> Self {
        let state = SimulatedHostsState {
            chance,
            journal: SimulatedJournal::default(),
            applied: Vec::new(),
            worker_is_dead: false,
            faults: Vec::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), spool: SharedSpool::default() }
    }

    pub(crate) fn is_worker_dead(&self) -> bool {
        self.lock().worker_is_dead
    }

    pub(crate) fn worker_died(&self) {
        self.lock().worker_is_dead = true;
    }

    /// Whether nothing more can happen.
    pub(crate) fn is_done(&self) -> bool {
        let state = self.lock();
        let all_applied = state.applied.len() == COMMANDS as usize;
        !state.faults.is_empty() || (state.journal.is_over && (all_applied || state.worker_is_dead))
    }

    /// What was promised, looked at when all is over.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let state = self.lock();
        let SimulatedJournal { taken, text, asks, commands, is_over } = &state.journal;
        let check = |good: bool, fault: String| if good { Ok(()) } else { Err(fault) };
        check(state.faults.is_empty(), state.faults.join("; "))?;
        check(*is_over, format!("not over; {taken} taken, {} applied", state.applied.len()))?;

        let words = text.split_terminator(' ').count();
        let said: String = (0..words).map(word).collect();
        check(*text == said, format!("the journal has {text:?}"))?;
        check(asks.iter().eq(&asks_of(asks.len())), format!("the journal has {asks:?}"))?;
        let last = self.spool.lock().last.0;
        check(*taken == last, format!("{taken} of {last} are journalled"))?;
        if !state.worker_is_dead {
            check(words == WORDS, format!("{words} words are journalled"))?;
            check(asks.len() == asks_among(WORDS), format!("{} asks are journalled", asks.len()))?;
        }

        // A cancel may overtake; all else comes in its order, and nothing comes twice.
        let steers = |all: &[AgentCommand]| -> Vec<u64> {
            all.iter().filter(|down| !is_cancel(down)).map(|down| down.number().0).collect()
        };
        let (given, applied) = (steers(commands), steers(&state.applied));
        check(given.starts_with(&applied), format!("of {given:?} were applied {applied:?}"))?;
        let mut numbers: Vec<_> = state.applied.iter().map(|down| down.number().0).collect();
        numbers.sort_unstable();
        let count = numbers.len();
        numbers.dedup();
        check(numbers.len() == count, format!("something was applied twice: {:?}", state.applied))?;
        check(state.worker_is_dead || count == COMMANDS as usize, format!("{count} commands were applied"))
    }

    /// The worker's host: listens until the end of the world.
    pub(crate) async fn worker(self) -> turmoil::Result {
        let options = WorkerEndpointOptions {
            session: session(),
            worker: worker_id(),
            secret: secret(),
            numbered_after: UpdateNumber(0),
            spool_max: SPOOL_MAX,
            software: String::new(),
        };
        let seat = WorkerEndpoint::new(options, Box::new(self.spool.clone()));
        let harbour = self.clone();
        seat.set_agent(host_agent(UpdateNumber(0), |agent| harbour.agent(agent)));
        let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            let seat = seat.clone();
            tokio::spawn(async move {
                let mut socket = Socket::from_upgraded(stream, Role::Server).await;
                if let Ok(hello) = read_hello(&mut socket).await {
                    // However it ends, the daemon comes again.
                    let _ended = seat.serve(socket, hello).await;
                }
            });
        }
    }

    /// The agent: talks, asks and does as it is told, until it has no more to say and nobody more to hear.
    async fn agent(self, mut agent: AgentEndpoint) -> AgentExitReason {
        let voice = agent.output();
        let talk = async {
            for number in 0..WORDS {
                self.pause(100).await;
                let what = TurnUpdate::Text { text: word(number) };
                voice.send(AgentUpdate::Turn { run: run(), update: what }).await.expect("the seat hears");
                if number % 10 == 9 {
                    voice.send(ask(number / 10)).await.expect("the seat hears");
                }
            }
        };
        let obey = async {
            while let Some(down) = agent.next_command().await {
                let mut state = self.lock();
                state.applied.push(down);
                if state.applied.len() == COMMANDS as usize {
                    break;
                }
            }
        };
        tokio::join!(talk, obey);
        AgentExitReason::Stopped
    }

    /// The daemon's host: journals what it hears, and commands what it likes.
    pub(crate) async fn daemon(self) -> turmoil::Result {
        let options = LinkOptions {
            session: session(),
            worker: worker_id(),
            secret: secret(),
            journalled: UpdateNumber(self.lock().journal.taken),
            software: String::new(),
            start: None,
        };
        let mut link = AgentLink::open(options, self.clone());
        let mut next_command = Instant::now();
        loop {
            let may_command = (self.lock().journal.commands.len() as u64) < COMMANDS;
            tokio::select! {
                heard = link.next_event() => match heard {
                    LinkEvent::Updates(said) => {
                        // A commit takes a while, and whoever is killed meanwhile has journalled nothing.
                        self.pause(60).await;
                        self.lock().journal(&said);
                        if self.lock().chance.below(3) > 0 {
                            link.ack(said[said.len() - 1].number);
                        }
                    }
                    LinkEvent::Attached { applied, .. } => {
                        let state = self.lock();
                        let owed = state.journal.commands.iter().filter(|down| down.number() > applied);
                        owed.for_each(|down| link.send(down.clone()));
                    }
                    LinkEvent::Disconnected => {}
                    LinkEvent::Gone(_) => self.lock().journal.is_over = true,
                },
                () = sleep_until(next_command), if may_command => {
                    let mut state = self.lock();
                    let down = command(state.journal.commands.len() as u64 + 1);
                    state.journal.commands.push(down.clone());
                    link.send(down);
                    next_command = Instant::now() + Duration::from_millis(state.chance.below(500));
                }
            }
            if self.lock().journal.is_over {
                // The link of an agent that is no more has nothing more to say.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn pause(&self, longest: u64) {
        let pause = self.lock().chance.below(longest);
        sleep(Duration::from_millis(pause)).await;
    }

    fn lock(&self) -> MutexGuard<'_, SimulatedHostsState> {
        self.state.lock().unwrap()
    }
}

impl SimulatedHostsState {
    /// Commits what was heard. Only what comes next may come.
    fn journal(&mut self, said: &[NumberedUpdate]) {
        for NumberedUpdate { number, update: up } in said {
            let journal = &mut self.journal;
            if number.0 != journal.taken + 1 {
                self.faults.push(format!("heard {} after {}", number.0, journal.taken));
            }
            journal.taken = number.0;
            match up {
                AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => journal.text.push_str(text),
                AgentUpdate::Ask { ask, .. } => journal.asks.push(ask.id.clone()),
                AgentUpdate::Gone(_) => journal.is_over = true,
                other => self.faults.push(format!("nobody said {other:?}")),
            }
        }
    }
}

impl WorkerConnector for SimulatedHosts {
    async fn dial(&mut self) -> Result<Socket<Box<dyn ByteStream>>, WorkerUnreachable> {
        if self.is_worker_dead() {
            return Err(WorkerUnreachable::Dead);
        }
        let stream = tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(("worker", PORT))).await;
        match stream {
            Ok(Ok(stream)) => {
                Ok(Socket::from_upgraded(Box::new(stream) as Box<dyn ByteStream>, Role::Client).await)
            }
            Ok(Err(_)) | Err(_) => Err(WorkerUnreachable::RetryLater),
        }
    }

    async fn read_undelivered(&mut self, after: UpdateNumber) -> Vec<NumberedUpdate> {
        let lines = self.spool.lock().spool.read(after, usize::MAX).unwrap();
        let parse = |(number, line): (UpdateNumber, Bytes)| NumberedUpdate {
            number,
            update: serde_json::from_slice(&line).unwrap(),
        };
        lines.into_iter().map(parse).collect()
    }
}

/// A spool that outlives its worker, as one on a disk does.
#[derive(Clone, Default)]
struct SharedSpool(Arc<Mutex<SharedSpoolState>>);

#[derive(Default)]
struct SharedSpoolState {
    spool: MemorySpool,
    /// The last number that was ever kept.
    last: UpdateNumber,
}

impl SharedSpool {
    fn lock(&self) -> MutexGuard<'_, SharedSpoolState> {
        self.0.lock().unwrap()
    }
}

impl Spool for SharedSpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        let mut kept = self.lock();
        kept.last = UpdateNumber(first.0 + lines.len() as u64 - 1);
        kept.spool.append(first, lines)
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn trim(&mut self, upto: UpdateNumber) -> io::Result<()> {
        self.lock().spool.trim(upto)
    }

    fn read(&mut self, after: UpdateNumber, max_bytes: usize) -> io::Result<Vec<(UpdateNumber, Bytes)>> {
        self.lock().spool.read(after, max_bytes)
    }

    fn bytes(&self) -> u64 {
        self.lock().spool.bytes()
    }
}

fn word(number: usize) -> String {
    format!("{number} ")
}

/// How many asks there are among so many words.
fn asks_among(words: usize) -> usize {
    words / 10
}

fn asks_of(count: usize) -> Vec<AskId> {
    (0..count).map(ask_id).collect()
}

fn ask_id(number: usize) -> AskId {
    AskId::parse(&format!("ask_{number}")).unwrap()
}

fn ask(number: usize) -> AgentUpdate {
    AgentUpdate::Ask {
        run: run(),
        ask: AskRequest {
            id: ask_id(number),
            kind: AskKind::Permission,
            tool: None,
            input: Value::Null,
            risk: None,
            prompt: String::new(),
            options: Vec::new(),
            implicit: false,
        },
    }
}

/// Every seventh is a cancel.
fn command(number: u64) -> AgentCommand {
    let (number, run) = (EventNumber(number), run());
    if number.0.is_multiple_of(7) {
        AgentCommand::Cancel { number, run }
    } else {
        AgentCommand::Steer { number, run, text: String::new() }
    }
}

fn is_cancel(down: &AgentCommand) -> bool {
    matches!(down, AgentCommand::Cancel { .. })
}

fn run() -> RunId {
    RunId::parse("run_1").unwrap()
}

fn session() -> SessionId {
    SessionId::parse("ses_1").unwrap()
}

fn worker_id() -> WorkerId {
    WorkerId::parse("wrk_1").unwrap()
}

fn secret() -> Secret {
    Secret("between us".to_owned())
}
