//! Promises of the task that owns an agent, shown with `echo`, which needs no process. Time stands still in these
//! tests: it moves on when everybody waits for it.

use qd_link::{FromAgent, SessionEnd, host};
use qd_protocol::frame::v1;
use qd_protocol::link::{Said, UpNumber};
use qd_protocol::{Number, SessionId, WorkerId};

use super::*;

/// A session's side of one agent.
struct Agent {
    end: SessionEnd,
    seat: watch::Sender<SeatState>,
    leash: Arc<Leash>,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    heard: Vec<Up>,
}

fn spec() -> AgentSpec {
    AgentSpec {
        agent_session_id: Some("conversation".to_owned()),
        mark: "m".to_owned(),
        ..AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[7; 8]), "echo", "/")
    }
}

fn state(attached: bool) -> SeatState {
    let (seat, since) = (v1::Seat::Starting, Instant::now());
    SeatState { attached, since, seat, run: None, limits: None, unacked: false }
}

fn run(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

fn launch(seat: Option<watch::Receiver<SeatState>>, leash: &Arc<Leash>) -> SessionEnd {
    let around = Around { below: None, seat, leash: Arc::clone(leash) };
    host(UpNumber(77), |end| live(Kind::Echo, Box::new(spec()), around, end))
}

impl Agent {
    async fn ready() -> Self {
        let (seat, leash) = (watch::Sender::new(state(true)), Arc::default());
        let end = launch(Some(seat.subscribe()), &leash);
        let mut agent = Self { end, seat, leash, number: 0, heard: Vec::new() };
        let id = Some("conversation".to_owned());
        assert_eq!(agent.hear().await, Up::Ready { agent_session_id: id, steers: false });
        agent
    }

    fn next(&mut self) -> Number {
        self.number += 1;
        Number(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_within(name, prompt, TurnLimits::default());
    }

    fn prompt_within(&mut self, name: &str, prompt: &str, limits: TurnLimits) {
        let number = self.next();
        let (files, messages) = (Vec::new(), Vec::new());
        let prompt = prompt.to_owned();
        self.end.send(Down::Prompt { number, run: run(name), prompt, files, messages, limits });
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next();
        self.end.send(Down::Cancel { number, run: run(name) });
    }

    fn kill(&mut self, name: &str) {
        self.end.send(Down::Kill { number: Number(self.number), run: run(name) });
    }

    fn steer(&mut self, name: &str) -> Number {
        let number = self.next();
        self.end.send(Down::Steer { number, run: run(name), text: "faster".to_owned() });
        number
    }

    async fn hear(&mut self) -> Up {
        while self.heard.is_empty() {
            match self.end.hear().await {
                FromAgent::Said(said) => self.heard.extend(said.into_iter().rev().map(|thing| thing.up)),
                FromAgent::Gone(gone) => panic!("it is gone: {gone:?}"),
            }
        }
        self.heard.pop().unwrap()
    }

    /// Everything until the terminal of this run, and the text of it.
    async fn ended(&mut self, name: &str) -> (Vec<Up>, String, Outcome) {
        let (mut ups, mut text) = (Vec::new(), String::new());
        loop {
            match self.hear().await {
                Up::Terminal { run: ended, outcome } if ended == run(name) => return (ups, text, outcome),
                Up::Said { what: Said::Text { text: piece }, .. } => text.push_str(&piece),
                other => ups.push(other),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn echo_says_the_prompt_exactly_and_gives_its_result() {
    let mut agent = Agent::ready().await;
    let prompt = "  two  words,\n\tand umlauts äöü ";
    agent.prompt("a", prompt);
    let (_, text, outcome) = agent.ended("a").await;
    assert_eq!(text, prompt);
    assert_eq!((outcome.stop, outcome.text), (Stop::EndTurn, Some(format!("echo: {prompt}"))));
}

#[tokio::test(start_paused = true)]
async fn echo_waits_before_it_speaks_if_told_to() {
    let mut agent = Agent::ready().await;
    let start = Instant::now();
    agent.prompt("a", "__sleep_ms:1500 later on");
    let (_, text, outcome) = agent.ended("a").await;
    assert_eq!(start.elapsed(), Duration::from_millis(1500), "by the clock of the test, which stands still");
    assert_eq!((text.as_str(), outcome.text.as_deref()), ("later on", Some("echo: later on")));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_cancelled_takes_no_other_with_it() {
    let mut agent = Agent::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.cancel("a");
    let (_, text, outcome) = agent.ended("a").await;
    assert_eq!((text.as_str(), outcome.stop, outcome.agent_ends), ("", Stop::Cancelled, false));
    agent.prompt("b", "again");
    assert_eq!(agent.ended("b").await.1, "again");
}

#[tokio::test(start_paused = true)]
async fn a_kill_is_the_end_of_the_turn_and_of_its_agent() {
    let mut agent = Agent::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.cancel("a");
    agent.kill("a");
    let (_, text, outcome) = agent.ended("a").await;
    assert_eq!((text.as_str(), outcome.stop, outcome.agent_ends), ("", Stop::Cancelled, true));
    assert_eq!(agent.end.hear().await, FromAgent::Gone(Gone::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_reaches_a_turn_that_never_stops_talking() {
    let mut agent = Agent::ready().await;
    agent.prompt("a", &"more ".repeat(2_000_000));
    assert!(matches!(agent.hear().await, Up::Said { .. }));
    agent.cancel("a");
    assert_eq!(agent.ended("a").await.2.stop, Stop::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn commands_of_another_run_change_nothing_and_its_steers_are_missed() {
    let mut agent = Agent::ready().await;
    agent.cancel("a");
    agent.kill("a");
    let early = agent.steer("a");
    agent.prompt("a", "__sleep_ms:50 x");
    agent.cancel("b");
    agent.kill("b");
    let strange = agent.steer("b");
    let mine = agent.steer("a");
    let (ups, text, outcome) = agent.ended("a").await;
    assert_eq!((text.as_str(), outcome.stop), ("x", Stop::EndTurn));
    assert_eq!(ups, [early, strange, mine].map(|steer| Up::SteerMissed { steer }));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_the_middle_of_a_turn_is_refused_and_the_turn_goes_on() {
    let mut agent = Agent::ready().await;
    agent.prompt("a", "__sleep_ms:100 done");
    agent.prompt("b", "x");
    let refused = agent.ended("b").await.2;
    assert_eq!(refused.error.map(|error| error.code).as_deref(), Some("agent_busy"));
    assert_eq!(agent.ended("a").await.1, "done");
}

#[tokio::test(start_paused = true)]
async fn a_turn_is_over_its_time_only_while_no_daemon_is_there_to_say_so() {
    let mut agent = Agent::ready().await;
    let limits = TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() };
    agent.prompt_within("a", "__sleep_ms:5000 in time", limits);
    let (_, text, outcome) = agent.ended("a").await;
    assert_eq!((text.as_str(), outcome.stop), ("in time", Stop::EndTurn));

    agent.seat.send_replace(state(false));
    let start = Instant::now();
    agent.prompt_within("b", "__sleep_ms:5000 never", limits);
    let (_, text, outcome) = agent.ended("b").await;
    assert_eq!((text.as_str(), outcome.stop), ("", Stop::Timeout));
    assert_eq!(start.elapsed(), Duration::from_millis(1000));
}

#[tokio::test(start_paused = true)]
async fn what_was_used_before_the_daemon_went_away_counts() {
    let mut agent = Agent::ready().await;
    let limits = TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() };
    let start = Instant::now();
    agent.prompt_within("a", "__sleep_ms:5000 never", limits);
    tokio::time::sleep(Duration::from_millis(1700)).await;
    agent.seat.send_replace(state(false));
    assert_eq!(agent.ended("a").await.2.stop, Stop::Timeout);
    assert_eq!(start.elapsed(), Duration::from_millis(1700));
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_to_rest_says_nothing_of_it_and_waits_to_be_ended() {
    let mut agent = Agent::ready().await;
    agent.leash.rest(Duration::from_secs(1)).await;
    agent.prompt("a", "too late");
    let silence = tokio::time::timeout(Duration::from_secs(3600), agent.end.hear()).await;
    assert!(silence.is_err(), "{silence:?}");
    agent.end.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_can_be_stopped_in_its_turn() {
    let mut agent = Agent::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.end.stop().await;
}

/// The resident memory of this process in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap() * 4096
}

#[tokio::test]
async fn an_idle_agent_with_its_link_costs_less_than_two_kibibytes() {
    const MANY: usize = 10_000;
    let mut ends: Vec<SessionEnd> = Vec::with_capacity(MANY);
    // What is needed once, whatever their number, is there by then.
    let mut first = launch(None, &Arc::default());
    assert!(matches!(first.hear().await, FromAgent::Said(_)));
    let before = resident();
    for _ in 0..MANY {
        ends.push(launch(None, &Arc::default()));
    }
    for end in &mut ends {
        assert!(matches!(end.hear().await, FromAgent::Said(_)));
    }
    let each = (resident() - before) / MANY;
    println!("{each} bytes for each idle agent");
    assert!(each < 2048, "{each} bytes");
    first.stop().await;
    for end in ends {
        end.stop().await;
    }
}
