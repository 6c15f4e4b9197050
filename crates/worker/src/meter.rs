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
    /// How far each of them may go.
    limits: TurnLimits,
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
            limits: TurnLimits::default(),
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

    /// Says what is left from now on.
    pub(crate) fn allow(&self, left: &TurnLimits) {
        let mut state = self.lock();
        let spent = u64::try_from(state.spent().as_millis()).unwrap_or(u64::MAX);
        state.limits = TurnLimits {
            timeout_ms: left.timeout_ms.map(|left| spent.saturating_add(left)),
            max_turns: left.max_turns.map(|left| state.calls().saturating_add(left)),
            budget_usd: left.budget_usd.map(|left| state.cost_usd + left),
            grace_ms: left.grace_ms,
        };
        drop(state);
        self.changed.notify_one();
    }

    /// Run time so far.
    pub(crate) fn spent(&self) -> Duration {
        self.lock().spent()
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
    pub(crate) async fn exceeded(&self) -> Stop {
        loop {
            let (over, left) = self.judge();
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
    fn judge(&self) -> (Option<Stop>, Option<Duration>) {
        let state = self.lock();
        let Counted { limits, .. } = &*state;
        let (spent, calls) = (state.spent(), state.calls());
        let time = limits.timeout_ms.map(Duration::from_millis);
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

impl Counted {
    fn spent(&self) -> Duration {
        self.spent + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn calls(&self) -> u32 {
        if self.reported > 0 { self.reported } else { self.tools }
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

    fn over(meter: &Meter) -> Option<Stop> {
        meter.judge().0
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_people_is_not_run_time() {
        let meter = Meter::default();
        meter.allow(&TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() });
        tokio::time::sleep(Duration::from_millis(400)).await;
        let (one, two) = (meter.wait(), meter.wait());
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(one);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(two);
        let start = Instant::now();
        assert_eq!(meter.exceeded().await, Stop::Timeout);
        assert_eq!(start.elapsed(), Duration::from_millis(600));
    }

    #[test]
    fn tool_calls_are_turns_unless_the_agent_reports_its_own() {
        let limits = TurnLimits { max_turns: Some(2), ..TurnLimits::default() };
        let meter = Meter::default();
        meter.allow(&limits);
        meter.note(&tool());
        meter.note(&tool());
        assert_eq!(over(&meter), None);
        meter.note(&tool());
        assert_eq!(over(&meter), Some(Stop::MaxTurns));
        meter.note(&Said::Turn);
        assert_eq!(over(&meter), None);
    }

    #[tokio::test(start_paused = true)]
    async fn limits_that_come_later_are_what_is_left_from_then_on() {
        let meter = Meter::default();
        meter.allow(&TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() });
        meter.note(&tool());
        meter.note(&cost(2.0));
        tokio::time::sleep(Duration::from_millis(900)).await;
        let left =
            TurnLimits { timeout_ms: Some(500), max_turns: Some(1), budget_usd: Some(1.0), grace_ms: None };
        meter.allow(&left);
        assert_eq!(over(&meter), None);
        meter.note(&cost(1.0));
        assert_eq!(over(&meter), Some(Stop::BudgetExceeded));
        meter.note(&tool());
        meter.note(&tool());
        assert_eq!(over(&meter), Some(Stop::MaxTurns));
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!((over(&meter), meter.spent()), (Some(Stop::Timeout), Duration::from_millis(1400)));
    }

    #[tokio::test(start_paused = true)]
    async fn money_that_is_spent_wakes_who_waits_for_it() {
        let meter = Meter::default();
        meter.allow(&TurnLimits { budget_usd: Some(1.0), ..TurnLimits::default() });
        meter.note(&cost(0.5));
        let spend = async { meter.note(&cost(0.5)) };
        let (stop, ()) = tokio::join!(meter.exceeded(), spend);
        assert_eq!(stop, Stop::BudgetExceeded);
    }
}
