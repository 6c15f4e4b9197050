//! A daemon whose only agent says what time it is. It is the product's own `serve`, and its workers are this program once
//! more, so that a reader elsewhere can tell how old each event is: all processes share the monotonic clock.

use std::path::PathBuf;
use std::time::Duration;

use qd_daemon::ServeOptions;
use qd_link::record::{self, WorkerFiles, WorkerLock};
use qd_link::socket::Socket;
use qd_link::{
    AgentEndpoint, LinkClosed, MemorySpool, WorkerEndpoint, WorkerEndpointOptions, host_agent, read_hello,
};
use qd_protocol::RunId;
use qd_protocol::frame::v1::SUBPROTOCOL;
use qd_protocol::limits::SPOOL_MAX;
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate,
};
use qd_protocol::worker::WorkerHostSpec;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::MissedTickBehavior;

/// The argument that makes this program that daemon.
pub(crate) const ROLE: &str = "--as-stamping-daemon";
/// The argument with which the daemon starts it as a worker.
pub(crate) const WORKER: &str = "__worker";
/// The agent's name: of any program that is here, since our worker does not look at it.
pub(crate) const AGENT: &str = "acp:true";
/// Makes an event about as large as one with a line of an answer.
const LINE: &str = "The quick brown fox jumps over the lazy dog, and then it goes on to do something else.";
/// Stands on both sides of a stamp and nowhere else.
const MARK: char = '@';

/// Runs the daemon in `QD_HOME` until it is told to end.
pub(crate) fn serve() {
    let home = std::env::var_os("QD_HOME").map(PathBuf::from);
    let options = ServeOptions { home, ..ServeOptions::default() };
    let exe = std::env::current_exe().expect("a process knows its own file");
    let ended = qd_daemon::serve(options, exe, &mut |line| println!("{line}"));
    ended.expect("the daemon starts in a fresh home");
}

/// Nanoseconds on the clock that all processes share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A line with the time in it.
pub(crate) fn line() -> String {
    format!("{LINE} {MARK}{}{MARK}", now())
}

/// The times in some lines.
pub(crate) fn stamps(text: &str) -> impl Iterator<Item = u64> {
    text.split(MARK).skip(1).step_by(2).filter_map(|stamp| stamp.parse().ok())
}

/// How many to say, and how long to wait before each.
pub(crate) fn prompt(count: usize, every: Duration) -> String {
    format!("{count} {}", every.as_micros())
}

/// The way back.
pub(crate) fn parse(prompt: &str) -> (usize, Duration) {
    let (count, every) = prompt.split_once(' ').unwrap_or((prompt, "0"));
    (count.parse().unwrap_or(0), Duration::from_micros(every.parse().unwrap_or(0)))
}

/// Waits between the things said, if at all; what is late is said at once, so that the rate is kept.
pub(crate) struct Pace(Option<tokio::time::Interval>);

impl Pace {
    pub(crate) fn new(every: Duration) -> Self {
        Self((!every.is_zero()).then(|| {
            let mut ticks = tokio::time::interval(every);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            ticks
        }))
    }

    pub(crate) async fn wait(&mut self) {
        if let Some(ticks) = &mut self.0 {
            ticks.tick().await;
        }
    }
}

/// Is a worker with that agent, as small as one can be, until it is killed with its daemon or told to end.
pub(crate) fn work() {
    let spec: WorkerHostSpec =
        serde_json::from_reader(std::io::stdin()).expect("the daemon writes a specification");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be had").block_on(serve_one(spec));
}

async fn serve_one(spec: WorkerHostSpec) {
    let files = WorkerFiles::of(&spec.dir, &spec.id).expect("the daemon chose the name");
    let _life = WorkerLock::try_acquire(&files)
        .expect("the folder can be written")
        .expect("nobody else has the name");
    let listener = record::bind_worker_socket(&files).expect("a socket can be had");
    let agent = spec.agents.into_iter().next().expect("there is one agent");
    let options = WorkerEndpointOptions {
        session: agent.session,
        worker: agent.worker,
        secret: spec.secret,
        numbered_after: agent.after,
        spool_max: SPOOL_MAX,
        software: String::new(),
    };
    let seat = WorkerEndpoint::new(options, Box::<MemorySpool>::default());
    seat.set_agent(host_agent(agent.after, |end| async move {
        // The session has let go: that is how this agent ends.
        let _let_go: Result<(), LinkClosed> = live(end).await;
        AgentExitReason::Stopped
    }));
    let ended = async {
        let (stream, _) = listener.accept().await.expect("a connection can be taken");
        let upgraded = Socket::accept(stream, |_| Ok(Some(SUBPROTOCOL.to_owned()))).await;
        let (mut socket, _) = upgraded.expect("the daemon speaks WebSocket");
        let hello = read_hello(&mut socket).await.expect("the daemon says hello");
        // However it ended: the daemon is gone or wants nothing more.
        let _ended = seat.serve(socket, hello).await;
    };
    tokio::select! {
        () = ended => {}
        _wanted = seat.next_request() => {}
    }
}

async fn live(mut end: AgentEndpoint) -> Result<(), LinkClosed> {
    end.send(AgentUpdate::Ready { agent_session_id: None, steers: false }).await?;
    while let Some(down) = end.next_command().await {
        if let AgentCommand::Prompt { run, prompt, .. } = down {
            speak(&end, &run, &prompt).await?;
            end.send(AgentUpdate::Terminal { run, outcome: TurnOutcome::of(TurnStopReason::EndTurn) })
                .await?;
        }
    }
    Ok(())
}

/// Notices, since the link merges neighbouring words.
async fn speak(end: &AgentEndpoint, run: &RunId, prompt: &str) -> Result<(), LinkClosed> {
    let (count, every) = parse(prompt);
    let mut pace = Pace::new(every);
    for _ in 0..count {
        pace.wait().await;
        end.send(AgentUpdate::Turn { run: run.clone(), update: TurnUpdate::Notice { text: line() } }).await?;
    }
    Ok(())
}
