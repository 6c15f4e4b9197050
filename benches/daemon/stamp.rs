//! A daemon whose only agent sends timestamps. It is the product's own `serve`, with this program as its worker. All
//! processes share the monotonic clock, so a reader can tell how old each event is.

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

/// The argument that makes this program the stamping daemon.
pub(crate) const ROLE: &str = "--as-stamping-daemon";
/// The argument with which the daemon starts this program as a worker.
pub(crate) const WORKER: &str = "__worker";
/// The agent's name. Any existing program will do, because our worker does not use it.
pub(crate) const AGENT: &str = "acp:true";
/// Makes an event about as large as one with a line of an answer.
const LINE: &str = "The quick brown fox jumps over the lazy dog, and then it goes on to do something else.";
/// Encloses a timestamp, and appears nowhere else.
const MARK: char = '@';

/// Runs the daemon in `QD_HOME` until it is stopped.
pub(crate) fn serve() {
    let home = std::env::var_os("QD_HOME").map(PathBuf::from);
    let options = ServeOptions { home, ..ServeOptions::default() };
    let exe = std::env::current_exe().expect("a process knows its own file");
    let result = qd_daemon::serve(options, exe, &mut |line| println!("{line}"));
    result.expect("the daemon starts in a fresh home");
}

/// Nanoseconds on the monotonic clock, which all processes share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A line with the current time in it.
pub(crate) fn line() -> String {
    format!("{LINE} {MARK}{}{MARK}", now())
}

/// The timestamps in some lines.
pub(crate) fn stamps(text: &str) -> impl Iterator<Item = u64> {
    text.split(MARK).skip(1).step_by(2).filter_map(|stamp| stamp.parse().ok())
}

/// A prompt for the agent: how many lines to send, and the interval between them.
pub(crate) fn prompt(count: usize, every: Duration) -> String {
    format!("{count} {}", every.as_micros())
}

/// Parses such a prompt.
pub(crate) fn parse(prompt: &str) -> (usize, Duration) {
    let (count, every) = prompt.split_once(' ').unwrap_or((prompt, "0"));
    (count.parse().unwrap_or(0), Duration::from_micros(every.parse().unwrap_or(0)))
}

/// Waits between lines, if at all. A late line is sent at once, so that the rate is kept.
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

/// Runs a minimal worker with the stamping agent, until it is killed with its daemon or asked to stop.
pub(crate) fn work() {
    let spec: WorkerHostSpec =
        serde_json::from_reader(std::io::stdin()).expect("the daemon writes a specification");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime starts").block_on(serve_one(spec));
}

async fn serve_one(spec: WorkerHostSpec) {
    let files = WorkerFiles::of(&spec.dir, &spec.id).expect("the daemon chose the name");
    let _lock = WorkerLock::try_acquire(&files)
        .expect("the directory is writable")
        .expect("the worker's id is not in use");
    let listener = record::bind_worker_socket(&files).expect("the socket can be bound");
    let agent = spec.agents.into_iter().next().expect("there is one agent");
    let options = WorkerEndpointOptions {
        session: agent.session,
        worker: agent.worker,
        secret: spec.secret,
        numbered_after: agent.after,
        spool_max: SPOOL_MAX,
        software: String::new(),
    };
    let endpoint = WorkerEndpoint::new(options, Box::<MemorySpool>::default());
    endpoint.set_agent(host_agent(agent.after, |agent_end| async move {
        // The link closes when the session has released the agent.
        let _closed: Result<(), LinkClosed> = answer_prompts(agent_end).await;
        AgentExitReason::Stopped
    }));
    let served = async {
        let (stream, _) = listener.accept().await.expect("a connection is accepted");
        let upgraded = Socket::accept(stream, |_| Ok(Some(SUBPROTOCOL.to_owned()))).await;
        let (mut socket, _) = upgraded.expect("the daemon speaks WebSocket");
        let hello = read_hello(&mut socket).await.expect("the daemon says hello");
        // However the connection ended, the daemon is gone or needs nothing more.
        let _end = endpoint.serve(socket, hello).await;
    };
    tokio::select! {
        () = served => {}
        _request = endpoint.next_request() => {}
    }
}

async fn answer_prompts(mut end: AgentEndpoint) -> Result<(), LinkClosed> {
    end.send(AgentUpdate::Ready { agent_session_id: None, steers: false }).await?;
    while let Some(command) = end.next_command().await {
        if let AgentCommand::Prompt { run, prompt, .. } = command {
            send_lines(&end, &run, &prompt).await?;
            end.send(AgentUpdate::TurnEnded { run, outcome: TurnOutcome::of(TurnStopReason::EndTurn) })
                .await?;
        }
    }
    Ok(())
}

/// Sends notices, because the link merges adjacent text.
async fn send_lines(end: &AgentEndpoint, run: &RunId, prompt: &str) -> Result<(), LinkClosed> {
    let (count, every) = parse(prompt);
    let mut pace = Pace::new(every);
    for _ in 0..count {
        pace.wait().await;
        end.send(AgentUpdate::Turn { run: run.clone(), update: TurnUpdate::notice(line()) }).await?;
    }
    Ok(())
}
