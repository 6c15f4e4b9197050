//! This program in the agent's place: it starts the agent, passes every line on, and logs it with its direction. Each
//! line is written at once and in one piece, so several processes can share one log file.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// The first argument that makes this program run in the agent's place.
pub(crate) const MODE_ARG: &str = "__listen";

/// Runs the agent until it exits.
pub(crate) fn run(log: &Path, program: &[String]) {
    let mut agent = Command::new(&program[0])
        .args(&program[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?} does not start: {error}"));
    let (stdin, stdout) =
        (agent.stdin.take().expect("it is piped"), agent.stdout.take().expect("it is piped"));
    let stdin_log = log.to_owned();
    // The thread is not joined: it may still wait for a line when the agent has exited.
    std::thread::spawn(move || pass_lines(">", &stdin_log, std::io::stdin().lock(), stdin));
    pass_lines("<", log, BufReader::new(stdout), std::io::stdout());
    let status = agent.wait().expect("a child can be waited for");
    std::process::exit(status.code().unwrap_or(1));
}

/// Passes lines on until the input ends or the output is closed.
fn pass_lines(direction: &str, log: &Path, mut from: impl BufRead, mut to: impl Write) {
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        // A replay only needs lines that are messages.
        if let Ok(message @ Value::Object(_)) = serde_json::from_slice(&line) {
            append(log, &json!({ "pid": std::process::id(), direction: message }));
        }
        if to.write_all(&line).and_then(|()| to.flush()).is_err() {
            return;
        }
        line.clear();
    }
}

/// Appends a line to a log.
pub(crate) fn append(log: &Path, line: &Value) {
    let file = OpenOptions::new().create(true).append(true).open(log);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{} cannot be written: {error}", log.display()));
}
