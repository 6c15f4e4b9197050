//! Steps of the `script` agent, as in section 9 of the contract. Pure: each function is one step as JSON, and
//! [`steps`] makes a prompt from several.

use serde_json::{Value, json};

/// A prompt that runs these steps in order.
pub fn steps(steps: &[Value]) -> String {
    Value::from(steps.to_vec()).to_string()
}

/// Sends `text`.
pub fn say(text: &str) -> Value {
    json!({ "say": text })
}

/// Sends `text` `times` times, `every_ms` apart.
pub fn say_times(text: &str, times: u64, every_ms: u64) -> Value {
    json!({ "say": text, "times": times, "every_ms": every_ms })
}

/// Sends `text` as a thought.
pub fn think(text: &str) -> Value {
    json!({ "think": text })
}

/// Waits; a cancel ends the wait.
pub fn sleep(ms: u64) -> Value {
    json!({ "sleep_ms": ms })
}

/// Waits longer than any test: only a cancel, a limit or the agent's death ends it.
pub fn sleep_forever() -> Value {
    sleep(600_000)
}

/// Reports a tool call that succeeds.
pub fn tool(name: &str, input: Value, output: &str) -> Value {
    json!({ "tool": { "name": name, "input": input, "output": output, "is_error": false } })
}

/// Reports a tool call that fails.
pub fn failing_tool(name: &str, output: &str) -> Value {
    json!({ "tool": { "name": name, "input": {}, "output": output, "is_error": true } })
}

/// Asks whether a tool may be used, then sends `allowed` or `denied: REASON`.
pub fn ask(tool: &str, input: Value) -> Value {
    json!({ "ask": { "tool": tool, "input": input } })
}

/// Asks whether a command may be run.
pub fn ask_bash(command: &str) -> Value {
    ask("Bash", json!({ "command": command }))
}

/// Asks so many times at once, then sends how many were allowed and denied.
pub fn ask_at_once(tool: &str, times: usize) -> Value {
    json!({ "ask": { "tool": tool, "times": times } })
}

/// Asks with a risk that the agent itself reports.
pub fn ask_risk(tool: &str, input: Value, risk: &str) -> Value {
    json!({ "ask": { "tool": tool, "input": input, "risk": risk } })
}

/// Asks a person a question, then sends the answer.
pub fn question(prompt: &str, options: &[&str]) -> Value {
    json!({ "question": { "prompt": prompt, "options": options } })
}

/// Reports a plan of one entry.
pub fn plan(content: &str, status: &str) -> Value {
    json!({ "plan": [{ "content": content, "status": status }] })
}

/// The agent switches its mode by itself.
pub fn mode(mode: &str) -> Value {
    json!({ "mode": mode })
}

/// Reports an increment of usage.
pub fn usage(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Value {
    json!({ "usage": { "input_tokens": input_tokens, "output_tokens": output_tokens, "cost_usd": cost_usd } })
}

/// Reports a cost, with one token each way.
pub fn cost(usd: f64) -> Value {
    usage(1, 1, usd)
}

/// Waits so many milliseconds for a steer, then sends `steered: TEXT` or `no steer`.
pub fn await_steer(ms: u64) -> Value {
    json!({ "await_steer": ms })
}

/// Calls a tool of the MCP server that the agent was given, and sends its result.
pub fn mcp(tool: &str, arguments: Value) -> Value {
    json!({ "mcp": { "tool": tool, "arguments": arguments } })
}

/// Ignores cancels from here on.
pub fn ignore_cancel() -> Value {
    json!({ "ignore_cancel": true })
}

/// Sends `text` after the end of the turn.
pub fn late(text: &str) -> Value {
    json!({ "late": text })
}

/// Sends its directory, model and system prompt.
pub fn config() -> Value {
    json!({ "config": true })
}

/// Stops with `max_tokens`, `max_turns` or `refused`.
pub fn stop(reason: &str) -> Value {
    json!({ "stop": reason })
}

/// Fails the turn.
pub fn fail(text: &str) -> Value {
    json!({ "fail": text })
}

/// Exits the agent's process.
pub fn exit(status: i32) -> Value {
    json!({ "exit": status })
}

pub fn write(path: &str, content: &str) -> Value {
    json!({ "write": { "path": path, "content": content } })
}

/// Sends the content of a file.
pub fn read(path: &str) -> Value {
    json!({ "read": path })
}

/// Starts a program and sends `pid N`; the turn does not wait for it.
pub fn spawn(argv: &[&str]) -> Value {
    json!({ "spawn": { "argv": argv } })
}

/// Starts a program that leaves its parent and its session, and sends `pid N`.
pub fn spawn_detached(argv: &[&str]) -> Value {
    json!({ "spawn": { "argv": argv, "setsid": true, "double_fork": true } })
}

/// Suspends the run until the sessions that it started have ended.
pub fn suspend() -> Value {
    json!({ "suspend": true })
}

/// Sends `0 `, `1 ` and so on, `every_ms` apart.
pub fn count(to: u64, every_ms: u64) -> Vec<Value> {
    (0..to).flat_map(|n| [say(&format!("{n} ")), sleep(every_ms)]).collect()
}

/// The whole text that [`count`] sends.
pub fn counted_text(to: u64) -> String {
    (0..to).map(|n| format!("{n} ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_a_json_array_of_steps() {
        assert_eq!(steps(&[say("hi"), sleep(5)]), r#"[{"say":"hi"},{"sleep_ms":5}]"#);
    }
}
