//! The model against a plain HTTP client, in every API.
use hyper::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{CALL_TOKENS, FakeModel, ModelApi, ModelRequestOutcome, ModelRequestRecord, sleeper_name};
use crate::TestClient;

const APIS: [ModelApi; 4] = [ModelApi::Messages, ModelApi::Responses, ModelApi::Chat, ModelApi::Gemini];

fn client(model: &FakeModel) -> TestClient {
    TestClient::tcp(model.address()).with_token("a-key-of-nobody")
}

/// A request with these texts of the user and a shell tool.
fn request(api: ModelApi, texts: &[&str], stream: bool) -> (String, Value) {
    let schema = json!({
        "type": "object", "properties": { "command": { "type": "string" } }, "required": ["command"],
    });
    let each = |make: &dyn Fn(&str) -> Value| texts.iter().map(|text| make(text)).collect::<Value>();
    let messages = each(&|text| json!({ "role": "user", "content": text }));
    match api {
        ModelApi::Messages => {
            let tools = json!([{ "name": "Bash", "input_schema": schema }]);
            (
                "/v1/messages".into(),
                json!({ "model": "m", "stream": stream, "messages": messages, "tools": tools }),
            )
        }
        ModelApi::Responses => {
            let part =
                |text: &str| json!({ "role": "user", "content": [{ "type": "input_text", "text": text }] });
            let tools = json!([{ "type": "function", "name": "shell", "parameters": schema }]);
            let body = json!({ "model": "m", "stream": stream, "input": each(&part), "tools": tools });
            ("/v1/responses".into(), body)
        }
        ModelApi::Chat => {
            let tools = json!([{ "type": "function", "function": { "name": "bash", "parameters": schema } }]);
            let body = json!({ "model": "m", "stream": stream, "messages": messages, "tools": tools });
            ("/v1/chat/completions".into(), body)
        }
        ModelApi::Gemini => {
            let contents = each(&|text| json!({ "role": "user", "parts": [{ "text": text }] }));
            let function = json!({ "name": "run_shell_command", "parametersJsonSchema": schema });
            let verb = if stream { "streamGenerateContent?alt=sse" } else { "generateContent" };
            let tools = json!([{ "functionDeclarations": [function] }]);
            (format!("/v1beta/models/m:{verb}"), json!({ "contents": contents, "tools": tools }))
        }
        ModelApi::Other => unreachable!("not an API of a conversation"),
    }
}

async fn post(model: &FakeModel, api: ModelApi, texts: &[&str], stream: bool) -> (u16, String) {
    let (path, body) = request(api, texts, stream);
    let response = client(model).post(&path, &body).await;
    (response.status, String::from_utf8(response.body.to_vec()).unwrap())
}

/// All text in the response, one piece per token if it was streamed.
fn text(api: ModelApi, response: &str) -> String {
    let pointer = match api {
        ModelApi::Messages => ["/delta/text", "/content/0/text"],
        ModelApi::Responses => ["/delta", "/output/0/content/0/text"],
        ModelApi::Chat => ["/choices/0/delta/content", "/choices/0/message/content"],
        _ => ["/candidates/0/content/parts/0/text"; 2],
    };
    let texts = event_data(response);
    let texts = texts.iter().filter_map(|data| pointer.iter().find_map(|p| data.pointer(p)?.as_str()));
    texts.collect()
}

/// The name and the arguments of the single call in the response.
fn call(api: ModelApi, response: &str) -> (String, Value) {
    let parsed = |text: &Value| serde_json::from_str::<Value>(text.as_str()?).ok();
    let (name, args) = match api {
        ModelApi::Messages => ("/content_block/name", "/delta/partial_json"),
        ModelApi::Responses => ("/item/name", "/arguments"),
        ModelApi::Chat => (
            "/choices/0/delta/tool_calls/0/function/name",
            "/choices/0/delta/tool_calls/0/function/arguments",
        ),
        _ => (
            "/candidates/0/content/parts/0/functionCall/name",
            "/candidates/0/content/parts/0/functionCall/args",
        ),
    };
    let data_list = event_data(response);
    let find = |pointer| data_list.iter().find_map(|data| data.pointer(pointer));
    let args = find(args).unwrap();
    (find(name).unwrap().as_str().unwrap().to_owned(), parsed(args).unwrap_or_else(|| args.clone()))
}

/// The data of each event, or the whole body if it is not a stream.
fn event_data(response: &str) -> Vec<Value> {
    if let Ok(whole) = serde_json::from_str(response) {
        return vec![whole];
    }
    let lines = response.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.filter(|line| *line != "[DONE]").map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The output tokens that the end of the response reports.
fn output_tokens(response: &str) -> u64 {
    fn find(value: &Value) -> Option<u64> {
        let keys = ["output_tokens", "completion_tokens", "candidatesTokenCount"];
        let own = keys.iter().find_map(|key| value.get(key)?.as_u64());
        own.or_else(|| value.as_object()?.values().find_map(find))
    }
    event_data(response).iter().filter_map(find).next_back().unwrap()
}

fn has_ended(record: &ModelRequestRecord) -> bool {
    record.outcome != ModelRequestOutcome::Streaming
}

#[tokio::test]
async fn a_plain_text_is_echoed_in_every_api_streamed_or_whole() {
    for (api, stream) in APIS.into_iter().flat_map(|api| [(api, true), (api, false)]) {
        let model = FakeModel::start();
        let (status, response) = post(&model, api, &["one", "two"], stream).await;
        assert_eq!(
            (status, text(api, &response).as_str()),
            (200, "ECHO[two] users=2 results=0"),
            "{api:?}: {response}"
        );
        assert_eq!(output_tokens(&response), 3, "{api:?}: {response}");
        let record = model.wait_for("the end", has_ended).await;
        assert_eq!(
            (record.api, record.model.as_str(), record.outcome),
            (api, "m", ModelRequestOutcome::Done { tokens: 3 })
        );
        assert_eq!(
            (record.texts.as_slice(), record.tools.len()),
            (["one".to_owned(), "two".to_owned()].as_slice(), 1)
        );
    }
}

#[tokio::test]
async fn the_agents_own_shell_is_called_in_every_api() {
    for api in APIS {
        let model = FakeModel::start();
        let (_, response) = post(&model, api, &["TOOL:run:echo a b > c"], true).await;
        let (name, args) = call(api, &response);
        assert!(["Bash", "shell", "bash", "run_shell_command"].contains(&name.as_str()), "{name}");
        assert_eq!(args, json!({ "command": "echo a b > c" }));
        assert_eq!(output_tokens(&response), CALL_TOKENS);
        let (_, whole) = post(&model, api, &["TOOL:sleep:61"], false).await;
        assert!(whole.contains(&sleeper_name("61")), "{whole}");
    }
}

#[tokio::test]
async fn after_the_results_of_its_tools_the_model_speaks() {
    let model = FakeModel::start();
    let (path, mut body) = request(ModelApi::Messages, &["TOOL:two:x"], false);
    let result = |body: &mut Value| {
        let part = json!([{ "type": "tool_result", "tool_use_id": "t", "content": "fine" }]);
        body["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": part }));
    };
    result(&mut body);
    let second = client(&model).post(&path, &body).await.json();
    assert_eq!(second["content"][0]["input"]["command"], "echo hi1 >> x");
    result(&mut body);
    let last = client(&model).post(&path, &body).await.json();
    assert_eq!(last["content"][0]["text"], "ECHO[TOOL:two:x] users=1 results=2 last=\"fine\"");
}

#[tokio::test]
async fn memory_is_everything_that_the_user_said_before() {
    for api in APIS {
        let model = FakeModel::start();
        let (_, response) = post(&model, api, &["the word is plum", "hello", "RECALL"], true).await;
        assert_eq!(text(api, &response), "RECALL[the word is plum | hello]");
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_is_missed_before_the_next_token() {
    for api in APIS {
        let model = FakeModel::start();
        // No other token ever comes, so it is not the failure to send one that shows it.
        let (path, body) = request(api, &["STALL"], true);
        let mut stream = open(&model, &path, &body).await;
        read_until(&mut stream, "tok0 ").await;
        drop(stream);
        let record = model.wait_for("a client that is gone", ModelRequestRecord::is_client_gone).await;
        assert_eq!(record.outcome, ModelRequestOutcome::ClientGone { tokens: 1 }, "{api:?}");
    }
}

#[tokio::test]
async fn a_client_that_does_not_want_a_stream_is_missed_too() {
    let model = FakeModel::start();
    let (path, body) = request(ModelApi::Chat, &["SLOW:60"], false);
    let stream = open(&model, &path, &body).await;
    model.wait_for("the request", |record| record.last_text() == "SLOW:60").await;
    drop(stream);
    model.wait_for("a client that is gone", ModelRequestRecord::is_client_gone).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_back_a_burst() {
    let model = FakeModel::start();
    let (path, body) = request(ModelApi::Chat, &["BURST:200000"], true);
    let mut stream = open(&model, &path, &body).await;
    read_until(&mut stream, "b1 ").await;
    drop(stream);
    let record = model.wait_for("a client that is gone", ModelRequestRecord::is_client_gone).await;
    assert!(matches!(record.outcome, ModelRequestOutcome::ClientGone { tokens: 1..200_000 }), "{record:?}");
}

#[tokio::test]
async fn an_error_is_given_always_or_once() {
    for api in APIS {
        let model = FakeModel::start();
        assert_eq!(post(&model, api, &["ERR:400"], true).await.0, 400);
        assert_eq!(post(&model, api, &["ERR:400"], true).await.0, 400);
        assert_eq!(post(&model, api, &["ERRONCE:529"], true).await.0, 529);
        assert_eq!(post(&model, api, &["ERRONCE:529"], true).await.0, 200);
        assert_eq!(model.turns()[2].outcome, ModelRequestOutcome::Refused { status: 529 });
    }
}

#[tokio::test]
async fn a_request_without_a_key_or_for_an_unknown_model_is_refused() {
    for api in APIS {
        let model = FakeModel::start();
        let (path, mut body) = request(api, &["hello"], true);
        let stranger = TestClient::tcp(model.address());
        assert_eq!(stranger.post(&path, &body).await.status, 401);
        assert_eq!(stranger.with_token("").post(&path, &body).await.status, 401);
        assert_eq!(stranger.with_header("x-goog-api-key", "k").post(&path, &body).await.status, 200);
        assert_eq!(model.turn_count(), 1, "a stranger has no turn");
        body["model"] = json!("a/no-such-model");
        assert_eq!(client(&model).post(&path, &body).await.status, 404);
    }
}

#[tokio::test]
async fn an_error_after_a_tool_call_waits_for_its_result() {
    let model = FakeModel::start();
    let (path, mut body) = request(ModelApi::Messages, &["ERRAFTER:400 TOOL:plain:true"], false);
    let call = client(&model).post(&path, &body).await.expect(200);
    assert_eq!(call["content"][0]["input"]["command"], "true");
    let result = json!([{ "type": "tool_result", "tool_use_id": "t", "content": "fine" }]);
    body["messages"].as_array_mut().unwrap().push(json!({ "role": "user", "content": result }));
    assert_eq!(client(&model).post(&path, &body).await.status, 400);
}

#[tokio::test]
async fn a_stream_is_cut_in_its_middle() {
    for api in APIS {
        let model = FakeModel::start();
        let (path, body) = request(api, &["DROPONCE"], true);
        let once = client(&model).send(Method::POST, &path, Some(body.to_string().into())).await;
        once.expect_err("the stream must not come to an end");
        let mut stream = open(&model, &path, &request(api, &["DROP"], true).1).await;
        let mut received = String::new();
        let _cut = stream.read_to_string(&mut received).await;
        assert!(received.contains("d2 ") && !received.contains("\r\n0\r\n"), "{api:?}: {received}");
        assert_eq!(post(&model, api, &["DROPONCE"], true).await.0, 200);
        let outcomes: Vec<_> = model.turns().iter().map(|record| record.outcome).collect();
        assert_eq!(outcomes[..2], [ModelRequestOutcome::Cut { tokens: 3 }; 2]);
    }
}

#[tokio::test]
async fn strange_answers_are_what_their_markers_say() {
    for (api, limit) in APIS.into_iter().zip(["max_tokens", "max_output_tokens", "length", "MAX_TOKENS"]) {
        let model = FakeModel::start();
        assert_eq!(post(&model, api, &["EMPTY-BODY"], true).await, (200, String::new()));
        let (status, garbled) = post(&model, api, &["GARBLED"], true).await;
        let data = garbled.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        assert!(status == 200 && serde_json::from_str::<Value>(data).is_err(), "{api:?}: {garbled}");
        for texts in [&["OUT-OF-TOKENS"][..], &["OUT-OF-TOKENS", "Please continue from where you left off."]]
        {
            for stream in [true, false] {
                let (_, truncated) = post(&model, api, texts, stream).await;
                assert!(truncated.contains(limit), "{api:?}: {truncated}");
            }
        }
        let (path, body) = request(api, &["HANG"], true);
        let connection = open(&model, &path, &body).await;
        model.wait_for("the hanging request", |record| record.last_text() == "HANG").await;
        drop(connection);
        let is_gone = |record: &ModelRequestRecord| {
            record.last_text() == "HANG" && record.outcome != ModelRequestOutcome::Streaming
        };
        model.wait_for("the hanging request to be dropped", is_gone).await;
    }
}

#[tokio::test]
async fn side_calls_follow_no_script_and_are_no_turns() {
    for api in APIS {
        let model = FakeModel::start();
        let (path, mut body) = request(api, &["ERR:500 SLOW:60"], true);
        body.as_object_mut().unwrap().remove("tools");
        let response = client(&model).post(&path, &body).await;
        assert_eq!(response.status, 200, "{response}");
        assert_eq!((model.turn_count(), model.requests().len()), (0, 1));
    }
    let model = FakeModel::start();
    let (path, mut body) = request(ModelApi::Gemini, &["SLOW:60"], false);
    let speaker = json!({ "type": "STRING", "enum": ["model", "user"] });
    let schema =
        json!({ "type": "OBJECT", "properties": { "next_speaker": speaker }, "required": ["next_speaker"] });
    body["generationConfig"] = json!({ "responseMimeType": "application/json", "responseSchema": schema });
    let response = client(&model).post(&path, &body).await;
    assert_eq!(text(ModelApi::Gemini, &response.expect(200).to_string()), r#"{"next_speaker":"user"}"#);
    let counted = client(&model).post("/v1beta/models/m:countTokens", &body).await;
    assert_eq!(counted.expect(200), json!({ "totalTokens": 100 }));
    let counted = client(&model).post("/v1/messages/count_tokens", &json!({})).await;
    assert_eq!(counted.expect(200), json!({ "input_tokens": 100 }));
    assert_eq!(client(&model).get("/v1/models").await.expect(200)["data"][0]["id"], "scripted");
    assert_eq!(model.turn_count(), 0);
}

#[tokio::test]
async fn the_model_is_no_way_out() {
    let model = FakeModel::start();
    let connect = "CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n";
    assert!(client(&model).exchange_raw(connect.as_bytes()).await.starts_with("HTTP/1.1 403 "));
    let proxied = "GET http://example.org/x HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n\r\n";
    assert!(client(&model).exchange_raw(proxied.as_bytes()).await.starts_with("HTTP/1.1 403 "));
    assert_eq!(model.proxied_hosts(), ["example.com:443", "example.org"]);
    assert!(model.requests().is_empty());
}

#[tokio::test]
async fn a_dropped_model_no_longer_listens() {
    let model = FakeModel::start();
    let address = model.address();
    drop(model);
    TcpStream::connect(address).await.expect_err("nothing listens there");
}

async fn open(model: &FakeModel, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(model.address()).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: model\r\nx-api-key: nobody\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    stream
}

async fn read_until(stream: &mut TcpStream, text: &str) {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(text) {
        assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0, "the stream ended before {text:?}");
    }
}
