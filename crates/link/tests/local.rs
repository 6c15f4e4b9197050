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

/// An update that is never merged.
fn model_call() -> AgentUpdate {
    AgentUpdate::Turn { run: run(), update: TurnUpdate::ModelCall }
}

fn terminal() -> AgentUpdate {
    AgentUpdate::TurnEnded { run: run(), outcome: TurnOutcome::of(TurnStopReason::EndTurn) }
}

fn steer(number: u64) -> AgentCommand {
    AgentCommand::Steer { number: EventNumber(number), run: run(), text: String::new() }
}

async fn next_updates(session: &mut SessionEndpoint) -> Vec<NumberedUpdate> {
    match session.next_event().await {
        LocalLinkEvent::Updates(updates) => updates,
        LocalLinkEvent::Gone(gone) => panic!("gone: {gone:?}"),
    }
}

fn numbers<'a>(updates: impl IntoIterator<Item = &'a NumberedUpdate>) -> Vec<u64> {
    updates.into_iter().map(|numbered| numbered.number.0).collect()
}

#[tokio::test]
async fn all_that_waits_is_heard_at_once_and_numbers_go_on() {
    let (agent, mut session) = local_link(UpdateNumber(10));
    for _ in 0..3 {
        agent.send(model_call()).await.unwrap();
    }
    assert_eq!(numbers(&next_updates(&mut session).await), [11, 12, 13]);
    agent.send(model_call()).await.unwrap();
    assert_eq!(numbers(&next_updates(&mut session).await), [14]);
}

#[tokio::test]
async fn words_that_nobody_has_taken_yet_come_as_one() {
    let (agent, mut session) = local_link(UpdateNumber(0));
    for word in ["one ", "two ", "", "three"] {
        agent.send(text(word)).await.unwrap();
    }
    assert_eq!(
        next_updates(&mut session).await,
        [NumberedUpdate { number: UpdateNumber(1), update: text("one two three") }]
    );
}

#[tokio::test]
async fn a_fast_agent_waits_for_a_session_that_does_not_hear() {
    let sent_count = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent_count);
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for _ in 0..10 * LINK_WINDOW {
            agent.send(model_call()).await.expect("the link is open");
            count.fetch_add(1, Ordering::Relaxed);
        }
        AgentExitReason::Stopped
    });
    // On this single thread the agent runs until it has to wait.
    while sent_count.load(Ordering::Relaxed) < LINK_WINDOW {
        tokio::task::yield_now().await;
    }
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(sent_count.load(Ordering::Relaxed), LINK_WINDOW);

    let mut received = Vec::new();
    let gone = loop {
        match session.next_event().await {
            LocalLinkEvent::Updates(updates) => {
                assert!(updates.len() <= LINK_WINDOW);
                received.extend(numbers(&updates));
            }
            LocalLinkEvent::Gone(gone) => break gone,
        }
    };
    assert_eq!(gone, AgentExitReason::Stopped);
    assert!(received.into_iter().eq(1..=10 * LINK_WINDOW as u64));
}

#[tokio::test]
async fn an_endless_stream_of_words_waits_too_and_none_is_lost() {
    let long = "äb".repeat(40 * DELTA_MAX);
    let expected = format!("{long}{long}");
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        for _ in 0..2 {
            agent.send(text(long.clone())).await.expect("the link is open");
        }
        AgentExitReason::Stopped
    });
    let mut joined = String::new();
    while let LocalLinkEvent::Updates(updates) = session.next_event().await {
        for numbered in updates {
            let AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } = numbered.update else {
                panic!("only text was sent")
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
        agent.send(model_call()).await.unwrap();
    }
    agent.send(terminal()).await.unwrap();
    assert_eq!(
        next_updates(&mut session).await.last().map(|numbered| numbered.update.clone()),
        Some(terminal())
    );
}

#[tokio::test]
async fn a_wait_that_was_given_up_loses_nothing() {
    let (mut agent, mut session) = local_link(UpdateNumber(0));
    for number in 1..=50 {
        // Both ends start waiting and are woken, but the wait is dropped before it is polled again.
        tokio::select! {
            biased;
            event = session.next_event() => panic!("got {event:?}"),
            () = async { agent.send(model_call()).await.expect("the session is there") } => {}
        }
        assert_eq!(numbers(&next_updates(&mut session).await), [number]);
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
    for command in [steer(1), steer(2), steer(1), cancel.clone(), cancel.clone()] {
        session.send(command);
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
        agent.send(model_call()).await.unwrap();
    }
    let output = agent.output();
    let sending = tokio::spawn(async move { output.send(model_call()).await });
    tokio::task::yield_now().await;
    drop(session);
    assert_eq!(sending.await.unwrap(), Err(LinkClosed));
}

#[tokio::test]
async fn stop_ends_the_task_and_waits_for_its_end() {
    let (guard, mut task_ended) = oneshot::channel::<()>();
    let session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        let _guards = (agent, guard);
        pending().await
    });
    session.stop().await;
    assert_eq!(task_ended.try_recv(), Err(TryRecvError::Closed), "the task is gone when stop returns");
}

#[tokio::test]
async fn a_session_that_is_dropped_ends_its_agent() {
    let (guard, task_ended) = oneshot::channel::<()>();
    let session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        let _guards = (agent, guard);
        pending().await
    });
    drop(session);
    assert!(task_ended.await.is_err());
}

#[tokio::test]
async fn a_panic_is_heard_after_the_last_words() {
    let mut session = host_agent(UpdateNumber(0), |agent: AgentEndpoint| async move {
        agent.send(text("last words")).await.expect("the link is open");
        panic!("out of luck")
    });
    assert_eq!(
        next_updates(&mut session).await,
        [NumberedUpdate { number: UpdateNumber(1), update: text("last words") }]
    );
    let gone = AgentExitReason::Failed(RunError::new("agent_panicked", "the agent panicked: out of luck"));
    assert_eq!(session.next_event().await, LocalLinkEvent::Gone(gone.clone()));
    assert_eq!(session.next_event().await, LocalLinkEvent::Gone(gone));
}

#[tokio::test]
async fn an_agent_that_ends_early_has_failed() {
    let (agent, mut session) = local_link(UpdateNumber(0));
    let output = agent.output();
    drop(agent);
    assert_eq!(output.send(model_call()).await, Err(LinkClosed));
    assert!(
        matches!(session.next_event().await, LocalLinkEvent::Gone(AgentExitReason::Failed(error)) if error.code == "agent_ended")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_two_threads_every_word_and_command_arrives_once_and_in_order() {
    const MANY: u64 = 20_000;
    let mut session = host_agent(UpdateNumber(0), |mut agent: AgentEndpoint| async move {
        while let Some(AgentCommand::Steer { number, .. }) = agent.next_command().await {
            agent.send(AgentUpdate::SteerTaken { steer: number }).await.expect("the link is open");
            agent.send(model_call()).await.expect("the link is open");
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
        let updates = next_updates(&mut session).await;
        for numbered in updates {
            last += 1;
            assert_eq!(numbered.number, UpdateNumber(last));
            if let AgentUpdate::SteerTaken { steer } = numbered.update {
                taken += 1;
                assert_eq!(steer, EventNumber(taken));
            }
        }
    }
    session.stop().await;
}

/// Holds all text back until another update comes, and then passes it on in capitals. It also replaces the exit
/// reason.
#[derive(Default)]
struct UppercaseFilter(String);

impl AgentOutputFilter for UppercaseFilter {
    fn filter_update(&mut self, update: AgentUpdate, out: &mut Vec<AgentUpdate>) {
        if let AgentUpdate::Turn { update: TurnUpdate::Text { text }, .. } = update {
            self.0.push_str(&text);
            return;
        }
        if !self.0.is_empty() {
            out.push(text(std::mem::take(&mut self.0).to_uppercase()));
        }
        out.push(match update {
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
        Some(Box::<UppercaseFilter>::default()),
        |agent: AgentEndpoint| async move {
            for update in [text("a"), text("b"), terminal(), text("c")] {
                agent.send(update).await.expect("the link is open");
            }
            AgentExitReason::Stopped
        },
    );
    let mut received = Vec::new();
    let gone = loop {
        match session.next_event().await {
            LocalLinkEvent::Updates(updates) => received.extend(updates),
            LocalLinkEvent::Gone(gone) => break gone,
        }
    };
    let expected = [text("AB"), terminal(), text("C")];
    assert_eq!(received.iter().map(|numbered| numbered.update.clone()).collect::<Vec<_>>(), expected);
    assert_eq!(numbers(&received), [5, 6, 7]);
    assert_eq!(gone, AgentExitReason::Failed(RunError::new("filtered", "")));
}

#[tokio::test]
async fn what_a_filter_lets_out_is_cut_and_taken_even_beyond_the_window() {
    let (sent_all, mut all_sent) = oneshot::channel();
    let mut session = host_agent_with_filter(
        UpdateNumber(0),
        Some(Box::<UppercaseFilter>::default()),
        |agent: AgentEndpoint| async move {
            for _ in 0..LINK_WINDOW - 1 {
                agent.send(model_call()).await.expect("the link is open");
            }
            agent.send(text("x".repeat(3 * DELTA_MAX))).await.expect("the link is open");
            agent.send(model_call()).await.expect("the link is open");
            sent_all.send(()).expect("the test waits");
            agent.send(model_call()).await.expect("the link is open");
            AgentExitReason::Stopped
        },
    );
    while all_sent.try_recv() == Err(TryRecvError::Empty) {
        tokio::task::yield_now().await;
    }
    let updates = next_updates(&mut session).await;
    assert_eq!(updates.len(), LINK_WINDOW + 3);
    let long = updates.iter().filter(|numbered| numbered.update == text("X".repeat(DELTA_MAX))).count();
    assert_eq!(long, 3);
    assert_eq!(numbers(&next_updates(&mut session).await), [LINK_WINDOW as u64 + 4]);
}
