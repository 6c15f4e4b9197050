//! What each event changes in the derived data. Pure: a stored event in, changes out. Which files a tool call changes is
//! the core's knowledge.

use std::collections::HashMap;
use std::sync::LazyLock;

use qd_core::policy::changed_paths;
use qd_journal::{DerivedChange, DerivedText, SessionKey, StoredEvent};
use qd_protocol::event::{EventBody, MessageDelta, ToolCallEvent};
use qd_protocol::search::SearchHitKind;
use qd_protocol::{MessageId, RunId};
use serde_json::Value;

use super::audit_entries::{AUDITED_KINDS, audit_entry};

/// The kinds of events that searches and usage reports are answered from.
const SEARCHED_KINDS: &[&str] = &[
    "workspace.created",
    "session.created",
    "session.updated",
    "run.accepted",
    "steer.accepted",
    "text.delta",
    "tool.started",
    "message.finished",
    "usage.reported",
];

/// The kinds of events that change the derived data.
pub(super) static DERIVED_KINDS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let is_derived = |kind: &&str| SEARCHED_KINDS.contains(kind) || AUDITED_KINDS.contains(kind);
    EventBody::KINDS.iter().copied().filter(is_derived).collect()
});

/// The changes of several events, which must be added in order.
#[derive(Debug, Default)]
pub(super) struct EventChanges {
    changes: Vec<DerivedChange>,
    /// Where the last piece of each unfinished message is in `changes`. Pieces that follow are added to it, because one
    /// row for each delta would be most of the work.
    pieces: HashMap<MessageId, usize>,
}

impl EventChanges {
    pub(super) fn into_changes(self) -> Vec<DerivedChange> {
        self.changes
    }

    /// Adds one event. One that this version cannot decode changes nothing.
    pub(super) fn add_event(&mut self, event: &StoredEvent) {
        let Ok(Some(body)) = EventBody::decode(&event.kind, &event.data) else { return };
        self.add_audit_entry(event, &body);
        if let (EventBody::WorkspaceCreated(created), Some((key, id))) = (&body, &event.scope.workspace) {
            self.changes.push(DerivedChange::Workspace {
                key: *key,
                id: id.clone(),
                path: created.path.clone(),
            });
        }
        let Some((session, id)) = &event.scope.session else { return };
        let text = |kind, run: Option<&RunId>| DerivedText {
            seq: event.seq,
            session: *session,
            kind,
            at: event.ts.wall,
            run: event.run.as_ref().or(run).cloned(),
        };
        match body {
            EventBody::SessionCreated(created) => self.changes.push(DerivedChange::Session {
                key: *session,
                id: id.clone(),
                workspace: event.scope.workspace.as_ref().map(|(key, _)| *key),
                agent: created.agent,
                title: created.title,
                model: created.model,
            }),
            EventBody::SessionUpdated(updated) if updated.title.is_some() || updated.model.is_some() => {
                let (title, model) = (updated.title, updated.model);
                self.changes.push(DerivedChange::SessionSettings { key: *session, title, model });
            }
            EventBody::RunAccepted(accepted) => {
                self.add_text(text(SearchHitKind::Prompt, None), accepted.prompt);
            }
            EventBody::SteerAccepted(steer) => self.add_text(text(SearchHitKind::Steer, None), steer.text),
            EventBody::TextDelta(delta) => {
                let place = text(SearchHitKind::Answer, delta.after_run.as_ref());
                self.add_delta(event, *session, place, delta);
            }
            EventBody::ToolStarted(call) => {
                self.add_tool_call(|kind| text(kind, call.after_run.as_ref()), &call);
            }
            EventBody::MessageFinished(finished) => {
                self.pieces.remove(&finished.message_id);
                let place = text(SearchHitKind::Answer, None);
                self.changes.push(DerivedChange::MessageFinished { place, message: finished.message_id });
            }
            EventBody::UsageReported(report) => self.changes.push(DerivedChange::Usage {
                seq: event.seq,
                session: *session,
                at: event.ts.wall,
                usage: report.usage(),
                run: event.run.clone().or(report.after_run),
            }),
            _ => {}
        }
    }

    fn add_audit_entry(&mut self, event: &StoredEvent, body: &EventBody) {
        let Some(entry) = audit_entry(event, body) else { return };
        let Ok(entry) = serde_json::to_string(&entry) else { return };
        self.changes.push(DerivedChange::Audit {
            seq: event.seq,
            session: event.scope.session.as_ref().map(|(key, _)| *key),
            workspace: event.scope.workspace.as_ref().map(|(key, _)| *key),
            at: event.ts.wall,
            entry,
        });
    }

    fn add_text(&mut self, place: DerivedText, text: String) {
        self.changes.push(DerivedChange::Text { place, text });
    }

    fn add_delta(
        &mut self,
        event: &StoredEvent,
        session: SessionKey,
        place: DerivedText,
        delta: MessageDelta,
    ) {
        // Text from after the end of its run belongs to no message.
        let Some(message) = delta.message_id else { return self.add_text(place, delta.text) };
        if let Some(at) = self.pieces.get(&message)
            && let Some(DerivedChange::MessagePiece { text, .. }) = self.changes.get_mut(*at)
        {
            text.push_str(&delta.text);
            return;
        }
        self.pieces.insert(message.clone(), self.changes.len());
        let (seq, text) = (event.seq, delta.text);
        self.changes.push(DerivedChange::MessagePiece { seq, session, message, text });
    }

    fn add_tool_call(&mut self, place: impl Fn(SearchHitKind) -> DerivedText, call: &ToolCallEvent) {
        let name = call.name.as_deref().unwrap_or_default();
        let input = call.input.as_ref().unwrap_or(&Value::Null);
        let mut text = name.to_owned();
        push_strings(&mut text, input);
        self.add_text(place(SearchHitKind::Tool), text);
        let paths = changed_paths(name, input);
        if !paths.is_empty() {
            self.add_text(place(SearchHitKind::Path), paths.join("\n"));
        }
    }
}

/// Appends every string in a value, each on a line of its own. Names of fields say nothing and are left out.
fn push_strings(text: &mut String, value: &Value) {
    match value {
        Value::String(string) => {
            text.push('\n');
            text.push_str(string);
        }
        Value::Array(items) => items.iter().for_each(|item| push_strings(text, item)),
        Value::Object(fields) => fields.values().for_each(|field| push_strings(text, field)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qd_journal::{EventScope, WorkspaceKey};
    use qd_protocol::{EventNumber, Millis, Seq, SessionId, WorkspaceId};
    use serde_json::json;

    use super::*;

    fn stored(seq: u64, kind: &'static str, run: Option<&str>, data: Value) -> StoredEvent {
        let scope = EventScope {
            workspace: Some((WorkspaceKey(1), WorkspaceId::parse("ws_1").unwrap())),
            session: Some((SessionKey(7), SessionId::parse("ses_7").unwrap())),
            fleet: None,
        };
        StoredEvent {
            seq: Seq(seq),
            number: Some(EventNumber(seq)),
            ts: Millis(seq).into(),
            scope: Arc::new(scope),
            run: run.map(|run| RunId::parse(run).unwrap()),
            kind: kind.into(),
            data: data.to_string().into_bytes(),
            update_number: None,
        }
    }

    fn changes(events: &[StoredEvent]) -> Vec<DerivedChange> {
        let mut all = EventChanges::default();
        events.iter().for_each(|event| all.add_event(event));
        all.into_changes()
    }

    fn texts(changes: &[DerivedChange]) -> Vec<(SearchHitKind, &str)> {
        let texts = changes.iter().filter_map(|change| match change {
            DerivedChange::Text { place, text } => Some((place.kind, text.as_str())),
            _ => None,
        });
        texts.collect()
    }

    #[test]
    fn every_kind_that_is_read_is_a_kind_of_event() {
        for kind in SEARCHED_KINDS {
            assert!(EventBody::KINDS.contains(kind), "{kind}");
        }
    }

    #[test]
    fn deltas_of_one_message_are_one_piece_and_others_stand_between_them() {
        let delta = |seq, id: &str, text: &str| {
            stored(seq, "text.delta", Some("run_1"), json!({ "message_id": id, "text": text }))
        };
        let finish =
            json!({ "message_id": "msg_a", "role": "assistant", "finish": { "reason": "end_turn" } });
        let found = changes(&[
            delta(1, "msg_a", "hel"),
            delta(2, "msg_b", "x"),
            delta(3, "msg_a", "lo"),
            stored(4, "message.finished", Some("run_1"), finish),
            delta(5, "msg_a", "again"),
        ]);
        let pieces: Vec<(u64, &str)> = found
            .iter()
            .filter_map(|change| match change {
                DerivedChange::MessagePiece { seq, text, .. } => Some((seq.0, text.as_str())),
                _ => None,
            })
            .collect();
        assert_eq!(pieces, [(1, "hello"), (2, "x"), (5, "again")]);
        assert!(matches!(&found[2], DerivedChange::MessageFinished { place, .. } if place.seq == Seq(4)));
    }

    #[test]
    fn late_text_and_usage_belong_to_the_run_they_came_after() {
        let late = json!({ "text": "late", "after_run": "run_9" });
        let usage = json!({ "input_tokens": 1, "output_tokens": 2, "cost_usd": 0.5, "after_run": "run_9" });
        let found = changes(&[stored(1, "text.delta", None, late), stored(2, "usage.reported", None, usage)]);
        let run = Some(RunId::parse("run_9").unwrap());
        assert!(matches!(&found[0], DerivedChange::Text { place, .. } if place.run == run), "{found:?}");
        assert!(matches!(&found[1], DerivedChange::Usage { run: of, .. } if *of == run), "{found:?}");
    }

    #[test]
    fn a_tool_call_is_found_by_its_name_its_input_and_the_files_that_it_changes() {
        let write =
            json!({ "call_id": "1", "name": "Write", "input": { "content": "fn x", "file_path": "a.rs" } });
        let bash =
            json!({ "call_id": "2", "name": "Bash", "input": { "command": ["ls", "-l"], "timeout": 5 } });
        let found = changes(&[
            stored(1, "tool.started", Some("run_1"), write),
            stored(2, "tool.started", Some("run_1"), bash),
        ]);
        assert_eq!(
            texts(&found),
            [
                (SearchHitKind::Tool, "Write\nfn x\na.rs"),
                (SearchHitKind::Path, "a.rs"),
                (SearchHitKind::Tool, "Bash\nls\n-l"),
            ]
        );
    }

    #[test]
    fn unreadable_and_unknown_events_change_nothing() {
        let bad = [
            stored(1, "run.accepted", Some("run_1"), json!({ "prompt": 5 })),
            stored(2, "run.imagined", Some("run_1"), json!({})),
            stored(3, "session.updated", None, json!({ "closing": "keep" })),
        ];
        assert_eq!(changes(&bad), []);
    }
}
