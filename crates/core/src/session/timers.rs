//! Deadlines. They are computed from the state, never set and forgotten, so a rebuilt session has the same ones.

use qd_protocol::Millis;
use qd_protocol::event::{Body, Empty, Limits, Processes, SessionUpdated, StopCause};
use qd_protocol::limits::{CANCEL_GRACE_S, KILL_S};

use super::draft::Draft;
use super::finish::Ending;
use super::{Effect, Link, Started, State};

/// How long a worker that was told to end, or to kill a turn, is waited for: what a killed process may take, and then some
/// for the news to come.
const STOP_S: u64 = KILL_S + 5;

/// What comes due.
enum Due {
    Kill,
    Abandon,
    Timeout,
    Close,
}

/// When [`Input::Tick`](super::Input::Tick) has something to do, if nothing else happens before.
pub fn deadline(state: &State, link: Link) -> Option<Millis> {
    [next(state, link).map(|(at, _)| at), state.claim_expires()].into_iter().flatten().min()
}

fn next(state: &State, link: Link) -> Option<(Millis, Due)> {
    match state.active() {
        Some((_, started)) => next_of_run(&state.settings.limits, started, link),
        None if state.is_closing_up() => Some((state.stopping?.plus(STOP_S * 1000), Due::Close)),
        None => None,
    }
}

fn next_of_run(limits: &Limits, started: &Started, link: Link) -> Option<(Millis, Due)> {
    match (started.stop, started.kill) {
        (_, Some(kill)) => Some((kill.at.plus(STOP_S * 1000), Due::Abandon)),
        (Some(stop), None) => {
            let grace = limits.cancel_grace_s.map_or(CANCEL_GRACE_S * 1000, milliseconds);
            Some((stop.at.plus(grace), Due::Kill))
        }
        (None, None) if started.waiting_since.is_some() => None,
        // A worker that is out of sight holds its turn to the limit itself, and only it knows how long that has run.
        (None, None) if link == Link::Lost => None,
        (None, None) => {
            let limit = milliseconds(limits.run_timeout_s?);
            Some((started.at.plus(started.waited_ms).plus(limit), Due::Timeout))
        }
    }
}

/// A limit in seconds as everything else counts time.
pub fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0).clamp(0.0, 1e15) as u64
}

impl Draft<'_> {
    pub(super) fn tick(&mut self) {
        self.return_expired();
        let Some((_, due)) = next(self, self.world.link).filter(|(at, _)| *at <= self.world.now) else {
            return;
        };
        match (due, self.active()) {
            (Due::Close, _) => self.advance(),
            (Due::Timeout, _) => {
                self.stop_active(StopCause::Timeout, None);
            }
            (Due::Kill, Some((run, _))) => {
                let run = run.id.clone();
                let number = self.emit(Some(run.clone()), Body::RunKillRequested(Empty {}));
                self.effect(Effect::Kill { number, run });
            }
            (Due::Abandon, Some((run, started))) => {
                let run = run.id.clone();
                let reason = started.stop.map_or(StopCause::User, |stop| stop.by).finish_reason();
                // Whoever did not let go of a killed turn is not given the next one, by no daemon to come either.
                self.update(SessionUpdated { stops_agent: true, ..Default::default() });
                let processes = Processes { killed: 0, survivors: 1 };
                self.end(&run, Ending { processes, ..Ending::of(reason) });
                self.advance();
            }
            (Due::Kill | Due::Abandon, None) => {}
        }
    }

    /// Whether the worker has had all the time that it gets to end.
    pub(super) fn has_waited_for_worker(&self) -> bool {
        self.stopping.is_some_and(|since| since.plus(STOP_S * 1000) <= self.world.now)
    }
}
