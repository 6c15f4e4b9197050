//! How fast the agent may speak. The crate's connection takes any number of messages and keeps them; here is counted
//! how many wait to be written, so that a script that says something a million times needs no memory for it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use agent_client_protocol::{ConnectTo, Lines, Role};
use futures_util::{sink, stream};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Notify;

/// Messages that may wait to be written.
const WAITING_MAX: usize = 64;

/// The count. A line that nobody counted when it was sent may be taken for one that was; that makes it a little too
/// low for a moment, and it is right again as soon as all is written.
#[derive(Debug, Default)]
pub(super) struct ScriptFlowControl {
    waiting: AtomicUsize,
    written: Notify,
}

impl ScriptFlowControl {
    /// A message was sent.
    pub(super) fn count_sent(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until another message may be sent.
    pub(super) async fn wait_for_room(&self) {
        self.wait_until_at_most(WAITING_MAX - 1).await;
    }

    /// Waits until all has been written.
    pub(super) async fn wait_until_drained(&self) {
        self.wait_until_at_most(0).await;
    }

    async fn wait_until_at_most(&self, most: usize) {
        loop {
            // Made before the look: a line that is written in between wakes it.
            let written = self.written.notified();
            if self.waiting.load(Ordering::Relaxed) <= most {
                return;
            }
            written.await;
        }
    }

    fn count_written(&self) {
        let less = |waiting: usize| Some(waiting.saturating_sub(1));
        // It cannot fail: there is always a next value.
        let _before = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        self.written.notify_waiters();
    }
}

/// Two streams as the crate wants them, counted.
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
