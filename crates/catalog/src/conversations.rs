//! The conversations that an agent has on disk, as its manifest describes them, for `qd adopt`. This file only reads, and
//! trusts nothing that it reads: it follows no links below the agent's folder, reads a bounded part of each file, and
//! leaves out what it does not understand. `conversation_files.rs` finds the files.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use qd_protocol::Millis;
use qd_protocol::ids::is_agent_session_id;
use qd_protocol::limits::{CONVERSATIONS_MAX, TITLE_MAX};
use qd_protocol::manifest::{ConversationFiles, Manifest};
use rustix::fs::{Mode, OFlags};
use serde_json::Value;

use crate::conversation_files::{ConversationFile, find_files, resolve_root};

/// How much of a file's beginning is searched for the directory and the first prompt, in bytes. Some agents write their
/// instructions first, which take some ten thousand.
const HEAD_MAX: u64 = 512 << 10;
/// How much of a file's end is searched for the title, in bytes.
const TAIL_MAX: u64 = 64 << 10;
/// The longest path of a directory, in bytes.
const DIRECTORY_MAX: u64 = 4096;

/// A conversation that an agent has on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentConversation {
    pub agent: String,
    /// The agent's own id of the conversation.
    pub id: String,
    /// The directory in which the agent works. It may no longer exist.
    pub directory: PathBuf,
    /// The agent's own title, or the beginning of the first prompt.
    pub title: Option<String>,
    /// When the conversation was last written to.
    pub changed_at: Millis,
    /// Size of its file in bytes.
    pub size: u64,
}

/// Whether the agent's conversations can be listed and continued. An isolated agent does not see those of the user.
pub fn can_adopt(manifest: &Manifest) -> bool {
    manifest.can_resume() && !manifest.startup.isolated && !manifest.conversations.files.is_empty()
}

/// The agent's conversations, the one that changed last first: all, or those in a directory that is given with its links
/// resolved. `variable` looks up the caller's environment, which may move the agent's folder. Conversations without a
/// prompt are left out.
pub fn list_conversations(
    manifest: &Manifest,
    variable: &dyn Fn(&str) -> Option<String>,
    directory: Option<&Path>,
) -> Vec<AgentConversation> {
    let rules = &manifest.conversations;
    let root = rules.roots.iter().find_map(|root| resolve_root(root, variable));
    let (true, Some(root)) = (can_adopt(manifest), root) else { return Vec::new() };
    let mut files = find_files(&root, &rules.files);
    files.sort_by(|a, b| b.changed_at.cmp(&a.changed_at).then_with(|| a.path.cmp(&b.path)));
    let mut conversations: Vec<AgentConversation> = Vec::new();
    for file in files.into_iter().take(CONVERSATIONS_MAX) {
        let read = read_conversation(&manifest.agent.name, rules, file, directory);
        conversations.extend(read.filter(|read| conversations.iter().all(|known| known.id != read.id)));
    }
    conversations
}

/// Reads one conversation. `None` if it is not one, has no prompt, or belongs to another directory.
fn read_conversation(
    agent: &str,
    rules: &ConversationFiles,
    found: ConversationFile,
    wanted: Option<&Path>,
) -> Option<AgentConversation> {
    let mut file = open_regular_file(&found.path)?;
    let size = file.metadata().ok()?.len();
    let mut facts = ConversationFacts::new(rules, found.id);
    if let Some(name) = &rules.directory_file {
        facts.directory = read_directory_file(&found.path.parent()?.join(name));
    }
    let mut read_len = 0;
    let mut lines = BufReader::new((&mut file).take(HEAD_MAX));
    let mut line = Vec::new();
    while !facts.are_complete() {
        line.clear();
        match lines.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(len) => read_len += len as u64,
        }
        facts.read_line(&line);
        if let (Some(wanted), Some(directory)) = (wanted, &facts.directory)
            && !is_same_directory(directory, wanted)
        {
            return None;
        }
    }
    if !rules.titles.is_empty()
        && file.seek(SeekFrom::Start(read_len.max(size.saturating_sub(TAIL_MAX)))).is_ok()
    {
        let mut tail = Vec::new();
        if file.take(TAIL_MAX).read_to_end(&mut tail).is_ok() {
            tail.split(|byte| *byte == b'\n').for_each(|line| facts.read_titles(line));
        }
    }
    let is_cut = read_len >= HEAD_MAX;
    let id = facts.id.filter(|id| is_agent_session_id(id))?;
    let directory =
        facts.directory.filter(|path| wanted.is_none_or(|wanted| is_same_directory(path, wanted)))?;
    if facts.prompt.is_none() && !is_cut {
        return None;
    }
    let title = facts.titles.into_iter().flatten().next().or(facts.prompt);
    let ConversationFile { changed_at, .. } = found;
    Some(AgentConversation { agent: agent.to_owned(), id, directory, title, changed_at, size })
}

/// The id, directory, prompt and titles found so far in the lines of a conversation's file.
struct ConversationFacts<'a> {
    rules: &'a ConversationFiles,
    id: Option<String>,
    directory: Option<PathBuf>,
    prompt: Option<String>,
    /// The last value of each of the manifest's `titles`.
    titles: Vec<Option<String>>,
}

impl<'a> ConversationFacts<'a> {
    fn new(rules: &'a ConversationFiles, id: Option<String>) -> Self {
        let titles = vec![None; rules.titles.len()];
        Self { rules, id, directory: None, prompt: None, titles }
    }

    fn are_complete(&self) -> bool {
        self.id.is_some() && self.directory.is_some() && self.prompt.is_some()
    }

    fn read_line(&mut self, line: &[u8]) {
        let Ok(line) = serde_json::from_slice::<Value>(line) else { return };
        let text_at =
            |pointer: &Option<String>| Some(line.pointer(pointer.as_deref()?)?.as_str()?.to_owned());
        self.id = self.id.take().or_else(|| text_at(&self.rules.id));
        let directory = self.directory.take().or_else(|| text_at(&self.rules.directory).map(PathBuf::from));
        self.directory = directory.filter(|path| path.is_absolute());
        self.prompt = self.prompt.take().or_else(|| self.prompt_in(&line));
        self.update_titles(&line);
    }

    fn read_titles(&mut self, line: &[u8]) {
        if let Ok(line) = serde_json::from_slice::<Value>(line) {
            self.update_titles(&line);
        }
    }

    fn update_titles(&mut self, line: &Value) {
        for (title, pointer) in self.titles.iter_mut().zip(&self.rules.titles) {
            let found = line.pointer(pointer).and_then(Value::as_str).and_then(title_line);
            *title = found.or(title.take());
        }
    }

    /// The prompt in a line. A text that begins with `<` was written by the agent: context, or the output of a command.
    fn prompt_in(&self, line: &Value) -> Option<String> {
        let matches = |(pointer, value): (&String, &Value)| line.pointer(pointer) == Some(value);
        let rule = self.rules.prompts.iter().find(|rule| rule.r#where.iter().all(matches))?;
        match line.pointer(&rule.text)? {
            Value::String(text) => Some(text.as_str()),
            Value::Array(parts) => {
                let mut texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
                texts.find(|text| !text.trim_start().starts_with('<'))
            }
            _ => None,
        }
        .filter(|text| !text.trim_start().starts_with('<'))
        .and_then(title_line)
    }
}

/// The first line of a text that is not blank, without control characters, cut to the length of a title.
fn title_line(text: &str) -> Option<String> {
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    let mut title: String = line.chars().filter(|c| !c.is_control()).collect();
    title.truncate(title.floor_char_boundary(TITLE_MAX));
    Some(title.trim_end().to_owned()).filter(|title| !title.is_empty())
}

fn is_same_directory(path: &Path, wanted: &Path) -> bool {
    path == wanted || path.canonicalize().is_ok_and(|path| path == wanted)
}

/// The directory that a file contains.
fn read_directory_file(path: &Path) -> Option<PathBuf> {
    let mut text = String::new();
    open_regular_file(path)?.take(DIRECTORY_MAX).read_to_string(&mut text).ok()?;
    Some(PathBuf::from(text.trim_end_matches('\n'))).filter(|path| path.is_absolute())
}

/// Opens a regular file that is not a link. Opening anything else, such as a pipe, does not block.
fn open_regular_file(path: &Path) -> Option<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    file.metadata().ok().filter(std::fs::Metadata::is_file).map(|_| file)
}

#[cfg(test)]
mod tests;
