//! The other side: gives a worker one assignment, prints its answer, and approves nothing.
//!
//! `cargo run -p qd-worker-sdk --example parent -- 127.0.0.1:7778 "say hello"`
#![expect(clippy::print_stdout, reason = "printing the answer is its purpose")]

use qd_worker_sdk::socket::SocketError;
use qd_worker_sdk::{PlainClient, PlainRunStatus, PlainWorkerFrame, RunAssignment, TurnUpdate, plain};

#[tokio::main]
async fn main() -> Result<(), SocketError> {
    let mut args = std::env::args().skip(1);
    let endpoint = args.next().unwrap_or_else(|| "127.0.0.1:7778".to_owned());
    let prompt = args.next().unwrap_or_else(|| "say hello".to_owned());
    let (status, answer) = assign(&endpoint, &prompt).await?;
    println!("{answer}\n{status:?}");
    Ok(())
}

/// Gives the worker an assignment and waits until the run has ended.
pub(crate) async fn assign(endpoint: &str, prompt: &str) -> Result<(PlainRunStatus, String), SocketError> {
    let mut client = PlainClient::connect(endpoint, None).await?;
    client.start_run(RunAssignment::from(prompt)).await?;
    let mut answer = String::new();
    loop {
        match client.next_frame().await? {
            PlainWorkerFrame::Event { event } => {
                if let Some(TurnUpdate::Text { text }) = plain::parse_event(event) {
                    answer.push_str(&text);
                }
            }
            PlainWorkerFrame::ApprovalRequest { id, .. } => client.reply_to_approval(id, false).await?,
            PlainWorkerFrame::Terminal { status, .. } => {
                client.close().await;
                return Ok((status, answer));
            }
        }
    }
}
