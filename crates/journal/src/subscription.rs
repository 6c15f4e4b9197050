//! A subscription: a cursor that is fed from a ring while it keeps up and from the journal when it does not. It owns
//! nothing that the writer or another reader could wait for, and dropping it is all it takes to end it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use qd_protocol::Seq;
use tokio::sync::watch;

use crate::error::JournalReadError;
use crate::event::PublishedEvent;
use crate::read::{self, ReaderPool};
use crate::ring::{ChannelSignal, EventFilter, EventHub, RingRead, TopicChannel};
use crate::stats::JournalStats;

/// Events that one call gives at most.
pub const BATCH_EVENTS: usize = 256;
/// Bytes that one call gives at most, unless a single event is larger.
pub const BATCH_BYTES: usize = 256 << 10;

/// A reader that misses nothing, sees nothing twice, and is waited for by nobody.
#[derive(Debug)]
pub struct Subscription {
    filter: EventFilter,
    cursor: Seq,
    channel: Arc<TopicChannel>,
    signal: watch::Receiver<ChannelSignal>,
    /// What is not newer than this comes from the journal; see [`Seat`](crate::ring::Seat).
    purged: Seq,
    hub: Arc<EventHub>,
    pool: Arc<ReaderPool>,
    stats: Arc<JournalStats>,
}

impl Subscription {
    /// `after` absent: from now. A cursor ahead of the journal counts as now.
    pub(crate) fn new(
        hub: Arc<EventHub>,
        pool: Arc<ReaderPool>,
        stats: Arc<JournalStats>,
        filter: EventFilter,
        after: Option<Seq>,
    ) -> Self {
        let seat = hub.subscribe(filter.topic);
        stats.subscriptions.fetch_add(1, Relaxed);
        let cursor = after.map_or(seat.head, |after| after.min(seat.head));
        Self {
            filter,
            cursor,
            channel: seat.channel,
            signal: seat.signal,
            purged: seat.purged,
            hub,
            pool,
            stats,
        }
    }

    /// Everything wanted up to here has been given.
    pub fn cursor(&self) -> Seq {
        self.cursor
    }

    /// The next events in order, at least one; waits until there is one. Nothing is lost if the future is dropped.
    /// After the journal was closed it gives what the ring still has and then [`ReadError::Stopped`].
    pub async fn next(&mut self) -> Result<Vec<Arc<PublishedEvent>>, JournalReadError> {
        loop {
            // Marked as seen before looking: what is published from here on wakes us.
            let closed = self.signal.borrow_and_update().closed;
            let found = if self.cursor < self.purged {
                RingRead::Overrun
            } else {
                self.channel.after(self.cursor, &self.filter, BATCH_EVENTS, BATCH_BYTES)
            };
            match found {
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
                    self.cursor = page.scanned;
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
