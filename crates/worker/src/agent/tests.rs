//! Promises of the task that owns an agent, tested with `echo`, which needs no process. The clock is paused in these
//! tests and advances when every task waits for it.

use qd_link::{LocalLinkEvent, SessionEndpoint, host_agent};
use qd_protocol::frame::v1;
use qd_protocol::link::{TurnUpdate, UpdateNumber};
use qd_protocol::{EventNumber, SessionId, WorkerId};

use super::*;

/// The session's side of one agent.
struct AgentHarness {
    link_end: SessionEndpoint,
    endpoint_status: watch::Sender<WorkerEndpointStatus>,
    control: Arc<AgentControl>,
    /// The number of the last command.
    number: u64,
    /// Updates received but not yet returned, in reverse order.
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
    let (presence, since) = (v1::AgentPresence::Starting, Instant::now());
    WorkerEndpointStatus {
        attached,
        attachment_changed_at: since,
        presence,
        run: None,
        limits: None,
        has_unacked: false,
    }
}

fn run_id(name: &str) -> RunId {
    RunId::parse(name).unwrap()
}

fn start_echo_agent(
    endpoint_status: Option<watch::Receiver<WorkerEndpointStatus>>,
    control: &Arc<AgentControl>,
) -> SessionEndpoint {
    let context = AgentContext { agent_processes: None, endpoint_status, control: Arc::clone(control) };
    let launcher = AgentLauncher::from_spec(&spec()).unwrap();
    host_agent(UpdateNumber(77), |end| run_agent(launcher, Box::new(spec()), context, end))
}

impl AgentHarness {
    async fn ready() -> Self {
        let (endpoint_status, control) = (watch::Sender::new(make_endpoint_status(true)), Arc::default());
        let link_end = start_echo_agent(Some(endpoint_status.subscribe()), &control);
        let mut agent = Self { link_end, endpoint_status, control, number: 0, unread: Vec::new() };
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
            mode: None,
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
                LocalLinkEvent::Updates(updates) => {
                    self.unread.extend(updates.into_iter().rev().map(|numbered| numbered.update))
                }
                LocalLinkEvent::Gone(gone) => panic!("the agent is gone: {gone:?}"),
            }
        }
        self.unread.pop().unwrap()
    }

    /// Collects all updates until the terminal of this run. Text is joined into the second value.
    async fn wait_for_end(&mut self, name: &str) -> (Vec<AgentUpdate>, String, TurnOutcome) {
        let (mut updates, mut text) = (Vec::new(), String::new());
        loop {
            match self.next_update().await {
                AgentUpdate::TurnEnded { run: ended, outcome } if ended == run_id(name) => {
                    return (updates, text, outcome);
                }
                AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } => text.push_str(&piece),
                other => updates.push(other),
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
async fn a_cancelled_turn_does_not_affect_the_next_one() {
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
    let (updates, text, outcome) = agent.wait_for_end("a").await;
    assert_eq!((text.as_str(), outcome.stop), ("x", TurnStopReason::EndTurn));
    assert_eq!(updates, [early, strange, mine].map(|steer| AgentUpdate::SteerMissed { steer }));
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
async fn the_worker_enforces_a_timeout_only_while_no_daemon_is_attached() {
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
async fn usage_before_the_daemon_went_away_counts() {
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
async fn a_stopped_idle_agent_reports_nothing_and_waits_to_be_dropped() {
    let mut agent = AgentHarness::ready().await;
    agent.control.request_idle_stop(Duration::from_secs(1)).await;
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
    // Warm up, so that one-time allocations do not count.
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
