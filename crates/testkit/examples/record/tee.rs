//! This program in the agent's place: it starts the agent, passes every line on, and keeps it with who said it. Each line
//! is written at once and in one piece, so that several processes may keep theirs in one file.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// What makes this program one that listens.
pub(crate) const WORD: &str = "__listen";

/// Is the agent, until it ends.
pub(crate) fn run(log: &Path, program: &[String]) {
    let mut agent = Command::new(&program[0])
        .args(&program[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?} does not start: {error}"));
    let (stdin, stdout) =
        (agent.stdin.take().expect("it is piped"), agent.stdout.take().expect("it is piped"));
    let to_agent = log.to_owned();
    // It is not waited for: it may wait for a line when the agent has ended.
    std::thread::spawn(move || pass(">", &to_agent, std::io::stdin().lock(), stdin));
    pass("<", log, BufReader::new(stdout), std::io::stdout());
    let status = agent.wait().expect("a child can be waited for");
    std::process::exit(status.code().unwrap_or(1));
}

/// Passes lines on until there are none, or nobody takes them.
fn pass(who: &str, log: &Path, mut from: impl BufRead, mut to: impl Write) {
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        // What is no message is of no use to a replay.
        if let Ok(said @ Value::Object(_)) = serde_json::from_slice(&line) {
            append(log, &json!({ "pid": std::process::id(), who: said }));
        }
        if to.write_all(&line).and_then(|()| to.flush()).is_err() {
            return;
        }
        line.clear();
    }
}

/// One more line of a log.
pub(crate) fn append(log: &Path, line: &Value) {
    let file = OpenOptions::new().create(true).append(true).open(log);
    let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{} cannot be written: {error}", log.display()));
}
