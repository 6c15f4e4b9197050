//! Properties that hold for every line, policy and input. The generators favour characters and words that have a
//! meaning in shells, since arbitrary text hardly ever contains them.

use proptest::prelude::*;

use super::super::command_line::{join, split};
use super::super::{assess_risk, glob, main_argument, validate_policy};
use super::*;

/// A line made of shell syntax, plain words and arbitrary text.
fn lines() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        6 => prop::sample::select(vec![
            " ", " ", " ", ";", "&&", "||", "|", "&", "\n", "'", "\"", "\\", "$(", ")", "(", "`", "$", "${", "}", "{", "<", ">",
            ">/dev/null", "2>&1", "&>", "#", "<<", "!", "=", "*", "\0", "\r", "\t",
        ]).prop_map(str::to_owned),
        6 => prop::sample::select(vec![
            "git", "status", "rm", "-rf", "/", "ls", "sudo", "bash", "-c", "eval", "if", "then", "do", "A=1", "x", "..", "~",
            "curl", "find", "-exec", "env", "cd", "push", "--force", "xargs", "-o", "kill", "chmod", "777", ".env", "ä",
        ]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn risks() -> impl Strategy<Value = Risk> {
    prop::sample::select(vec![Risk::Low, Risk::Medium, Risk::High])
}

fn policies() -> impl Strategy<Value = Policy> {
    let verdicts =
        || prop::sample::select(vec![PolicyVerdict::Ask, PolicyVerdict::Allow, PolicyVerdict::Deny]);
    let patterns = prop_oneof![
        3 => prop::sample::select(vec!["*", "git *", "git status*", "rm *", "ls", "?*", "src/*", "*x*"]).prop_map(str::to_owned),
        1 => any::<String>(),
    ];
    let tools = prop::sample::select(vec!["*", "Bash", "Read", "B?sh", "Demo"]);
    let rule = (tools, prop::option::of(patterns), verdicts(), prop::option::of(risks())).prop_map(
        |(tool, pattern, decision, risk)| PolicyRule { tool: tool.to_owned(), pattern, decision, risk },
    );
    prop_oneof![1 => verdicts().prop_map(Policy::Always), 5 => prop::collection::vec(rule, 0..6).prop_map(Policy::Rules)]
}

fn inputs() -> impl Strategy<Value = Value> {
    let keys =
        || prop::sample::select(vec!["command", "cmd", "path", "file_path", "url", "pattern", "x", "script"]);
    let values = prop_oneof![
        8 => lines().prop_map(Value::from),
        1 => prop::collection::vec(lines(), 0..4).prop_map(Value::from),
        1 => Just(json!(7)),
        1 => Just(json!({"command": "ls"})),
    ];
    prop_oneof![
        8 => prop::collection::vec((keys(), values), 0..3).prop_map(|pairs| {
            pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<serde_json::Map<_, _>>().into()
        }),
        1 => lines().prop_map(Value::from),
        1 => Just(Value::Null),
    ]
}

fn tools() -> impl Strategy<Value = String> {
    prop_oneof![prop::sample::select(vec!["Bash", "Read", "Demo"]).prop_map(str::to_owned), any::<String>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn splitting_what_was_joined_gives_back_the_words(words in prop::collection::vec("[^\\p{Cc}]{0,8}", 1..6)) {
        if let Some(parts) = split(&join(&words)) {
            prop_assert_eq!(parts.len(), 1);
            let values: Vec<_> = parts[0].words.iter().map(|word| word.value.clone()).collect();
            prop_assert_eq!(values, words);
        }
    }

    #[test]
    fn splitting_invents_no_word_and_loses_none(line in lines()) {
        if let Some(parts) = split(&line) {
            let plain = line.replace("\\\n", "");
            let mut from = 0;
            for word in parts.iter().flat_map(|part| &part.words) {
                let at = plain[from..].find(&word.raw);
                prop_assert!(at.is_some(), "{:?} is not in the rest of the line", word.raw);
                from += at.unwrap() + word.raw.len();
            }
            let again = parts.iter().map(|part| part.text()).collect::<Vec<_>>().join("\n");
            let words = |parts: Vec<super::super::command_line::ShellCommand>| -> Vec<Vec<String>> {
                parts.into_iter().map(|part| part.words.into_iter().map(|word| word.value).collect()).collect()
            };
            prop_assert_eq!(split(&again).map(words), Some(words(parts)));
        }
    }

    #[test]
    fn an_allow_rule_never_covers_a_part_that_it_does_not_match(
        separator in prop::sample::select(vec![";", "&&", "||", "|", "&", "\n", " ; ", "\n\n", "|&"]),
        before in "[a-z ]{0,12}", intruder in "[a-z]{1,8}( [a-z]{1,4})?", after in lines(),
    ) {
        let pattern = "git status*";
        prop_assume!(!glob::matches(pattern, &intruder));
        let policy = rules(&[("Bash", pattern, PolicyVerdict::Allow)]);
        for command in [
            format!("git status {before}{separator}{intruder}"),
            format!("git status {before}{separator}{intruder}\n{after}"),
            format!("{intruder}{separator}git status {before}"),
        ] {
            prop_assert_ne!(verdict_on(&policy, "Bash", &command_input(&command)), PolicyVerdict::Allow, "{:?}", command);
        }
    }

    #[test]
    fn high_risk_is_never_allowed_without_a_rule_for_high_risk(
        policy in policies(), granted in any::<bool>(), tool in tools(), input in inputs(),
    ) {
        let judgement = judge(&policy, granted, &ProposedToolCall { tool: &tool, input: &input, risk: Risk::High, workspace: None });
        prop_assert_ne!(&judgement, &PolicyJudgement::Granted, "a grant is not for high risk");
        if let PolicyJudgement::Allow { rule } = judgement {
            let rule = rule.expect("only a rule can allow high risk");
            prop_assert_eq!((rule.decision, rule.risk), (PolicyVerdict::Allow, Some(Risk::High)));
        }
    }

    #[test]
    fn nothing_panics_whatever_comes(
        policy in policies(), granted in any::<bool>(), tool in tools(), input in inputs(), claimed in prop::option::of(risks()),
        workspace in prop::option::of(prop_oneof![Just("/srv/app".to_owned()), any::<String>()]),
    ) {
        let risk = assess_risk(&tool, &input, claimed, workspace.as_deref());
        prop_assert!(Some(risk) >= claimed);
        let _ = (judge(&policy, granted, &ProposedToolCall { tool: &tool, input: &input, risk, workspace: workspace.as_deref() }), main_argument(&tool, &input), validate_policy(&policy));
    }

    #[test]
    fn a_grant_never_makes_a_judgement_stricter_nor_beats_a_deny(
        policy in policies(), tool in tools(), input in inputs(), risk in risks(),
    ) {
        let call = ProposedToolCall { tool: &tool, input: &input, risk, workspace: None };
        let (plain, granted) = (judge(&policy, false, &call), judge(&policy, true, &call));
        match plain {
            PolicyJudgement::Ask => prop_assert_ne!(verdict_of(&granted), PolicyVerdict::Deny),
            plain => prop_assert_eq!(plain, granted),
        }
    }
}
