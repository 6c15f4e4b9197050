//! The risk table against `corpus.txt`: calls as agents make them, in good faith and bad, each with its class and the
//! risk that it must have in a known workspace.

use std::collections::BTreeMap;

use super::super::assess_risk;
use super::*;

const WORKSPACE: &str = "/home/ann/shop";
const CLASSES: [&str; 6] = ["destructive", "network", "credential", "outside", "read_only", "change"];

struct CorpusLine<'c> {
    class: &'c str,
    risk: Risk,
    tool: &'c str,
    input: Value,
    text: &'c str,
}

fn corpus() -> Vec<CorpusLine<'static>> {
    let lines = include_str!("corpus.txt").lines();
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(parse_corpus_line).collect()
}

fn parse_corpus_line(text: &str) -> CorpusLine<'_> {
    let mut fields = text.splitn(4, ' ');
    let mut field = || fields.next().unwrap_or_else(|| panic!("{text} has four fields"));
    let (class, risk, tool, input) = (field(), field(), field(), field());
    let risk = serde_json::from_value(json!(risk)).unwrap();
    // A command line may also begin with a brace or a quote; then it is not JSON.
    let input = match serde_json::from_str(input) {
        Ok(Value::String(command)) => command_input(&command),
        Ok(object @ Value::Object(_)) => object,
        _ => command_input(input),
    };
    CorpusLine { class, risk, tool, input, text }
}

#[test]
fn every_call_of_the_corpus_has_the_risk_that_it_must_have() {
    let wrong: Vec<String> = corpus()
        .iter()
        .map(|line| (line, assess_risk(line.tool, &line.input, None, Some(WORKSPACE))))
        .filter(|(line, found)| *found != line.risk)
        .map(|(line, found)| format!("{found:?}: {}", line.text))
        .collect();
    assert!(wrong.is_empty(), "{} of the corpus are judged wrongly:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_corpus_is_large_and_has_every_class() {
    let mut counts: BTreeMap<&str, usize> = CLASSES.iter().map(|class| (*class, 0)).collect();
    let lines = corpus();
    for line in &lines {
        let count = counts.get_mut(line.class);
        *count.unwrap_or_else(|| panic!("{} is not a class: {}", line.class, line.text)) += 1;
    }
    assert!(lines.len() >= 200, "the corpus has {} lines", lines.len());
    assert!(counts.values().all(|count| *count > 0), "{counts:?}");
    let mut texts: Vec<&str> = lines.iter().map(|line| line.text).collect();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), lines.len(), "no line occurs twice");
}

#[test]
fn the_agents_claim_never_lowers_a_call_of_the_corpus() {
    for line in corpus() {
        // Calls that are medium only because they are unknown may be claimed to be low.
        let found = assess_risk(line.tool, &line.input, Some(Risk::Low), Some(WORKSPACE));
        assert!(found == line.risk || (line.risk == Risk::Medium && found == Risk::Low), "{}", line.text);
        assert_eq!(
            assess_risk(line.tool, &line.input, Some(Risk::High), Some(WORKSPACE)),
            Risk::High,
            "{}",
            line.text
        );
    }
}

/// A file in the workspace is the same file however it is named.
#[test]
fn an_absolute_path_in_the_workspace_is_judged_as_the_relative_one() {
    for line in corpus() {
        let text = line.input.to_string();
        if !text.contains(&format!("{WORKSPACE}/")) || text.contains("/..") {
            continue;
        }
        let relative: Value = serde_json::from_str(&text.replace(&format!("{WORKSPACE}/"), "")).unwrap();
        assert_eq!(assess_risk(line.tool, &relative, None, Some(WORKSPACE)), line.risk, "{}", line.text);
        assert_eq!(
            assess_risk(line.tool, &relative, None, None),
            line.risk,
            "{} without a workspace",
            line.text
        );
    }
}
