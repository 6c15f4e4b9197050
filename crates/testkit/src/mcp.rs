//! A client of `qd mcp`, handwritten from the protocol's own documentation: JSON-RPC lines on the stdio of a process.
//! It accepts responses in any order, so a call may stay open while others are made.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::{TestHome, TestSession, within};

/// The environment variable with a session's token.
pub const TOKEN_VAR: &str = "QD_SESSION_TOKEN";
const VERSION: &str = "2025-06-18";

/// A process `qd mcp` and our end of its pipes. It is killed if it is dropped before its end.
#[derive(Debug)]
pub struct TestMcpClient {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Lines<BufReader<ChildStdout>>,
    last_id: u64,
    early_responses: HashMap<u64, Value>,
    /// Notifications received so far, in order.
    pub notifications: Vec<Value>,
}

/// The folder with the socket and the token of a session.
pub fn tool_directory(home: &TestHome, session: &str) -> PathBuf {
    home.path().join("tools").join(session)
}

/// The token of a session whose agent was given the tools.
pub fn session_token(home: &TestHome, session: &str) -> String {
    let path = tool_directory(home, session).join("token");
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl TestMcpClient {
    /// Starts with the user's rights.
    pub async fn as_user(home: &TestHome) -> Self {
        Self::start(home, None).await
    }

    /// Starts with the rights of a session whose agent was given the tools.
    pub async fn as_session(home: &TestHome, session: &TestSession) -> Self {
        Self::start(home, Some(&session_token(home, &session.id))).await
    }

    /// Starts with this token and completes the handshake.
    pub async fn start(home: &TestHome, token: Option<&str>) -> Self {
        let mut mcp = Self::spawn(home, token);
        let client_info = json!({ "name": "testkit", "version": "1" });
        let params = json!({ "protocolVersion": VERSION, "capabilities": {}, "clientInfo": client_info });
        let response = mcp.request("initialize", params).await;
        assert_eq!(response["result"]["serverInfo"]["name"], "quarterdeck", "{response}");
        mcp.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await;
        mcp
    }

    /// Starts the process without the handshake.
    pub fn spawn(home: &TestHome, token: Option<&str>) -> Self {
        let mut command = home.command(&["mcp"]);
        if let Some(token) = token {
            command.env(TOKEN_VAR, token);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("qd starts");
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        Self { child, stdin, stdout, last_id: 0, early_responses: HashMap::new(), notifications: Vec::new() }
    }

    /// Sends a message as it is.
    pub async fn send(&mut self, message: &Value) {
        let stdin = self.stdin.as_mut().expect("not hung up");
        stdin.write_all(format!("{message}\n").as_bytes()).await.expect("it listens");
    }

    /// Sends a request, and returns its id.
    pub async fn begin_request(&mut self, method: &str, params: Value) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        self.send(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })).await;
        id
    }

    /// Waits for the response to a request.
    pub async fn wait_for_response(&mut self, id: u64) -> Value {
        loop {
            if let Some(response) = self.early_responses.remove(&id) {
                return response;
            }
            let line = within("a response of qd mcp", self.stdout.next_line()).await.expect("it can be read");
            let message: Value =
                serde_json::from_str(&line.expect("it has not ended")).expect("only messages on stdout");
            match message["id"].as_u64() {
                Some(id) => drop(self.early_responses.insert(id, message)),
                None => self.notifications.push(message),
            }
        }
    }

    /// Sends a request and waits for its response.
    pub async fn request(&mut self, method: &str, params: Value) -> Value {
        let id = self.begin_request(method, params).await;
        self.wait_for_response(id).await
    }

    /// Starts a tool call.
    pub async fn begin_call(&mut self, tool: &str, arguments: Value) -> u64 {
        self.begin_request("tools/call", json!({ "name": tool, "arguments": arguments })).await
    }

    /// The result of a call, which must succeed.
    pub async fn wait_for_result(&mut self, id: u64) -> Value {
        let response = self.wait_for_response(id).await;
        let result = &response["result"];
        assert_ne!(result["isError"], true, "{response}");
        let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("a text: {response}"));
        let value: Value = serde_json::from_str(text).expect("the text is JSON");
        assert_eq!(value, result["structuredContent"], "text and structured content agree");
        value
    }

    /// Calls a tool, which must succeed.
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.begin_call(tool, arguments).await;
        self.wait_for_result(id).await
    }

    /// Calls a tool, which must be refused with this code. Returns the message.
    pub async fn call_refused(&mut self, tool: &str, arguments: Value, code: &str) -> String {
        let id = self.begin_call(tool, arguments).await;
        let response = self.wait_for_response(id).await;
        assert_eq!(response["result"]["isError"], true, "{response}");
        let error = &response["result"]["structuredContent"]["error"];
        assert_eq!(error["code"], code, "{response}");
        error["message"].as_str().unwrap_or_default().to_owned()
    }

    /// Closes stdin, and returns the exit code.
    pub async fn close(mut self) -> Option<i32> {
        drop(self.stdin.take());
        within("the end of qd mcp", self.child.wait()).await.expect("it ends").code()
    }
}
