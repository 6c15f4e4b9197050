//! Turns an agent's session updates into turn updates, and remembers what is needed to judge how a turn ended. Nothing
//! is truncated here; that happens last, when events are fitted to their size limit.

use agent_client_protocol::v1::schema::{
    ContentBlock, ContentChunk, EmbeddedResourceResource, Meta, Notice, Plan, SessionUpdate, ToolCallUpdate,
    Usage as TurnUsage,
};
use qd_protocol::event::PlanEntry;
use qd_protocol::link::TurnUpdate;
use qd_protocol::worker::META_KEY;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::profile::AcpProfile;
use super::tool_calls::{AcpTerminalLookup, AcpToolCalls, AcpToolPermission};
use super::usage::AcpUsageCounter;

/// How many bytes of the agent's last text are kept. An error message fits; a longer answer need not.
const LAST_TEXT_MAX: usize = 16 << 10;

/// Our own entry in a `_meta`, if it is there and has the expected shape.
pub(super) fn quarterdeck_meta<T: DeserializeOwned>(meta: Option<&Meta>) -> Option<T> {
    T::deserialize(meta?.get(META_KEY)?).ok()
}

/// Decodes the session updates of one conversation.
#[derive(Debug, Default)]
pub(super) struct AcpEventDecoder {
    profile: AcpProfile,
    tool_calls: AcpToolCalls,
    usage: AcpUsageCounter,
    /// The agent's text since its last tool call.
    last_text: String,
    /// Whether an update reported that the turn failed.
    failure_reported: bool,
}

impl AcpEventDecoder {
    pub(super) fn new(profile: AcpProfile) -> Self {
        Self { profile, ..Self::default() }
    }

    pub(super) fn profile(&self) -> &AcpProfile {
        &self.profile
    }

    /// Clears the state of the previous turn.
    pub(super) fn begin_turn(&mut self) {
        self.tool_calls.clear();
        self.usage.begin_turn();
        self.last_text.clear();
        self.failure_reported = false;
    }

    /// Decodes one session update. Kinds that a session has no use for yield nothing.
    pub(super) fn decode(
        &mut self,
        update: SessionUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => self.decode_text_chunk(chunk),
            SessionUpdate::AgentThoughtChunk(chunk) => {
                vec![TurnUpdate::Thought { text: content_block_text(chunk.content) }]
            }
            SessionUpdate::ToolCall(call) => self.decode_tool_call(call.into(), terminals),
            SessionUpdate::ToolCallUpdate(update) => self.decode_tool_call(update, terminals),
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

    /// Records a tool call for which the agent requests permission.
    pub(super) fn record_permission_request(
        &mut self,
        call: ToolCallUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> AcpToolPermission {
        self.tool_calls.record_permission_request(call, terminals)
    }

    /// Counts the tokens reported in the response to a prompt.
    pub(super) fn decode_prompt_response(
        &mut self,
        usage: Option<&TurnUsage>,
        meta: Option<&Meta>,
    ) -> Option<TurnUpdate> {
        self.usage.count_response(usage, meta, &self.profile)
    }

    /// Why the turn failed, if it did, whatever stop reason the agent reported. Text that matches an error pattern
    /// counts only if the model used no tokens: otherwise the model may have written it itself.
    pub(super) fn turn_failure(&self) -> Option<String> {
        let matches_error = !self.usage.has_used() && self.profile.is_error(&self.last_text);
        let text = self.last_text.trim();
        (self.failure_reported || matches_error).then(|| match text.is_empty() {
            true => "the agent reported that its turn failed, without a reason".to_owned(),
            false => text.to_owned(),
        })
    }

    fn decode_text_chunk(&mut self, chunk: ContentChunk) -> Vec<TurnUpdate> {
        let ContentChunk { content, meta, .. } = chunk;
        let used = self.usage.count_chunk(meta.as_ref(), &self.profile);
        let text = content_block_text(content);
        let update = if self.profile.is_notice(&text) {
            Some(TurnUpdate::Notice { text: text.trim_end().to_owned() })
        } else {
            if self.last_text.len() < LAST_TEXT_MAX {
                self.last_text.push_str(&text);
            }
            (!text.is_empty()).then_some(TurnUpdate::Text { text })
        };
        update.into_iter().chain(used).collect()
    }

    fn decode_tool_call(
        &mut self,
        update: ToolCallUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        self.last_text.clear();
        self.tool_calls.update(update, terminals)
    }
}

/// The text of a content block. Anything but text is replaced by its name or type in brackets.
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
                .and_then(|status| status.as_str().map(str::to_owned))
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

    fn decode_text(decoder: &mut AcpEventDecoder, text: &str) -> Vec<TurnUpdate> {
        let chunk = ContentChunk::new(ContentBlock::Text(TextContent::new(text)));
        decoder.decode(SessionUpdate::AgentMessageChunk(chunk), &|_| None)
    }

    #[test]
    fn an_error_sent_as_an_answer_is_a_failure_only_if_no_model_was_used() {
        let mut decoder = decoder_for("copilot");
        assert_eq!(decode_text(&mut decoder, "Error: 400 no").len(), 1);
        assert_eq!(decoder.turn_failure().as_deref(), Some("Error: 400 no"));
        decoder.begin_turn();
        assert_eq!(decoder.turn_failure(), None);
        decode_text(&mut decoder, "Error: that is what the file says");
        let meta = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        decoder.decode_prompt_response(None, meta.as_object());
        assert_eq!(decoder.turn_failure(), None, "the model said so");
    }

    #[test]
    fn a_failure_reported_in_an_update_fails_the_turn_and_a_warning_becomes_a_notice() {
        let mut decoder = decoder_for("codex-acp");
        assert!(matches!(
            &decode_text(&mut decoder, "Warning: old model\n\n")[..],
            [TurnUpdate::Notice { .. }]
        ));
        decode_text(&mut decoder, "no such key\n\n");
        assert_eq!(decoder.turn_failure(), None);
        let meta = json!({"codex": {"threadStatus": {"type": "systemError"}}});
        let info = SessionInfoUpdate::new().meta(meta.as_object().cloned());
        decoder.decode(SessionUpdate::SessionInfoUpdate(info), &|_| None);
        assert_eq!(decoder.turn_failure().as_deref(), Some("no such key"));
    }
}
