//! A daemon whose only agent says what time it is. It is the product's own `serve` with another launcher, in a process
//! of its own, so that a reader elsewhere can tell how old each event is: all processes share the monotonic clock.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use qd_daemon::ServeOptions;
use qd_link::{AgentEnd, AgentSpec, Closed, Launcher, SessionEnd, host};
use qd_protocol::RunId;
use qd_protocol::api::Agent;
use qd_protocol::event::Processes;
use qd_protocol::link::{Down, Gone, Outcome, Said, Stop, Up};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::MissedTickBehavior;

/// The argument that makes this program that daemon.
pub(crate) const ROLE: &str = "--as-stamping-daemon";
/// The agent's name.
pub(crate) const AGENT: &str = "stamp";
/// Makes an event about as large as one with a line of an answer.
const LINE: &str = "The quick brown fox jumps over the lazy dog, and then it goes on to do something else.";
/// Stands on both sides of a stamp and nowhere else.
const MARK: char = '@';

/// Runs the daemon in `QD_HOME` until it is told to end.
pub(crate) fn serve() {
    let home = std::env::var_os("QD_HOME").map(PathBuf::from);
    let options = ServeOptions { home, ..ServeOptions::default() };
    let ended = qd_daemon::serve(options, Arc::new(Stamping), &mut |line| println!("{line}"));
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

struct Stamping;

impl Launcher for Stamping {
    fn agents(&self) -> Vec<Agent> {
        vec![Agent {
            name: AGENT.to_owned(),
            description: "Says what time it is.".to_owned(),
            driver: "built-in".to_owned(),
            available: true,
            install: None,
            steers: false,
            settings: Vec::new(),
            env: Vec::new(),
        }]
    }

    fn launch(&self, spec: AgentSpec) -> SessionEnd {
        host(spec.after, |end| async move {
            // The session has let go: that is how this agent ends.
            let _let_go: Result<(), Closed> = live(end).await;
            Gone::Stopped
        })
    }
}

async fn live(mut end: AgentEnd) -> Result<(), Closed> {
    end.say(Up::Ready { agent_session_id: None, steers: false }).await?;
    while let Some(down) = end.command().await {
        if let Down::Prompt { run, prompt, .. } = down {
            speak(&end, &run, &prompt).await?;
            let outcome =
                Outcome { stop: Stop::EndTurn, text: None, error: None, processes: Processes::default() };
            end.say(Up::Terminal { run, outcome }).await?;
        }
    }
    Ok(())
}

/// Notices, since the link merges neighbouring words.
async fn speak(end: &AgentEnd, run: &RunId, prompt: &str) -> Result<(), Closed> {
    let (count, every) = parse(prompt);
    let mut pace = Pace::new(every);
    for _ in 0..count {
        pace.wait().await;
        end.say(Up::Said { run: run.clone(), what: Said::Notice { text: line() } }).await?;
    }
    Ok(())
}
