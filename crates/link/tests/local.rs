//! Promises of a local link, seen from its two ends.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use qd_link::{AgentEnd, Closed, Filter, FromAgent, Numbered, SessionEnd, host, host_with, local};
use qd_protocol::event::RunError;
use qd_protocol::limits::{DELTA_MAX, LINK_WINDOW};
use qd_protocol::link::{Down, Gone, Outcome, Said, Stop, Up, UpNumber};
use qd_protocol::{Number, RunId};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

fn run() -> RunId {
    RunId::parse("run_1").expect("a good id")
}

fn text(text: impl Into<String>) -> Up {
    Up::Said { run: run(), what: Said::Text { text: text.into() } }
}

/// Something that is never merged.
fn turn() -> Up {
    Up::Said { run: run(), what: Said::Turn }
}

fn terminal() -> Up {
    Up::Terminal { run: run(), outcome: Outcome::of(Stop::EndTurn) }
}

fn steer(number: u64) -> Down {
    Down::Steer { number: Number(number), run: run(), text: String::new() }
}

async fn said(session: &mut SessionEnd) -> Vec<Numbered> {
    match session.hear().await {
        FromAgent::Said(said) => said,
        FromAgent::Gone(gone) => panic!("gone: {gone:?}"),
    }
}

fn numbers<'a>(things: impl IntoIterator<Item = &'a Numbered>) -> Vec<u64> {
    things.into_iter().map(|thing| thing.number.0).collect()
}

#[tokio::test]
async fn all_that_waits_is_heard_at_once_and_numbers_go_on() {
    let (agent, mut session) = local(UpNumber(10));
    for _ in 0..3 {
        agent.say(turn()).await.unwrap();
    }
    assert_eq!(numbers(&said(&mut session).await), [11, 12, 13]);
    agent.say(turn()).await.unwrap();
    assert_eq!(numbers(&said(&mut session).await), [14]);
}

#[tokio::test]
async fn words_that_nobody_has_taken_yet_come_as_one() {
    let (agent, mut session) = local(UpNumber(0));
    for word in ["one ", "two ", "", "three"] {
        agent.say(text(word)).await.unwrap();
    }
    assert_eq!(said(&mut session).await, [Numbered { number: UpNumber(1), up: text("one two three") }]);
}

#[tokio::test]
async fn a_fast_agent_waits_for_a_session_that_does_not_hear() {
    let spoken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&spoken);
    let mut session = host(UpNumber(0), |agent: AgentEnd| async move {
        for _ in 0..10 * LINK_WINDOW {
            agent.say(turn()).await.expect("the session hears");
            count.fetch_add(1, Ordering::Relaxed);
        }
        Gone::Stopped
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
        match session.hear().await {
            FromAgent::Said(said) => {
                assert!(said.len() <= LINK_WINDOW);
                heard.extend(numbers(&said));
            }
            FromAgent::Gone(gone) => break gone,
        }
    };
    assert_eq!(gone, Gone::Stopped);
    assert!(heard.into_iter().eq(1..=10 * LINK_WINDOW as u64));
}

#[tokio::test]
async fn an_endless_stream_of_words_waits_too_and_none_is_lost() {
    let long = "äb".repeat(40 * DELTA_MAX);
    let expected = format!("{long}{long}");
    let mut session = host(UpNumber(0), |agent: AgentEnd| async move {
        for _ in 0..2 {
            agent.say(text(long.clone())).await.expect("the session hears");
        }
        Gone::Stopped
    });
    let mut joined = String::new();
    while let FromAgent::Said(said) = session.hear().await {
        for thing in said {
            let Up::Said { what: Said::Text { text }, .. } = thing.up else { panic!("only text was said") };
            assert!(text.len() <= DELTA_MAX);
            joined.push_str(&text);
        }
    }
    assert!(joined == expected);
}

#[tokio::test]
async fn a_terminal_does_not_wait_behind_a_full_window() {
    let (agent, mut session) = local(UpNumber(0));
    for _ in 0..LINK_WINDOW {
        agent.say(turn()).await.unwrap();
    }
    agent.say(terminal()).await.unwrap();
    assert_eq!(said(&mut session).await.last().map(|thing| thing.up.clone()), Some(terminal()));
}

#[tokio::test]
async fn a_wait_that_was_given_up_loses_nothing() {
    let (mut agent, mut session) = local(UpNumber(0));
    for number in 1..=50 {
        // Both ends begin to wait and are woken, but the wait is dropped before it is looked at again.
        tokio::select! {
            biased;
            heard = session.hear() => panic!("heard {heard:?}"),
            () = async { agent.say(turn()).await.expect("the session is there") } => {}
        }
        assert_eq!(numbers(&said(&mut session).await), [number]);
        tokio::select! {
            biased;
            command = agent.command() => panic!("got {command:?}"),
            () = async { session.send(steer(number)) } => {}
        }
        assert_eq!(agent.command().await, Some(steer(number)));
    }
}

#[tokio::test]
async fn a_cancel_overtakes_and_a_repeat_is_dropped() {
    let (mut agent, session) = local(UpNumber(0));
    let cancel = Down::Cancel { number: Number(3), run: run() };
    for down in [steer(1), steer(2), steer(1), cancel.clone(), cancel.clone()] {
        session.send(down);
    }
    assert_eq!(agent.command().await, Some(cancel.clone()));
    session.send(cancel);
    assert_eq!(agent.command().await, Some(steer(1)));
    assert_eq!(agent.command().await, Some(steer(2)));
    drop(session);
    assert_eq!(agent.command().await, None);
}

#[tokio::test]
async fn an_agent_whose_session_let_go_is_told_even_while_it_waits() {
    let (agent, session) = local(UpNumber(0));
    for _ in 0..LINK_WINDOW {
        agent.say(turn()).await.unwrap();
    }
    let voice = agent.voice();
    let waiting = tokio::spawn(async move { voice.say(turn()).await });
    tokio::task::yield_now().await;
    drop(session);
    assert_eq!(waiting.await.unwrap(), Err(Closed));
}

#[tokio::test]
async fn stop_ends_the_task_and_waits_for_its_end() {
    let (held, mut seen) = oneshot::channel::<()>();
    let session = host(UpNumber(0), |agent: AgentEnd| async move {
        let _held = (agent, held);
        pending().await
    });
    session.stop().await;
    assert_eq!(seen.try_recv(), Err(TryRecvError::Closed), "what the task held is gone when stop returns");
}

#[tokio::test]
async fn a_session_that_is_dropped_ends_its_agent() {
    let (held, seen) = oneshot::channel::<()>();
    let session = host(UpNumber(0), |agent: AgentEnd| async move {
        let _held = (agent, held);
        pending().await
    });
    drop(session);
    assert!(seen.await.is_err());
}

#[tokio::test]
async fn a_panic_is_heard_after_the_last_words() {
    let mut session = host(UpNumber(0), |agent: AgentEnd| async move {
        agent.say(text("last words")).await.expect("the session hears");
        panic!("out of luck")
    });
    assert_eq!(said(&mut session).await, [Numbered { number: UpNumber(1), up: text("last words") }]);
    let gone = Gone::Failed(RunError::new("agent_panicked", "the agent panicked: out of luck"));
    assert_eq!(session.hear().await, FromAgent::Gone(gone.clone()));
    assert_eq!(session.hear().await, FromAgent::Gone(gone));
}

#[tokio::test]
async fn an_agent_that_ends_early_has_failed() {
    let (agent, mut session) = local(UpNumber(0));
    let voice = agent.voice();
    drop(agent);
    assert_eq!(voice.say(turn()).await, Err(Closed));
    assert!(
        matches!(session.hear().await, FromAgent::Gone(Gone::Failed(error)) if error.code == "agent_ended")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_two_threads_every_word_and_command_arrives_once_and_in_order() {
    const MANY: u64 = 20_000;
    let mut session = host(UpNumber(0), |mut agent: AgentEnd| async move {
        while let Some(Down::Steer { number, .. }) = agent.command().await {
            agent.say(Up::SteerTaken { steer: number }).await.expect("the session hears");
            agent.say(turn()).await.expect("the session hears");
        }
        Gone::Stopped
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
            assert_eq!(thing.number, UpNumber(last));
            if let Up::SteerTaken { steer } = thing.up {
                taken += 1;
                assert_eq!(steer, Number(taken));
            }
        }
    }
    session.stop().await;
}

/// Holds all text back until something else is said, and says it in capitals then. It lets nobody go without a reason.
#[derive(Default)]
struct Capitals(String);

impl Filter for Capitals {
    fn pass(&mut self, up: Up, out: &mut Vec<Up>) {
        if let Up::Said { what: Said::Text { text }, .. } = up {
            self.0.push_str(&text);
            return;
        }
        if !self.0.is_empty() {
            out.push(text(std::mem::take(&mut self.0).to_uppercase()));
        }
        out.push(match up {
            Up::Gone(Gone::Stopped) => Up::Gone(Gone::Failed(RunError::new("filtered", ""))),
            other => other,
        });
    }
}

#[tokio::test]
async fn what_a_filter_held_back_is_heard_in_its_place_and_at_the_latest_before_the_end() {
    let mut session =
        host_with(UpNumber(4), Some(Box::<Capitals>::default()), |agent: AgentEnd| async move {
            for up in [text("a"), text("b"), terminal(), text("c")] {
                agent.say(up).await.expect("the session hears");
            }
            Gone::Stopped
        });
    let mut heard = Vec::new();
    let gone = loop {
        match session.hear().await {
            FromAgent::Said(said) => heard.extend(said),
            FromAgent::Gone(gone) => break gone,
        }
    };
    let expected = [text("AB"), terminal(), text("C")];
    assert_eq!(heard.iter().map(|thing| thing.up.clone()).collect::<Vec<_>>(), expected);
    assert_eq!(numbers(&heard), [5, 6, 7]);
    assert_eq!(gone, Gone::Failed(RunError::new("filtered", "")));
}

#[tokio::test]
async fn what_a_filter_lets_out_is_cut_and_taken_even_beyond_the_window() {
    let (said_all, mut all_said) = oneshot::channel();
    let mut session =
        host_with(UpNumber(0), Some(Box::<Capitals>::default()), |agent: AgentEnd| async move {
            for _ in 0..LINK_WINDOW - 1 {
                agent.say(turn()).await.expect("the session hears");
            }
            agent.say(text("x".repeat(3 * DELTA_MAX))).await.expect("the session hears");
            agent.say(turn()).await.expect("the session hears");
            said_all.send(()).expect("the test waits");
            agent.say(turn()).await.expect("the session hears");
            Gone::Stopped
        });
    while all_said.try_recv() == Err(TryRecvError::Empty) {
        tokio::task::yield_now().await;
    }
    let things = said(&mut session).await;
    assert_eq!(things.len(), LINK_WINDOW + 3);
    let long = things.iter().filter(|thing| thing.up == text("X".repeat(DELTA_MAX))).count();
    assert_eq!(long, 3);
    assert_eq!(numbers(&said(&mut session).await), [LINK_WINDOW as u64 + 4]);
}
