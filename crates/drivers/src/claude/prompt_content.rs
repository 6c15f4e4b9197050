//! Builds prompts for the agent: the text, the messages of a conversation that the agent may not know yet, and the
//! files in forms that the model accepts.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use qd_protocol::link::PromptFile;
use serde_json::{Value, json};

use super::messages::text_block;
use crate::acp::unseen_messages;
use crate::turn::DriverPrompt;

/// The image types that the model accepts.
const IMAGE_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const PDF_TYPE: &str = "application/pdf";

/// Builds the content blocks of a prompt, and returns the names of the files that the agent cannot take.
pub(super) fn content_blocks(prompt: &DriverPrompt) -> (Vec<Value>, Vec<String>) {
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
    if blocks.is_empty() {
        // A message needs at least one block.
        blocks.push(text_block(&prompt.text));
    }
    (blocks, left_out)
}

fn file_block(file: &PromptFile) -> Option<Value> {
    let PromptFile { name, mime, data } = file;
    let source = json!({"type": "base64", "media_type": mime, "data": data});
    if IMAGE_TYPES.contains(&mime.as_str()) {
        return Some(json!({"type": "image", "source": source}));
    }
    if mime == PDF_TYPE {
        return Some(json!({"type": "document", "source": source, "title": name}));
    }
    let text = BASE64_STANDARD.decode(data).ok().and_then(|bytes| String::from_utf8(bytes).ok())?;
    Some(text_block(&format!("{name}:\n{text}")))
}

#[cfg(test)]
mod tests {
    use qd_protocol::RunId;
    use qd_protocol::link::TurnLimits;

    use super::*;

    fn prompt(text: &str, files: Vec<PromptFile>, messages: Vec<Value>) -> DriverPrompt {
        let run = RunId::parse("r").unwrap();
        DriverPrompt { run, text: text.to_owned(), files, messages, limits: TurnLimits::default() }
    }

    fn file(name: &str, mime: &str, data: &[u8]) -> PromptFile {
        PromptFile { name: name.to_owned(), mime: mime.to_owned(), data: BASE64_STANDARD.encode(data) }
    }

    #[test]
    fn files_come_as_pictures_documents_or_text_and_the_rest_is_named() {
        let files = vec![
            file("a.png", "image/png", &[0xff]),
            file("b.txt", "text/plain", b"words"),
            file("c.pdf", PDF_TYPE, b"%PDF"),
            file("d.bin", "application/octet-stream", &[0xff, 0xfe]),
            file("e.tiff", "image/tiff", &[0xff]),
        ];
        let (blocks, left_out) = content_blocks(&prompt("look", files, vec![]));
        assert_eq!(blocks[0], text_block("look"));
        assert_eq!(blocks[1]["source"], json!({"type": "base64", "media_type": "image/png", "data": "/w=="}));
        assert_eq!(blocks[2], text_block("b.txt:\nwords"));
        assert_eq!((&blocks[3]["type"], &blocks[3]["title"]), (&json!("document"), &json!("c.pdf")));
        assert_eq!((blocks.len(), left_out), (4, vec!["d.bin".to_owned(), "e.tiff".to_owned()]));
    }

    #[test]
    fn a_suspended_turn_goes_on_with_the_messages_after_its_last_one() {
        let messages = vec![
            json!({"role": "assistant", "content": "waits"}),
            json!({"role": "user", "content": "one is done"}),
        ];
        assert_eq!(content_blocks(&prompt("", vec![], messages)).0, [text_block("one is done")]);
        assert_eq!(content_blocks(&prompt("", vec![], vec![])).0, [text_block("")]);
    }
}
