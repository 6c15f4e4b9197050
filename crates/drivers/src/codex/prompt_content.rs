//! Builds prompts for the server: the text, the files in forms that it accepts, and the messages that arrived while a
//! turn was suspended.

use qd_protocol::link::PromptFile;
use serde_json::{Value, json};

use crate::prompt_content::{decode_text_file, named_text, prompt_blocks};
use crate::turn::DriverPrompt;

/// Builds the input of a turn, and returns the names of the files that the agent cannot take.
pub(super) fn turn_input(prompt: &DriverPrompt) -> (Vec<Value>, Vec<String>) {
    prompt_blocks(prompt, text_block, file_block)
}

pub(super) fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn file_block(file: &PromptFile) -> Option<Value> {
    let PromptFile { name, mime, data } = file;
    if mime.starts_with("image/") {
        return Some(json!({"type": "image", "url": format!("data:{mime};base64,{data}")}));
    }
    decode_text_file(file).map(|text| text_block(&named_text(name, &text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt_content::{test_file, test_prompt};

    #[test]
    fn images_text_and_unseen_messages_are_sent_and_other_files_are_named() {
        let files = vec![
            test_file("a.png", "image/png", b"x"),
            test_file("b.txt", "text/plain", b"words"),
            test_file("c.bin", "application/octet-stream", &[0xff]),
        ];
        let messages = vec![json!({"role": "assistant", "content": "old"}), json!({"content": {"n": 1}})];
        let (input, left_out) = turn_input(&test_prompt("look", files, messages));
        let image = json!({"type": "image", "url": "data:image/png;base64,eA=="});
        assert_eq!(input, [text_block("look"), text_block(r#"{"n":1}"#), image, text_block("b.txt:\nwords")]);
        assert_eq!(left_out, ["c.bin"]);
    }
}
