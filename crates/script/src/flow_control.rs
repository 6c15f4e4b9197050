//! Limits how fast the agent may send. The connection of the protocol crate queues any number of messages. This module
//! counts those that wait to be written, so that a script that says something a million times does not fill memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agent_client_protocol::{ConnectTo, Lines, Role};
use futures_util::{sink, stream};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Notify;

/// The most messages that may wait to be written.
const WAITING_MAX: usize = 64;

/// Counts the waiting messages. Some lines are written without having been counted when sent, so the count may be a
/// little too low for a moment; it is right again as soon as everything is written.
#[derive(Debug, Default)]
pub(super) struct ScriptFlowControl {
    waiting: AtomicUsize,
    written: Notify,
}

impl ScriptFlowControl {
    /// Counts a message that was sent.
    pub(super) fn count_sent(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) async fn wait_for_room(&self) {
        self.wait_until_at_most(WAITING_MAX - 1).await;
    }

    /// Waits until everything has been written.
    pub(super) async fn wait_until_drained(&self) {
        self.wait_until_at_most(0).await;
    }

    async fn wait_until_at_most(&self, max: usize) {
        loop {
            // Created before the check, so that a line written in between wakes it.
            let written = self.written.notified();
            if self.waiting.load(Ordering::Relaxed) <= max {
                return;
            }
            written.await;
        }
    }

    fn count_written(&self) {
        let decrement = |waiting: usize| Some(waiting.saturating_sub(1));
        // This cannot fail: the closure always returns a value.
        let _previous = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, decrement);
        self.written.notify_waiters();
    }
}

/// Wraps two streams as the protocol crate wants them, counting written lines.
pub(super) fn counted_lines<R, W, C>(from: R, to: W, flow: Arc<ScriptFlowControl>) -> impl ConnectTo<C>
where
    R: AsyncRead + Unpin + Send + 'static,
    W: AsyncWrite + Unpin + Send + 'static,
    C: Role,
{
    let incoming = stream::unfold(BufReader::new(from).lines(), async |mut lines| {
        lines.next_line().await.transpose().map(|line| (line, lines))
    });
    let outgoing =
        sink::unfold((to, flow), async |(mut to, flow): (W, Arc<ScriptFlowControl>), mut line: String| {
            line.push('\n');
            to.write_all(line.as_bytes()).await?;
            to.flush().await?;
            flow.count_written();
            Ok::<_, io::Error>((to, flow))
        });
    Lines::new(outgoing, incoming)
}
