//! The smallest worker: it greets whoever assigns it something.
#![expect(clippy::print_stdout, reason = "the address is all that it prints")]

use qd_worker_sdk::{RunAssignment, RunHandle, ServeMode, TurnOutcome, WorkerServeError, WorkerServer};

#[tokio::main]
async fn main() -> Result<(), WorkerServeError> {
    let server = WorkerServer::bind("127.0.0.1:7778").await?;
    println!("listening on {}", server.endpoint());
    server.serve(greet, ServeMode::Many).await
}

pub(crate) async fn greet(assignment: RunAssignment, run: RunHandle) -> TurnOutcome {
    let answer = format!("Hello! You want me to {}.", assignment.prompt);
    match run.send_text(answer.as_str()).await {
        Ok(()) => TurnOutcome::completed(answer),
        Err(_) => TurnOutcome::cancelled(),
    }
}
