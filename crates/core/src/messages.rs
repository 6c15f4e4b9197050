//! Events folded into messages: one of the user's and one of the assistant's for every run.

use std::collections::HashMap;

use qd_protocol::api::Message;
use qd_protocol::event::{Body, Part, Tool};
use qd_protocol::{MessageId, Number, RunId};

/// Messages in the making. Feed it a session's events in order.
#[derive(Debug, Default)]
pub struct Messages {
    list: Vec<Message>,
    place: HashMap<MessageId, usize>,
    steers: HashMap<Number, String>,
}

impl Messages {
    /// Takes one event in. What has no run, or came after its end, is part of no message.
    pub fn add(&mut self, number: Number, run: Option<&RunId>, body: Body) {
        let Some(run) = run else { return };
        match body {
            Body::MessageCreated(created) => {
                self.place.insert(created.message_id.clone(), self.list.len());
                self.list.push(Message {
                    message_id: created.message_id,
                    run_id: run.clone(),
                    role: created.role,
                    parts: created.parts,
                    finish: None,
                });
            }
            Body::TextDelta(delta) => {
                let Some(parts) = self.parts(run) else { return };
                match parts.last_mut() {
                    Some(Part::Text { text, .. }) => text.push_str(&delta.text),
                    _ => parts.push(Part::Text { text: delta.text, blob: None }),
                }
            }
            Body::ThoughtDelta(delta) => {
                let Some(parts) = self.parts(run) else { return };
                match parts.last_mut() {
                    Some(Part::Thought { text }) => text.push_str(&delta.text),
                    _ => parts.push(Part::Thought { text: delta.text }),
                }
            }
            Body::ToolStarted(tool) | Body::ToolOutput(tool) | Body::ToolFinished(tool) => {
                self.tool(run, tool)
            }
            Body::PlanUpdated(plan) => {
                let Some(parts) = self.parts(run) else { return };
                match parts.iter_mut().find(|part| matches!(part, Part::Plan { .. })) {
                    Some(part) => *part = Part::Plan { entries: plan.entries },
                    None => parts.push(Part::Plan { entries: plan.entries }),
                }
            }
            Body::SteerAccepted(steer) => {
                self.steers.insert(number, steer.text);
            }
            Body::SteerTaken(taken) => {
                let text = self.steers.remove(&taken.steer).unwrap_or_default();
                if let Some(parts) = self.parts(run) {
                    parts.push(Part::Steer { text });
                }
            }
            Body::MessageFinished(finished) => {
                if let Some(message) =
                    self.place.get(&finished.message_id).and_then(|at| self.list.get_mut(*at))
                {
                    message.finish = Some(finished.finish);
                }
            }
            _ => {}
        }
    }

    /// All of them, in the order in which they began.
    pub fn done(self) -> Vec<Message> {
        self.list
    }

    fn parts(&mut self, run: &RunId) -> Option<&mut Vec<Part>> {
        let at = self.place.get(&MessageId::assistant(run))?;
        self.list.get_mut(*at).map(|message| &mut message.parts)
    }

    fn tool(&mut self, run: &RunId, news: Tool) {
        let Some(parts) = self.parts(run) else { return };
        let known = parts
            .iter_mut()
            .rev()
            .find(|part| matches!(part, Part::Tool { call_id, .. } if *call_id == news.call_id));
        match known {
            Some(Part::Tool { text, output, is_error, .. }) => {
                text.push_str(news.text.as_deref().unwrap_or_default());
                *output = news.output.or(output.take());
                *is_error = news.is_error.or(*is_error);
            }
            _ => parts.push(Part::Tool {
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
