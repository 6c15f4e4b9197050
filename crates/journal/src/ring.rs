//! The newest events, in memory, and the signal that wakes their readers. There is one ring for all events and one for
//! each workspace or session that has a reader, so no reader wakes for events of another topic, and an event without
//! readers costs one push. Nothing here reads the journal; a reader that has fallen behind its ring does.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use qd_protocol::Seq;
use tokio::sync::watch;

use crate::event::{PublishedEvent, SessionKey, WorkspaceKey};

/// Events in the ring of all events.
pub(crate) const RING_EVENTS: usize = 4096;
/// Bytes in the ring of all events.
pub(crate) const RING_BYTES: usize = 8 << 20;
/// Events in the ring of one workspace or session.
pub(crate) const TOPIC_EVENTS: usize = 512;
/// Bytes in the ring of one workspace or session.
pub(crate) const TOPIC_BYTES: usize = 1 << 20;

/// The scope of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventTopic {
    All,
    Workspace(WorkspaceKey),
    /// One session or fleet.
    Session(SessionKey),
}

/// Selects the events of a subscription or page.
#[derive(Debug, Clone)]
pub struct EventFilter {
    pub topic: EventTopic,
    /// Absent: all kinds.
    pub kinds: Option<Arc<[String]>>,
}

impl EventFilter {
    /// All events of a topic.
    pub fn of(topic: EventTopic) -> Self {
        Self { topic, kinds: None }
    }

    pub(crate) fn matches_kind(&self, kind: &str) -> bool {
        self.kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|wanted| wanted == kind))
    }
}

/// The newest events of one topic. It holds every event of the topic after `evicted_through`.
#[derive(Debug)]
pub(crate) struct EventRing {
    evicted_through: Seq,
    events: VecDeque<Arc<PublishedEvent>>,
    bytes: usize,
    max_events: usize,
    max_bytes: usize,
}

/// The result of reading a ring.
#[derive(Debug)]
pub(crate) enum RingRead {
    /// The matching events. Everything up to `cursor` has been scanned; `end` is true if the ring has no more.
    Events { events: Vec<Arc<PublishedEvent>>, cursor: Seq, end: bool },
    /// Some of the requested events are no longer in the ring.
    Overrun,
}

impl EventRing {
    fn new(evicted_through: Seq, max_events: usize, max_bytes: usize) -> Self {
        Self { evicted_through, events: VecDeque::new(), bytes: 0, max_events, max_bytes }
    }

    fn push(&mut self, event: Arc<PublishedEvent>) {
        self.bytes += event.frame.len();
        self.events.push_back(event);
        while self.events.len() > self.max_events || self.bytes > self.max_bytes {
            let Some(oldest) = self.events.pop_front() else { break };
            self.bytes -= oldest.frame.len();
            self.evicted_through = oldest.seq;
        }
    }

    fn after(&self, cursor: Seq, filter: &EventFilter, max_events: usize, max_bytes: usize) -> RingRead {
        if cursor < self.evicted_through {
            return RingRead::Overrun;
        }
        let start = self.events.partition_point(|event| event.seq <= cursor);
        let (mut events, mut bytes, mut cursor) = (Vec::new(), 0, cursor);
        for event in self.events.range(start..) {
            if filter.matches_kind(&event.kind) {
                if events.len() == max_events || (bytes + event.frame.len() > max_bytes && !events.is_empty())
                {
                    return RingRead::Events { events, cursor, end: false };
                }
                bytes += event.frame.len();
                events.push(event.clone());
            }
            cursor = event.seq;
        }
        RingRead::Events { events, cursor, end: true }
    }
}

/// The value that wakes a channel's readers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChannelSignal {
    /// No more events will come.
    pub(crate) closed: bool,
}

/// A ring and the signal for its readers.
#[derive(Debug)]
pub(crate) struct TopicChannel {
    ring: RwLock<EventRing>,
    signal: watch::Sender<ChannelSignal>,
}

impl TopicChannel {
    fn new(ring: EventRing, closed: bool) -> Arc<Self> {
        Arc::new(Self { ring: RwLock::new(ring), signal: watch::Sender::new(ChannelSignal { closed }) })
    }

    pub(crate) fn after(
        &self,
        cursor: Seq,
        filter: &EventFilter,
        max_events: usize,
        max_bytes: usize,
    ) -> RingRead {
        self.read().after(cursor, filter, max_events, max_bytes)
    }

    fn read(&self) -> RwLockReadGuard<'_, EventRing> {
        self.ring.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, EventRing> {
        self.ring.write()
    }
}

/// What a new reader of a topic gets.
#[derive(Debug)]
pub(crate) struct TopicReader {
    pub(crate) channel: Arc<TopicChannel>,
    pub(crate) signal: watch::Receiver<ChannelSignal>,
    /// The last event published when the reader subscribed.
    pub(crate) head: Seq,
    /// A purge happened up to this seq. Events up to it must be read from the journal, because a ring may still hold
    /// purged ones.
    pub(crate) purged: Seq,
}

/// What has happened to the journal, for those who follow it as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalActivity {
    /// The seq of the last published event.
    pub head: Seq,
    /// How many times sessions were purged since the journal was opened.
    pub purges: u64,
}

/// The rings of all topics. The writer publishes here.
#[derive(Debug)]
pub(crate) struct EventHub {
    head: AtomicU64,
    activity: watch::Sender<JournalActivity>,
    all: Arc<TopicChannel>,
    topics: Mutex<TopicChannels>,
}

#[derive(Debug, Default)]
struct TopicChannels {
    /// Each channel with its number of readers. A topic without readers is not in the map.
    channels: HashMap<EventTopic, (Arc<TopicChannel>, usize)>,
    purged: Seq,
    closed: bool,
}

impl EventHub {
    pub(crate) fn new(head: Seq) -> Self {
        Self {
            head: AtomicU64::new(head.0),
            activity: watch::Sender::new(JournalActivity { head, purges: 0 }),
            all: TopicChannel::new(EventRing::new(head, RING_EVENTS, RING_BYTES), false),
            topics: Mutex::default(),
        }
    }

    /// The seq of the last published event.
    pub(crate) fn head(&self) -> Seq {
        Seq(self.head.load(Ordering::Acquire))
    }

    /// Reports every published batch and every purge.
    pub(crate) fn activity(&self) -> watch::Receiver<JournalActivity> {
        self.activity.subscribe()
    }

    /// Subscribes to a topic. Every event published after this returns is in the channel, or makes a read return
    /// [`RingRead::Overrun`].
    pub(crate) fn subscribe(&self, topic: EventTopic) -> TopicReader {
        let mut topics = self.topics.lock();
        let head = self.head();
        let channel = if topic == EventTopic::All {
            self.all.clone()
        } else {
            let closed = topics.closed;
            let (channel, readers) = topics.channels.entry(topic).or_insert_with(|| {
                (TopicChannel::new(EventRing::new(head, TOPIC_EVENTS, TOPIC_BYTES), closed), 0)
            });
            *readers += 1;
            channel.clone()
        };
        let signal = channel.signal.subscribe();
        TopicReader { channel, signal, head, purged: topics.purged }
    }

    /// Removes a reader of a topic.
    pub(crate) fn unsubscribe(&self, topic: EventTopic) {
        let mut topics = self.topics.lock();
        if let Some((_, readers)) = topics.channels.get_mut(&topic) {
            *readers -= 1;
            if *readers == 0 {
                topics.channels.remove(&topic);
            }
        }
    }

    /// Publishes a committed batch in order and wakes the readers of its topics.
    pub(crate) fn publish(&self, events: Vec<Arc<PublishedEvent>>, purge: bool) {
        let mut touched: Vec<Arc<TopicChannel>> = Vec::new();
        {
            let mut topics = self.topics.lock();
            if !topics.channels.is_empty() {
                for event in &events {
                    let workspace = event.workspace.map(EventTopic::Workspace);
                    let session = event.session.map(EventTopic::Session);
                    for topic in [workspace, session].into_iter().flatten() {
                        let Some((channel, _)) = topics.channels.get(&topic) else { continue };
                        channel.write().push(event.clone());
                        if !touched.iter().any(|known| Arc::ptr_eq(known, channel)) {
                            touched.push(channel.clone());
                        }
                    }
                }
            }
            if let Some(last) = events.last().map(|event| event.seq) {
                let mut all = self.all.write();
                for event in events {
                    all.push(event);
                }
                self.head.store(last.0, Ordering::Release);
                touched.push(self.all.clone());
            }
            if purge {
                topics.purged = self.head();
            }
        }
        self.activity.send_modify(|activity| {
            activity.head = self.head();
            activity.purges += u64::from(purge);
        });
        for channel in touched {
            if channel.signal.receiver_count() > 0 {
                channel.signal.send_modify(|_| {});
            }
        }
    }

    /// Wakes all readers and tells them that no more events will come.
    pub(crate) fn close(&self) {
        let mut topics = self.topics.lock();
        topics.closed = true;
        self.all.signal.send_modify(|signal| signal.closed = true);
        for (channel, _) in topics.channels.values() {
            channel.signal.send_modify(|signal| signal.closed = true);
        }
    }

    #[cfg(test)]
    pub(crate) fn topic_count(&self) -> usize {
        self.topics.lock().channels.len()
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use qd_protocol::{Millis, SessionId};

    use super::*;
    use crate::event::{EventDraft, EventScope};

    fn event(seq: u64, session: i64) -> Arc<PublishedEvent> {
        let id = SessionId::parse("ses_x").unwrap();
        let scope =
            Arc::new(EventScope { session: Some((SessionKey(session), id)), ..EventScope::default() });
        let draft =
            EventDraft::new(scope, None, Millis(0).into(), None, Cow::Borrowed("text.delta"), b"{}", None);
        Arc::new(draft.publish(Seq(seq)))
    }

    fn seqs(read: RingRead) -> Vec<u64> {
        match read {
            RingRead::Events { events, .. } => events.iter().map(|event| event.seq.0).collect(),
            RingRead::Overrun => panic!("overrun"),
        }
    }

    #[test]
    fn a_ring_forgets_the_oldest_and_says_so() {
        let mut ring = EventRing::new(Seq(10), 3, usize::MAX);
        let filter = EventFilter::of(EventTopic::All);
        assert!(seqs(ring.after(Seq(10), &filter, 9, 999)).is_empty());
        for seq in 11..=15 {
            ring.push(event(seq, 1));
        }
        assert!(matches!(ring.after(Seq(11), &filter, 9, 9999), RingRead::Overrun));
        assert_eq!(seqs(ring.after(Seq(12), &filter, 9, 9999)), [13, 14, 15]);
        assert_eq!(seqs(ring.after(Seq(13), &filter, 1, 9999)), [14]);
        assert_eq!(seqs(ring.after(Seq(13), &filter, 9, 1)), [14], "one event always fits");
    }

    #[test]
    fn a_reader_of_one_session_is_not_woken_by_another() {
        let hub = EventHub::new(Seq(0));
        let mut first = hub.subscribe(EventTopic::Session(SessionKey(1)));
        let mut second = hub.subscribe(EventTopic::Session(SessionKey(2)));
        first.signal.borrow_and_update();
        second.signal.borrow_and_update();
        hub.publish(vec![event(1, 1), event(2, 3)], false);
        assert!(first.signal.has_changed().unwrap());
        assert!(!second.signal.has_changed().unwrap());
        assert_eq!(hub.head(), Seq(2));
        hub.unsubscribe(EventTopic::Session(SessionKey(1)));
        hub.unsubscribe(EventTopic::Session(SessionKey(2)));
        assert_eq!(hub.topic_count(), 0);
    }

    #[test]
    fn a_quiet_sessions_reader_stays_inside_its_ring_however_much_others_say() {
        let hub = EventHub::new(Seq(0));
        let filter = EventFilter::of(EventTopic::Session(SessionKey(1)));
        let reader = hub.subscribe(filter.topic);
        for seq in 1..=10_000 {
            hub.publish(vec![event(seq, 2)], false);
        }
        hub.publish(vec![event(10_001, 1)], false);
        assert_eq!(seqs(reader.channel.after(Seq(0), &filter, 9, 9999)), [10_001]);
    }
}
