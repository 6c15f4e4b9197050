//! What an operator would like to know, counted as it happens and written as Prometheus text when asked for.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use qd_protocol::Usage;
use qd_protocol::event::{Body, FinishReason};

use crate::daemon::Daemon;

/// Counts since the daemon began.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    accepted: AtomicU64,
    started: AtomicU64,
    finished: [AtomicU64; REASONS.len()],
    cancels: AtomicU64,
    asks: AtomicU64,
    /// By what stands for the agent in a label.
    used: Mutex<BTreeMap<String, Usage>>,
    /// Event streams that are open.
    pub(crate) streams: AtomicU64,
    /// Answers, by the first digit of their status.
    pub(crate) answers: [AtomicU64; 6],
}

const REASONS: [(FinishReason, &str); 9] = [
    (FinishReason::EndTurn, "end_turn"),
    (FinishReason::Cancelled, "cancelled"),
    (FinishReason::Error, "error"),
    (FinishReason::MaxTokens, "max_tokens"),
    (FinishReason::MaxTurns, "max_turns"),
    (FinishReason::BudgetExceeded, "budget_exceeded"),
    (FinishReason::Timeout, "timeout"),
    (FinishReason::Refused, "refused"),
    (FinishReason::Interrupted, "interrupted"),
];

impl Stats {
    /// Counts what has just been journalled of a session with this agent.
    pub(crate) fn count<'a>(&self, agent: &str, bodies: impl Iterator<Item = &'a Body>) {
        for body in bodies {
            if let Body::UsageReported(report) = body {
                let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
                *used.entry(label(agent).to_owned()).or_default() += report.usage();
            }
            let counter = match body {
                Body::RunAccepted(_) => &self.accepted,
                Body::RunStarted(_) => &self.started,
                Body::RunCancelRequested(_) => &self.cancels,
                Body::AskOpened(_) => &self.asks,
                Body::RunFinished(finished) => {
                    let at = REASONS.iter().position(|(reason, _)| *reason == finished.finish_reason);
                    &self.finished[at.unwrap_or_default()]
                }
                _ => continue,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// What stands for an agent in a label: its name, or of `acp:CMD` and its like the way alone, since commands and
/// addresses are many and may hold what is not for everybody.
fn label(agent: &str) -> &str {
    agent.split_once(':').map_or(agent, |(way, _)| way)
}

/// The page for a scraper.
pub(crate) async fn page(daemon: &Daemon) -> Result<String, qd_protocol::ApiError> {
    let stats = &daemon.stats;
    let journal = daemon.journal.stats();
    let counts = daemon.journal.counts().await.map_err(crate::daemon::read_failed)?;
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let mut page = Page(String::with_capacity(8 << 10));
    page.one("quarterdeck_runs_accepted_total", "counter", "Prompts taken.", get(&stats.accepted));
    page.one("quarterdeck_runs_started_total", "counter", "Prompts given to an agent.", get(&stats.started));
    page.head("quarterdeck_runs_finished_total", "counter", "Runs that have ended, by reason.");
    for ((_, reason), counter) in REASONS.iter().zip(&stats.finished) {
        page.line(&format!("quarterdeck_runs_finished_total{{reason=\"{reason}\"}}"), get(counter));
    }
    page.one("quarterdeck_cancels_total", "counter", "Stops asked of runs.", get(&stats.cancels));
    page.one("quarterdeck_asks_total", "counter", "Asks put to people.", get(&stats.asks));
    let used = stats.used.lock().unwrap_or_else(PoisonError::into_inner).clone();
    page.used(&used);
    let active = counts.live_sessions.min(counts.unfinished_runs);
    page.one("quarterdeck_runs_active", "gauge", "Runs at the head of their session.", active);
    page.one(
        "quarterdeck_runs_queued",
        "gauge",
        "Runs behind another of their session.",
        counts.unfinished_runs - active,
    );
    page.one("quarterdeck_asks_waiting", "gauge", "Asks that nobody has answered.", counts.pending_asks);
    page.one("quarterdeck_sessions_open", "gauge", "Sessions that are not closed.", counts.open_sessions);
    page.one(
        "quarterdeck_sessions_awake",
        "gauge",
        "Sessions with an actor in memory.",
        daemon.awake() as u64,
    );
    page.one("quarterdeck_streams_open", "gauge", "Event streams that are open.", get(&stats.streams));
    page.one("quarterdeck_halted", "gauge", "1 while nothing may start.", u64::from(daemon.halted()));
    page.one("quarterdeck_events_total", "counter", "Events journalled.", get(&journal.events));
    page.one("quarterdeck_head_seq", "gauge", "The last seq of the journal.", daemon.journal.head().0);
    page.one("quarterdeck_commits_total", "counter", "Commits of the journal.", get(&journal.commits));
    page.one(
        "quarterdeck_commits_failed_total",
        "counter",
        "Commits that failed.",
        get(&journal.failed_commits),
    );
    page.head("quarterdeck_commit_seconds", "histogram", "Time of a commit with its sync.");
    for (most, count) in journal.commit_us.cumulative() {
        let most = most as f64 / 1e6;
        page.line(&format!("quarterdeck_commit_seconds_bucket{{le=\"{most}\"}}"), count);
    }
    page.line("quarterdeck_commit_seconds_bucket{le=\"+Inf\"}", journal.commit_us.count());
    let seconds = journal.commit_us.sum() as f64 / 1e6;
    page.0.push_str(&format!("quarterdeck_commit_seconds_sum {seconds}\n"));
    page.line("quarterdeck_commit_seconds_count", journal.commit_us.count());
    page.head("quarterdeck_http_answers_total", "counter", "Answers, by the class of their status.");
    for (class, counter) in stats.answers.iter().enumerate().skip(2) {
        page.line(&format!("quarterdeck_http_answers_total{{class=\"{class}xx\"}}"), get(counter));
    }
    Ok(page.0)
}

struct Page(String);

impl Page {
    fn one(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(name, value);
    }

    fn used(&mut self, used: &BTreeMap<String, Usage>) {
        self.head(
            "quarterdeck_tokens_total",
            "counter",
            "Tokens that agents reported, by agent and direction.",
        );
        for (agent, usage) in used {
            for (direction, tokens) in [("input", usage.input_tokens), ("output", usage.output_tokens)] {
                let labels = format!("agent=\"{agent}\",direction=\"{direction}\"");
                self.line(&format!("quarterdeck_tokens_total{{{labels}}}"), tokens);
            }
        }
        self.head("quarterdeck_cost_usd_total", "counter", "Dollars that agents have cost, by agent.");
        for (agent, usage) in used {
            let cost = usage.cost_usd;
            self.0.push_str(&format!("quarterdeck_cost_usd_total{{agent=\"{agent}\"}} {cost}\n"));
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}")
            .expect("a string takes what it is given");
    }

    fn line(&mut self, name: &str, value: u64) {
        writeln!(self.0, "{name} {value}").expect("a string takes what it is given");
    }
}
