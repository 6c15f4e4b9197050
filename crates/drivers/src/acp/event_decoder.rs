//! Turns an agent's session updates into turn updates, and remembers what is needed to judge how a turn ended. Nothing
//! is truncated here; that happens last, when events are fitted to their size limit.

use std::collections::BTreeSet;

use agent_client_protocol::v1::schema::{
    CompactionStatus, ContentBlock, ContentChunk, EmbeddedResourceResource, Meta, Notice, Plan,
    SessionUpdate, ToolCallUpdate, Usage as TurnUsage,
};
use qd_protocol::event::{ContextUsage, PlanEntry};
use qd_protocol::link::TurnUpdate;
use qd_protocol::manifest::SlashCommandRules;
use qd_protocol::worker::META_KEY;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::profile::AcpProfile;
use super::tool_calls::{AcpTerminalLookup, AcpToolCalls, AcpToolPermission};
use super::usage::AcpUsageCounter;

/// How many bytes of the agent's last text are kept. An error message fits; a longer answer need not.
const LAST_TEXT_MAX: usize = 16 << 10;

/// The word before a prompt that begins with a slash and is no command.
const ESCAPE_WORD: &str = "Message:";

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
    /// The agent's text since its last tool call, or from the last piece that begins with an error on.
    last_text: String,
    /// Whether the last piece of text matches an error pattern.
    ends_with_error: bool,
    /// How many pieces of text came since the last tool call.
    text_pieces: usize,
    /// Whether the turn had a tool call.
    called_tool: bool,
    /// Whether a notice came since the last tool call: an agent that retries a model call reports it so.
    noticed: bool,
    /// The commands that the agent has listed; `None` if it has not listed any yet.
    listed_commands: Option<Vec<String>>,
    /// Whether the turn had any text, thought or tool call.
    has_output: bool,
    /// Whether an update reported that the turn failed.
    failure_reported: bool,
    /// The ids of finished compactions of this turn.
    compactions: BTreeSet<String>,
    /// Tokens that the model can read, if the agent reports that only when a session is opened.
    context_size: Option<u64>,
}

impl AcpEventDecoder {
    pub(super) fn new(profile: AcpProfile) -> Self {
        let tool_calls = AcpToolCalls::new(profile.name_in_call_id.clone(), profile.describes_calls);
        Self { profile, tool_calls, ..Self::default() }
    }

    /// Decodes a conversation that is resumed, and that has cost this much before if that is known.
    pub(super) fn resumed(profile: AcpProfile, earlier_cost_usd: Option<f64>) -> Self {
        Self { usage: AcpUsageCounter::resumed(earlier_cost_usd), ..Self::new(profile) }
    }

    /// Sets how many tokens the model can read, if the agent has reported it.
    pub(super) fn set_context_size(&mut self, size: Option<u64>) {
        self.context_size = size;
    }

    pub(super) fn profile(&self) -> &AcpProfile {
        &self.profile
    }

    /// Whether the agent has yet to list the commands that it must be known to have.
    pub(super) fn waits_for_commands(&self) -> bool {
        self.profile.slash_commands.ignores_unknown && self.listed_commands.is_none()
    }

    /// The text as the agent must get it. If the agent would take it for a command that it does not have, and ignore it,
    /// a word comes first.
    pub(super) fn escape_unknown_command(&self, text: &str) -> Option<String> {
        let SlashCommandRules { ignores_unknown, unlisted } = &self.profile.slash_commands;
        let name = text.trim_start().strip_prefix('/')?.split(char::is_whitespace).next()?;
        if name.is_empty() {
            return None;
        }
        let known = self.listed_commands.iter().flatten().chain(unlisted).any(|command| command == name);
        (*ignores_unknown && !known).then(|| format!("{ESCAPE_WORD} {}", text.trim_start()))
    }

    /// Whether the turn had any text, thought or tool call.
    pub(super) fn has_output(&self) -> bool {
        self.has_output
    }

    /// Clears the state of the previous turn.
    pub(super) fn begin_turn(&mut self) {
        self.tool_calls.clear();
        self.usage.begin_turn();
        self.forget_text();
        self.called_tool = false;
        self.failure_reported = false;
        self.compactions.clear();
        self.has_output = false;
    }

    fn forget_text(&mut self) {
        self.last_text.clear();
        self.ends_with_error = false;
        self.text_pieces = 0;
        self.noticed = false;
    }

    /// Decodes one session update. Kinds that a session has no use for yield nothing.
    pub(super) fn decode(
        &mut self,
        update: SessionUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        self.has_output |= matches!(
            update,
            SessionUpdate::AgentMessageChunk(_)
                | SessionUpdate::AgentThoughtChunk(_)
                | SessionUpdate::ToolCall(_)
                | SessionUpdate::ToolCallUpdate(_)
        );
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => self.decode_text_chunk(chunk),
            SessionUpdate::AgentThoughtChunk(chunk) => {
                vec![TurnUpdate::Thought { text: content_block_text(chunk.content) }]
            }
            SessionUpdate::ToolCall(call) => self.decode_tool_call(call.into(), terminals),
            SessionUpdate::ToolCallUpdate(update) => self.decode_tool_call(update, terminals),
            SessionUpdate::Plan(plan) => vec![TurnUpdate::Plan { entries: plan_entries(plan) }],
            SessionUpdate::UsageUpdate(update) => {
                // Some agents report a cost before they know their model.
                let context = ContextUsage { used: update.used, size: update.size };
                let context = (context.size > 0).then_some(TurnUpdate::Context(context));
                self.usage.count_update(&update).into_iter().chain(context).collect()
            }
            SessionUpdate::CompactionUpdate(update) if update.status == CompactionStatus::Completed => {
                // Some agents report the end twice.
                let is_new = self.compactions.insert(update.compaction_id.to_string());
                is_new.then_some(TurnUpdate::Compacted { used_before: None }).into_iter().collect()
            }
            SessionUpdate::Notice(notice) => vec![TurnUpdate::notice(notice_text(notice))],
            SessionUpdate::AvailableCommandsUpdate(update) => {
                let names = update.available_commands.into_iter().map(|command| command.name);
                self.listed_commands = Some(names.collect());
                Vec::new()
            }
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
        self.usage.count_response(usage, meta, self.has_output, &self.profile)
    }

    /// Why the turn failed, if it did, whatever stop reason the agent reported. Text that matches an error pattern
    /// counts only if the model used no tokens, because otherwise the model may have written it itself; or if it is the
    /// agent's last piece of text, and either the agent has shown a notice of its retries, or it is the only piece since
    /// a tool call. A model's words come in several pieces, and the call before the tool explains the tokens.
    pub(super) fn turn_failure(&self) -> Option<String> {
        let is_only_piece = self.called_tool && self.text_pieces == 1;
        let gave_up = self.ends_with_error && (self.noticed || is_only_piece);
        let matches_error = gave_up || !self.usage.has_used() && self.profile.is_error(&self.last_text);
        let text = self.last_text.trim();
        (self.failure_reported || matches_error).then(|| match text.is_empty() {
            true => "the agent reported that its turn failed, without a reason".to_owned(),
            false => text.to_owned(),
        })
    }

    fn decode_text_chunk(&mut self, chunk: ContentChunk) -> Vec<TurnUpdate> {
        let ContentChunk { content, meta, .. } = chunk;
        let used = self.usage.count_chunk(meta.as_ref(), &self.profile);
        let context = used.as_ref().zip(self.context_size).and_then(|(update, size)| match update {
            TurnUpdate::Usage { usage, .. } => Some(TurnUpdate::Context(ContextUsage {
                used: usage.input_tokens + usage.output_tokens,
                size,
            })),
            _ => None,
        });
        let text = content_block_text(content);
        let update = if self.profile.is_notice(&text) {
            self.noticed = true;
            Some(TurnUpdate::notice(text.trim_end().to_owned()))
        } else {
            // An agent sends an error as a piece of its own, often right after words of the model without a line break.
            self.ends_with_error = self.profile.is_error(&text);
            self.text_pieces += 1;
            if self.ends_with_error {
                self.last_text.clear();
            }
            if self.last_text.len() < LAST_TEXT_MAX {
                self.last_text.push_str(&text);
            }
            (!text.is_empty()).then_some(TurnUpdate::Text { text })
        };
        update.into_iter().chain(used).chain(context).collect()
    }

    fn decode_tool_call(
        &mut self,
        update: ToolCallUpdate,
        terminals: AcpTerminalLookup<'_>,
    ) -> Vec<TurnUpdate> {
        self.forget_text();
        self.called_tool = true;
        let mut updates = self.tool_calls.update(update, terminals);
        let plan = updates.iter().find_map(|update| match update {
            TurnUpdate::ToolStarted { name, input, .. } if self.profile.todo_tools.contains(name) => {
                todo_entries(input)
            }
            _ => None,
        });
        updates.extend(plan.map(|entries| TurnUpdate::Plan { entries }));
        updates
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

/// The entries of a to-do list that is the argument of a tool call.
fn todo_entries(input: &Value) -> Option<Vec<PlanEntry>> {
    #[derive(Deserialize)]
    struct AcpTodoInput {
        todos: Vec<PlanEntry>,
    }
    AcpTodoInput::deserialize(input).ok().map(|AcpTodoInput { todos }| todos)
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
    fn an_error_right_after_retries_or_words_of_the_model_is_a_failure() {
        const RETRY: &str = "Info: Response was interrupted due to a server error. Retrying...";
        const GAVE_UP: &str = "Error: Failed to get response from the AI model; retried 5 times";
        let mut decoder = decoder_for("copilot");
        decode_text(&mut decoder, "half a ");
        decode_text(&mut decoder, "sentence");
        let retry = decode_text(&mut decoder, RETRY);
        assert_eq!(retry, [TurnUpdate::notice(RETRY.to_owned())], "a retry is no part of the answer");
        decode_text(&mut decoder, "half a ");
        decode_text(&mut decoder, GAVE_UP);
        assert_eq!(decoder.turn_failure().as_deref(), Some(GAVE_UP));
        // The call before it, with a tool, used tokens.
        let meta = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        decoder.decode_prompt_response(None, meta.as_object());
        assert_eq!(decoder.turn_failure().as_deref(), Some(GAVE_UP));
        decoder.begin_turn();
        decode_text(&mut decoder, RETRY);
        for piece in ["the log says\n", "Error: disk full", ", so I stopped"] {
            decode_text(&mut decoder, piece);
        }
        let meta = json!({"quota": {"token_count": {"input_tokens": 20, "output_tokens": 4}}});
        decoder.decode_prompt_response(None, meta.as_object());
        assert_eq!(decoder.turn_failure(), None, "the retry succeeded, and the model said so");
    }

    #[test]
    fn an_error_that_is_all_the_text_after_a_tool_call_is_a_failure() {
        let call_a_tool = |decoder: &mut AcpEventDecoder| {
            let call = json!({"sessionUpdate": "tool_call", "toolCallId": "t", "title": "Run", "status": "completed"});
            decoder.decode(serde_json::from_value(call).unwrap(), &|_| None);
        };
        // The call before the tool used tokens.
        let meta = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        let mut decoder = decoder_for("copilot");
        decode_text(&mut decoder, "I will look. ");
        call_a_tool(&mut decoder);
        decode_text(&mut decoder, "Error: 400 no");
        decoder.decode_prompt_response(None, meta.as_object());
        assert_eq!(decoder.turn_failure().as_deref(), Some("Error: 400 no"));
        decoder.begin_turn();
        call_a_tool(&mut decoder);
        for piece in ["Error: ", "the file ", "is missing"] {
            decode_text(&mut decoder, piece);
        }
        let meta = json!({"quota": {"token_count": {"input_tokens": 20, "output_tokens": 4}}});
        decoder.decode_prompt_response(None, meta.as_object());
        assert_eq!(decoder.turn_failure(), None, "the model said so");
    }

    #[test]
    fn a_prompt_that_only_looks_like_a_command_is_escaped_where_it_would_be_ignored() {
        let mut decoder = decoder_for("opencode");
        assert!(decoder.waits_for_commands());
        let listed = json!({"sessionUpdate": "available_commands_update", "availableCommands": [
            {"name": "init", "description": ""},
        ]});
        decoder.decode(serde_json::from_value(listed).unwrap(), &|_| None);
        assert!(!decoder.waits_for_commands());
        let escaped = decoder.escape_unknown_command(" /etc/hosts is wrong");
        assert_eq!(escaped.as_deref(), Some("Message: /etc/hosts is wrong"));
        for text in ["/init", "/compact", "/init now", "a / b", "/ is a slash", "hello"] {
            assert_eq!(decoder.escape_unknown_command(text), None, "{text}");
        }
        assert_eq!(decoder_for("gemini").escape_unknown_command("/etc/hosts is wrong"), None);
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
