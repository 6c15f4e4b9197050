//! Turns an agent's session updates into what a session hears, and remembers of a turn what its end is judged by.
//! Nothing is cut here: that comes last, in `fit`.

use agent_client_protocol::v1::schema::{
    ContentBlock, ContentChunk, EmbeddedResourceResource, Meta, Notice, Plan, SessionUpdate, ToolCallUpdate,
    Usage as TurnUsage,
};
use qd_protocol::event::PlanEntry;
use qd_protocol::link::Said;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::calls::{Asking, Calls, Shows};
use super::profile::Profile;
use super::usage::Counter;

/// How much of the agent's last words is remembered: an error fits, and an answer need not.
const LAST_WORDS_MAX: usize = 16 << 10;

/// Our corner of a `_meta`, if there is one and it is as expected.
pub(super) fn ours<T: DeserializeOwned>(meta: Option<&Meta>) -> Option<T> {
    T::deserialize(meta?.get(OURS)?).ok()
}

/// The key under which we put what the protocol has no field for.
pub(crate) const OURS: &str = "quarterdeck";

/// What is known of a conversation beyond its text.
#[derive(Debug, Default)]
pub(super) struct Ear {
    profile: Profile,
    calls: Calls,
    usage: Counter,
    /// What the agent has said since it last did something.
    last_words: String,
    /// Whether an update told that the turn failed.
    failed: bool,
}

impl Ear {
    /// The ear for an agent of this kind.
    pub(super) fn new(profile: Profile) -> Self {
        Self { profile, ..Self::default() }
    }

    pub(super) fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Forgets the turn before.
    pub(super) fn begin_turn(&mut self) {
        self.calls.clear();
        self.usage.begin_turn();
        self.last_words.clear();
        self.failed = false;
    }

    /// What an update says. Kinds that mean nothing to a session say nothing.
    pub(super) fn hear(&mut self, update: SessionUpdate, shows: Shows<'_>) -> Vec<Said> {
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => self.words(chunk),
            SessionUpdate::AgentThoughtChunk(chunk) => vec![Said::Thought { text: text_of(chunk.content) }],
            SessionUpdate::ToolCall(call) => self.tool(call.into(), shows),
            SessionUpdate::ToolCallUpdate(update) => self.tool(update, shows),
            SessionUpdate::Plan(plan) => vec![Said::Plan { entries: entries(plan) }],
            SessionUpdate::UsageUpdate(update) => self.usage.update(&update).into_iter().collect(),
            SessionUpdate::Notice(notice) => vec![Said::Notice { text: notice_text(notice) }],
            SessionUpdate::SessionInfoUpdate(info) => {
                self.failed |= self.profile.tells_failure(info.meta.as_ref());
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// A tool call that the agent asks about.
    pub(super) fn asked(&mut self, call: ToolCallUpdate, shows: Shows<'_>) -> Asking {
        self.calls.asked(call, shows)
    }

    /// What the answer to a prompt says of its tokens.
    pub(super) fn hear_answer(&mut self, usage: Option<&TurnUsage>, meta: Option<&Meta>) -> Option<Said> {
        self.usage.answer(usage, meta, &self.profile)
    }

    /// What the turn failed of, if it did, whatever the agent says of how it ended. Words alone do not make a failure
    /// where the model was at work: it may have said them itself.
    pub(super) fn failure(&self) -> Option<String> {
        let by_words = !self.usage.has_used() && self.profile.is_error(&self.last_words);
        let told = self.last_words.trim();
        (self.failed || by_words).then(|| match told.is_empty() {
            true => "the agent tells that its turn failed, and not why".to_owned(),
            false => told.to_owned(),
        })
    }

    fn words(&mut self, chunk: ContentChunk) -> Vec<Said> {
        let ContentChunk { content, meta, .. } = chunk;
        let used = self.usage.beside(meta.as_ref(), &self.profile);
        let text = text_of(content);
        let said = if self.profile.is_notice(&text) {
            Some(Said::Notice { text: text.trim_end().to_owned() })
        } else {
            if self.last_words.len() < LAST_WORDS_MAX {
                self.last_words.push_str(&text);
            }
            (!text.is_empty()).then_some(Said::Text { text })
        };
        said.into_iter().chain(used).collect()
    }

    fn tool(&mut self, update: ToolCallUpdate, shows: Shows<'_>) -> Vec<Said> {
        self.last_words.clear();
        self.calls.update(update, shows)
    }
}

/// The text of a piece of content; what is no text is named.
pub(super) fn text_of(content: ContentBlock) -> String {
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

fn entries(plan: Plan) -> Vec<PlanEntry> {
    #[derive(Deserialize)]
    struct Status {
        status: String,
    }
    let entries = plan.entries.into_iter().map(|entry| {
        let status = match ours(entry.meta.as_ref()) {
            Some(Status { status }) => status,
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

    fn ear(agent: &str) -> Ear {
        let spec = AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), agent, "/");
        Ear::new(Profile::of(&Catalog::built_in().get(agent).unwrap(), &spec))
    }

    fn says(ear: &mut Ear, text: &str) -> Vec<Said> {
        let chunk = ContentChunk::new(ContentBlock::Text(TextContent::new(text)));
        ear.hear(SessionUpdate::AgentMessageChunk(chunk), &|_| None)
    }

    #[test]
    fn a_failure_that_is_told_as_an_answer_is_known_by_its_words_if_no_model_was_at_work() {
        let mut ear = ear("copilot");
        assert_eq!(says(&mut ear, "Error: 400 no").len(), 1);
        assert_eq!(ear.failure().as_deref(), Some("Error: 400 no"));
        ear.begin_turn();
        assert_eq!(ear.failure(), None);
        says(&mut ear, "Error: that is what the file says");
        let meta = json!({"quota": {"token_count": {"input_tokens": 10, "output_tokens": 2}}});
        ear.hear_answer(None, meta.as_object());
        assert_eq!(ear.failure(), None, "the model said so");
    }

    #[test]
    fn a_failure_that_is_told_in_an_update_is_one_and_warnings_are_no_answer() {
        let mut ear = ear("codex-acp");
        assert!(matches!(&says(&mut ear, "Warning: old model\n\n")[..], [Said::Notice { .. }]));
        says(&mut ear, "no such key\n\n");
        assert_eq!(ear.failure(), None);
        let meta = json!({"codex": {"threadStatus": {"type": "systemError"}}});
        let info = SessionInfoUpdate::new().meta(meta.as_object().cloned());
        ear.hear(SessionUpdate::SessionInfoUpdate(info), &|_| None);
        assert_eq!(ear.failure().as_deref(), Some("no such key"));
    }
}
