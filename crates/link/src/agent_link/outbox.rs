//! What a session has for its worker and has not got rid of: wishes until they are answered, and commands, which the
//! session says again after every break. No task, lock or connection is known here.

use qd_protocol::RunId;
use qd_protocol::frame::v1::{Seat, ToWorker};
use qd_protocol::link::{Down, TurnLimits, Up, UpNumber};
use qd_protocol::worker::AgentSpec;

use crate::down::Commands;

/// See the module.
#[derive(Debug)]
pub(super) struct Outbox {
    /// What goes out.
    commands: Commands,
    /// What was said while the session knew of no connection. It waits, since what the session owes from before comes
    /// first.
    held: Commands,
    phase: Phase,
    /// What a turn has left, until it has gone out.
    limits: Option<(RunId, TurnLimits)>,
    /// An agent that is wanted, until it is known to be on its way.
    start: Option<Box<AgentSpec>>,
    /// A rest that is wanted, until the agent rests.
    rest: bool,
    /// An end that is wanted, until it has come.
    close: bool,
    sent: Sent,
}

/// How far a session is with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It knows of none.
    Away,
    /// It has heard of one, and says what it owes.
    Told,
    /// It has said all that it owes.
    Open,
}

/// What has gone out on this connection.
#[derive(Debug, Default)]
struct Sent {
    acked: UpNumber,
    start: bool,
    rest: bool,
    close: bool,
}

impl Outbox {
    pub(super) fn new(start: Option<Box<AgentSpec>>) -> Self {
        Self {
            commands: Commands::default(),
            held: Commands::default(),
            phase: Phase::Away,
            limits: None,
            start,
            rest: false,
            close: false,
            sent: Sent::default(),
        }
    }

    pub(super) fn command(&mut self, down: Down) {
        match self.phase {
            Phase::Away => self.held.put(down),
            Phase::Told | Phase::Open => self.commands.put(down),
        }
    }

    pub(super) fn limit(&mut self, run: RunId, limits: TurnLimits) {
        self.limits = Some((run, limits));
    }

    pub(super) fn start(&mut self, spec: Box<AgentSpec>) {
        self.start = Some(spec);
        self.sent.start = false;
    }

    pub(super) fn rest(&mut self) {
        // One that is still wanted has gone out once; one that was answered is another wish.
        self.sent.rest &= self.rest;
        self.rest = true;
    }

    pub(super) fn close(&mut self) {
        self.close = true;
    }

    /// Whether there is something to start in an empty seat.
    pub(super) fn can_start(&self) -> bool {
        self.start.is_some()
    }

    /// There is a connection to a worker that knows of this acknowledgement and has this for us.
    pub(super) fn connected(&mut self, acked: UpNumber, seat: Seat) {
        self.sent = Sent { acked, ..Sent::default() };
        match seat {
            // Before it has rested, the agent that is there is not yet the one that is wanted.
            Seat::Starting | Seat::Ready { .. } if !self.rest => self.start = None,
            Seat::Gone => self.start = None,
            Seat::Empty | Seat::Starting | Seat::Ready { .. } | Seat::Resting => {}
        }
    }

    /// The session has heard of the connection.
    pub(super) fn told(&mut self) {
        self.phase = Phase::Told;
    }

    /// The session has come back to listen, and so has said what it owes. True if something can go out now.
    pub(super) fn open(&mut self) -> bool {
        let told = self.phase == Phase::Told;
        if told {
            self.phase = Phase::Open;
            self.commands.absorb(std::mem::take(&mut self.held));
        }
        told
    }

    /// The connection broke. What went out on it is forgotten, so that it can be said again.
    pub(super) fn broke(&mut self) {
        self.phase = Phase::Away;
        self.held.absorb(std::mem::take(&mut self.commands));
        self.limits = None;
    }

    /// What the worker's word answers.
    pub(super) fn heard(&mut self, up: &Up) {
        match up {
            Up::Ready { .. } if !self.rest => self.start = None,
            Up::Rested => self.rest = false,
            Up::Gone(_) => {
                self.start = None;
                self.rest = false;
                self.close = false;
            }
            _ => {}
        }
    }

    /// The next frame of this connection.
    pub(super) fn next(&mut self, acked: UpNumber) -> Option<ToWorker> {
        if self.sent.acked < acked {
            self.sent.acked = acked;
            return Some(ToWorker::Ack(acked));
        }
        if self.close && !std::mem::replace(&mut self.sent.close, true) {
            return Some(ToWorker::Close);
        }
        if self.rest && !self.close && !std::mem::replace(&mut self.sent.rest, true) {
            return Some(ToWorker::Rest);
        }
        // An agent that is to rest first is not started again before it does: a worker could not tell a repeated rest
        // from one that is meant for the new agent.
        if let Some(spec) = &self.start
            && !self.rest
            && !self.close
            && !std::mem::replace(&mut self.sent.start, true)
        {
            return Some(ToWorker::Start(spec.clone()));
        }
        match self.phase {
            // After the prompt that they are for.
            Phase::Open => self.commands.take().map(ToWorker::Do).or_else(|| {
                let (run, limits) = self.limits.take()?;
                Some(ToWorker::Limits { run, limits })
            }),
            Phase::Away | Phase::Told => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::link::Gone;
    use qd_protocol::{Number, RunId, SessionId, WorkerId};

    use super::*;

    fn steer(number: u64) -> Down {
        Down::Steer { number: Number(number), run: RunId::parse("r").unwrap(), text: String::new() }
    }

    fn spec() -> Box<AgentSpec> {
        Box::new(AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[2]), "a", "/"))
    }

    fn all(outbox: &mut Outbox) -> Vec<ToWorker> {
        std::iter::from_fn(|| outbox.next(UpNumber(0))).collect()
    }

    fn connect(outbox: &mut Outbox, seat: Seat) {
        outbox.connected(UpNumber(0), seat);
        outbox.told();
    }

    const READY: Seat = Seat::Ready { steers: true };

    #[test]
    fn an_agent_rests_as_often_as_it_is_wanted_on_one_connection() {
        let mut outbox = Outbox::new(None);
        connect(&mut outbox, READY);
        for _ in 0..3 {
            outbox.rest();
            assert!(matches!(all(&mut outbox)[..], [ToWorker::Rest]));
            outbox.rest();
            assert!(all(&mut outbox).is_empty(), "it has been said");
            outbox.heard(&Up::Rested);
            outbox.start(spec());
            assert!(matches!(all(&mut outbox)[..], [ToWorker::Start(_)]));
            outbox.heard(&Up::Ready { agent_session_id: None, steers: true });
        }
    }

    #[test]
    fn what_is_owed_goes_out_before_what_was_said_without_a_connection() {
        let mut outbox = Outbox::new(None);
        connect(&mut outbox, READY);
        [1, 2, 3].map(steer).into_iter().for_each(|down| outbox.command(down));
        outbox.open();
        assert_eq!(outbox.next(UpNumber(0)), Some(ToWorker::Do(steer(1))));

        outbox.broke();
        outbox.command(steer(4));
        connect(&mut outbox, READY);
        assert_eq!(all(&mut outbox), [], "the session has not said what it owes");
        [1, 2, 3, 4].map(steer).into_iter().for_each(|down| outbox.command(down));
        outbox.open();
        assert_eq!(all(&mut outbox), [1, 2, 3, 4].map(|number| ToWorker::Do(steer(number))));
    }

    #[test]
    fn what_was_said_without_a_connection_goes_out_even_if_it_is_not_said_again() {
        let mut outbox = Outbox::new(None);
        outbox.command(steer(4));
        connect(&mut outbox, READY);
        outbox.command(steer(3));
        outbox.open();
        assert_eq!(all(&mut outbox), [3, 4].map(|number| ToWorker::Do(steer(number))));
    }

    #[test]
    fn a_rest_is_said_on_every_connection_until_the_agent_rests_and_a_start_waits_for_it() {
        let mut outbox = Outbox::new(None);
        connect(&mut outbox, READY);
        outbox.rest();
        outbox.start(spec());
        assert_eq!(all(&mut outbox), [ToWorker::Rest]);
        assert_eq!(all(&mut outbox), []);
        outbox.broke();
        connect(&mut outbox, READY);
        assert_eq!(all(&mut outbox), [ToWorker::Rest]);
        outbox.heard(&Up::Rested);
        assert_eq!(all(&mut outbox), [ToWorker::Start(spec())]);
        outbox.broke();
        connect(&mut outbox, Seat::Resting);
        assert_eq!(all(&mut outbox), [ToWorker::Start(spec())]);
        outbox.broke();
        connect(&mut outbox, Seat::Starting);
        assert_eq!(all(&mut outbox), [], "it has arrived");
    }

    #[test]
    fn an_end_is_said_on_every_connection_until_it_has_come_and_nothing_is_wanted_beside_it() {
        let mut outbox = Outbox::new(Some(spec()));
        outbox.rest();
        outbox.close();
        for _ in 0..2 {
            connect(&mut outbox, Seat::Empty);
            assert_eq!(all(&mut outbox), [ToWorker::Close]);
            outbox.broke();
        }
        outbox.heard(&Up::Gone(Gone::Stopped));
        connect(&mut outbox, Seat::Gone);
        assert_eq!(all(&mut outbox), []);
    }

    #[test]
    fn acknowledgements_are_merged_and_go_first() {
        let mut outbox = Outbox::new(None);
        outbox.connected(UpNumber(3), READY);
        outbox.close();
        assert_eq!(outbox.next(UpNumber(3)), Some(ToWorker::Close));
        assert_eq!(outbox.next(UpNumber(9)), Some(ToWorker::Ack(UpNumber(9))));
        assert_eq!(outbox.next(UpNumber(9)), None);
    }
}
