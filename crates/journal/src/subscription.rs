//! A subscription: a cursor that reads from a ring while it keeps up and from the journal when it does not. The writer
//! and other readers never wait for it. Dropping it ends it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use qd_protocol::Seq;
use tokio::sync::watch;

use crate::error::JournalReadError;
use crate::event::PublishedEvent;
use crate::read::{self, ReaderPool};
use crate::ring::{ChannelSignal, EventFilter, EventHub, RingRead, TopicChannel};
use crate::stats::JournalStats;

/// The maximum number of events that one call returns.
pub const BATCH_EVENTS: usize = 256;
/// The maximum number of bytes that one call returns, unless a single event is larger.
pub const BATCH_BYTES: usize = 256 << 10;

/// A reader that misses no event and sees none twice.
#[derive(Debug)]
pub struct Subscription {
    filter: EventFilter,
    cursor: Seq,
    channel: Arc<TopicChannel>,
    signal: watch::Receiver<ChannelSignal>,
    /// Events up to this seq are read from the journal; see [`TopicReader::purged`](crate::ring::TopicReader::purged).
    purged: Seq,
    hub: Arc<EventHub>,
    pool: Arc<ReaderPool>,
    stats: Arc<JournalStats>,
}

impl Subscription {
    /// Starts after `after`, or at the journal's head if it is absent or beyond the head.
    pub(crate) fn new(
        hub: Arc<EventHub>,
        pool: Arc<ReaderPool>,
        stats: Arc<JournalStats>,
        filter: EventFilter,
        after: Option<Seq>,
    ) -> Self {
        let reader = hub.subscribe(filter.topic);
        stats.subscriptions.fetch_add(1, Relaxed);
        let cursor = after.map_or(reader.head, |after| after.min(reader.head));
        Self {
            filter,
            cursor,
            channel: reader.channel,
            signal: reader.signal,
            purged: reader.purged,
            hub,
            pool,
            stats,
        }
    }

    /// Every matching event up to here has been returned.
    pub fn cursor(&self) -> Seq {
        self.cursor
    }

    /// The next events in order, at least one; waits until there is one. No event is lost if the future is dropped.
    /// After the journal is closed, returns what is still in the ring and then [`JournalReadError::Stopped`].
    pub async fn next(&mut self) -> Result<Vec<Arc<PublishedEvent>>, JournalReadError> {
        loop {
            // Marked as seen before the ring is read, so that anything published from here on wakes us.
            let closed = self.signal.borrow_and_update().closed;
            let ring_read = if self.cursor < self.purged {
                RingRead::Overrun
            } else {
                self.channel.after(self.cursor, &self.filter, BATCH_EVENTS, BATCH_BYTES)
            };
            match ring_read {
                RingRead::Events { events, cursor, end } => {
                    self.cursor = cursor;
                    if !events.is_empty() {
                        return Ok(events);
                    }
                    if end {
                        if closed {
                            return Err(JournalReadError::Stopped);
                        }
                        self.signal.changed().await.map_err(|_| JournalReadError::Stopped)?;
                    }
                }
                RingRead::Overrun => {
                    let (filter, after, head) = (self.filter.clone(), self.cursor, self.hub.head());
                    let page = self
                        .pool
                        .read(move |db| read::page(db, &filter, after, head, BATCH_EVENTS, BATCH_BYTES))
                        .await?;
                    self.cursor = page.scanned_through;
                    if !page.events.is_empty() {
                        return Ok(page.events);
                    }
                }
            }
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.unsubscribe(self.filter.topic);
        self.stats.subscriptions.fetch_sub(1, Relaxed);
    }
}
