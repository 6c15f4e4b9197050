//! Promises of a local link, seen from its two ends.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use qd_link::{
    AgentEndpoint, AgentOutputFilter, LinkClosed, LocalLinkEvent, NumberedUpdate, SessionEndpoint,
    host_agent, host_agent_with_filter, local_link,
};
use qd_protocol::event::RunError;
use qd_protocol::limits::{DELTA_MAX, LINK_WINDOW};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, TurnOutcome, TurnStopReason, TurnUpdate, UpdateNumber,
};
use qd_protocol::{EventNumber, RunId};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

fn run() -> RunId {
    RunId::parse("run_1").expect("a good id")
}

fn text(text: impl Into<String>) -> AgentUpdate {
    AgentUpdate::Turn { run: run(), update: TurnUpdate::Text { text: text.into() } }
}

/// Something that is never merged.
fn turn() -> AgentUpdate {
    AgentUpdate::Turn { run: run(), update: TurnUpdate::ModelCall }
}

fn terminal() -> AgentUpdate {
    AgentUpdate::Terminal { run: run(), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
}

fn steer(number: u64) -> AgentCommand {
    AgentCommand::Steer { number: EventNumber(number), run: run(), text: String::new() }
}

async fn said(session: &mut SessionEndpoint) -> Vec<NumberedUpdate> {
    match session.next_event().await {
        LocalLinkEvent::Updates(said) => said,
        LocalLinkEvent::Gone(gone) => panic!("gone: {gone:?}"),
    }
}

fn numbers<'a>(things: impl IntoIterator<Item = &'a NumberedUpdate>) -> Vec<u64> {
    things.into_iter().map(|thing| thing.number.0).collect()
}

#[tokio::test]
async fn all_that_waits_is_heard_at_once_and_numbers_go_on() {
    let (agent, mut session) = local_link(UpdateNumber(10));
    for _ in 0..3 {
        agent.send(turn()).await.unwrap();
    }
    assert_eq!(numbers(&said(&mut session).await), [11, 12, 13]);
    agent.send(turn()).await.unwrap();
    assert_eq!(numbers(&said(&mut session).await), [14]);
}

#[tokio::test]
async fn words_that_nobody_has_taken_yet_come_as_one() {
    let (agent, mut session) = local_link(UpdateNumber(0));
    for word in ["one ", "two ", "", "three"] {
        agent.send(text(word)).await.unwrap();
    }
    assert_eq!(
        said(&mut session).await,
        [NumberedUpdate { number: UpdateNumber(1), update: text("one two three") }]
    );
}

#[tokio::test]
async fn a_fast_agent_waits_for_a_session_that_does_not_hear() {
    let spoken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&spoken);
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for _ in 0..10 * LINK_WINDOW {
            agent.send(turn()).await.expect("the session hears");
            count.fetch_add(1, Ordering::Relaxed);
        }
        AgentExitReason::Stopped
    });
    // On this one thread the agent runs until it can only wait.
    while spoken.load(Ordering::Relaxed) < LINK_WINDOW {
        tokio::task::yield_now().await;
    }
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(spoken.load(Ordering::Relaxed), LINK_WINDOW);

    let mut heard = Vec::new();
    let gone = loop {
        match session.next_event().await {
            LocalLinkEvent::Updates(said) => {
                assert!(said.len() <= LINK_WINDOW);
                heard.extend(numbers(&said));
            }
            LocalLinkEvent::Gone(gone) => break gone,
        }
    };
    assert_eq!(gone, AgentExitReason::Stopped);
    assert!(heard.into_iter().eq(1..=10 * LINK_WINDOW as u64));
}

#[tokio::test]
async fn an_endless_stream_of_words_waits_too_and_none_is_lost() {
    let long = "äb".repeat(40 * DELTA_MAX);
    let expected = format!("{long}{long}");
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for _ in 0..2 {
            agent.send(text(long.clone())).await.expect("the session hears");
        }
        AgentExitReason::Stopped
    });
    let mut joined = String::new();
    while let LocalLinkEvent::Updates(said) = session.next_event().await {
        for thing in said {
            let AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } = thing.update else {
                panic!("only text was said")
            };
            assert!(text.len() <= DELTA_MAX);
            joined.push_str(&text);
        }
    }
    assert!(joined == expected);
}

#[tokio::test]
async fn a_terminal_does_not_wait_behind_a_full_window() {
    let (agent, mut session) = local_link(UpdateNumber(0));
    for _ in 0..LINK_WINDOW {
        agent.send(turn()).await.unwrap();
    }
    agent.send(terminal()).await.unwrap();
    assert_eq!(said(&mut session).await.last().map(|thing| thing.update.clone()), Some(terminal()));
}

#[tokio::test]
async fn a_wait_that_was_given_up_loses_nothing() {
    let (mut agent, mut session) = local_link(UpdateNumber(0));
    for number in 1..=50 {
        // Both ends begin to wait and are woken, but the wait is dropped before it is looked at again.
        tokio::select! {
            biased;
            heard = session.next_event() => panic!("heard {heard:?}"),
            () = async { agent.send(turn()).await.expect("the session is there") } => {}
        }
        assert_eq!(numbers(&said(&mut session).await), [number]);
        tokio::select! {
            biased;
            command = agent.next_command() => panic!("got {command:?}"),
            () = async { session.send(steer(number)) } => {}
        }
        assert_eq!(agent.next_command().await, Some(steer(number)));
    }
}

#[tokio::test]
async fn a_cancel_overtakes_and_a_repeat_is_dropped() {
    let (mut agent, session) = local_link(UpdateNumber(0));
    let cancel = AgentCommand::Cancel { number: EventNumber(3), run: run() };
    for down in [steer(1), steer(2), steer(1), cancel.clone(), cancel.clone()] {
        session.send(down);
    }
    assert_eq!(agent.next_command().await, Some(cancel.clone()));
    session.send(cancel);
    assert_eq!(agent.next_command().await, Some(steer(1)));
    assert_eq!(agent.next_command().await, Some(steer(2)));
    drop(session);
    assert_eq!(agent.next_command().await, None);
}

#[tokio::test]
async fn an_agent_whose_session_let_go_is_told_even_while_it_waits() {
    let (agent, session) = local_link(UpdateNumber(0));
    for _ in 0..LINK_WINDOW {
        agent.send(turn()).await.unwrap();
    }
    let voice = agent.output();
    let waiting = tokio::spawn(async move { voice.send(turn()).await });
    tokio::task::yield_now().await;
    drop(session);
    assert_eq!(waiting.await.unwrap(), Err(LinkClosed));
}

#[tokio::test]
async fn stop_ends_the_task_and_waits_for_its_end() {
    let (held, mut seen) = oneshot::channel::<()>();
    let session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        let _held = (agent, held);
        pending().await
    });
    session.stop().await;
    assert_eq!(seen.try_recv(), Err(TryRecvError::Closed), "what the task held is gone when stop returns");
}

#[tokio::test]
async fn a_session_that_is_dropped_ends_its_agent() {
    let (held, seen) = oneshot::channel::<()>();
    let session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        let _held = (agent, held);
        pending().await
    });
    drop(session);
    assert!(seen.await.is_err());
}

#[tokio::test]
async fn a_panic_is_heard_after_the_last_words() {
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        agent.send(text("last words")).await.expect("the session hears");
        panic!("out of luck")
    });
    assert_eq!(
        said(&mut session).await,
        [NumberedUpdate { number: UpdateNumber(1), update: text("last words") }]
    );
    let gone = AgentExitReason::Failed(RunError::new("agent_panicked", "the agent panicked: out of luck"));
    assert_eq!(session.next_event().await, LocalLinkEvent::Gone(gone.clone()));
    assert_eq!(session.next_event().await, LocalLinkEvent::Gone(gone));
}

#[tokio::test]
async fn an_agent_that_ends_early_has_failed() {
    let (agent, mut session) = local_link(UpdateNumber(0));
    let voice = agent.output();
    drop(agent);
    assert_eq!(voice.send(turn()).await, Err(LinkClosed));
    assert!(
        matches!(session.next_event().await, LocalLinkEvent::Gone(AgentExitReason::Failed(error)) if error.code == "agent_ended")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_two_threads_every_word_and_command_arrives_once_and_in_order() {
    const MANY: u64 = 20_000;
    let mut session = host_agent(UpdateNumber(0), |mut agent: AgentEndpoint| async move {
        while let Some(AgentCommand::Steer { number, .. }) = agent.next_command().await {
            agent.send(AgentUpdate::SteerTaken { steer: number }).await.expect("the session hears");
            agent.send(turn()).await.expect("the session hears");
        }
        AgentExitReason::Stopped
    });
    let (mut sent, mut taken, mut last) = (0, 0, 0);
    while taken < MANY {
        while sent < MANY && sent < taken + 100 {
            sent += 1;
            session.send(steer(sent));
            session.send(steer(sent));
        }
        let things = said(&mut session).await;
        for thing in things {
            last += 1;
            assert_eq!(thing.number, UpdateNumber(last));
            if let AgentUpdate::SteerTaken { steer } = thing.update {
                taken += 1;
                assert_eq!(steer, EventNumber(taken));
            }
        }
    }
    session.stop().await;
}

/// Holds all text back until something else is said, and says it in capitals then. It lets nobody go without a reason.
#[derive(Default)]
struct UppercaseExecutor(String);

impl AgentOutputFilter for UppercaseExecutor {
    fn filter_update(&mut self, up: AgentUpdate, out: &mut Vec<AgentUpdate>) {
        if let AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } = up {
            self.0.push_str(&text);
            return;
        }
        if !self.0.is_empty() {
            out.push(text(std::mem::take(&mut self.0).to_uppercase()));
        }
        out.push(match up {
            AgentUpdate::Gone(AgentExitReason::Stopped) => {
                AgentUpdate::Gone(AgentExitReason::Failed(RunError::new("filtered", "")))
            }
            other => other,
        });
    }
}

#[tokio::test]
async fn what_a_filter_held_back_is_heard_in_its_place_and_at_the_latest_before_the_end() {
    let mut session = host_agent_with_filter(
        UpdateNumber(4),
        Some(Box::<UppercaseExecutor>::default()),
        |agent: AgentEndpoint| async move {
            for up in [text("a"), text("b"), terminal(), text("c")] {
                agent.send(up).await.expect("the session hears");
            }
            AgentExitReason::Stopped
        },
    );
    let mut heard = Vec::new();
    let gone = loop {
        match session.next_event().await {
            LocalLinkEvent::Updates(said) => heard.extend(said),
            LocalLinkEvent::Gone(gone) => break gone,
        }
    };
    let expected = [text("AB"), terminal(), text("C")];
    assert_eq!(heard.iter().map(|thing| thing.update.clone()).collect::<Vec<_>>(), expected);
    assert_eq!(numbers(&heard), [5, 6, 7]);
    assert_eq!(gone, AgentExitReason::Failed(RunError::new("filtered", "")));
}

#[tokio::test]
async fn what_a_filter_lets_out_is_cut_and_taken_even_beyond_the_window() {
    let (said_all, mut all_said) = oneshot::channel();
    let mut session = host_agent_with_filter(
        UpdateNumber(0),
        Some(Box::<UppercaseExecutor>::default()),
        |agent: AgentEndpoint| async move {
            for _ in 0..LINK_WINDOW - 1 {
                agent.send(turn()).await.expect("the session hears");
            }
            agent.send(text("x".repeat(3 * DELTA_MAX))).await.expect("the session hears");
            agent.send(turn()).await.expect("the session hears");
            said_all.send(()).expect("the test waits");
            agent.send(turn()).await.expect("the session hears");
            AgentExitReason::Stopped
        },
    );
    while all_said.try_recv() == Err(TryRecvError::Empty) {
        tokio::task::yield_now().await;
    }
    let things = said(&mut session).await;
    assert_eq!(things.len(), LINK_WINDOW + 3);
    let long = things.iter().filter(|thing| thing.update == text("X".repeat(DELTA_MAX))).count();
    assert_eq!(long, 3);
    assert_eq!(numbers(&said(&mut session).await), [LINK_WINDOW as u64 + 4]);
}
