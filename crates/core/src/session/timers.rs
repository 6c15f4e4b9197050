//! Deadlines. They are computed from the state, never set and forgotten, so a rebuilt session has the same ones.

use qd_protocol::Millis;
use qd_protocol::event::{Body, Empty, Processes, StopCause};
use qd_protocol::limits::{CANCEL_GRACE_S, KILL_S};

use super::draft::Draft;
use super::finish::Ending;
use super::{Effect, Link, Started, State};

/// What comes due for a run.
enum Due {
    Kill,
    Abandon,
    Timeout,
}

/// When [`Input::Tick`](super::Input::Tick) has something to do, if nothing else happens before.
pub fn deadline(state: &State) -> Option<Millis> {
    let (_, started) = state.active()?;
    next(state, started).map(|(at, _)| at)
}

fn next(state: &State, started: &Started) -> Option<(Millis, Due)> {
    let limits = &state.settings.limits;
    match (started.stop, started.kill) {
        (_, Some(kill)) => Some((kill.at.plus(KILL_S * 1000), Due::Abandon)),
        (Some(stop), None) => {
            let grace = limits.cancel_grace_s.map_or(CANCEL_GRACE_S * 1000, milliseconds);
            Some((stop.at.plus(grace), Due::Kill))
        }
        (None, None) if started.waiting_since.is_some() => None,
        (None, None) => {
            let limit = milliseconds(limits.run_timeout_s?);
            Some((started.at.plus(started.waited_ms).plus(limit), Due::Timeout))
        }
    }
}

fn milliseconds(seconds: f64) -> u64 {
    (seconds * 1000.0).clamp(0.0, 1e15) as u64
}

impl Draft<'_> {
    pub(super) fn tick(&mut self) {
        let Some((run, started)) = self.active() else { return };
        let run = run.id.clone();
        let Some((_, due)) = next(self, started).filter(|(at, _)| *at <= self.world.now) else { return };
        match due {
            Due::Timeout => {
                self.stop_active(StopCause::Timeout, None);
            }
            Due::Kill => {
                let number = self.emit(Some(run.clone()), Body::RunKillRequested(Empty {}));
                self.effect(Effect::Kill { number, run });
            }
            Due::Abandon => {
                let reason = started.stop.map_or(StopCause::User, |stop| stop.by).finish_reason();
                let processes = Processes { killed: 0, survivors: 1 };
                self.end(&run, Ending { processes, ..Ending::of(reason) });
                // Whoever did not let go of a killed turn is not given the next one.
                self.effect(Effect::StopAgent);
                self.world.link = Link::Absent;
                self.advance();
            }
        }
    }
}
