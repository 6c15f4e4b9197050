//! Google's Gemini API.

use serde_json::{Value, json};

use super::INPUT_TOKENS;
use super::heard::{Heard, list};
use super::server::{Reply, Voice, sse};

pub(super) fn hear(path: &str, body: &Value) -> Heard {
    let name = path.rsplit('/').next().and_then(|name| name.split(':').next()).unwrap_or_default();
    let stream = path.contains(":streamGenerateContent");
    let mut heard = Heard { model: name.to_owned(), stream, ..Heard::default() };
    for content in list(&body["contents"]).iter().filter(|content| content["role"] != "model") {
        for part in list(&content["parts"]) {
            if let Some(answer) = part.get("functionResponse") {
                heard.result(answer["response"].to_string());
            } else if let Some(text) = part["text"].as_str() {
                heard.user(text);
            }
        }
    }
    let declared = list(&body["tools"]).iter().flat_map(|tool| list(&tool["functionDeclarations"]));
    for function in declared {
        let schema = function.get("parametersJsonSchema").unwrap_or(&function["parameters"]);
        heard.tool(&function["name"], schema);
    }
    let config = &body["generationConfig"];
    let schema = || config.get("responseJsonSchema").or_else(|| config.get("responseSchema"));
    heard.form =
        (config["responseMimeType"] == "application/json").then(|| schema().cloned().unwrap_or_default());
    heard
}

/// One answer.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) id: String,
    pub(super) model: String,
    /// What has been said: every piece counts all before it.
    pub(super) tokens: u64,
}

impl Candidate {
    fn with(&self, part: &Value, finish: Option<&str>) -> Value {
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

    fn part(&self, reply: &Reply, text: &str) -> Value {
        match reply {
            Reply::Text => json!({ "text": text }),
            Reply::Call(call) => {
                let id = format!("fc_{}", self.id);
                json!({ "functionCall": { "id": id, "name": call.name, "args": call.args } })
            }
        }
    }
}

impl Voice for Candidate {
    fn open(&mut self, _: &Reply) -> String {
        String::new()
    }

    fn token(&mut self, token: &str) -> String {
        self.tokens += 1;
        sse(None, &self.with(&json!({ "text": token }), None))
    }

    fn close(&mut self, reply: &Reply, tokens: u64) -> String {
        self.tokens = tokens;
        sse(None, &self.with(&self.part(reply, ""), Some("STOP")))
    }

    fn whole(&mut self, reply: &Reply, text: &str, tokens: u64) -> Value {
        self.tokens = tokens;
        self.with(&self.part(reply, text), Some("STOP"))
    }
}
