//! Turns an agent's session updates into what a session hears, and remembers of a turn what its end is judged by.
//! Nothing is cut here: that comes last, in `fit`.

use agent_client_protocol::v1::schema::{
    ContentBlock, ContentChunk, EmbeddedResourceResource, Meta, Notice, Plan, SessionUpdate, ToolCallUpdate,
    Usage as TurnUsage,
};
use qd_protocol::event::PlanEntry;
use qd_protocol::link::TurnUpdate;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::profile::AcpProfile;
use super::tool_calls::{AcpTerminalLookup, AcpToolCalls, AcpToolPermission};
use super::usage::AcpUsageCounter;

/// How much of the agent's last words is remembered: an error fits, and an answer need not.
const LAST_TEXT_MAX: usize = 16 << 10;

/// Our corner of a `_meta`, if there is one and it is as expected.
pub(super) fn quarterdeck_meta<T: DeserializeOwned>(meta: Option<&Meta>) -> Option<T> {
    T::deserialize(meta?.get(META_KEY)?).ok()
}

/// The key under which we put what the protocol has no field for.
pub(crate) const META_KEY: &str = "quarterdeck";

/// What is known of a conversation beyond its text.
#[derive(Debug, Default)]
pub(super) struct AcpEventDecoder {
    profile: AcpProfile,
    tool_calls: AcpToolCalls,
    usage: AcpUsageCounter,
    /// What the agent has said since it last did something.
    last_text: String,
    /// Whether an update told that the turn failed.
    failure_reported: bool,
}

impl AcpEventDecoder {
    /// The ear for an agent of this kind.
    pub(super) fn new(profile: AcpProfile) -> Self {
        Self { profile, ..Self::default() }
    }

    pub(super) fn profile(&self) -> &AcpProfile {
        &self.profile
    }

    /// Forgets the turn before.
    pub(super) fn begin_turn(&mut self) {
        self.tool_calls.clear();
        self.usage.begin_turn();
        self.last_text.clear();
        self.failure_reported = false;
    }

    /// What an update says. Kinds that mean nothing to a session say nothing.
    pub(super) fn decode(&mut self, update: SessionUpdate, shows: AcpTerminalLookup<'_>) -> Vec<TurnUpdate> {
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => self.decode_text_chunk(chunk),
            SessionUpdate::AgentThoughtChunk(chunk) => {
                vec![TurnUpdate::Thought { text: content_block_text(chunk.content) }]
            }
            SessionUpdate::ToolCall(call) => self.decode_tool_call(call.into(), shows),
            SessionUpdate::ToolCallUpdate(update) => self.decode_tool_call(update, shows),
            SessionUpdate::Plan(plan) => vec![TurnUpdate::Plan { entries: plan_entries(plan) }],
            SessionUpdate::UsageUpdate(update) => self.usage.count_update(&update).into_iter().collect(),
            SessionUpdate::Notice(notice) => vec![TurnUpdate::Notice { text: notice_text(notice) }],
            SessionUpdate::SessionInfoUpdate(info) => {
                self.failure_reported |= self.profile.reports_failure(info.meta.as_ref());
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// A tool call that the agent asks about.
    pub(super) fn record_permission_request(
        &mut self,
        call: ToolCallUpdate,
        shows: AcpTerminalLookup<'_>,
    ) -> AcpToolPermission {
        self.tool_calls.record_permission_request(call, shows)
    }

    /// What the answer to a prompt says of its tokens.
    pub(super) fn decode_prompt_response(
        &mut self,
        usage: Option<&TurnUsage>,
        meta: Option<&Meta>,
    ) -> Option<TurnUpdate> {
        self.usage.count_response(usage, meta, &self.profile)
    }

    /// What the turn failed of, if it did, whatever the agent says of how it ended. Words alone do not make a failure
    /// where the model was at work: it may have said them itself.
    pub(super) fn turn_failure(&self) -> Option<String> {
        let by_words = !self.usage.has_used() && self.profile.is_error(&self.last_text);
        let told = self.last_text.trim();
        (self.failure_reported || by_words).then(|| match told.is_empty() {
            true => "the agent tells that its turn failed, and not why".to_owned(),
            false => told.to_owned(),
        })
    }

    fn decode_text_chunk(&mut self, chunk: ContentChunk) -> Vec<TurnUpdate> {
        let ContentChunk { content, meta, .. } = chunk;
        let used = self.usage.count_chunk(meta.as_ref(), &self.profile);
        let text = content_block_text(content);
        let said = if self.profile.is_notice(&text) {
            Some(TurnUpdate::Notice { text: text.trim_end().to_owned() })
        } else {
            if self.last_text.len() < LAST_TEXT_MAX {
                self.last_text.push_str(&text);
            }
            (!text.is_empty()).then_some(TurnUpdate::Text { text })
        };
        said.into_iter().chain(used).collect()
    }

    fn decode_tool_call(&mut self, update: ToolCallUpdate, shows: AcpTerminalLookup<'_>) -> Vec<TurnUpdate> {
        self.last_text.clear();
        self.tool_calls.update(update, shows)
    }
}

/// The text of a piece of content; what is no text is named.
pub(super) fn content_block_text(content: ContentBlock) -> String {
    match content {
        ContentBlock::Text(text) => text.text,
        ContentBlock::ResourceLink(link) => format!("[{}]({})", link.name, link.uri),
        ContentBlock::Resource(resource) => match resource.resource {
            EmbeddedResourceResource::TextResourceContents(text) => text.text,
            EmbeddedResourceResource::BlobResourceContents(blob) => format!("[{}]", blob.uri),
            _ => String::new(),
        },
        ContentBlock::Image(image) => format!("[{}]", image.mime_type),
        ContentBlock::Audio(audio) => format!("[{}]", audio.mime_type),
        _ => String::new(),
    }
}

fn plan_entries(plan: Plan) -> Vec<PlanEntry> {
    #[derive(Deserialize)]
    struct AcpPlanStatus {
        status: String,
    }
    let entries = plan.entries.into_iter().map(|entry| {
        let status = match quarterdeck_meta(entry.meta.as_ref()) {
            Some(AcpPlanStatus { status }) => status,
            None => serde_json::to_value(&entry.status)
                .ok()
                .and_then(|word| word.as_str().map(str::to_owned))
                .unwrap_or_default(),
        };
        PlanEntry { content: entry.content, status }
    });
    entries.collect()
}

fn notice_text(notice: Notice) -> String {
    match notice.description {
        Some(description) => format!("{}: {description}", notice.title),
        None => notice.title,
    }
}

#[cfg(test)]
mod tests {
    use agent_client_protocol::v1::schema::{SessionInfoUpdate, TextContent};
    use qd_catalog::Catalog;
    use qd_protocol::worker::AgentSpec;
    use qd_protocol::{SessionId, WorkerId};
    use serde_json::json;

    use super::*;

    fn decoder_for(agent: &str) -> AcpEventDecoder {
        let spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), agent, "/");
        AcpEventDecoder::new(AcpProfile::from_manifest(&Catalog::built_in().get(agent).unwrap(), &spec))
    }

    fn decode_text(ear: &mut AcpEventDecoder, text: &str) -> Vec<TurnUpdate> {
        let chunk = ContentChunk::new(ContentBlock::Text(TextContent::new(text)));
        ear.decode(SessionUpdate::AgentMessageChunk(chunk), &|_| None)
    }

    #[test]
    fn a_failure_that_is_told_as_an_answer_is_known_by_its_words_if_no_model_was_at_work() {
        let mut ear = decoder_for("copilot");
        assert_eq!(decode_text(&mut ear, "Error: 400 no").len(), 1);
        assert_eq!(ear.turn_failure().as_deref(), Some("Error: 400 no"));
        ear.begin_turn();
        assert_eq!(ear.turn_failure(), None);
        decode_text(&mut ear, "Error: that is what the file says");
        let meta = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        ear.decode_prompt_response(None, meta.as_object());
        assert_eq!(ear.turn_failure(), None, "the model said so");
    }

    #[test]
    fn a_failure_that_is_told_in_an_update_is_one_and_warnings_are_no_answer() {
        let mut ear = decoder_for("codex-acp");
        assert!(matches!(&decode_text(&mut ear, "Warning: old model\n\n")[..], [TurnUpdate::Notice { .. }]));
        decode_text(&mut ear, "no such key\n\n");
        assert_eq!(ear.turn_failure(), None);
        let meta = json!({"codex": {"threadStatus": {"type": "systemError"}}});
        let info = SessionInfoUpdate::new().meta(meta.as_object().cloned());
        ear.decode(SessionUpdate::SessionInfoUpdate(info), &|_| None);
        assert_eq!(ear.turn_failure().as_deref(), Some("no such key"));
    }
}
