//! Google's Gemini API.

use serde_json::{Value, json};

use super::INPUT_TOKENS;
use super::request::{ModelRequest, items};
use super::server::{ModelReply, ModelReplyEncoder, sse};

pub(super) fn parse_request(path: &str, body: &Value) -> ModelRequest {
    let name = path.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap_or_default();
    let stream = path.contains(":streamGenerateContent");
    let mut request = ModelRequest { model: name.to_owned(), stream, ..ModelRequest::default() };
    for content in items(&body["contents"]).iter().filter(|content| content["role"] != "model") {
        for part in items(&content["parts"]) {
            if let Some(response) = part.get("functionResponse") {
                request.add_tool_result(response["response"].to_string());
            } else if let Some(text) = part["text"].as_str() {
                request.add_user_text(text);
            }
        }
    }
    let declared = items(&body["tools"]).iter().flat_map(|tool| items(&tool["functionDeclarations"]));
    for function in declared {
        let schema = function.get("parametersJsonSchema").unwrap_or(&function["parameters"]);
        request.add_tool(&function["name"], schema);
    }
    let config = &body["generationConfig"];
    let schema = || config.get("responseJsonSchema").or_else(|| config.get("responseSchema"));
    request.json_schema =
        (config["responseMimeType"] == "application/json").then(|| schema().cloned().unwrap_or_default());
    request
}

/// Encodes one answer.
#[derive(Debug)]
pub(super) struct GeminiEncoder {
    pub(super) id: String,
    pub(super) model: String,
    /// The tokens sent so far. Every piece reports the total.
    pub(super) tokens: u64,
}

impl GeminiEncoder {
    fn response(&self, part: &Value, finish: Option<&str>) -> Value {
        let mut candidate = json!({ "index": 0, "content": { "role": "model", "parts": [part] } });
        if let Some(finish) = finish {
            candidate["finishReason"] = json!(finish);
        }
        json!({
            "candidates": [candidate],
            "usageMetadata": {
                "promptTokenCount": INPUT_TOKENS, "candidatesTokenCount": self.tokens,
                "totalTokenCount": INPUT_TOKENS + self.tokens,
            },
            "modelVersion": self.model, "responseId": self.id,
        })
    }

    fn part(&self, reply: &ModelReply, text: &str) -> Value {
        match reply {
            ModelReply::Text | ModelReply::TruncatedText => json!({ "text": text }),
            ModelReply::Call(call) => {
                let id = format!("fc_{}", self.id);
                json!({ "functionCall": { "id": id, "name": call.name, "args": call.args } })
            }
        }
    }
}

impl ModelReplyEncoder for GeminiEncoder {
    fn encode_start(&mut self, _: &ModelReply) -> String {
        String::new()
    }

    fn encode_token(&mut self, token: &str) -> String {
        self.tokens += 1;
        sse(None, &self.response(&json!({ "text": token }), None))
    }

    fn encode_end(&mut self, reply: &ModelReply, tokens: u64) -> String {
        self.tokens = tokens;
        sse(None, &self.response(&self.part(reply, ""), Some(finish_reason(reply))))
    }

    fn encode_whole(&mut self, reply: &ModelReply, text: &str, tokens: u64) -> Value {
        self.tokens = tokens;
        self.response(&self.part(reply, text), Some(finish_reason(reply)))
    }
}

fn finish_reason(reply: &ModelReply) -> &'static str {
    if matches!(reply, ModelReply::TruncatedText) { "MAX_TOKENS" } else { "STOP" }
}
