//! Promises of the task that owns an agent, shown with `echo`, which needs no process. Time stands still in these
//! tests: it moves on when everybody waits for it.

use qd_link::{LocalLinkEvent, SessionEndpoint, host_agent};
use qd_protocol::frame::v1;
use qd_protocol::link::{TurnUpdate, UpdateNumber};
use qd_protocol::{EventNumber, SessionId, WorkerId};

use super::*;

/// A session's side of one agent.
struct AgentHarness {
    link_end: SessionEndpoint,
    endpoint_status: watch::Sender<WorkerEndpointStatus>,
    control: Arc<AgentControl>,
    /// The last number used downwards.
    number: u64,
    /// Heard and not looked at yet, in reverse.
    unread: Vec<AgentUpdate>,
}

fn spec() -> AgentSpec {
    AgentSpec {
        agent_session_id: Some("conversation".to_owned()),
        mark: "m".to_owned(),
        ..AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[7; 8]), "echo", "/")
    }
}

fn make_endpoint_status(attached: bool) -> WorkerEndpointStatus {
    let (seat, since) = (v1::AgentPresence::Starting, Instant::now());
    WorkerEndpointStatus {
        attached,
        attachment_changed_at: since,
        presence: seat,
        run: None,
        limits: None,
        has_unacked: false,
    }
}

fn run_id(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

fn start_echo_agent(
    seat: Option<watch::Receiver<WorkerEndpointStatus>>,
    leash: &Arc<AgentControl>,
) -> SessionEndpoint {
    let around = AgentContext { agent_processes: None, endpoint_status: seat, control: Arc::clone(leash) };
    host_agent(UpdateNumber(77), |end| run_agent(AgentKind::Echo, Box::new(spec()), around, end))
}

impl AgentHarness {
    async fn ready() -> Self {
        let (seat, leash) = (watch::Sender::new(make_endpoint_status(true)), Arc::default());
        let end = start_echo_agent(Some(seat.subscribe()), &leash);
        let mut agent =
            Self { link_end: end, endpoint_status: seat, control: leash, number: 0, unread: Vec::new() };
        let id = Some("conversation".to_owned());
        assert_eq!(agent.next_update().await, AgentUpdate::Ready { agent_session_id: id, steers: false });
        agent
    }

    fn next_number(&mut self) -> EventNumber {
        self.number += 1;
        EventNumber(self.number)
    }

    fn prompt(&mut self, name: &str, prompt: &str) {
        self.prompt_within(name, prompt, TurnLimits::default());
    }

    fn prompt_within(&mut self, name: &str, prompt: &str, limits: TurnLimits) {
        let number = self.next_number();
        let (files, messages) = (Vec::new(), Vec::new());
        let prompt = prompt.to_owned();
        self.link_end.send(AgentCommand::Prompt {
            number,
            run: run_id(name),
            prompt,
            files,
            messages,
            limits,
        });
    }

    fn cancel(&mut self, name: &str) {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Cancel { number, run: run_id(name) });
    }

    fn kill(&mut self, name: &str) {
        self.link_end.send(AgentCommand::Kill { number: EventNumber(self.number), run: run_id(name) });
    }

    fn steer(&mut self, name: &str) -> EventNumber {
        let number = self.next_number();
        self.link_end.send(AgentCommand::Steer { number, run: run_id(name), text: "faster".to_owned() });
        number
    }

    async fn next_update(&mut self) -> AgentUpdate {
        while self.unread.is_empty() {
            match self.link_end.next_event().await {
                LocalLinkEvent::Updates(said) => {
                    self.unread.extend(said.into_iter().rev().map(|thing| thing.update))
                }
                LocalLinkEvent::Gone(gone) => panic!("it is gone: {gone:?}"),
            }
        }
        self.unread.pop().unwrap()
    }

    /// Everything until the terminal of this run, and the text of it.
    async fn wait_for_end(&mut self, name: &str) -> (Vec<AgentUpdate>, String, TurnOutcome) {
        let (mut ups, mut text) = (Vec::new(), String::new());
        loop {
            match self.next_update().await {
                AgentUpdate::Terminal { run: ended, outcome } if ended == run_id(name) => {
                    return (ups, text, outcome);
                }
                AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } => text.push_str(&piece),
                other => ups.push(other),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn echo_says_the_prompt_exactly_and_gives_its_result() {
    let mut agent = AgentHarness::ready().await;
    let prompt = "  two  words,\n\tand umlauts äöü ";
    agent.prompt("a", prompt);
    let (_, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!(text, prompt);
    assert_eq!((outcome.stop, outcome.text), (TurnStopReason::EndTurn, Some(format!("echo: {prompt}"))));
}

#[tokio::test(start_paused = true)]
async fn echo_waits_before_it_speaks_if_told_to() {
    let mut agent = AgentHarness::ready().await;
    let start = Instant::now();
    agent.prompt("a", "__sleep_ms:1500 later on");
    let (_, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!(start.elapsed(), Duration::from_millis(1500), "by the clock of the test, which stands still");
    assert_eq!((text.as_str(), outcome.text.as_deref()), ("later on", Some("echo: later on")));
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_was_cancelled_takes_no_other_with_it() {
    let mut agent = AgentHarness::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.cancel("a");
    let (_, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!((text.as_str(), outcome.stop, outcome.agent_ends), ("", TurnStopReason::Cancelled, false));
    agent.prompt("b", "again");
    assert_eq!(agent.wait_for_end("b").await.1, "again");
}

#[tokio::test(start_paused = true)]
async fn a_kill_is_the_end_of_the_turn_and_of_its_agent() {
    let mut agent = AgentHarness::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.cancel("a");
    agent.kill("a");
    let (_, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!((text.as_str(), outcome.stop, outcome.agent_ends), ("", TurnStopReason::Cancelled, true));
    assert_eq!(agent.link_end.next_event().await, LocalLinkEvent::Gone(AgentExitReason::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_cancel_reaches_a_turn_that_never_stops_talking() {
    let mut agent = AgentHarness::ready().await;
    agent.prompt("a", &"more ".repeat(2_000_000));
    assert!(matches!(agent.next_update().await, AgentUpdate::Turn { .. }));
    agent.cancel("a");
    assert_eq!(agent.wait_for_end("a").await.2.stop, TurnStopReason::Cancelled);
}

#[tokio::test(start_paused = true)]
async fn commands_of_another_run_change_nothing_and_its_steers_are_missed() {
    let mut agent = AgentHarness::ready().await;
    agent.cancel("a");
    agent.kill("a");
    let early = agent.steer("a");
    agent.prompt("a", "__sleep_ms:50 x");
    agent.cancel("b");
    agent.kill("b");
    let strange = agent.steer("b");
    let mine = agent.steer("a");
    let (ups, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!((text.as_str(), outcome.stop), ("x", TurnStopReason::EndTurn));
    assert_eq!(ups, [early, strange, mine].map(|steer| AgentUpdate::SteerMissed { steer }));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_in_the_middle_of_a_turn_is_refused_and_the_turn_goes_on() {
    let mut agent = AgentHarness::ready().await;
    agent.prompt("a", "__sleep_ms:100 done");
    agent.prompt("b", "x");
    let refused = agent.wait_for_end("b").await.2;
    assert_eq!(refused.error.map(|error| error.code).as_deref(), Some("agent_busy"));
    assert_eq!(agent.wait_for_end("a").await.1, "done");
}

#[tokio::test(start_paused = true)]
async fn a_turn_is_over_its_time_only_while_no_daemon_is_there_to_say_so() {
    let mut agent = AgentHarness::ready().await;
    let limits = TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() };
    agent.prompt_within("a", "__sleep_ms:5000 in time", limits);
    let (_, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!((text.as_str(), outcome.stop), ("in time", TurnStopReason::EndTurn));

    agent.endpoint_status.send_replace(make_endpoint_status(false));
    let start = Instant::now();
    agent.prompt_within("b", "__sleep_ms:5000 never", limits);
    let (_, text, outcome) = agent.wait_for_end("b").await;
    assert_eq!((text.as_str(), outcome.stop), ("", TurnStopReason::Timeout));
    assert_eq!(start.elapsed(), Duration::from_millis(1000));
}

#[tokio::test(start_paused = true)]
async fn what_was_used_before_the_daemon_went_away_counts() {
    let mut agent = AgentHarness::ready().await;
    let limits = TurnLimits { timeout_ms: Some(1000), ..TurnLimits::default() };
    let start = Instant::now();
    agent.prompt_within("a", "__sleep_ms:5000 never", limits);
    tokio::time::sleep(Duration::from_millis(1700)).await;
    agent.endpoint_status.send_replace(make_endpoint_status(false));
    assert_eq!(agent.wait_for_end("a").await.2.stop, TurnStopReason::Timeout);
    assert_eq!(start.elapsed(), Duration::from_millis(1700));
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_is_to_rest_says_nothing_of_it_and_waits_to_be_ended() {
    let mut agent = AgentHarness::ready().await;
    agent.control.request_rest(Duration::from_secs(1)).await;
    agent.prompt("a", "too late");
    let silence = tokio::time::timeout(Duration::from_secs(3600), agent.link_end.next_event()).await;
    assert!(silence.is_err(), "{silence:?}");
    agent.link_end.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_agent_can_be_stopped_in_its_turn() {
    let mut agent = AgentHarness::ready().await;
    agent.prompt("a", "__sleep_ms:999999999 never");
    agent.link_end.stop().await;
}

/// The resident memory of this process in bytes.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap() * 4096
}

#[tokio::test]
async fn an_idle_agent_with_its_link_costs_less_than_two_kibibytes() {
    const MANY: usize = 10_000;
    let mut ends: Vec<SessionEndpoint> = Vec::with_capacity(MANY);
    // What is needed once, whatever their number, is there by then.
    let mut first = start_echo_agent(None, &Arc::default());
    assert!(matches!(first.next_event().await, LocalLinkEvent::Updates(_)));
    let before = resident_bytes();
    for _ in 0..MANY {
        ends.push(start_echo_agent(None, &Arc::default()));
    }
    for end in &mut ends {
        assert!(matches!(end.next_event().await, LocalLinkEvent::Updates(_)));
    }
    let each = (resident_bytes() - before) / MANY;
    println!("{each} bytes for each idle agent");
    assert!(each < 2048, "{each} bytes");
    first.stop().await;
    for end in ends {
        end.stop().await;
    }
}
