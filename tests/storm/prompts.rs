//! Random prompts. Each begins with a word of its own, so that the journal shows a prompt that was given to an agent
//! twice, and a prompt that starts processes names them after its number, so that `/proc` shows whose they are.

use qd_testkit::SeededRandom;
use qd_testkit::script::*;
use serde_json::{Value, json};

use super::StormFeatures;
use super::record::StormAgent;

/// How many asks of a session may be open, as docs/limits.md says.
pub(crate) const ASKS_OPEN_MAX: u64 = 100;

/// The word with which the answer to prompt `number` begins.
pub(crate) fn marker(number: u64) -> String {
    format!("<{number}>")
}

/// What a prompt says after its marker and before its mode.
pub(crate) const MODE_WORD: &str = "in ";

/// The id of the run that prompt `number` starts.
pub(crate) fn run_id(number: u64) -> String {
    format!("r{number}")
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

/// A prompt that asks so many times at once.
pub(crate) fn ask_flood(number: u64, times: u64) -> String {
    steps(&[say(&marker(number)), ask_at_once("Bash", usize::try_from(times).unwrap_or_default())])
}

/// A prompt for `script`.
pub(crate) fn script_prompt(
    number: u64,
    random: &mut SeededRandom,
    features: &StormFeatures,
    agent: StormAgent,
) -> String {
    let mut script = vec![say(&marker(number))];
    if features.modes && random.below(4) == 0 {
        // Says its mode before any step can have changed it.
        script.extend([say(MODE_WORD), config()]);
    }
    for _ in 0..=random.below(3) {
        script.extend(random_steps(number, random, features));
    }
    if features.suspend && random.below(8) == 0 {
        script.extend(suspension(number, random, features));
    }
    // The clock of another machine is not ours, and clocks jump in storms.
    let may_report_quota = features.quotas && agent == StormAgent::Script;
    script.extend(random_end(random, may_report_quota));
    steps(&script)
}

fn random_steps(number: u64, random: &mut SeededRandom, features: &StormFeatures) -> Vec<Value> {
    let sleeper = sleeper_argument(number);
    match random.below(22) {
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
        19 if features.modes => vec![mode(["plan", "default", "yolo"][random.below(3) as usize])],
        20 if features.session_limits => vec![say_times(&"long ".repeat(8000), 1 + random.below(8), 0)],
        _ => vec![late("late")],
    }
}

/// Children by a tool, then a suspension that waits for them.
fn suspension(number: u64, random: &mut SeededRandom, features: &StormFeatures) -> Vec<Value> {
    let mut script = Vec::new();
    for _ in 0..=random.below(2) {
        let (agent, prompt) = match random.below(3) {
            0 => ("echo", format!("__sleep_ms:{} child of {number}", random.below(600))),
            1 => ("script", steps(&[sleep(random.below(500)), say("child")])),
            _ => ("script", steps(&[question("child?", &[]), say("child")])),
        };
        let mut arguments = json!({ "agent": agent, "prompt": prompt });
        if features.sandboxes && random.below(2) == 0 {
            arguments["sandbox"] = json!(*random.pick(&["off", "workspace"]));
        }
        script.push(mcp("spawn_agent", arguments));
    }
    script.push(suspend());
    script.push(say("resumed"));
    script
}

fn random_end(random: &mut SeededRandom, may_report_quota: bool) -> Option<Value> {
    match random.below(30) {
        0 | 1 => Some(fail("no")),
        2 | 3 => Some(exit(1)),
        4 | 5 => Some(stop("max_tokens")),
        6 | 7 => Some(stop("refused")),
        8 if may_report_quota => Some(fail(&format!("quota exhausted, resets in {}s", 1 + random.below(3)))),
        _ => None,
    }
}

/// A prompt that waits for a steer and then for the children that a client has created meanwhile.
pub(crate) fn parent_prompt(number: u64) -> String {
    steps(&[say(&marker(number)), await_steer(3000), suspend(), say("resumed")])
}
