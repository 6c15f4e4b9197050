//! The two hosts of the simulation, and the memory that outlives them: the daemon's journal, the worker's spool, and
//! the commands that the agent received. The verdict is based on these.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use qd_link::{
    AgentEndpoint, AgentLink, LinkEvent, LinkOptions, MemorySpool, NumberedUpdate, Spool, WorkerConnector,
    WorkerEndpoint, WorkerEndpointOptions, WorkerUnreachable, host_agent, read_hello,
};
use qd_protocol::event::AskKind;
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{AgentCommand, AgentExitReason, AgentUpdate, AskRequest, TurnUpdate, UpdateNumber};
use qd_protocol::worker::Secret;
use qd_protocol::{AskId, EventNumber, RunId, SessionId, WorkerId};
use qd_worker_sdk::socket::{ByteStream, Socket};
use serde_json::Value;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_tungstenite::tungstenite::protocol::Role;
use turmoil::net::{TcpListener, TcpStream};

const PORT: u16 = 7000;
/// How many pieces of text the agent sends.
const WORDS: usize = 150;
/// How many commands the daemon sends.
const COMMANDS: u64 = 40;

/// A small deterministic random number generator.
#[derive(Debug, Clone)]
pub(crate) struct SimulationRandom(u64);

impl SimulationRandom {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn fork(&mut self) -> Self {
        Self(self.below(u64::MAX))
    }

    /// A number from 0 up to, but not including, `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// See the module. All clones share the same state.
#[derive(Clone)]
pub(crate) struct SimulatedHosts {
    state: Arc<Mutex<SimulatedHostsState>>,
    spool: SharedSpool,
}

struct SimulatedHostsState {
    random: SimulationRandom,
    journal: SimulatedJournal,
    /// The commands that the agent received, in order.
    applied: Vec<AgentCommand>,
    worker_is_dead: bool,
    faults: Vec<String>,
}

/// What survives when the daemon is killed.
#[derive(Default)]
struct SimulatedJournal {
    journalled: u64,
    text: String,
    asks: Vec<AskId>,
    commands: Vec<AgentCommand>,
    is_over: bool,
}

impl SimulatedHosts {
    pub(crate) fn new(random: SimulationRandom) -> Self {
        let state = SimulatedHostsState {
            random,
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

    /// Checks the promises at the end of a run.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let state = self.lock();
        let SimulatedJournal { journalled, text, asks, commands, is_over } = &state.journal;
        let check = |good: bool, fault: String| if good { Ok(()) } else { Err(fault) };
        check(state.faults.is_empty(), state.faults.join("; "))?;
        check(*is_over, format!("not over; {journalled} journalled, {} applied", state.applied.len()))?;

        let words = text.split_terminator(' ').count();
        let expected: String = (0..words).map(word).collect();
        check(*text == expected, format!("the journal has {text:?}"))?;
        check(asks.iter().eq(&asks_of(asks.len())), format!("the journal has {asks:?}"))?;
        let last = self.spool.lock().last.0;
        check(*journalled == last, format!("{journalled} of {last} are journalled"))?;
        if !state.worker_is_dead {
            check(words == WORDS, format!("{words} words are journalled"))?;
            check(asks.len() == asks_among(WORDS), format!("{} asks are journalled", asks.len()))?;
        }

        // A cancel may overtake. Everything else arrives in order, and nothing arrives twice.
        let steers = |commands: &[AgentCommand]| -> Vec<u64> {
            commands.iter().filter(|command| !is_cancel(command)).map(|command| command.number().0).collect()
        };
        let (sent, applied) = (steers(commands), steers(&state.applied));
        check(sent.starts_with(&applied), format!("of {sent:?} were applied {applied:?}"))?;
        let mut numbers: Vec<_> = state.applied.iter().map(|command| command.number().0).collect();
        numbers.sort_unstable();
        let count = numbers.len();
        numbers.dedup();
        check(numbers.len() == count, format!("something was applied twice: {:?}", state.applied))?;
        check(state.worker_is_dead || count == COMMANDS as usize, format!("{count} commands were applied"))
    }

    /// The worker's host. It listens until the end of the simulation.
    pub(crate) async fn worker(self) -> turmoil::Result {
        let options = WorkerEndpointOptions {
            session: session(),
            worker: worker_id(),
            secret: secret(),
            numbered_after: UpdateNumber(0),
            spool_max: SPOOL_MAX,
            software: String::new(),
        };
        let endpoint = WorkerEndpoint::new(options, Box::new(self.spool.clone()));
        let hosts = self.clone();
        endpoint.set_agent(host_agent(UpdateNumber(0), |agent| hosts.agent(agent)));
        let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), PORT)).await?;
        loop {
            let (stream, _) = listener.accept().await?;
            let endpoint = endpoint.clone();
            tokio::spawn(async move {
                let mut socket = Socket::from_upgraded(stream, Role::Server).await;
                if let Ok(hello) = read_hello(&mut socket).await {
                    // However the connection ends, the daemon connects again.
                    let _ended = endpoint.serve(socket, hello).await;
                }
            });
        }
    }

    /// The agent: sends text and asks, and receives commands, until both are complete.
    async fn agent(self, mut agent: AgentEndpoint) -> AgentExitReason {
        let output = agent.output();
        let send_updates = async {
            for number in 0..WORDS {
                self.pause(100).await;
                let update = TurnUpdate::Text { text: word(number) };
                output
                    .send(AgentUpdate::Turn { run: run(), update })
                    .await
                    .expect("the endpoint accepts updates");
                if number % 10 == 9 {
                    output.send(ask(number / 10)).await.expect("the endpoint accepts updates");
                }
            }
        };
        let receive_commands = async {
            while let Some(command) = agent.next_command().await {
                let mut state = self.lock();
                state.applied.push(command);
                if state.applied.len() == COMMANDS as usize {
                    break;
                }
            }
        };
        tokio::join!(send_updates, receive_commands);
        AgentExitReason::Stopped
    }

    /// The daemon's host: journals what it receives and sends commands at random times.
    pub(crate) async fn daemon(self) -> turmoil::Result {
        let options = LinkOptions {
            session: session(),
            worker: worker_id(),
            secret: secret(),
            journalled: UpdateNumber(self.lock().journal.journalled),
            // Longer than any simulated break.
            reach_timeout: Duration::from_secs(24 * 3600),
            software: String::new(),
            start: None,
        };
        let mut link = AgentLink::open(options, self.clone());
        let mut next_command = Instant::now();
        loop {
            let may_command = (self.lock().journal.commands.len() as u64) < COMMANDS;
            tokio::select! {
                event = link.next_event() => match event {
                    LinkEvent::Updates(updates) => {
                        // A commit takes a while. A daemon that is killed meanwhile has journalled nothing.
                        self.pause(60).await;
                        self.lock().journal(&updates);
                        if self.lock().random.below(3) > 0 {
                            link.ack(updates[updates.len() - 1].number);
                        }
                    }
                    LinkEvent::Attached { applied, .. } => {
                        let state = self.lock();
                        let outstanding = state.journal.commands.iter().filter(|command| command.number() > applied);
                        outstanding.for_each(|command| link.send(command.clone()));
                    }
                    LinkEvent::Disconnected => {}
                    LinkEvent::Gone(_) => self.lock().journal.is_over = true,
                },
                () = sleep_until(next_command), if may_command => {
                    let mut state = self.lock();
                    let command_to_send = command(state.journal.commands.len() as u64 + 1);
                    state.journal.commands.push(command_to_send.clone());
                    link.send(command_to_send);
                    next_command = Instant::now() + Duration::from_millis(state.random.below(500));
                }
            }
            if self.lock().journal.is_over {
                // Nothing more happens on the link of an agent that has ended.
                std::future::pending::<()>().await;
            }
        }
    }

    async fn pause(&self, longest: u64) {
        let pause = self.lock().random.below(longest);
        sleep(Duration::from_millis(pause)).await;
    }

    fn lock(&self) -> MutexGuard<'_, SimulatedHostsState> {
        self.state.lock()
    }
}

impl SimulatedHostsState {
    /// Journals updates. Only the next number in order is allowed.
    fn journal(&mut self, updates: &[NumberedUpdate]) {
        for NumberedUpdate { number, update } in updates {
            let journal = &mut self.journal;
            if number.0 != journal.journalled + 1 {
                self.faults.push(format!("received {} after {}", number.0, journal.journalled));
            }
            journal.journalled = number.0;
            match update {
                AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } => journal.text.push_str(text),
                AgentUpdate::Ask { ask, .. } => journal.asks.push(ask.id.clone()),
                AgentUpdate::Gone(_) => journal.is_over = true,
                other => self.faults.push(format!("unexpected update: {other:?}")),
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
            Ok(Err(error)) => Err(WorkerUnreachable::RetryLater(error.to_string())),
            Err(elapsed) => Err(WorkerUnreachable::RetryLater(elapsed.to_string())),
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

/// A spool that outlives its worker, like one on disk.
#[derive(Clone, Default)]
struct SharedSpool(Arc<Mutex<SharedSpoolState>>);

#[derive(Default)]
struct SharedSpoolState {
    spool: MemorySpool,
    /// The last number that was ever appended.
    last: UpdateNumber,
}

impl SharedSpool {
    fn lock(&self) -> MutexGuard<'_, SharedSpoolState> {
        self.0.lock()
    }
}

impl Spool for SharedSpool {
    fn append(&mut self, first: UpdateNumber, lines: &[Bytes]) -> io::Result<()> {
        let mut state = self.lock();
        state.last = UpdateNumber(first.0 + lines.len() as u64 - 1);
        state.spool.append(first, lines)
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

/// How many asks the agent sends among so many pieces of text.
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

/// Every seventh command is a cancel.
fn command(number: u64) -> AgentCommand {
    let (number, run) = (EventNumber(number), run());
    if number.0.is_multiple_of(7) {
        AgentCommand::Cancel { number, run }
    } else {
        AgentCommand::Steer { number, run, text: String::new() }
    }
}

fn is_cancel(command: &AgentCommand) -> bool {
    matches!(command, AgentCommand::Cancel { .. })
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
