//! The session's side of its agent: the link if there is one, and what is known of it.

use qd_core::session::{Link, State};
use qd_link::{AgentSpec, Heard, Launcher, Numbered, SessionEnd};
use qd_protocol::link::{Down, UpNumber};

/// An agent, perhaps.
#[derive(Default)]
pub(super) struct Agent {
    link: Option<Box<SessionEnd>>,
    /// Whether it has said that it is ready, and then whether it steers.
    ready: Option<bool>,
    is_lost: bool,
    /// Whether settings have changed that it was started with.
    outdated: bool,
}

impl Agent {
    pub(super) fn state(&self) -> Link {
        match (&self.link, self.ready) {
            (None, _) => Link::Absent,
            _ if self.is_lost => Link::Lost,
            (Some(_), Some(steers)) if !self.outdated => Link::Ready { steers },
            // One that is outdated finishes its turn, but the next run waits for another.
            (Some(_), _) => Link::Starting,
        }
    }

    pub(super) fn is_starting(&self) -> bool {
        self.link.is_some() && self.ready.is_none()
    }

    /// See that there is an agent.
    pub(super) fn launch(&mut self, launcher: &dyn Launcher, spec: impl FnOnce() -> AgentSpec) {
        if self.link.is_none() {
            *self = Self { link: Some(Box::new(launcher.launch(spec()))), ..Self::default() };
        }
    }

    /// Waits for the agent to say something; for ever, if there is none.
    pub(super) async fn hear(&mut self) -> Heard {
        match &mut self.link {
            Some(link) => link.hear().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn send(&self, down: Down) {
        if let Some(link) = &self.link {
            link.send(down);
        }
    }

    pub(super) fn acknowledge(&mut self, number: UpNumber) {
        if let Some(link) = &mut self.link {
            link.ack(number);
        }
    }

    /// What was heard and is not known to be journalled.
    pub(super) fn unacknowledged(&self) -> Vec<Numbered> {
        self.link.iter().flat_map(|link| link.unacked().cloned()).collect()
    }

    pub(super) fn ready(&mut self, steers: bool) {
        self.ready = Some(steers);
    }

    pub(super) fn lost(&mut self) {
        self.is_lost = true;
    }

    pub(super) fn back(&mut self) {
        self.is_lost = false;
    }

    pub(super) fn gone(&mut self) {
        *self = Self::default();
    }

    /// Settings have changed: the next run gets an agent that was started with them.
    pub(super) fn outdate(&mut self) {
        self.outdated = self.link.is_some();
    }

    /// Lets go of an outdated agent once it works on nothing; true if it did.
    pub(super) async fn refresh(&mut self, state: &State) -> bool {
        let over = self.outdated && state.active().is_none();
        if over {
            self.stop().await;
        }
        over
    }

    /// Ends the agent and waits for its end.
    pub(super) async fn stop(&mut self) {
        let link = self.link.take();
        *self = Self::default();
        if let Some(link) = link {
            link.stop().await;
        }
    }
}
