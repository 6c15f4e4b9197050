//! Metrics for operators, counted as things happen and rendered as Prometheus text on request.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use qd_journal::JournalCounts;
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
    let counts = daemon.journal.counts().await.map_err(crate::daemon::read_failed)?;
    let mut page = MetricsPage(String::with_capacity(8 << 10));
    page.write_run_counters(&daemon.metrics);
    let used = daemon.metrics.usage_by_agent.lock().clone();
    page.write_usage(&used);
    page.write_current_numbers(daemon, &counts);
    page.write_journal(daemon);
    page.write_responses(&daemon.metrics);
    Ok(page.0)
}

fn read_counter(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// The page, to which each method appends the metrics of one part.
struct MetricsPage(String);

impl MetricsPage {
    fn write_run_counters(&mut self, metrics: &DaemonMetrics) {
        self.write_counter(
            "quarterdeck_runs_accepted_total",
            "Accepted prompts.",
            read_counter(&metrics.runs_accepted),
        );
        self.write_counter(
            "quarterdeck_runs_started_total",
            "Runs that have started.",
            read_counter(&metrics.runs_started),
        );
        self.write_header("quarterdeck_runs_finished_total", "counter", "Finished runs, by reason.");
        for ((_, reason), counter) in FINISH_REASONS.iter().zip(&metrics.runs_finished) {
            self.write_sample(
                &format!("quarterdeck_runs_finished_total{{reason=\"{reason}\"}}"),
                read_counter(counter),
            );
        }
        self.write_counter(
            "quarterdeck_cancels_total",
            "Cancel requests for runs.",
            read_counter(&metrics.cancels),
        );
        self.write_counter("quarterdeck_asks_total", "Opened asks.", read_counter(&metrics.asks_opened));
        self.write_counter(
            "quarterdeck_stuck_sessions_total",
            "Sessions that had unfinished runs and nothing to wake them, until a check found them. Please report any.",
            read_counter(&metrics.stuck_sessions),
        );
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

    fn write_current_numbers(&mut self, daemon: &Daemon, counts: &JournalCounts) {
        let active = counts.live_sessions.min(counts.unfinished_runs);
        self.write_gauge(
            "quarterdeck_runs_active",
            "Active runs: the first unfinished run of each session.",
            active,
        );
        self.write_gauge(
            "quarterdeck_runs_queued",
            "Queued runs, behind another run of their session.",
            counts.unfinished_runs - active,
        );
        self.write_gauge("quarterdeck_asks_waiting", "Asks that wait for an answer.", counts.pending_asks);
        self.write_gauge("quarterdeck_sessions_open", "Open sessions.", counts.open_sessions);
        self.write_gauge(
            "quarterdeck_sessions_awake",
            "Sessions with an actor in memory.",
            daemon.awake_count() as u64,
        );
        self.write_gauge(
            "quarterdeck_streams_open",
            "Open event streams.",
            read_counter(&daemon.metrics.open_streams),
        );
        self.write_gauge("quarterdeck_halted", "1 while a halt is set.", u64::from(daemon.is_halted()));
    }

    fn write_journal(&mut self, daemon: &Daemon) {
        let journal = daemon.journal.stats();
        self.write_counter("quarterdeck_events_total", "Events journalled.", read_counter(&journal.events));
        self.write_gauge("quarterdeck_head_seq", "The last seq in the journal.", daemon.journal.head().0);
        self.write_counter(
            "quarterdeck_commits_total",
            "Commits of the journal.",
            read_counter(&journal.commits),
        );
        self.write_counter(
            "quarterdeck_commits_failed_total",
            "Failed commits of the journal.",
            read_counter(&journal.failed_commits),
        );
        self.write_counter(
            "quarterdeck_journal_checks_total",
            "Complete checks of the journal for damage.",
            read_counter(&daemon.journal_checks.finished),
        );
        self.write_gauge(
            "quarterdeck_journal_damaged_places",
            "Damaged places that the last check of the journal found.",
            read_counter(&daemon.journal_checks.damaged_places),
        );
        self.write_header("quarterdeck_commit_seconds", "histogram", "Duration of a commit with its sync.");
        for (bound, count) in journal.commit_us.cumulative() {
            let bound = bound as f64 / 1e6;
            self.write_sample(&format!("quarterdeck_commit_seconds_bucket{{le=\"{bound}\"}}"), count);
        }
        self.write_sample("quarterdeck_commit_seconds_bucket{le=\"+Inf\"}", journal.commit_us.count());
        let seconds = journal.commit_us.sum() as f64 / 1e6;
        self.0.push_str(&format!("quarterdeck_commit_seconds_sum {seconds}\n"));
        self.write_sample("quarterdeck_commit_seconds_count", journal.commit_us.count());
    }

    fn write_responses(&mut self, metrics: &DaemonMetrics) {
        self.write_header("quarterdeck_http_answers_total", "counter", "HTTP responses, by status class.");
        for (class, counter) in metrics.responses.iter().enumerate().skip(2) {
            self.write_sample(
                &format!("quarterdeck_http_answers_total{{class=\"{class}xx\"}}"),
                read_counter(counter),
            );
        }
    }

    fn write_counter(&mut self, name: &str, help: &str, value: u64) {
        self.write_header(name, "counter", help);
        self.write_sample(name, value);
    }

    fn write_gauge(&mut self, name: &str, help: &str, value: u64) {
        self.write_header(name, "gauge", help);
        self.write_sample(name, value);
    }

    fn write_header(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}")
            .expect("a string takes what it is given");
    }

    fn write_sample(&mut self, name: &str, value: u64) {
        writeln!(self.0, "{name} {value}").expect("a string takes what it is given");
    }
}
