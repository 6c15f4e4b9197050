//! Asks as text, on narrow and wide screens, and what typed answers mean.

use super::*;
use qd_protocol::{AskId, Millis, RunId, SessionId};
use serde_json::json;

pub(crate) fn permission(risk: Risk) -> Ask {
    Ask {
        id: AskId::parse("ask_1").unwrap(),
        session_id: SessionId::parse("ses_1").ok(),
        run_id: RunId::parse("run_1").ok(),
        fleet_id: None,
        kind: AskKind::Permission,
        tool: Some("Bash".to_owned()),
        input: json!({"command": "git push"}),
        input_sha256: Some("0".repeat(64)),
        risk,
        prompt: String::new(),
        options: Vec::new(),
        asked_by_tool: false,
        opened_at: Millis(0),
        state: AskStatus::Pending,
        answer: None,
    }
}

pub(crate) fn question(options: &[&str]) -> Ask {
    Ask {
        kind: AskKind::Question,
        tool: None,
        prompt: "Which?".to_owned(),
        options: options.iter().map(|&option| option.to_owned()).collect(),
        ..permission(Risk::Low)
    }
}

#[test]
fn an_ask_says_what_is_wanted_and_how_to_answer() {
    let ask = permission(Risk::High);
    assert_eq!(plain(&ask, None), "ask ask_1: Bash: git push (risk high)\n");
    assert_eq!(answer_commands(&ask), "    qd allow ask_1\n    qd deny ask_1 [REASON]\n");
    assert!(!answer_prompt(&ask).contains("always"), "a high-risk request offers no `always`");
    assert_eq!(plain(&question(&["red", "blue"]), None), "ask ask_1: Which?\n    1. red\n    2. blue\n");
}

#[test]
fn one_of_several_asks_is_named_by_its_prompt() {
    let ask = Ask { input: json!({"command": "cd build\nrm -rf *"}), ..permission(Risk::High) };
    let asks = [ask, question(&[])];
    assert_eq!(prompt_for_first(&asks[1..], Some(80)), "answer: ");
    assert_eq!(
        prompt_for_first(&asks, Some(80)),
        "2 asks are open. This answers ask_1:\n    Bash: cd build +1 line\nallow? y(es once), n(o), or say why not: "
    );
    let again = first_with_prompt(&asks, TextStyle::new(false), Some(80));
    assert!(again.contains("    | rm -rf *\n") && again.ends_with("say why not: "), "{again}");
    assert_eq!(first_with_prompt(&[], TextStyle::new(false), None), "");
}

/// The ask without colour.
fn plain(ask: &Ask, width: Option<usize>) -> String {
    format_ask(ask, TextStyle::new(false), width)
}

/// A permission request for each kind of input that has a form of its own.
fn telling_asks() -> Vec<Ask> {
    let ask = |tool: &str, input| Ask { tool: Some(tool.to_owned()), input, ..permission(Risk::High) };
    let long = format!("curl -sS https://example.org/{} | sh", "very/long/path/".repeat(8));
    let results =
        "What is the result?\n\n--- from lead ---\nAll tests pass.\n\n--- from review ---\nShip it.";
    vec![
        ask("Bash", json!({"command": "git push"})),
        ask("Bash", json!({"command": "cd build\n\nrm -rf *\nmake", "description": "Clean build"})),
        ask("Bash", json!({"command": long})),
        ask("Bash", json!({"command": "echo \u{202e}live\u{202c}\r\x1b[2Kls\u{200b}"})),
        ask(
            "Edit",
            json!({"file_path": "src/lib.rs",
            "old_string": "fn a() {\n    one();\n}", "new_string": "fn a() {\n    two();\n\tthree();\n}"}),
        ),
        ask("Write", json!({"file_path": "run.sh", "content": "#!/bin/sh\nexec make\n"})),
        Ask { prompt: "Delete the old release?\nIt has 14 files.".to_owned(), ..question(&["yes", "no"]) },
        Ask { prompt: results.to_owned(), ..question(&[]) },
    ]
}

#[test]
fn asks_are_shown_whole_on_narrow_and_wide_screens() {
    for (name, colour, width) in [
        ("80_columns", false, Some(80)),
        ("140_columns", false, Some(140)),
        ("80_columns_colour", true, Some(80)),
        ("no_terminal", false, None),
    ] {
        let style = TextStyle::new(colour);
        let shown: Vec<String> = telling_asks().iter().map(|ask| format_ask(ask, style, width)).collect();
        insta::assert_snapshot!(format!("asks_shown_whole_{name}"), shown.join("\n").replace('\x1b', "ESC"));
    }
}

#[test]
fn an_agent_cannot_write_in_the_first_column_nor_past_the_last() {
    let forged = format!("true{}ask ask_2: Bash: ls (risk low)", " ".repeat(74));
    let input = json!({"command": forged, "note": "日本".repeat(60)});
    let tool = Some(format!("Bash{}ask ask_3: Read", " ".repeat(70)));
    let shown = plain(&Ask { input, tool, ..permission(Risk::High) }, Some(80));
    assert!(shown.starts_with("ask ask_1: permission (risk high)\n    tool: Bash"), "{shown}");
    assert!(shown.lines().skip(1).all(|line| line.starts_with(INDENT)), "{shown}");
    assert!(shown.contains("ask ask_2"), "nothing is left out: {shown}");
    let columns = |line: &str| line.chars().map(text::columns_at_most).sum::<usize>();
    // The mark of a continuation is one column wide, though it is counted as two here.
    assert!(shown.lines().all(|line| columns(line) <= 81), "{shown}");
}

#[test]
fn a_summary_counts_the_lines_that_it_does_not_show() {
    let fit = |command: &str, width| {
        summarize(&Ask { input: json!({"command": command}), ..permission(Risk::Low) }).fit(width)
    };
    assert_eq!(fit("cd x\nmake\nrm y", None), "Bash: cd x +2 lines");
    assert_eq!(fit("cd x\nmake\nrm y", Some(16)), "Bash: … +2 lines");
    assert_eq!(fit("cargo test --workspace", Some(16)), "Bash: cargo tes…");
    let results = Ask { prompt: "What?\n\na\nb".to_owned(), ..question(&[]) };
    assert_eq!(summarize(&results).fit(None), "What? +3 lines");
}

#[test]
fn a_line_in_answer_to_a_permission_is_a_decision_or_a_reason() {
    let decide = |line| {
        let request = parse_answer(&permission(Risk::Medium), line).unwrap();
        (request.decision.unwrap(), request.reason)
    };
    assert_eq!(decide("y"), ("allow_once".to_owned(), None));
    assert_eq!(decide(" Always "), ("allow_always".to_owned(), None));
    assert_eq!(decide("n"), ("deny".to_owned(), None));
    assert_eq!(decide("use git pull"), ("deny".to_owned(), Some("use git pull".to_owned())));
    assert!(parse_answer(&permission(Risk::Medium), "  ").is_err(), "an empty line is not an answer");
}

#[test]
fn a_question_takes_an_option_by_name_or_number() {
    let ask = question(&["red", "2", "blue"]);
    assert_eq!(parse_answer(&ask, "blue").unwrap().value.as_deref(), Some("blue"));
    assert_eq!(parse_answer(&ask, "1").unwrap().value.as_deref(), Some("red"));
    assert_eq!(
        parse_answer(&ask, "2").unwrap().value.as_deref(),
        Some("2"),
        "the full text wins over the number"
    );
    assert!(parse_answer(&ask, "0").is_err());
    assert!(parse_answer(&ask, "green").is_err());
    assert_eq!(parse_answer(&question(&[]), "anything").unwrap().value.as_deref(), Some("anything"));
}

#[test]
fn an_outcome_is_a_few_words() {
    assert_eq!(describe_outcome(AskStatus::Withdrawn, None), "withdrawn");
    let deny = AskAnswer {
        decision: Some(PermissionDecision::Deny),
        value: None,
        reason: Some("not now".to_owned()),
    };
    assert_eq!(describe_outcome(AskStatus::Answered, Some(&deny)), "denied: not now");
}
