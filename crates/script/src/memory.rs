//! What the scripted agent remembers of a conversation beyond its process: a small file, so that tests can resume it.
//! It promises nothing about power cuts.

use std::io;
use std::path::{Path, PathBuf};

use qd_protocol::event::TokenUsage;
use qd_protocol::text::escaped_head;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;

/// About how many bytes are remembered of one prompt and of one answer.
pub(super) const REMEMBERED_MAX: usize = 16 << 10;

/// One turn, as one line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ScriptTurnRecord {
    pub(super) prompt: String,
    pub(super) answer: String,
    /// The total usage up to the end of the turn.
    pub(super) used: TokenUsage,
}

/// The beginning of a text that is remembered.
pub(super) fn remembered_part(text: &str) -> &str {
    escaped_head(text, REMEMBERED_MAX)
}

#[derive(Debug)]
pub(super) struct ScriptMemory {
    path: Option<PathBuf>,
}

impl ScriptMemory {
    /// The file of a session; without a folder nothing is remembered.
    pub(super) fn for_session(folder: Option<&Path>, session: &str) -> Self {
        // A session id is used as a file name only if it looks like one of ours.
        let plain = !session.is_empty() && session.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        Self { path: folder.filter(|_| plain).map(|folder| folder.join(format!("{session}.jsonl"))) }
    }

    /// Creates the file, so that a conversation without a turn is remembered too.
    pub(super) async fn create_file(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        if let Some(folder) = path.parent() {
            tokio::fs::create_dir_all(folder).await?;
        }
        tokio::fs::write(path, "").await
    }

    /// The turns so far, or `None` if there is no file. Incomplete lines are skipped.
    pub(super) async fn load_turns(&self) -> Option<Vec<ScriptTurnRecord>> {
        let text = tokio::fs::read_to_string(self.path.as_ref()?).await.ok()?;
        Some(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    pub(super) async fn append_turn(&self, turn: &ScriptTurnRecord) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut line = serde_json::to_string(turn)?;
        line.push('\n');
        let mut file = tokio::fs::OpenOptions::new().append(true).create(true).open(path).await?;
        file.write_all(line.as_bytes()).await?;
        file.flush().await
    }
}
