//! Metrics for operators, counted as things happen and rendered as Prometheus text on request.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use qd_protocol::TokenUsage;
use qd_protocol::event::{EventBody, FinishReason};

use crate::daemon::Daemon;

/// Counters since the start of the daemon.
#[derive(Debug, Default)]
pub(crate) struct DaemonMetrics {
    runs_accepted: AtomicU64,
    runs_started: AtomicU64,
    runs_finished: [AtomicU64; FINISH_REASONS.len()],
    cancels: AtomicU64,
    asks_opened: AtomicU64,
    stuck_sessions: AtomicU64,
    /// By the agent's label.
    usage_by_agent: Mutex<BTreeMap<String, TokenUsage>>,
    pub(crate) open_streams: AtomicU64,
    /// HTTP responses, by the first digit of their status.
    pub(crate) responses: [AtomicU64; 6],
}

const FINISH_REASONS: [(FinishReason, &str); 9] = [
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

impl DaemonMetrics {
    /// Counts a session that had unfinished runs and nothing that would wake it.
    pub(crate) fn count_stuck_session(&self) {
        self.stuck_sessions.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts events of a session with this agent that have just been journalled.
    pub(crate) fn count_events<'a>(&self, agent: &str, bodies: impl Iterator<Item = &'a EventBody>) {
        for body in bodies {
            if let EventBody::UsageReported(report) = body {
                let mut used = self.usage_by_agent.lock();
                *used.entry(agent_label(agent).to_owned()).or_default() += report.usage();
            }
            let counter = match body {
                EventBody::RunAccepted(_) => &self.runs_accepted,
                EventBody::RunStarted(_) => &self.runs_started,
                EventBody::RunCancelRequested(_) => &self.cancels,
                EventBody::AskOpened(_) => &self.asks_opened,
                EventBody::RunFinished(finished) => {
                    let at = FINISH_REASONS.iter().position(|(reason, _)| *reason == finished.finish_reason);
                    &self.runs_finished[at.unwrap_or_default()]
                }
                _ => continue,
            };
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The label of an agent: its name, or only the kind for `acp:CMD` and the like, because commands and addresses are
/// many and may be confidential.
fn agent_label(agent: &str) -> &str {
    agent.split_once(':').map_or(agent, |(kind, _)| kind)
}

/// Renders the metrics page.
pub(crate) async fn render_metrics(daemon: &Daemon) -> Result<String, qd_protocol::ApiError> {
    let stats = &daemon.metrics;
    let journal = daemon.journal.stats();
    let counts = daemon.journal.counts().await.map_err(crate::daemon::read_failed)?;
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let mut page = MetricsPage(String::with_capacity(8 << 10));
    page.write_metric(
        "quarterdeck_runs_accepted_total",
        "counter",
        "Accepted prompts.",
        get(&stats.runs_accepted),
    );
    page.write_metric(
        "quarterdeck_runs_started_total",
        "counter",
        "Runs that have started.",
        get(&stats.runs_started),
    );
    page.write_header("quarterdeck_runs_finished_total", "counter", "Finished runs, by reason.");
    for ((_, reason), counter) in FINISH_REASONS.iter().zip(&stats.runs_finished) {
        page.write_sample(&format!("quarterdeck_runs_finished_total{{reason=\"{reason}\"}}"), get(counter));
    }
    page.write_metric(
        "quarterdeck_cancels_total",
        "counter",
        "Cancel requests for runs.",
        get(&stats.cancels),
    );
    page.write_metric("quarterdeck_asks_total", "counter", "Opened asks.", get(&stats.asks_opened));
    page.write_metric(
        "quarterdeck_stuck_sessions_total",
        "counter",
        "Sessions that had unfinished runs and nothing to wake them, until a check found them. Please report any.",
        get(&stats.stuck_sessions),
    );
    let used = stats.usage_by_agent.lock().clone();
    page.write_usage(&used);
    let active = counts.live_sessions.min(counts.unfinished_runs);
    page.write_metric(
        "quarterdeck_runs_active",
        "gauge",
        "Active runs: the first unfinished run of each session.",
        active,
    );
    page.write_metric(
        "quarterdeck_runs_queued",
        "gauge",
        "Queued runs, behind another run of their session.",
        counts.unfinished_runs - active,
    );
    page.write_metric(
        "quarterdeck_asks_waiting",
        "gauge",
        "Asks that wait for an answer.",
        counts.pending_asks,
    );
    page.write_metric("quarterdeck_sessions_open", "gauge", "Open sessions.", counts.open_sessions);
    page.write_metric(
        "quarterdeck_sessions_awake",
        "gauge",
        "Sessions with an actor in memory.",
        daemon.awake_count() as u64,
    );
    page.write_metric("quarterdeck_streams_open", "gauge", "Open event streams.", get(&stats.open_streams));
    page.write_metric("quarterdeck_halted", "gauge", "1 while a halt is set.", u64::from(daemon.is_halted()));
    page.write_metric("quarterdeck_events_total", "counter", "Events journalled.", get(&journal.events));
    page.write_metric(
        "quarterdeck_head_seq",
        "gauge",
        "The last seq in the journal.",
        daemon.journal.head().0,
    );
    page.write_metric(
        "quarterdeck_commits_total",
        "counter",
        "Commits of the journal.",
        get(&journal.commits),
    );
    page.write_metric(
        "quarterdeck_commits_failed_total",
        "counter",
        "Failed commits of the journal.",
        get(&journal.failed_commits),
    );
    let checks = &daemon.journal_checks;
    page.write_metric(
        "quarterdeck_journal_checks_total",
        "counter",
        "Complete checks of the journal for damage.",
        get(&checks.finished),
    );
    page.write_metric(
        "quarterdeck_journal_damaged_places",
        "gauge",
        "Damaged places that the last check of the journal found.",
        get(&checks.damaged_places),
    );
    page.write_header("quarterdeck_commit_seconds", "histogram", "Duration of a commit with its sync.");
    for (bound, count) in journal.commit_us.cumulative() {
        let bound = bound as f64 / 1e6;
        page.write_sample(&format!("quarterdeck_commit_seconds_bucket{{le=\"{bound}\"}}"), count);
    }
    page.write_sample("quarterdeck_commit_seconds_bucket{le=\"+Inf\"}", journal.commit_us.count());
    let seconds = journal.commit_us.sum() as f64 / 1e6;
    page.0.push_str(&format!("quarterdeck_commit_seconds_sum {seconds}\n"));
    page.write_sample("quarterdeck_commit_seconds_count", journal.commit_us.count());
    page.write_header("quarterdeck_http_answers_total", "counter", "HTTP responses, by status class.");
    for (class, counter) in stats.responses.iter().enumerate().skip(2) {
        page.write_sample(&format!("quarterdeck_http_answers_total{{class=\"{class}xx\"}}"), get(counter));
    }
    Ok(page.0)
}

struct MetricsPage(String);

impl MetricsPage {
    fn write_metric(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.write_header(name, kind, help);
        self.write_sample(name, value);
    }

    fn write_usage(&mut self, used: &BTreeMap<String, TokenUsage>) {
        self.write_header(
            "quarterdeck_tokens_total",
            "counter",
            "Tokens that agents reported, by agent and direction.",
        );
        for (agent, usage) in used {
            for (direction, tokens) in [("input", usage.input_tokens), ("output", usage.output_tokens)] {
                let labels = format!("agent=\"{agent}\",direction=\"{direction}\"");
                self.write_sample(&format!("quarterdeck_tokens_total{{{labels}}}"), tokens);
            }
        }
        self.write_header(
            "quarterdeck_cost_usd_total",
            "counter",
            "Dollars that agents have cost, by agent.",
        );
        for (agent, usage) in used {
            let cost = usage.cost_usd;
            self.0.push_str(&format!("quarterdeck_cost_usd_total{{agent=\"{agent}\"}} {cost}\n"));
        }
    }

    fn write_header(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}")
            .expect("a string takes what it is given");
    }

    fn write_sample(&mut self, name: &str, value: u64) {
        writeln!(self.0, "{name} {value}").expect("a string takes what it is given");
    }
}
