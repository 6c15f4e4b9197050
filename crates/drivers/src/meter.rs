//! What a turn has used: time, model calls, money, counted from the prompt on; and how long its agent has been silent. `agent` stops a turn that exceeds its
//! limits by these counts, but only while no daemon is attached: the daemon also counts the session's other runs and
//! its child sessions.
//!
//! Design: docs/design/worker-keeps-time-and-limits.md

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use qd_protocol::link::{TurnLimits, TurnStopReason, TurnUpdate};
use qd_protocol::worker::SilenceRules;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::silence::{SilenceAction, SilenceCheck, SilenceClock};

#[derive(Debug, Default)]
pub struct TurnMeter {
    state: Mutex<MeterState>,
    /// Wakes [`TurnMeter::wait_until_exceeded`]: something was counted, or the clock was paused or resumed.
    changed: Notify,
}

#[derive(Debug)]
struct MeterState {
    /// Run time up to `running_since`.
    spent: Duration,
    /// When the clock last started; `None` while an ask is open.
    running_since: Option<Instant>,
    /// The number of asks that wait for an answer.
    open_asks: usize,
    /// Model calls that the agent reported.
    reported_calls: u32,
    /// Tool calls. Each counts as a model call if the agent reports none.
    tool_calls: u32,
    cost_usd: f64,
    /// The last total of the conversation that the agent reported.
    conversation_cost_usd: Option<f64>,
    /// Whether the turn had text, a thought, a tool call or usage.
    has_answered: bool,
    silence: SilenceClock,
    /// Absolute limits on the counters above.
    limits: TurnLimits,
}

impl Default for MeterState {
    fn default() -> Self {
        Self {
            spent: Duration::ZERO,
            running_since: Some(Instant::now()),
            open_asks: 0,
            reported_calls: 0,
            tool_calls: 0,
            cost_usd: 0.0,
            conversation_cost_usd: None,
            has_answered: false,
            silence: SilenceClock::new(Instant::now()),
            limits: TurnLimits::default(),
        }
    }
}

impl TurnMeter {
    /// Counts an update of the turn.
    pub fn count_update(&self, update: &TurnUpdate) {
        let mut state = self.lock();
        state.silence.record_update(update, Instant::now());
        state.has_answered |= is_answer(update);
        match update {
            TurnUpdate::ModelCall => state.reported_calls = state.reported_calls.saturating_add(1),
            TurnUpdate::ToolStarted { .. } => state.tool_calls = state.tool_calls.saturating_add(1),
            // A report that is negative or not a number must not make room in the budget.
            TurnUpdate::Usage { usage, conversation_cost_usd } => {
                state.cost_usd += usage.cost_usd.max(0.0);
                state.conversation_cost_usd = conversation_cost_usd.or(state.conversation_cost_usd);
            }
            _ => return,
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Sets what follows from the silence of the turn.
    pub fn set_silence_rules(&self, rules: SilenceRules) {
        self.lock().silence.set_rules(rules, Instant::now());
    }

    /// Waits until the turn has been silent for so long that something follows. Dropping the wait loses nothing.
    pub async fn wait_for_silence(&self) -> SilenceAction {
        loop {
            let check = self.lock().silence.check(Instant::now());
            match check {
                SilenceCheck::Act(action) => return action,
                SilenceCheck::CheckAgainIn(time) => tokio::time::sleep(time).await,
                SilenceCheck::Never => std::future::pending().await,
            }
        }
    }

    /// Until the result is dropped, the turn does not count as silent: it is the session that does not take an update.
    pub(crate) fn pause_silence(&self) -> SilencePause<'_> {
        self.lock().silence.begin_wait();
        SilencePause { meter: self }
    }

    /// Whether the turn had text, a thought, a tool call or usage.
    pub fn has_answered(&self) -> bool {
        self.lock().has_answered
    }

    /// Sets what the turn may still use from now on.
    pub fn set_remaining(&self, remaining: &TurnLimits) {
        let mut state = self.lock();
        let spent = u64::try_from(state.run_time().as_millis()).unwrap_or(u64::MAX);
        state.limits = TurnLimits {
            timeout_ms: remaining.timeout_ms.map(|remaining| spent.saturating_add(remaining)),
            max_turns: remaining.max_turns.map(|remaining| state.model_calls().saturating_add(remaining)),
            budget_usd: remaining.budget_usd.map(|remaining| state.cost_usd + remaining),
            grace_ms: remaining.grace_ms,
        };
        drop(state);
        self.changed.notify_one();
    }

    pub fn run_time(&self) -> Duration {
        self.lock().run_time()
    }

    /// The cost of the whole conversation in US dollars, if the agent has reported that in this turn.
    pub fn conversation_cost_usd(&self) -> Option<f64> {
        self.lock().conversation_cost_usd
    }

    /// Stops the clock while the agent waits for a person.
    pub fn pause_clock(&self) -> ClockPause<'_> {
        let mut state = self.lock();
        state.open_asks += 1;
        state.silence.begin_wait();
        if let Some(since) = state.running_since.take() {
            state.spent += since.elapsed();
        }
        drop(state);
        self.changed.notify_one();
        ClockPause { meter: self }
    }

    /// Waits until one of the limits is exceeded, and returns which. Dropping the wait loses nothing.
    pub async fn wait_until_exceeded(&self) -> TurnStopReason {
        loop {
            let (exceeded, remaining) = self.check_limits();
            if let Some(stop) = exceeded {
                return stop;
            }
            match remaining {
                Some(remaining) => tokio::select! {
                    () = tokio::time::sleep(remaining) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Returns the exceeded limit, or else the time until the timeout.
    fn check_limits(&self) -> (Option<TurnStopReason>, Option<Duration>) {
        let state = self.lock();
        let MeterState { limits, .. } = &*state;
        let (spent, calls) = (state.run_time(), state.model_calls());
        let time = limits.timeout_ms.map(Duration::from_millis);
        let exceeded = if time.is_some_and(|time| spent >= time) {
            Some(TurnStopReason::Timeout)
        } else if limits.max_turns.is_some_and(|max| calls > max) {
            Some(TurnStopReason::MaxTurns)
        } else if limits.budget_usd.is_some_and(|max| state.cost_usd >= max) {
            Some(TurnStopReason::BudgetExceeded)
        } else {
            None
        };
        let remaining = time.filter(|_| state.running_since.is_some()).map(|time| time.saturating_sub(spent));
        (exceeded, remaining)
    }

    fn lock(&self) -> MutexGuard<'_, MeterState> {
        self.state.lock()
    }
}

impl MeterState {
    fn run_time(&self) -> Duration {
        self.spent + self.running_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn model_calls(&self) -> u32 {
        if self.reported_calls > 0 { self.reported_calls } else { self.tool_calls }
    }
}

/// Whether the update is a part of an answer, and not about it.
fn is_answer(update: &TurnUpdate) -> bool {
    match update {
        TurnUpdate::Text { text } | TurnUpdate::Thought { text } => !text.is_empty(),
        TurnUpdate::ToolStarted { .. }
        | TurnUpdate::ToolOutput { .. }
        | TurnUpdate::ToolFinished { .. }
        | TurnUpdate::Plan { .. }
        | TurnUpdate::Usage { .. } => true,
        TurnUpdate::Notice { .. }
        | TurnUpdate::ModelCall
        | TurnUpdate::Mode { .. }
        | TurnUpdate::Context(_)
        | TurnUpdate::Compacted { .. } => false,
    }
}

/// Keeps the clock paused until it is dropped.
#[derive(Debug)]
pub struct ClockPause<'a> {
    meter: &'a TurnMeter,
}

impl Drop for ClockPause<'_> {
    fn drop(&mut self) {
        let mut state = self.meter.lock();
        state.open_asks -= 1;
        state.silence.end_wait(Instant::now());
        if state.open_asks == 0 {
            state.running_since = Some(Instant::now());
        }
        drop(state);
        self.meter.changed.notify_one();
    }
}

/// Keeps the turn from counting as silent until it is dropped.
#[derive(Debug)]
pub(crate) struct SilencePause<'a> {
    meter: &'a TurnMeter,
}

impl Drop for SilencePause<'_> {
    fn drop(&mut self) {
        self.meter.lock().silence.end_wait(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::TokenUsage;

    use super::*;

    fn tool_started() -> TurnUpdate {
        TurnUpdate::ToolStarted {
            call_id: "1".to_owned(),
            name: "T".to_owned(),
            input: serde_json::Value::Null,
        }
    }

    fn usage_of_cost(cost_usd: f64) -> TurnUpdate {
        TurnUpdate::usage(TokenUsage { cost_usd, ..TokenUsage::default() })
    }

    fn exceeded_limit(meter: &TurnMeter) -> Option<TurnStopReason> {
        meter.check_limits().0
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_people_is_not_run_time() {
        let meter = TurnMeter::default();
        meter.set_remaining(&TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() });
        tokio::time::sleep(Duration::from_millis(400)).await;
        let (first, second) = (meter.pause_clock(), meter.pause_clock());
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(first);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(second);
        let start = Instant::now();
        assert_eq!(meter.wait_until_exceeded().await, TurnStopReason::Timeout);
        assert_eq!(start.elapsed(), Duration::from_millis(600));
    }

    #[test]
    fn tool_calls_are_turns_unless_the_agent_reports_its_own() {
        let limits = TurnLimits { max_turns: Some(2), ..TurnLimits::default() };
        let meter = TurnMeter::default();
        meter.set_remaining(&limits);
        meter.count_update(&tool_started());
        meter.count_update(&tool_started());
        assert_eq!(exceeded_limit(&meter), None);
        meter.count_update(&tool_started());
        assert_eq!(exceeded_limit(&meter), Some(TurnStopReason::MaxTurns));
        meter.count_update(&TurnUpdate::ModelCall);
        assert_eq!(exceeded_limit(&meter), None);
    }

    #[tokio::test(start_paused = true)]
    async fn later_limits_count_from_the_moment_they_arrive() {
        let meter = TurnMeter::default();
        meter.set_remaining(&TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() });
        meter.count_update(&tool_started());
        meter.count_update(&usage_of_cost(2.0));
        tokio::time::sleep(Duration::from_millis(900)).await;
        let left =
            TurnLimits { timeout_ms: Some(500), max_turns: Some(1), budget_usd: Some(1.0), grace_ms: None };
        meter.set_remaining(&left);
        assert_eq!(exceeded_limit(&meter), None);
        meter.count_update(&usage_of_cost(1.0));
        assert_eq!(exceeded_limit(&meter), Some(TurnStopReason::BudgetExceeded));
        meter.count_update(&tool_started());
        meter.count_update(&tool_started());
        assert_eq!(exceeded_limit(&meter), Some(TurnStopReason::MaxTurns));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(
            (exceeded_limit(&meter), meter.run_time()),
            (Some(TurnStopReason::Timeout), Duration::from_millis(1400))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn spent_money_wakes_the_wait_for_a_limit() {
        let meter = TurnMeter::default();
        meter.set_remaining(&TurnLimits { budget_usd: Some(1.0), ..TurnLimits::default() });
        meter.count_update(&usage_of_cost(0.5));
        let spend = async { meter.count_update(&usage_of_cost(0.5)) };
        let (stop, ()) = tokio::join!(meter.wait_until_exceeded(), spend);
        assert_eq!(stop, TurnStopReason::BudgetExceeded);
    }
}
