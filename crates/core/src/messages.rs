//! Folds events into messages: one of the user and one of the assistant for every run.

use std::collections::HashMap;

use qd_protocol::api::Message;
use qd_protocol::event::{EventBody, MessagePart, ToolCallEvent};
use qd_protocol::{EventNumber, MessageId, RunId};

/// Assembles messages from a session's events, which must be added in order.
#[derive(Debug, Default)]
pub struct MessageAssembler {
    messages: Vec<Message>,
    positions: HashMap<MessageId, usize>,
    steers: HashMap<EventNumber, String>,
}

impl MessageAssembler {
    /// Adds one event. Events without a run, or from after the run's end, belong to no message.
    pub fn add_event(&mut self, number: EventNumber, run: Option<&RunId>, body: EventBody) {
        let Some(run) = run else { return };
        match body {
            EventBody::MessageCreated(created) => {
                self.positions.insert(created.message_id.clone(), self.messages.len());
                self.messages.push(Message {
                    message_id: created.message_id,
                    run_id: run.clone(),
                    role: created.role,
                    parts: created.parts,
                    finish: None,
                });
            }
            EventBody::TextDelta(delta) => {
                let Some(parts) = self.assistant_parts(run) else { return };
                match parts.last_mut() {
                    Some(MessagePart::Text { text, .. }) => text.push_str(&delta.text),
                    _ => parts.push(MessagePart::Text { text: delta.text, blob: None }),
                }
            }
            EventBody::ThoughtDelta(delta) => {
                let Some(parts) = self.assistant_parts(run) else { return };
                match parts.last_mut() {
                    Some(MessagePart::Thought { text }) => text.push_str(&delta.text),
                    _ => parts.push(MessagePart::Thought { text: delta.text }),
                }
            }
            EventBody::ToolStarted(tool) | EventBody::ToolOutput(tool) | EventBody::ToolFinished(tool) => {
                self.update_tool(run, tool)
            }
            EventBody::PlanUpdated(plan) => {
                let Some(parts) = self.assistant_parts(run) else { return };
                match parts.iter_mut().find(|part| matches!(part, MessagePart::Plan { .. })) {
                    Some(part) => *part = MessagePart::Plan { entries: plan.entries },
                    None => parts.push(MessagePart::Plan { entries: plan.entries }),
                }
            }
            EventBody::SteerAccepted(steer) => {
                self.steers.insert(number, steer.text);
            }
            EventBody::SteerTaken(taken) => {
                let text = self.steers.remove(&taken.steer).unwrap_or_default();
                if let Some(parts) = self.assistant_parts(run) {
                    parts.push(MessagePart::Steer { text });
                }
            }
            EventBody::MessageFinished(finished) => {
                if let Some(message) =
                    self.positions.get(&finished.message_id).and_then(|at| self.messages.get_mut(*at))
                {
                    message.finish = Some(finished.finish);
                }
            }
            _ => {}
        }
    }

    /// All messages, in the order in which they were created.
    pub fn into_messages(self) -> Vec<Message> {
        self.messages
    }

    fn assistant_parts(&mut self, run: &RunId) -> Option<&mut Vec<MessagePart>> {
        let at = self.positions.get(&MessageId::assistant(run))?;
        self.messages.get_mut(*at).map(|message| &mut message.parts)
    }

    fn update_tool(&mut self, run: &RunId, event: ToolCallEvent) {
        let Some(parts) = self.assistant_parts(run) else { return };
        let existing = parts
            .iter_mut()
            .rev()
            .find(|part| matches!(part, MessagePart::Tool { call_id, .. } if *call_id == event.call_id));
        match existing {
            Some(MessagePart::Tool { text, output, is_error, .. }) => {
                text.push_str(event.text.as_deref().unwrap_or_default());
                *output = event.output.or(output.take());
                *is_error = event.is_error.or(*is_error);
            }
            _ => parts.push(MessagePart::Tool {
                call_id: event.call_id,
                name: event.name.unwrap_or_default(),
                input: event.input.unwrap_or_default(),
                text: event.text.unwrap_or_default(),
                output: event.output,
                is_error: event.is_error,
            }),
        }
    }
}
