//! The scripted agent as a real process. The test writes every line of the protocol by hand.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// A scripted agent with a session.
struct ScriptAgentProcess {
    process: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    session: Value,
}

impl ScriptAgentProcess {
    fn start() -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_worker-under-test"))
            .arg("__script")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (process.stdin.take(), BufReader::new(process.stdout.take().unwrap()));
        let mut agent = Self { process, stdin, stdout, session: Value::Null };
        agent.send(&json!({"id": 1, "method": "initialize", "params": {"protocolVersion": 1}}));
        assert_eq!(agent.next_message()["result"]["protocolVersion"], 1);
        let folder = std::env::temp_dir();
        agent.send(&json!({"id": 2, "method": "session/new", "params": {"cwd": folder, "mcpServers": []}}));
        agent.session = agent.next_message()["result"]["sessionId"].take();
        agent
    }

    fn send(&mut self, message: &Value) {
        let mut message = message.clone();
        message["jsonrpc"] = json!("2.0");
        writeln!(self.stdin.as_mut().unwrap(), "{message}").unwrap();
    }

    fn next_message(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_default()
    }

    fn prompt(&mut self, steps: &Value) {
        let prompt = json!([{"type": "text", "text": steps.to_string()}]);
        let params = json!({"sessionId": self.session, "prompt": prompt});
        self.send(&json!({"id": 3, "method": "session/prompt", "params": params}));
    }

    /// Runs a script; returns the text it sent.
    fn run_script(&mut self, steps: &Value) -> String {
        self.prompt(steps);
        let mut text = String::new();
        loop {
            let message = self.next_message();
            if message["id"] == 3 {
                assert_eq!(message["result"]["stopReason"], "end_turn", "{message}");
                return text;
            }
            text.push_str(message["params"]["update"]["content"]["text"].as_str().unwrap_or_default());
        }
    }

    /// Starts a process; returns its pid.
    fn spawn(&mut self, setsid: bool, double_fork: bool) -> Pid {
        let spawn = json!({"argv": ["sleep", "600"], "setsid": setsid, "double_fork": double_fork});
        let text = self.run_script(&json!([{"spawn": spawn}]));
        Pid::from_raw(text.strip_prefix("pid ").unwrap().parse().unwrap()).unwrap()
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }
}

impl Drop for ScriptAgentProcess {
    fn drop(&mut self) {
        drop(self.stdin.take());
        // The agent exits when its stdin is closed. If it does not, the test hangs here.
        let _status = self.process.wait();
    }
}

fn parent(pid: Pid) -> Option<i32> {
    stat(pid, 1)
}

/// The leader of the process's session: 0 if the leader is outside of this pid namespace, as it can be in a test run.
fn session(pid: Pid) -> Option<i32> {
    stat(pid, 3)
}

/// A field of `/proc/PID/stat`, counted from the one after the process name.
fn stat(pid: Pid, field: usize) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(field)?.parse().ok()
}

#[test]
fn spawned_processes_leave_their_session_and_their_parent_as_they_are_told() {
    let mut agent = ScriptAgentProcess::start();
    for (leaves_session, leaves_parent) in [(false, false), (true, false), (false, true), (true, true)] {
        let pid = agent.spawn(leaves_session, leaves_parent);
        let left_session = session(pid).unwrap() != session(agent.pid()).unwrap();
        let orphaned = parent(pid) != Some(agent.pid().as_raw_nonzero().get());
        kill_process(pid, Signal::KILL).unwrap();
        assert_eq!((left_session, orphaned), (leaves_session, leaves_parent));
    }
}

#[test]
fn a_program_that_does_not_exist_fails_the_turn_however_it_is_started() {
    let mut agent = ScriptAgentProcess::start();
    for (setsid, double_fork) in [(false, false), (true, false), (false, true), (true, true)] {
        agent.prompt(
            &json!([{"spawn": {"argv": ["/no/such/program"], "setsid": setsid, "double_fork": double_fork}}]),
        );
        let message = agent.next_message()["error"]["message"].take();
        assert!(message.as_str().unwrap().starts_with("cannot start /no/such/program: "), "{message}");
    }
}

#[test]
fn a_process_that_ends_is_reaped_while_the_agent_lives() {
    let mut agent = ScriptAgentProcess::start();
    let pid = agent.spawn(false, false);
    kill_process(pid, Signal::KILL).unwrap();
    // The turn gives the agent something to wake up for. A zombie has a parent until it is reaped.
    while parent(pid).is_some() {
        agent.run_script(&json!([{"sleep_ms": 10}]));
    }
}

#[test]
fn exit_is_the_status_of_the_process_and_comes_after_its_last_words() {
    let mut agent = ScriptAgentProcess::start();
    agent.prompt(&json!([{"say": "last words"}, {"exit": 42}]));
    assert_eq!(agent.next_message()["params"]["update"]["content"]["text"], "last words");
    assert_eq!(agent.next_message(), Value::Null);
    assert_eq!(agent.process.wait().unwrap().code(), Some(42));
}

#[test]
fn it_ends_with_its_stdin_also_in_the_middle_of_a_turn() {
    let mut agent = ScriptAgentProcess::start();
    agent.prompt(&json!([{"say": "x"}, {"sleep_ms": 600_000}]));
    agent.next_message();
    drop(agent.stdin.take());
    assert_eq!(agent.process.wait().unwrap().code(), Some(0));
}

#[test]
fn a_request_that_it_does_not_know_is_refused_and_the_next_one_is_answered() {
    let mut agent = ScriptAgentProcess::start();
    agent.send(&json!({"id": 7, "method": "session/dance", "params": {}}));
    assert_eq!(agent.next_message()["error"]["code"], -32601);
    assert_eq!(agent.run_script(&json!([{"say": "fine"}])), "fine");
}
