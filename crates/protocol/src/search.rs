//! Searching the conversations of all sessions: the response of `GET /v1/search`. The docs of these types are the
//! descriptions in `openapi.json`, so they are written for users of the API.

use serde::{Deserialize, Serialize};

use crate::ids::{RunId, Seq, SessionId, WorkspaceId};
use crate::time::Millis;

/// Response of `GET /v1/search`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SearchPage {
    /// What was found, newest first.
    pub hits: Vec<SearchHit>,
    /// The `before` of the next page. Null if there is no more.
    pub next_before: Option<String>,
    /// Whether everything was searched that was in the journal when the search began. If not, the index is still being
    /// built, and `index` says how far it is.
    pub complete: bool,
    pub index: IndexProgress,
}

/// How far the index that searches and usage reports are answered from has followed the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
pub struct IndexProgress {
    /// Everything up to this event is in the index.
    #[schema(value_type = u64)]
    pub indexed_seq: Seq,
    /// The last event of the journal when the request came.
    #[schema(value_type = u64)]
    pub journal_seq: Seq,
}

impl IndexProgress {
    /// Whether the index has everything that was in the journal when the request came.
    pub fn is_complete(self) -> bool {
        self.indexed_seq >= self.journal_seq
    }
}

/// One place in a session that contains all the words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SearchHit {
    /// The session in which the words were found.
    pub session_id: SessionId,
    pub workspace_id: Option<WorkspaceId>,
    /// Agent of the session.
    pub agent: String,
    /// Title of the session.
    pub title: Option<String>,
    pub kind: SearchHitKind,
    /// When the text was sent; for an answer, when it was finished.
    pub at: Millis,
    /// The event that completed the text.
    #[schema(value_type = u64)]
    pub seq: Seq,
    /// The run that the text belongs to.
    pub run_id: Option<RunId>,
    /// The text around the words, cut into pieces at the words. Joined, they are the snippet.
    pub snippet: Vec<SnippetPart>,
    /// The command that shows the place in its conversation.
    pub open: String,
}

/// What kind of text was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SearchHitKind {
    /// A prompt.
    Prompt,
    /// Text for a turn that was under way.
    Steer,
    /// Text of the agent.
    Answer,
    /// The name and the input of a tool call, such as a command.
    Tool,
    /// Files that a tool call changed.
    Path,
}

impl SearchHitKind {
    pub const ALL: [Self; 5] = [Self::Prompt, Self::Steer, Self::Answer, Self::Tool, Self::Path];

    /// The name in JSON and in the index.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Steer => "steer",
            Self::Answer => "answer",
            Self::Tool => "tool",
            Self::Path => "path",
        }
    }
}

/// A piece of a snippet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
pub struct SnippetPart {
    pub text: String,
    /// Whether this piece is one of the words that were searched for.
    #[serde(rename = "match")]
    pub is_match: bool,
}
