//! Asks as text: what the agent wants, the commands that answer it, the prompt for answering in place, and the parsing
//! of a typed answer. The daemon validates every answer; nothing is decided here.

use qd_protocol::api::AnswerRequest;
use qd_protocol::event::{Ask, AskAnswer, AskKind, AskStatus, PermissionDecision};
use qd_protocol::policy::Risk;

use super::{text, tool};

/// How much of a question one line shows.
const PREVIEW_CHARS: usize = 200;

/// What the agent wants, in one line.
pub(crate) fn summary(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Question => text::first_line(&ask.prompt, PREVIEW_CHARS),
        AskKind::Permission => {
            let call = ask.tool.as_ref().map(|name| tool::summarize_call(name, &ask.input));
            call.unwrap_or_else(|| text::first_line(&ask.prompt, PREVIEW_CHARS))
        }
    }
}

/// What the agent wants, with the id, the risk and the options of a question.
pub(crate) fn format_ask(ask: &Ask) -> String {
    let mut out = match ask.kind {
        AskKind::Permission => format!("ask {}: {} (risk {})\n", ask.id, summary(ask), risk_name(ask.risk)),
        AskKind::Question => format!("ask {}: {}\n", ask.id, summary(ask)),
    };
    let prompt = text::strip_controls(ask.prompt.trim());
    let shown_whole = ask.kind == AskKind::Question && prompt == summary(ask);
    if !prompt.is_empty() && !shown_whole && prompt != ask.tool.as_deref().unwrap_or_default() {
        for line in prompt.lines() {
            out.push_str(&format!("    {line}\n"));
        }
    }
    for (i, option) in ask.options.iter().enumerate() {
        out.push_str(&format!("    {}. {}\n", i + 1, text::strip_controls(option)));
    }
    out
}

/// The commands that answer the ask from any terminal, one per line.
pub(crate) fn answer_commands(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Permission => format!("    qd allow {0}\n    qd deny {0} [REASON]\n", ask.id),
        AskKind::Question => format!("    qd answer {} VALUE\n", ask.id),
    }
}

/// The prompt for answering on the terminal.
pub(crate) fn answer_prompt(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Permission if ask.risk == Risk::High => {
            "allow? y(es once), n(o), or say why not: ".to_owned()
        }
        AskKind::Permission => "allow? y(es once), a(lways), n(o), or say why not: ".to_owned(),
        AskKind::Question if ask.options.is_empty() => "answer: ".to_owned(),
        AskKind::Question => "answer, by number or in full: ".to_owned(),
    }
}

/// Parses a typed line as an answer. The error is the text to print instead; an empty line is never an answer.
pub(crate) fn parse_answer(ask: &Ask, line: &str) -> Result<AnswerRequest, String> {
    let line = line.trim();
    if line.is_empty() {
        return Err(answer_prompt(ask));
    }
    if ask.kind == AskKind::Question {
        let value = choose_option(&ask.options, line)?;
        return Ok(AnswerRequest { value: Some(value), ..AnswerRequest::default() });
    }
    let decision = |word: &str| AnswerRequest { decision: Some(word.to_owned()), ..AnswerRequest::default() };
    Ok(match line.to_ascii_lowercase().as_str() {
        "y" | "yes" => decision("allow_once"),
        "a" | "always" => decision("allow_always"),
        "n" | "no" => decision("deny"),
        _ => AnswerRequest { reason: Some(line.to_owned()), ..decision("deny") },
    })
}

/// How an ask ended, in a few words.
pub(crate) fn describe_outcome(state: AskStatus, answer: Option<&AskAnswer>) -> String {
    let Some(answer) = answer else {
        return if state == AskStatus::Pending { "pending" } else { "withdrawn" }.to_owned();
    };
    let reason = answer.reason.as_deref().filter(|reason| !reason.is_empty());
    match (answer.decision, &answer.value) {
        (Some(PermissionDecision::AllowOnce), _) => "allowed once".to_owned(),
        (Some(PermissionDecision::AllowAlways), _) => "allowed always".to_owned(),
        (Some(PermissionDecision::Deny), _) => reason.map_or_else(
            || "denied".to_owned(),
            |why| format!("denied: {}", text::first_line(why, PREVIEW_CHARS)),
        ),
        (None, Some(value)) => format!("answered: {}", text::first_line(value, PREVIEW_CHARS)),
        (None, None) => "answered".to_owned(),
    }
}

/// The name of a risk, as in JSON.
pub(crate) fn risk_name(risk: Risk) -> &'static str {
    match risk {
        Risk::Low => "low",
        Risk::Medium => "medium",
        Risk::High => "high",
    }
}

/// The chosen option, by full text or by number. Without options, any text is an answer.
fn choose_option(options: &[String], line: &str) -> Result<String, String> {
    if options.is_empty() {
        return Ok(line.to_owned());
    }
    if let Some(exact) = options.iter().find(|option| option.trim() == line) {
        return Ok(exact.clone());
    }
    let numbered = line.parse::<usize>().ok().and_then(|number| options.get(number.checked_sub(1)?));
    numbered.cloned().ok_or_else(|| format!("answer with one of: {}\n", options.join(", ")))
}

#[cfg(test)]
pub(crate) mod tests {
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

    fn question(options: &[&str]) -> Ask {
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
        assert_eq!(format_ask(&ask), "ask ask_1: Bash: git push (risk high)\n");
        assert_eq!(answer_commands(&ask), "    qd allow ask_1\n    qd deny ask_1 [REASON]\n");
        assert!(!answer_prompt(&ask).contains("always"), "a high-risk request offers no `always`");
        assert_eq!(format_ask(&question(&["red", "blue"])), "ask ask_1: Which?\n    1. red\n    2. blue\n");
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
}
