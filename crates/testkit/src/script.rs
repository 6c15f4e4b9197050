//! Steps of the `script` agent, as in section 9 of the contract. Pure: each function is one step as JSON, and
//! [`steps`] makes a prompt of several.

use serde_json::{Value, json};

/// A prompt that does these steps in order.
pub fn steps(steps: &[Value]) -> String {
    Value::from(steps.to_vec()).to_string()
}

/// Says `text`.
pub fn say(text: &str) -> Value {
    json!({ "say": text })
}

/// Says `text` so many times, with so many milliseconds in between.
pub fn say_times(text: &str, times: u64, every_ms: u64) -> Value {
    json!({ "say": text, "times": times, "every_ms": every_ms })
}

/// Thinks `text`.
pub fn think(text: &str) -> Value {
    json!({ "think": text })
}

/// Waits; a cancel ends the wait.
pub fn sleep(ms: u64) -> Value {
    json!({ "sleep_ms": ms })
}

/// Waits for longer than any test does: only a cancel, a limit or a death ends it.
pub fn sleep_forever() -> Value {
    sleep(600_000)
}

/// Uses a tool that does well.
pub fn tool(name: &str, input: Value, output: &str) -> Value {
    json!({ "tool": { "name": name, "input": input, "output": output, "is_error": false } })
}

/// Uses a tool that fails.
pub fn failing_tool(name: &str, output: &str) -> Value {
    json!({ "tool": { "name": name, "input": {}, "output": output, "is_error": true } })
}

/// Asks whether a tool may be used, then says `allowed` or `denied: REASON`.
pub fn ask(tool: &str, input: Value) -> Value {
    json!({ "ask": { "tool": tool, "input": input } })
}

/// Asks whether a command may be run.
pub fn ask_bash(command: &str) -> Value {
    ask("Bash", json!({ "command": command }))
}

/// Asks with the agent's own word on the risk.
pub fn ask_risk(tool: &str, input: Value, risk: &str) -> Value {
    json!({ "ask": { "tool": tool, "input": input, "risk": risk } })
}

/// Asks a person something, then says the answer.
pub fn question(prompt: &str, options: &[&str]) -> Value {
    json!({ "question": { "prompt": prompt, "options": options } })
}

/// Shows a plan of one entry.
pub fn plan(content: &str, status: &str) -> Value {
    json!({ "plan": [{ "content": content, "status": status }] })
}

/// Reports an increment of what was used.
pub fn usage(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> Value {
    json!({ "usage": { "input_tokens": input_tokens, "output_tokens": output_tokens, "cost_usd": cost_usd } })
}

/// Reports a cost alone.
pub fn cost(usd: f64) -> Value {
    usage(1, 1, usd)
}

/// Waits so long for a steer, then says `steered: TEXT` or `no steer`.
pub fn await_steer(ms: u64) -> Value {
    json!({ "await_steer": ms })
}

/// Calls a tool of the server that the agent was given, and says its result.
pub fn mcp(tool: &str, arguments: Value) -> Value {
    json!({ "mcp": { "tool": tool, "arguments": arguments } })
}

/// From here on hears no cancel.
pub fn ignore_cancel() -> Value {
    json!({ "ignore_cancel": true })
}

/// Says `text` after the end of the turn.
pub fn late(text: &str) -> Value {
    json!({ "late": text })
}

/// Says its directory, model and system prompt.
pub fn config() -> Value {
    json!({ "config": true })
}

/// Stops as `max_tokens`, `max_turns` or `refused`.
pub fn stop(reason: &str) -> Value {
    json!({ "stop": reason })
}

/// The turn fails.
pub fn fail(text: &str) -> Value {
    json!({ "fail": text })
}

/// The agent dies.
pub fn exit(status: i32) -> Value {
    json!({ "exit": status })
}

/// Writes a file.
pub fn write(path: &str, content: &str) -> Value {
    json!({ "write": { "path": path, "content": content } })
}

/// Says what is in a file.
pub fn read(path: &str) -> Value {
    json!({ "read": path })
}

/// Starts a program and says `pid N`; the turn does not wait for it.
pub fn spawn(argv: &[&str]) -> Value {
    json!({ "spawn": { "argv": argv } })
}

/// Starts a program that leaves its parent and its session, and says `pid N`.
pub fn spawn_detached(argv: &[&str]) -> Value {
    json!({ "spawn": { "argv": argv, "setsid": true, "double_fork": true } })
}

/// Ends the turn until the sessions that it started have ended.
pub fn suspend() -> Value {
    json!({ "suspend": true })
}

/// Says `0 `, `1 ` and so on, one after another, with so many milliseconds in between.
pub fn count(to: u64, every_ms: u64) -> Vec<Value> {
    (0..to).flat_map(|n| [say(&format!("{n} ")), sleep(every_ms)]).collect()
}

/// What [`count`] says in all.
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
