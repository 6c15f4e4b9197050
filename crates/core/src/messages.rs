//! Events folded into messages: one of the user's and one of the assistant's for every run.

use std::collections::HashMap;

use qd_protocol::api::Message;
use qd_protocol::event::{EventBody, MessagePart, ToolCallEvent};
use qd_protocol::{EventNumber, MessageId, RunId};

/// Messages in the making. Feed it a session's events in order.
#[derive(Debug, Default)]
pub struct MessageAssembler {
    messages: Vec<Message>,
    positions: HashMap<MessageId, usize>,
    steers: HashMap<EventNumber, String>,
}

impl MessageAssembler {
    /// Takes one event in. What has no run, or came after its end, is part of no message.
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

    /// All of them, in the order in which they began.
    pub fn into_messages(self) -> Vec<Message> {
        self.messages
    }

    fn assistant_parts(&mut self, run: &RunId) -> Option<&mut Vec<MessagePart>> {
        let at = self.positions.get(&MessageId::assistant(run))?;
        self.messages.get_mut(*at).map(|message| &mut message.parts)
    }

    fn update_tool(&mut self, run: &RunId, news: ToolCallEvent) {
        let Some(parts) = self.assistant_parts(run) else { return };
        let known = parts
            .iter_mut()
            .rev()
            .find(|part| matches!(part, MessagePart::Tool { call_id, .. } if *call_id == news.call_id));
        match known {
            Some(MessagePart::Tool { text, output, is_error, .. }) => {
                text.push_str(news.text.as_deref().unwrap_or_default());
                *output = news.output.or(output.take());
                *is_error = news.is_error.or(*is_error);
            }
            _ => parts.push(MessagePart::Tool {
                call_id: news.call_id,
                name: news.name.unwrap_or_default(),
                input: news.input.unwrap_or_default(),
                text: news.text.unwrap_or_default(),
                output: news.output,
                is_error: news.is_error,
            }),
        }
    }
}
