//! A complete worker. It sends its prompt back in capitals, word by word, followed by any message it gets meanwhile.
//! It asks for approval if the prompt contains `rm`, and it stops when cancelled. `examples/worker.py` is the same in
//! Python.
//!
//! `cargo run -p qd-worker-sdk --example worker` prints the address it listens on. Any WebSocket client can then send it
//! `{"kind":"run","assignment":"hello world"}`, then `{"kind":"message","text":"and more"}` or `{"kind":"cancel"}`.
#![expect(clippy::print_stdout, reason = "the address is all that it prints")]

use std::collections::VecDeque;
use std::time::Duration;

use qd_worker_sdk::{
    PlainApproval, RunAssignment, RunError, RunHandle, ServeMode, TurnOutcome, WorkerServeError, WorkerServer,
};

/// Pause before each word, in place of real work.
const PACE: Duration = Duration::from_millis(20);

#[tokio::main]
async fn main() -> Result<(), WorkerServeError> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:0".to_owned());
    let server = WorkerServer::bind(address).await?;
    println!("listening on {}", server.endpoint());
    server.serve(shout, ServeMode::Many).await
}

/// One run. The server takes care of the rest: a panic here fails the run and nothing else.
pub(crate) async fn shout(assignment: RunAssignment, run: RunHandle) -> TurnOutcome {
    if assignment.prompt.contains("rm") && !run.request_approval(approval_for(&assignment.prompt)).await {
        return TurnOutcome::failed(RunError::new("denied", "not allowed to say that"));
    }
    let mut words = capitalized_words(&assignment.prompt);
    let mut sent = String::new();
    while !words.is_empty() {
        tokio::select! {
            () = run.cancelled() => return TurnOutcome::cancelled(),
            Some(more) = run.next_steer() => words.extend(capitalized_words(&more)),
            () = tokio::time::sleep(PACE) => {
                let word = words.pop_front().unwrap_or_default();
                sent.push_str(&word);
                // Waits while the peer is slow, and fails once the run is stopped.
                if run.send_text(word).await.is_err() {
                    return TurnOutcome::cancelled();
                }
            }
        }
    }
    TurnOutcome::completed(sent.trim_end())
}

fn capitalized_words(text: &str) -> VecDeque<String> {
    text.split_whitespace().map(|word| word.to_uppercase() + " ").collect()
}

fn approval_for(text: &str) -> PlainApproval {
    let question = "May I say something with `rm` in it?".to_owned();
    PlainApproval {
        tool_name: "say".to_owned(),
        resource: text.to_owned(),
        question,
        ..PlainApproval::default()
    }
}
