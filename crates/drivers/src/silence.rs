//! When a turn counts as silent: nothing has come from the agent for some time, although the turn waits neither for a
//! person nor for a tool nor for us. Pure: the caller passes the time and does what the clock says.

use std::collections::BTreeSet;
use std::time::Duration;

use qd_protocol::link::TurnUpdate;
use qd_protocol::worker::SilenceRules;
use tokio::time::Instant;

/// The most tool calls that are remembered as running. An agent with more of them is not silent.
const RUNNING_TOOLS_MAX: usize = 1024;

/// What follows from the silence of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SilenceAction {
    /// Tell people that nothing has come for this long.
    Notice(Duration),
    /// End the turn, because nothing has come for this long.
    EndTurn(Duration),
}

/// The result of a look at the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SilenceCheck {
    Act(SilenceAction),
    /// Nothing can follow before this time has passed.
    CheckAgainIn(Duration),
    /// Nothing will ever follow.
    Never,
}

/// Measures the silence of one turn.
#[derive(Debug)]
pub(crate) struct SilenceClock {
    rules: SilenceRules,
    /// When the agent last gave a sign of life, or the last wait ended.
    silent_since: Instant,
    /// The waits that are not the agent's: asks without an answer, and updates that the session has not taken yet.
    open_waits: usize,
    running_tools: BTreeSet<String>,
    /// The silence at which the next notice is due.
    next_notice: Option<Duration>,
}

impl SilenceClock {
    pub(crate) fn new(now: Instant) -> Self {
        let rules = SilenceRules::default();
        Self { rules, silent_since: now, open_waits: 0, running_tools: BTreeSet::new(), next_notice: None }
    }

    pub(crate) fn set_rules(&mut self, rules: SilenceRules, now: Instant) {
        self.rules = rules;
        self.restart(now);
    }

    /// Records an update of the turn.
    pub(crate) fn record_update(&mut self, update: &TurnUpdate, now: Instant) {
        match update {
            TurnUpdate::ToolStarted { call_id, .. } if self.running_tools.len() < RUNNING_TOOLS_MAX => {
                self.running_tools.insert(call_id.clone());
            }
            TurnUpdate::ToolFinished { call_id, .. } => {
                self.running_tools.remove(call_id);
            }
            _ => {}
        }
        self.restart(now);
    }

    /// Records that the turn waits, and not for its agent.
    pub(crate) fn begin_wait(&mut self) {
        self.open_waits += 1;
    }

    /// Records the end of such a wait.
    pub(crate) fn end_wait(&mut self, now: Instant) {
        self.open_waits = self.open_waits.saturating_sub(1);
        self.restart(now);
    }

    /// Says what follows at this moment. A notice is due once, and again when the silence has doubled.
    pub(crate) fn check(&mut self, now: Instant) -> SilenceCheck {
        let end = self.rules.end_ms.map(Duration::from_millis);
        let Some(first_due) = self.next_notice.into_iter().chain(end).min() else {
            return SilenceCheck::Never;
        };
        if self.open_waits > 0 || !self.running_tools.is_empty() {
            // When the wait is over, the silence begins, so nothing is due before all of this time has passed.
            return SilenceCheck::CheckAgainIn(first_due);
        }
        let silence = now.saturating_duration_since(self.silent_since);
        if end.is_some_and(|end| silence >= end) {
            return SilenceCheck::Act(SilenceAction::EndTurn(silence));
        }
        match self.next_notice {
            Some(due) if silence >= due => {
                self.next_notice = Some(due.saturating_mul(2));
                SilenceCheck::Act(SilenceAction::Notice(due))
            }
            _ => SilenceCheck::CheckAgainIn(first_due.saturating_sub(silence)),
        }
    }

    fn restart(&mut self, now: Instant) {
        self.silent_since = now;
        self.next_notice = self.rules.notice_ms.map(Duration::from_millis);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn clock(start: Instant, notice_s: Option<u64>, end_s: Option<u64>) -> SilenceClock {
        let mut clock = SilenceClock::new(start);
        let millis = |seconds: Option<u64>| seconds.map(|seconds| seconds * 1000);
        clock.set_rules(SilenceRules { notice_ms: millis(notice_s), end_ms: millis(end_s) }, start);
        clock
    }

    /// What the clock says in each second up to `until`, with the second.
    fn actions(clock: &mut SilenceClock, start: Instant, from: u32, until: u32) -> Vec<(u32, SilenceAction)> {
        let acts = |at: u32, clock: &mut SilenceClock| match clock.check(start + SECOND * at) {
            SilenceCheck::Act(action) => Some((at, action)),
            _ => None,
        };
        (from..=until).filter_map(|at| acts(at, clock)).collect()
    }

    fn notices(at: &[u32], start: u32) -> Vec<(u32, SilenceAction)> {
        at.iter().map(|at| (*at, SilenceAction::Notice(SECOND * (at - start)))).collect()
    }

    fn tool(call_id: &str, finished: bool) -> TurnUpdate {
        let (call_id, name) = (call_id.to_owned(), String::new());
        let value = serde_json::Value::Null;
        match finished {
            false => TurnUpdate::ToolStarted { call_id, name, input: value },
            true => TurnUpdate::ToolFinished { call_id, name, output: value, is_error: false },
        }
    }

    #[test]
    fn a_notice_comes_at_each_doubling_and_begins_again_after_a_sign_of_life() {
        let start = Instant::now();
        let mut clock = clock(start, Some(30), None);
        assert_eq!(actions(&mut clock, start, 0, 200), notices(&[30, 60, 120], 0));
        clock.record_update(&TurnUpdate::ModelCall, start + SECOND * 200);
        assert_eq!(actions(&mut clock, start, 200, 290), notices(&[230, 260], 200));
    }

    #[test]
    fn a_turn_that_waits_for_a_person_or_a_tool_is_not_silent() {
        let start = Instant::now();
        let mut clock = clock(start, Some(30), Some(100));
        clock.record_update(&tool("a", false), start);
        clock.record_update(&tool("b", false), start);
        clock.record_update(&tool("a", true), start + SECOND);
        assert_eq!(actions(&mut clock, start, 1, 1000), []);
        clock.begin_wait();
        clock.record_update(&tool("b", true), start + SECOND * 1000);
        assert_eq!(actions(&mut clock, start, 1000, 2000), []);
        clock.end_wait(start + SECOND * 2000);
        assert_eq!(actions(&mut clock, start, 2000, 2099), notices(&[2030, 2060], 2000));
        let ended = clock.check(start + SECOND * 2100);
        assert_eq!(ended, SilenceCheck::Act(SilenceAction::EndTurn(SECOND * 100)));
    }

    #[test]
    fn a_check_at_the_time_that_the_clock_names_is_never_late() {
        let start = Instant::now();
        let mut clock = clock(start, Some(30), None);
        clock.record_update(&tool("a", false), start);
        assert_eq!(clock.check(start + SECOND), SilenceCheck::CheckAgainIn(SECOND * 30));
        clock.record_update(&tool("a", true), start + SECOND * 2);
        assert_eq!(clock.check(start + SECOND * 31), SilenceCheck::CheckAgainIn(SECOND));
        assert_eq!(actions(&mut clock, start, 32, 32), notices(&[32], 2));
    }

    #[test]
    fn without_rules_nothing_follows() {
        let start = Instant::now();
        assert_eq!(SilenceClock::new(start).check(start + SECOND * 9999), SilenceCheck::Never);
    }
}
