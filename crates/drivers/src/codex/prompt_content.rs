//! Builds prompts for the server: the text, the files in forms that it accepts, and the messages that arrived while a
//! turn was suspended.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use qd_protocol::link::PromptFile;
use serde_json::{Value, json};

use crate::acp::unseen_messages;
use crate::turn::DriverPrompt;

/// Builds the input of a turn, and returns the names of the files that the agent cannot take.
pub(super) fn turn_input(prompt: &DriverPrompt) -> (Vec<Value>, Vec<String>) {
    let mut input = Vec::new();
    let mut left_out = Vec::new();
    if !prompt.text.is_empty() {
        input.push(text_block(&prompt.text));
    }
    input.extend(unseen_messages(&prompt.messages).iter().map(|text| text_block(text)));
    for file in &prompt.files {
        match file_block(file) {
            Some(part) => input.push(part),
            None => left_out.push(file.name.clone()),
        }
    }
    (input, left_out)
}

pub(super) fn text_block(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn file_block(file: &PromptFile) -> Option<Value> {
    let PromptFile { name, mime, data } = file;
    if mime.starts_with("image/") {
        return Some(json!({"type": "image", "url": format!("data:{mime};base64,{data}")}));
    }
    let text = BASE64_STANDARD.decode(data).ok().and_then(|bytes| String::from_utf8(bytes).ok())?;
    Some(text_block(&format!("{name}:\n{text}")))
}

#[cfg(test)]
mod tests {
    use qd_protocol::RunId;
    use qd_protocol::link::TurnLimits;

    use super::*;

    #[test]
    fn images_text_and_unseen_messages_are_sent_and_other_files_are_named() {
        let file = |name: &str, mime: &str, data: &[u8]| PromptFile {
            name: name.to_owned(),
            mime: mime.to_owned(),
            data: BASE64_STANDARD.encode(data),
        };
        let prompt = DriverPrompt {
            run: RunId::parse("r").unwrap(),
            text: "look".to_owned(),
            files: vec![
                file("a.png", "image/png", b"x"),
                file("b.txt", "text/plain", b"words"),
                file("c.bin", "application/octet-stream", &[0xff]),
            ],
            messages: vec![json!({"role": "assistant", "content": "old"}), json!({"content": {"n": 1}})],
            limits: TurnLimits::default(),
        };
        let (input, left_out) = turn_input(&prompt);
        let image = json!({"type": "image", "url": "data:image/png;base64,eA=="});
        assert_eq!(input, [text_block("look"), text_block(r#"{"n":1}"#), image, text_block("b.txt:\nwords")]);
        assert_eq!(left_out, ["c.bin"]);
    }
}
