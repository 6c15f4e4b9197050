//! Calls tools of an MCP server on stdio. The protocol is written by hand: the scripted agent stands for any agent, so
//! it does not rely on anybody's MCP client library.

use std::process::Stdio;

use agent_client_protocol::v1::schema::{McpServer, McpServerStdio};
use qd_protocol::limits::BODY_MAX;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The version of the Model Context Protocol that is used.
const MCP_VERSION: &str = "2025-06-18";

/// Starts a server, calls one of its tools, and returns the text of the result.
pub(super) async fn call_tool(
    server: Option<&McpServer>,
    tool: &str,
    arguments: &Value,
) -> Result<String, String> {
    let Some(McpServer::Stdio(server)) = server else {
        return Err("this agent was given no MCP server".to_owned());
    };
    let mut server = ScriptMcpClient::start(server)?;
    let client_info = json!({ "name": "script", "version": env!("CARGO_PKG_VERSION") });
    let params = json!({ "protocolVersion": MCP_VERSION, "capabilities": {}, "clientInfo": client_info });
    server.request(1, "initialize", params).await?;
    server.send(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })).await?;
    let result = server.request(2, "tools/call", json!({ "name": tool, "arguments": arguments })).await?;
    let text: Vec<&str> = result["content"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|block| block["text"].as_str())
        .collect();
    Ok(text.concat())
}

/// A running server, which is killed when this is dropped.
struct ScriptMcpClient {
    _child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl ScriptMcpClient {
    fn start(server: &McpServerStdio) -> Result<Self, String> {
        let mut child = Command::new(&server.command)
            .args(&server.args)
            .envs(server.env.iter().map(|variable| (&variable.name, &variable.value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|cause| format!("cannot start {}: {cause}", server.command.display()))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => Ok(Self { _child: child, stdin, stdout: BufReader::new(stdout) }),
            _ => Err("the server has no stdio".to_owned()),
        }
    }

    async fn send(&mut self, message: &Value) -> Result<(), String> {
        let line = format!("{message}\n");
        self.stdin.write_all(line.as_bytes()).await.map_err(|cause| format!("the server hung up: {cause}"))
    }

    /// Sends a request, and skips messages until its response.
    async fn request(&mut self, id: u64, method: &str, params: Value) -> Result<Value, String> {
        self.send(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })).await?;
        loop {
            let mut line = String::new();
            let mut limited = (&mut self.stdout).take(BODY_MAX as u64);
            match limited.read_line(&mut line).await {
                Ok(1..) => {}
                Ok(_) => return Err("the server ended".to_owned()),
                Err(cause) => return Err(format!("the server cannot be read: {cause}")),
            }
            let Ok(mut message) = serde_json::from_str::<Value>(&line) else { continue };
            if message["id"] == id {
                return match message.get("error") {
                    Some(error) => Err(format!("the server refused {method}: {error}")),
                    None => Ok(message["result"].take()),
                };
            }
        }
    }
}
