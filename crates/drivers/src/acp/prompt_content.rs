//! Builds prompts for an agent: the text, the files in a form that the agent accepts, and the messages of a
//! conversation that the agent may not know yet.

use agent_client_protocol::v1::schema::{
    AudioContent, BlobResourceContents, ContentBlock, EmbeddedResource, EmbeddedResourceResource,
    ImageContent, Meta, PromptCapabilities, PromptRequest, SessionId, TextContent, TextResourceContents,
};
use qd_protocol::link::PromptFile;
use qd_protocol::worker::META_KEY;
use serde_json::json;

use crate::prompt_content::{decode_text_file, named_text, prompt_blocks};
use crate::turn::DriverPrompt;

/// Builds the prompt request, and returns the names of the files that the agent cannot take. The reasons
/// of earlier denials that could not be passed on come first in the prompt.
pub(super) fn prompt_request(
    session: SessionId,
    capabilities: &PromptCapabilities,
    prompt: &DriverPrompt,
    unsent_reasons: &[String],
) -> (PromptRequest, Vec<String>) {
    let mut blocks: Vec<ContentBlock> = unsent_reasons.iter().map(|text| text_block(text)).collect();
    let (content, left_out) = prompt_blocks(prompt, text_block, |file| file_block(file, capabilities));
    blocks.extend(content);
    let request = PromptRequest::new(session, blocks);
    if prompt.messages.is_empty() {
        return (request, left_out);
    }
    let meta = Meta::from_iter([(META_KEY.to_owned(), json!({"messages": prompt.messages}))]);
    (request.meta(meta), left_out)
}

/// Replaces the first text of a prompt by what `escape` makes of it. Only the first can be taken for a command.
pub(super) fn escape_first_text(request: &mut PromptRequest, escape: impl Fn(&str) -> Option<String>) {
    let first = request.prompt.iter_mut().find_map(|block| match block {
        ContentBlock::Text(text) => Some(&mut text.text),
        _ => None,
    });
    if let Some(first) = first
        && let Some(escaped) = escape(first)
    {
        *first = escaped;
    }
}

fn file_block(file: &PromptFile, capabilities: &PromptCapabilities) -> Option<ContentBlock> {
    let PromptFile { name, mime, data } = file;
    if mime.starts_with("image/") && capabilities.image {
        return Some(ContentBlock::Image(ImageContent::new(data, mime)));
    }
    if mime.starts_with("audio/") && capabilities.audio {
        return Some(ContentBlock::Audio(AudioContent::new(data, mime)));
    }
    let plain = decode_text_file(file);
    if capabilities.embedded_context {
        let uri = format!("attachment:///{name}");
        let resource = match plain {
            Some(text) => EmbeddedResourceResource::TextResourceContents(
                TextResourceContents::new(text, uri).mime_type(mime.clone()),
            ),
            None => EmbeddedResourceResource::BlobResourceContents(
                BlobResourceContents::new(data, uri).mime_type(mime.clone()),
            ),
        };
        return Some(ContentBlock::Resource(EmbeddedResource::new(resource)));
    }
    plain.map(|text| text_block(&named_text(name, &text)))
}

fn text_block(text: &str) -> ContentBlock {
    ContentBlock::Text(TextContent::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt_content::{test_file, test_prompt};

    #[test]
    fn files_come_in_the_form_that_the_agent_can_take_and_the_rest_is_named() {
        let files =
            vec![test_file("a.png", "image/png", &[0xff]), test_file("b.txt", "text/plain", b"words")];
        let prompt = test_prompt("look", files, vec![]);
        let (poor, left_out) = prompt_request("s".into(), &PromptCapabilities::new(), &prompt, &[]);
        assert_eq!(poor.prompt, [text_block("look"), text_block("b.txt:\nwords")]);
        assert_eq!(left_out, ["a.png"]);
        let capabilities = PromptCapabilities::new().image(true).embedded_context(true);
        let (rich, left_out) = prompt_request("s".into(), &capabilities, &prompt, &[]);
        assert!(matches!(rich.prompt[..], [_, ContentBlock::Image(_), ContentBlock::Resource(_)]));
        assert!(left_out.is_empty());
    }

    #[test]
    fn an_agent_gets_the_messages_after_its_own_last_one() {
        let messages = vec![
            json!({"role": "user", "content": "old"}),
            json!({"role": "assistant", "content": "waits"}),
            json!({"role": "user", "content": "one is done"}),
            json!({"role": "user", "content": {"n": 2}}),
        ];
        let prompt = test_prompt("look", vec![], messages.clone());
        let (request, _) = prompt_request("s".into(), &PromptCapabilities::new(), &prompt, &[]);
        assert_eq!(request.prompt, [text_block("look"), text_block("one is done"), text_block(r#"{"n":2}"#)]);
        assert_eq!(request.meta.unwrap()[META_KEY]["messages"], json!(messages));
    }
}
