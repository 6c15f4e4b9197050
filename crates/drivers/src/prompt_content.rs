//! What the drivers share about prompts: the parts of a prompt and their order, and files that are text. How a part is
//! written for an agent is up to its driver.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use qd_protocol::link::PromptFile;
use serde_json::Value;

use crate::turn::DriverPrompt;

/// Builds the blocks of a prompt: its text, the messages that the agent has not seen, and its files. Also returns the
/// names of the files that the agent cannot take, for which `file_block` has no block.
pub(crate) fn prompt_blocks<B>(
    prompt: &DriverPrompt,
    text_block: impl Fn(&str) -> B,
    file_block: impl Fn(&PromptFile) -> Option<B>,
) -> (Vec<B>, Vec<String>) {
    let mut blocks = Vec::new();
    let mut left_out = Vec::new();
    if !prompt.text.is_empty() {
        blocks.push(text_block(&prompt.text));
    }
    blocks.extend(unseen_messages(&prompt.messages).iter().map(|text| text_block(text)));
    for file in &prompt.files {
        match file_block(file) {
            Some(block) => blocks.push(block),
            None => left_out.push(file.name.clone()),
        }
    }
    (blocks, left_out)
}

/// The content of a file that is text.
pub(crate) fn decode_text_file(file: &PromptFile) -> Option<String> {
    BASE64_STANDARD.decode(&file.data).ok().and_then(|bytes| String::from_utf8(bytes).ok())
}

/// A text file as a text of the prompt, with its name.
pub(crate) fn named_text(name: &str, text: &str) -> String {
    format!("{name}:\n{text}")
}

/// The messages that an agent which remembers its conversation has not seen: those after its own last message.
fn unseen_messages(messages: &[Value]) -> Vec<String> {
    let first_unseen =
        messages.iter().rposition(|message| message["role"] == "assistant").map_or(0, |at| at + 1);
    let text = |message: &Value| match &message["content"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    messages[first_unseen..].iter().map(text).collect()
}

/// A prompt, for the tests of drivers.
#[cfg(test)]
pub(crate) fn test_prompt(text: &str, files: Vec<PromptFile>, messages: Vec<Value>) -> DriverPrompt {
    let run = qd_protocol::RunId::parse("r").unwrap();
    DriverPrompt { run, text: text.to_owned(), mode: None, files, messages, limits: Default::default() }
}

/// A file of a prompt, for the tests of drivers.
#[cfg(test)]
pub(crate) fn test_file(name: &str, mime: &str, data: &[u8]) -> PromptFile {
    PromptFile { name: name.to_owned(), mime: mime.to_owned(), data: BASE64_STANDARD.encode(data) }
}
