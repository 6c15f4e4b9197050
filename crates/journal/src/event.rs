//! An event as it is appended, stored and published. The caller of an append renders the SSE frame that clients see,
//! all but its seq, and the writer fills in the seq. So rendering stays off the writer's thread, and the same code
//! renders events that are read back.
//!
//! Design: docs/design/frames-are-rendered-once.md

use std::borrow::Cow;
use std::io::Write;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use qd_protocol::link::UpdateNumber;
use qd_protocol::{
    ClockReading, EventBody, EventNumber, FleetId, Millis, RunId, Seq, SessionId, WorkspaceId,
};

/// A session's or fleet's key inside this journal: compact, and allocated in the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey(pub i64);

/// A workspace's key inside this journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkspaceKey(pub i64);

/// The workspace and the session or fleet that an event belongs to. Shared by all events of a session.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct EventScope {
    pub workspace: Option<(WorkspaceKey, WorkspaceId)>,
    pub session: Option<(SessionKey, SessionId)>,
    /// Set instead of `session` for an event of a fleet. A fleet has a session key, and its events are numbered like a
    /// session's.
    pub fleet: Option<(SessionKey, FleetId)>,
}

impl EventScope {
    /// The session or fleet that numbers this event.
    pub(crate) fn stream(&self) -> Option<(SessionKey, &str)> {
        let session = self.session.as_ref().map(|(key, id)| (*key, id.as_str()));
        session.or_else(|| self.fleet.as_ref().map(|(key, id)| (*key, id.as_str())))
    }
}

#[derive(Debug, Clone)]
pub struct NewEvent {
    pub scope: Arc<EventScope>,
    /// The event's position in its session or fleet. Present exactly if the scope has one of them.
    pub number: Option<EventNumber>,
    /// When the event was decided. Readers of the stream see the wall clock only.
    pub ts: ClockReading,
    pub run: Option<RunId>,
    pub kind: &'static str,
    /// A JSON object on one line.
    pub data: Vec<u8>,
    /// The number of the agent's update that caused this event.
    pub update_number: Option<UpdateNumber>,
}

/// An event as it is stored in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEvent {
    /// The position in the whole journal.
    pub seq: Seq,
    /// The position in its session or fleet.
    pub number: Option<EventNumber>,
    /// When the event was decided.
    pub ts: ClockReading,
    pub scope: Arc<EventScope>,
    pub run: Option<RunId>,
    /// Can be a kind that only a newer version knows.
    pub kind: Cow<'static, str>,
    /// A JSON object on one line.
    pub data: Vec<u8>,
    /// The number of the agent's update that caused this event.
    pub update_number: Option<UpdateNumber>,
}

/// A committed event, rendered once for any number of readers.
#[derive(Debug, Clone)]
pub struct PublishedEvent {
    pub seq: Seq,
    /// When the event was decided.
    pub ts: Millis,
    pub workspace: Option<WorkspaceKey>,
    /// The session or fleet.
    pub session: Option<SessionKey>,
    pub kind: Cow<'static, str>,
    /// The whole SSE frame, shared by all readers.
    pub frame: Bytes,
    /// The offset of the JSON in the frame.
    json_at: usize,
}

impl PublishedEvent {
    /// The event as JSON, sharing the frame's memory.
    pub fn json(&self) -> Bytes {
        self.frame.slice(self.json_at..self.frame.len() - FRAME_END.len())
    }
}

const FRAME_END: &[u8] = b"\n\n";
const EVENT_END: &[u8] = b"}\n\n";
/// The number of digits in `u64::MAX`.
const SEQ_DIGITS_MAX: usize = 20;

/// A frame that is complete except for its seq.
#[derive(Debug)]
pub(crate) struct EventDraft {
    pub(crate) scope: Arc<EventScope>,
    pub(crate) number: Option<EventNumber>,
    pub(crate) ts: ClockReading,
    pub(crate) run: Option<RunId>,
    pub(crate) kind: Cow<'static, str>,
    pub(crate) update_number: Option<UpdateNumber>,
    /// Starts with `header_space` reserved bytes. The SSE header and the seq are later written right-aligned into them.
    frame: Vec<u8>,
    header_space: usize,
    data_at: usize,
}

impl From<NewEvent> for EventDraft {
    fn from(event: NewEvent) -> Self {
        let NewEvent { scope, number, ts, run, kind, data, update_number } = event;
        Self::new(scope, number, ts, run, Cow::Borrowed(kind), &data, update_number)
    }
}

impl EventDraft {
    pub(crate) fn new(
        scope: Arc<EventScope>,
        number: Option<EventNumber>,
        ts: ClockReading,
        run: Option<RunId>,
        kind: Cow<'static, str>,
        data: &[u8],
        update_number: Option<UpdateNumber>,
    ) -> Self {
        let header_space = "id: \nevent: \ndata: {\"seq\":".len() + kind.len() + 2 * SEQ_DIGITS_MAX;
        let workspace = scope.workspace.as_ref().map(|(_, id)| id.as_str());
        let session = scope.session.as_ref().map(|(_, id)| id.as_str());
        let run_id = run.as_ref().map(RunId::as_str);
        let id_len = |id: Option<&str>| id.map_or(4, |id| id.len() + 2);
        let names = r#","ts":"","workspace_id":,"session_id":,"run_id":,"kind":"","data":"#.len();
        let time = "2026-11-15T20:30:45.123Z".len();
        let ids = id_len(workspace) + id_len(session) + id_len(run_id);
        let head = header_space + names + time + ids + kind.len();
        // The capacity is exact where possible, because a vector without slack becomes `Bytes` without another
        // allocation.
        let mut frame = Vec::with_capacity(head + data.len() + EVENT_END.len());
        frame.resize(header_space, 0);
        frame.extend_from_slice(br#","ts":""#);
        write!(frame, "{}", ts.wall).expect("writing to a vector cannot fail");
        frame.extend_from_slice(br#"","workspace_id":"#);
        push_id(&mut frame, workspace);
        frame.extend_from_slice(br#","session_id":"#);
        push_id(&mut frame, session);
        frame.extend_from_slice(br#","run_id":"#);
        push_id(&mut frame, run_id);
        frame.extend_from_slice(br#","kind":""#);
        frame.extend_from_slice(kind.as_bytes());
        frame.extend_from_slice(br#"","data":"#);
        let data_at = frame.len();
        frame.extend_from_slice(data);
        frame.extend_from_slice(EVENT_END);
        Self { scope, number, ts, run, kind, update_number, frame, header_space, data_at }
    }

    pub(crate) fn data(&self) -> &[u8] {
        &self.frame[self.data_at..self.frame.len() - EVENT_END.len()]
    }

    /// The size that counts towards the limits of the writer's queue.
    pub(crate) fn weight(&self) -> usize {
        self.frame.len()
    }

    /// Fills in the seq and finishes the frame.
    pub(crate) fn publish(mut self, seq: Seq) -> PublishedEvent {
        let mut digits = [0; SEQ_DIGITS_MAX];
        let digits = decimal(seq.0, &mut digits);
        let mut at = self.header_space;
        let mut prepend = |text: &[u8]| {
            at -= text.len();
            self.frame[at..at + text.len()].copy_from_slice(text);
            at
        };
        prepend(digits);
        let json_at = prepend(br#"{"seq":"#);
        prepend(b"\ndata: ");
        prepend(self.kind.as_bytes());
        prepend(b"\nevent: ");
        prepend(digits);
        let start = prepend(b"id: ");
        let mut frame = Bytes::from(self.frame);
        frame.advance(start);
        PublishedEvent {
            seq,
            ts: self.ts.wall,
            workspace: self.scope.workspace.as_ref().map(|(key, _)| *key),
            session: self.scope.stream().map(|(key, _)| key),
            kind: self.kind,
            frame,
            json_at: json_at - start,
        }
    }
}

/// Appends an id as a JSON string. Ids contain no character that JSON would escape.
fn push_id(frame: &mut Vec<u8>, id: Option<&str>) {
    match id {
        Some(id) => {
            frame.push(b'"');
            frame.extend_from_slice(id.as_bytes());
            frame.push(b'"');
        }
        None => frame.extend_from_slice(b"null"),
    }
}

fn decimal(mut value: u64, digits: &mut [u8; SEQ_DIGITS_MAX]) -> &[u8] {
    let mut at = SEQ_DIGITS_MAX;
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(value % 10).expect("a decimal digit is below ten");
        value /= 10;
        if value == 0 {
            return &digits[at..];
        }
    }
}

/// The kind as a static string if this version knows it, which avoids an allocation.
pub(crate) fn intern_kind(text: &str) -> Cow<'static, str> {
    match EventBody::KINDS.iter().find(|kind| **kind == text) {
        Some(kind) => Cow::Borrowed(kind),
        None => Cow::Owned(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope() -> Arc<EventScope> {
        Arc::new(EventScope {
            workspace: Some((WorkspaceKey(1), WorkspaceId::parse("ws_1").unwrap())),
            session: Some((SessionKey(2), SessionId::parse("ses_2").unwrap())),
            fleet: None,
        })
    }

    #[test]
    fn a_frame_is_what_the_contract_says() {
        let draft = EventDraft::from(NewEvent {
            scope: scope(),
            number: Some(EventNumber(7)),
            ts: Millis(1_794_774_645_123).into(),
            run: Some(RunId::parse("run_3").unwrap()),
            kind: "text.delta",
            data: br#"{"text":"a b"}"#.to_vec(),
            update_number: None,
        });
        assert_eq!(draft.data(), br#"{"text":"a b"}"#);
        assert_eq!(draft.frame.len(), draft.frame.capacity());
        let event = draft.publish(Seq(10_203));
        let json = r#"{"seq":10203,"ts":"2026-11-15T20:30:45.123Z","workspace_id":"ws_1","session_id":"ses_2","run_id":"run_3","kind":"text.delta","data":{"text":"a b"}}"#;
        assert_eq!(event.json(), json.as_bytes());
        assert_eq!(event.frame, format!("id: 10203\nevent: text.delta\ndata: {json}\n\n").as_bytes());
        serde_json::from_slice::<qd_protocol::Event>(&event.json()).unwrap();
    }

    #[test]
    fn a_frame_without_ids_says_null_and_takes_any_seq() {
        for seq in [0, 1, 9, 10, u64::MAX] {
            let data = b"{}".to_vec();
            let event = NewEvent {
                scope: Arc::default(),
                number: None,
                ts: Millis(0).into(),
                run: None,
                kind: "halt.lifted",
                data,
                update_number: None,
            };
            let event = EventDraft::from(event).publish(Seq(seq));
            let value: qd_protocol::Event = serde_json::from_slice(&event.json()).unwrap();
            assert_eq!((value.seq, value.session_id, value.run_id), (Seq(seq), None, None));
            assert!(event.frame.starts_with(format!("id: {seq}\nevent: halt.lifted\ndata: {{").as_bytes()));
        }
    }
}
