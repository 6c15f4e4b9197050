//! Builds prompts for the agent: the text, the messages of a conversation that the agent may not know yet, and the
//! files in forms that the model accepts.

use qd_protocol::link::PromptFile;
use serde_json::{Value, json};

use super::messages::text_block;
use crate::prompt_content::{decode_text_file, named_text, prompt_blocks};
use crate::turn::DriverPrompt;

/// The image types that the model accepts.
const IMAGE_TYPES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];
const PDF_TYPE: &str = "application/pdf";

/// Builds the content blocks of a prompt, and returns the names of the files that the agent cannot take.
pub(super) fn content_blocks(prompt: &DriverPrompt) -> (Vec<Value>, Vec<String>) {
    let (mut blocks, left_out) = prompt_blocks(prompt, text_block, file_block);
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
    decode_text_file(file).map(|text| text_block(&named_text(name, &text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt_content::{test_file, test_prompt};

    #[test]
    fn files_come_as_pictures_documents_or_text_and_the_rest_is_named() {
        let files = vec![
            test_file("a.png", "image/png", &[0xff]),
            test_file("b.txt", "text/plain", b"words"),
            test_file("c.pdf", PDF_TYPE, b"%PDF"),
            test_file("d.bin", "application/octet-stream", &[0xff, 0xfe]),
            test_file("e.tiff", "image/tiff", &[0xff]),
        ];
        let (blocks, left_out) = content_blocks(&test_prompt("look", files, vec![]));
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
        assert_eq!(content_blocks(&test_prompt("", vec![], messages)).0, [text_block("one is done")]);
        assert_eq!(content_blocks(&test_prompt("", vec![], vec![])).0, [text_block("")]);
    }
}
