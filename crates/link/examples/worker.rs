//! A whole worker: says its assignment in capitals, word by word, and whatever it is told on its way after that; asks
//! before it says anything with `rm` in it; stops when it is told to. `examples/worker.py` is the same in Python.
//!
//! `cargo run -p qd-link --example worker` prints where it listens. Any WebSocket client can then send it
//! `{"kind":"run","assignment":"hello world"}`, then `{"kind":"message","text":"and more"}` or `{"kind":"cancel"}`.
#![expect(clippy::print_stdout, reason = "where it listens is all that it prints")]

use std::collections::VecDeque;
use std::time::Duration;

use qd_link::{
    PlainApproval, RunAssignment, RunError, RunHandle, ServeMode, TurnOutcome, WorkerServeError, WorkerServer,
};

/// Thinking takes time, also for a worker that does not think.
const PACE: Duration = Duration::from_millis(20);

#[tokio::main]
async fn main() -> Result<(), WorkerServeError> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let server = WorkerServer::bind(address).await?;
    println!("listening on {}", server.endpoint());
    server.serve(shout, ServeMode::Many).await
}

/// One run. The server sees to the rest: a panic here is the run's failure and nothing more.
pub(crate) async fn shout(job: RunAssignment, turn: RunHandle) -> TurnOutcome {
    if job.prompt.contains("rm") && !turn.request_approval(leave_for(&job.prompt)).await {
        return TurnOutcome::failed(RunError::new("denied", "not allowed to say that"));
    }
    let mut words = words(&job.prompt);
    let mut said = String::new();
    while !words.is_empty() {
        tokio::select! {
            () = turn.cancelled() => return TurnOutcome::cancelled(),
            Some(more) = turn.next_steer() => words.extend(self::words(&more)),
            () = tokio::time::sleep(PACE) => {
                let word = words.pop_front().unwrap_or_default();
                said.push_str(&word);
                // Waits while the peer is slow; fails when nobody wants to hear it any more.
                if turn.send_text(word).await.is_err() {
                    return TurnOutcome::cancelled();
                }
            }
        }
    }
    TurnOutcome::completed(said.trim_end())
}

fn words(text: &str) -> VecDeque<String> {
    text.split_whitespace().map(|word| word.to_uppercase() + " ").collect()
}

fn leave_for(text: &str) -> PlainApproval {
    let question = "May I say something with `rm` in it?".to_owned();
    PlainApproval {
        tool_name: "say".to_owned(),
        resource: text.to_owned(),
        question,
        ..PlainApproval::default()
    }
}
