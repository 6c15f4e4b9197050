//! How a conversation begins: the program is asked for what it can do, and answers when it is ready. One that is to go on
//! with a conversation that it does not find says so instead.

use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::talk::next;
use super::words::{self, Word};
use crate::drivers::lines::Lines;

/// Why nothing came of it.
#[derive(Debug)]
pub(super) enum Unopened {
    /// The agent is no more.
    HungUp,
    /// It would not, for this reason.
    Refused(String),
}

const HELLO: &str = "qd-hello";

/// Waits until the agent is ready.
pub(super) async fn open<R, W>(lines: &mut Lines<R, W>) -> Result<(), Unopened>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    lines.put(&words::request(HELLO, json!({"subtype": "initialize"})));
    loop {
        match next(lines, true).await.ok_or(Unopened::HungUp)? {
            Word::Answered { id, answer } if id == HELLO => {
                return answer.map(drop).map_err(Unopened::Refused);
            }
            Word::Result(result) if result.is_error => {
                let told = result.errors.join("; ");
                let told = if told.is_empty() { result.result.unwrap_or(result.subtype) } else { told };
                return Err(Unopened::Refused(told));
            }
            Word::Wants { id, .. } => {
                lines.put(&words::refusal(&id, "nothing can be asked before the start"))
            }
            // What it repeats of its past is known.
            _ => {}
        }
    }
}
