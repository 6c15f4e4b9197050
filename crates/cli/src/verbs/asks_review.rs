//! Going through the open asks one by one on a terminal: each is shown whole, and a typed line answers it. What a line
//! means is decided by a pure function.

use std::collections::HashSet;

use qd_protocol::AskId;
use qd_protocol::api::AnswerRequest;
use qd_protocol::event::{Ask, AskKind};
use qd_protocol::policy::Risk;

use super::VerbContext;
use super::answer::{self, PENDING_PATH};
use super::asks::{AskTitles, format_with_owner};
use super::stdin_lines::StdinLines;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::ask;

/// What a typed line means.
#[derive(Debug)]
enum ReviewCommand {
    Answer(AnswerRequest),
    Skip,
    Quit,
    /// The line means nothing; the text says what does.
    Unclear(String),
}

/// Whether somebody can be asked: both ends are terminals, and nobody wants JSON.
pub(super) fn is_possible(context: &VerbContext) -> bool {
    StdinLines::new().tty && context.out.out_tty && !context.out.json
}

/// Goes through these asks, then through those that were opened meanwhile.
pub(super) async fn review(
    context: &VerbContext,
    client: &DaemonClient,
    asks: Vec<Ask>,
) -> Result<CliExitCode> {
    let mut stdin = StdinLines::new();
    let mut seen: HashSet<AskId> = HashSet::new();
    let mut open = asks;
    while !open.is_empty() {
        let count = open.len();
        for (i, ask) in open.iter().enumerate() {
            seen.insert(ask.id.clone());
            let titles = AskTitles::load(client, std::slice::from_ref(ask)).await?;
            context.out.print_data(&format!("\n{} of {count}\n", i + 1))?;
            context.out.print_data(&format_with_owner(context, &titles, ask))?;
            if !review_one(context, client, &mut stdin, ask).await? {
                return Ok(CliExitCode::Success);
            }
        }
        open = client.list(PENDING_PATH).await?;
        open.retain(|ask| !seen.contains(&ask.id));
    }
    context.out.print_note("no more asks");
    Ok(CliExitCode::Success)
}

/// Reads lines until one answers or skips the ask. False if the user quits.
async fn review_one(
    context: &VerbContext,
    client: &DaemonClient,
    stdin: &mut StdinLines,
    ask: &Ask,
) -> Result<bool> {
    loop {
        context.out.print_data(&prompt(ask))?;
        let Some(line) = stdin.next_line().await else { return Ok(false) };
        context.out.line_was_typed();
        let request = match parse_command(ask, &line) {
            ReviewCommand::Answer(request) => request,
            ReviewCommand::Skip => return Ok(true),
            ReviewCommand::Quit => return Ok(false),
            ReviewCommand::Unclear(hint) => {
                context.out.print_note(&hint);
                continue;
            }
        };
        match answer::post_answer(client, ask, request).await {
            Ok(resolved) => {
                let outcome = ask::describe_outcome(resolved.ask.state, resolved.ask.answer.as_ref());
                context.out.print_line(&outcome)?;
                return Ok(true);
            }
            Err(CliFailure::Refused(refusal)) => {
                context.out.print_note(&refusal.error.message);
                // Any other refusal means that the ask is resolved or gone.
                if refusal.error.code != "invalid_answer" {
                    return Ok(true);
                }
            }
            Err(failure) => return Err(failure),
        }
    }
}

/// The letters are those of `qd run`, so that nobody allows always what they meant to allow once.
fn prompt(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Permission if ask.risk == Risk::High => {
            "allow? y(es once), n(o) [REASON], s(kip), q(uit): ".to_owned()
        }
        AskKind::Permission => "allow? y(es once), a(lways), n(o) [REASON], s(kip), q(uit): ".to_owned(),
        AskKind::Question if ask.options.is_empty() => "answer, or s(kip), q(uit): ".to_owned(),
        AskKind::Question => "number or text of the answer, or s(kip), q(uit): ".to_owned(),
    }
}

fn parse_command(ask: &Ask, line: &str) -> ReviewCommand {
    let line = line.trim();
    let is_option = ask.options.iter().any(|option| option.trim() == line);
    match (ask.kind, line) {
        (_, "") => ReviewCommand::Unclear("type one of the letters and Enter".to_owned()),
        (_, "s" | "q") if is_option => answer_question(ask, line),
        (_, "s") => ReviewCommand::Skip,
        (_, "q") => ReviewCommand::Quit,
        (AskKind::Question, _) => answer_question(ask, line),
        (AskKind::Permission, "y" | "yes") => ReviewCommand::Answer(answer::allow_request(false)),
        (AskKind::Permission, "a" | "always") => ReviewCommand::Answer(answer::allow_request(true)),
        (AskKind::Permission, "n" | "no") => ReviewCommand::Answer(answer::deny_request("")),
        (AskKind::Permission, _) => match line.strip_prefix("n ") {
            Some(reason) => ReviewCommand::Answer(answer::deny_request(reason.trim())),
            None => ReviewCommand::Unclear(format!("{line:?} is none of the letters; nothing was answered")),
        },
    }
}

fn answer_question(ask: &Ask, line: &str) -> ReviewCommand {
    match ask::choose_option(&ask.options, line) {
        Ok(value) => ReviewCommand::Answer(AnswerRequest { value: Some(value), ..AnswerRequest::default() }),
        Err(hint) => ReviewCommand::Unclear(hint.trim_end().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::ask::tests::{permission, question};

    fn answer_of(ask: &Ask, line: &str) -> AnswerRequest {
        match parse_command(ask, line) {
            ReviewCommand::Answer(request) => request,
            other => panic!("{line:?} is {other:?}"),
        }
    }

    #[test]
    fn only_the_letters_decide_a_permission_request() {
        let ask = permission(Risk::Medium);
        let decision = |line| answer_of(&ask, line).decision.unwrap();
        assert_eq!((decision("y"), decision(" a ")), ("allow_once".to_owned(), "allow_always".to_owned()));
        assert_eq!((decision("n"), answer_of(&ask, "n").reason), ("deny".to_owned(), None));
        assert_eq!(answer_of(&ask, "n use make clean").reason.as_deref(), Some("use make clean"));
        assert!(matches!(parse_command(&ask, "s"), ReviewCommand::Skip));
        assert!(matches!(parse_command(&ask, "q"), ReviewCommand::Quit));
        for line in ["", "A", "allow", "aa", "d", "deny", "N", "S"] {
            assert!(matches!(parse_command(&ask, line), ReviewCommand::Unclear(_)), "{line:?}");
        }
        assert!(!prompt(&permission(Risk::High)).contains("a(lways)"));
    }

    #[test]
    fn a_line_means_the_same_here_as_in_qd_run() {
        let ask = permission(Risk::Medium);
        for line in ["y", "yes", "a", "always", "n", "no", "n use make clean"] {
            let here = serde_json::to_value(answer_of(&ask, line)).unwrap();
            let in_run = serde_json::to_value(ask::parse_answer(&ask, line).unwrap()).unwrap();
            assert_eq!(here, in_run, "{line:?}");
        }
    }

    #[test]
    fn a_question_takes_a_number_or_text() {
        let ask = question(&["red", "blue", "s"]);
        assert_eq!(answer_of(&ask, "2").value.as_deref(), Some("blue"));
        assert_eq!(answer_of(&ask, "red").value.as_deref(), Some("red"));
        assert_eq!(answer_of(&ask, "s").value.as_deref(), Some("s"), "an option wins over a letter");
        assert!(matches!(parse_command(&ask, "q"), ReviewCommand::Quit));
        assert!(matches!(parse_command(&ask, "green"), ReviewCommand::Unclear(_)));
        assert_eq!(answer_of(&question(&[]), "anything").value.as_deref(), Some("anything"));
    }
}
