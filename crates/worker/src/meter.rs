//! What a turn has used: time, model calls, money. It is counted from the prompt on and judged only while no daemon is
//! attached, since a daemon counts the session's other runs and the sessions below as well.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qd_protocol::link::{Said, Stop, TurnLimits};
use tokio::sync::Notify;
use tokio::time::Instant;

/// The counters of one turn.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    state: Mutex<Counted>,
    /// Wakes the judge: something was counted, or a wait began or ended.
    changed: Notify,
}

#[derive(Debug)]
struct Counted {
    /// Run time up to `since`.
    spent: Duration,
    /// When run time began to count again; `None` while an ask is open.
    since: Option<Instant>,
    /// Asks that somebody waits for.
    waits: usize,
    /// Model calls as the agent reports them.
    reported: u32,
    /// Tool calls, each of which counts as a model call of an agent that reports none.
    tools: u32,
    cost_usd: f64,
}

impl Default for Counted {
    fn default() -> Self {
        Self {
            spent: Duration::ZERO,
            since: Some(Instant::now()),
            waits: 0,
            reported: 0,
            tools: 0,
            cost_usd: 0.0,
        }
    }
}

impl Meter {
    /// Counts what was said.
    pub(crate) fn note(&self, what: &Said) {
        let mut state = self.lock();
        match what {
            Said::Turn => state.reported = state.reported.saturating_add(1),
            Said::ToolStarted { .. } => state.tools = state.tools.saturating_add(1),
            Said::Usage { usage } => state.cost_usd += usage.cost_usd,
            _ => return,
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Stops the clock while somebody waits for a person.
    pub(crate) fn wait(&self) -> Waiting<'_> {
        let mut state = self.lock();
        state.waits += 1;
        if let Some(since) = state.since.take() {
            state.spent += since.elapsed();
        }
        drop(state);
        self.changed.notify_one();
        Waiting { meter: self }
    }

    /// Waits until one of the limits is passed, and tells which. Nothing is lost if the wait is given up.
    pub(crate) async fn exceeded(&self, limits: &TurnLimits) -> Stop {
        loop {
            let (over, left) = self.judge(limits);
            if let Some(stop) = over {
                return stop;
            }
            match left {
                Some(left) => tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    /// Which limit is passed; if none, how long until the time is over.
    fn judge(&self, limits: &TurnLimits) -> (Option<Stop>, Option<Duration>) {
        let state = self.lock();
        let spent = state.spent + state.since.map_or(Duration::ZERO, |since| since.elapsed());
        let time = limits.timeout_ms.map(Duration::from_millis);
        let calls = if state.reported > 0 { state.reported } else { state.tools };
        let over = if time.is_some_and(|time| spent >= time) {
            Some(Stop::Timeout)
        } else if limits.max_turns.is_some_and(|most| calls > most) {
            Some(Stop::MaxTurns)
        } else if limits.budget_usd.is_some_and(|most| state.cost_usd >= most) {
            Some(Stop::BudgetExceeded)
        } else {
            None
        };
        let left = time.filter(|_| state.since.is_some()).map(|time| time.saturating_sub(spent));
        (over, left)
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An ask that somebody waits for; until it is dropped, the clock stands.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    meter: &'a Meter,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.meter.lock();
        state.waits -= 1;
        if state.waits == 0 {
            state.since = Some(Instant::now());
        }
        drop(state);
        self.meter.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::event::Usage;

    use super::*;

    fn tool() -> Said {
        Said::ToolStarted { call_id: "1".to_owned(), name: "T".to_owned(), input: serde_json::Value::Null }
    }

    fn cost(cost_usd: f64) -> Said {
        Said::Usage { usage: Usage { cost_usd, ..Usage::default() } }
    }

    fn over(meter: &Meter, limits: TurnLimits) -> Option<Stop> {
        meter.judge(&limits).0
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_people_is_not_run_time() {
        let meter = Meter::default();
        let limits = TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() };
        tokio::time::sleep(Duration::from_millis(400)).await;
        let (one, two) = (meter.wait(), meter.wait());
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(one);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(two);
        let start = Instant::now();
        assert_eq!(meter.exceeded(&limits).await, Stop::Timeout);
        assert_eq!(start.elapsed(), Duration::from_millis(600));
    }

    #[test]
    fn tool_calls_are_turns_unless_the_agent_reports_its_own() {
        let limits = TurnLimits { max_turns: Some(2), ..TurnLimits::default() };
        let meter = Meter::default();
        meter.note(&tool());
        meter.note(&tool());
        assert_eq!(over(&meter, limits), None);
        meter.note(&tool());
        assert_eq!(over(&meter, limits), Some(Stop::MaxTurns));
        meter.note(&Said::Turn);
        assert_eq!(over(&meter, limits), None);
    }

    #[tokio::test(start_paused = true)]
    async fn money_that_is_spent_wakes_who_waits_for_it() {
        let meter = Meter::default();
        let limits = TurnLimits { budget_usd: Some(1.0), ..TurnLimits::default() };
        meter.note(&cost(0.5));
        let spend = async { meter.note(&cost(0.5)) };
        let (stop, ()) = tokio::join!(meter.exceeded(&limits), spend);
        assert_eq!(stop, Stop::BudgetExceeded);
    }
}
