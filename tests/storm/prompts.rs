//! Random prompts. Each begins with a word of its own, so that the journal shows a prompt that was given to an agent
//! twice, and a prompt that starts processes names them after its number, so that `/proc` shows whose they are.

use qd_testkit::SeededRandom;
use qd_testkit::script::*;
use serde_json::{Value, json};

use super::StormFeatures;

/// The word with which the answer to prompt `number` begins.
pub(crate) fn marker(number: u64) -> String {
    format!("<{number}>")
}

/// The argument of `sleep` for a process that prompt `number` starts. Nobody else has it, not even a storm that runs
/// at the same time.
pub(crate) fn sleeper_argument(number: u64) -> String {
    format!("90.{:07}{number:07}", std::process::id())
}

/// A prompt for `echo`.
pub(crate) fn echo_prompt(number: u64, random: &mut SeededRandom) -> String {
    let words = marker(number) + " a few words for everybody";
    match random.below(3) {
        0 => words,
        _ => format!("__sleep_ms:{} {words}", random.below(900)),
    }
}

/// A prompt for `script`.
pub(crate) fn script_prompt(number: u64, random: &mut SeededRandom, features: &StormFeatures) -> String {
    let mut script = vec![say(&marker(number))];
    for _ in 0..=random.below(3) {
        script.extend(random_steps(number, random, features));
    }
    if features.suspend && random.below(8) == 0 {
        script.extend(suspension(number, random));
    }
    script.extend(random_end(random));
    steps(&script)
}

fn random_steps(number: u64, random: &mut SeededRandom, features: &StormFeatures) -> Vec<Value> {
    let sleeper = sleeper_argument(number);
    match random.below(20) {
        0..=3 => vec![say_times("w ", 1 + random.below(15), random.below(40))],
        4 | 5 => vec![sleep(random.below(1200))],
        6 => vec![think("hm"), tool("Read", json!({ "path": "a.txt" }), "one"), plan("it", "pending")],
        7 => vec![failing_tool("Bash", "no"), usage(10, 5, 0.01)],
        8 => vec![ask_bash("make")],
        9 => vec![ask_risk("Bash", json!({ "command": "make install" }), "high")],
        10 => vec![question("which?", &["a", "b"])],
        11 => vec![spawn(&["sleep", &sleeper]), sleep(random.below(700))],
        12 if features.leftovers => vec![spawn_detached(&["sleep", &sleeper])],
        12 | 13 => vec![spawn_detached(&["sleep", &sleeper]), sleep(300 + random.below(700))],
        14 => vec![await_steer(random.below(1200))],
        15 => vec![ignore_cancel(), sleep(random.below(900))],
        16 => vec![write(&format!("f{}.txt", random.below(5)), &marker(number)), config()],
        17 => vec![mcp("list", json!({}))],
        18 => vec![usage(1, 1, 0.2)],
        _ => vec![late("late")],
    }
}

/// Children by a tool, then a suspension that waits for them.
fn suspension(number: u64, random: &mut SeededRandom) -> Vec<Value> {
    let mut script = Vec::new();
    for _ in 0..=random.below(2) {
        let (agent, prompt) = match random.below(3) {
            0 => ("echo", format!("__sleep_ms:{} child of {number}", random.below(600))),
            1 => ("script", steps(&[sleep(random.below(500)), say("child")])),
            _ => ("script", steps(&[question("child?", &[]), say("child")])),
        };
        script.push(mcp("spawn_agent", json!({ "agent": agent, "prompt": prompt })));
    }
    script.push(suspend());
    script.push(say("resumed"));
    script
}

fn random_end(random: &mut SeededRandom) -> Option<Value> {
    match random.below(14) {
        0 => Some(fail("no")),
        1 => Some(exit(1)),
        2 => Some(stop("max_tokens")),
        3 => Some(stop("refused")),
        _ => None,
    }
}

/// A prompt that waits for a steer and then for the children that a client has created meanwhile.
pub(crate) fn parent_prompt(number: u64) -> String {
    steps(&[say(&marker(number)), await_steer(3000), suspend(), say("resumed")])
}
