//! Composes the prompt for a session of a fleet. A template may use `{{task}}`, `{{subtask}}`, `{{role}}`,
//! `{{session}}`, `{{round}}`, `{{from.text}}` (the last messages of all triggering sessions) and
//! `{{from.NAME.text}}` (of one session). Without a template the session gets the task and the last messages that
//! triggered it, or only its subtask.

use std::collections::BTreeMap;

use qd_protocol::limits::FLEET_PASSED_MAX;

use super::{FleetAssignment, FleetState};

/// Why a template is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// No value or session has this name.
    #[error("unknown name {{{{{0}}}}}")]
    UnknownName(String),
    /// A `{{` without its `}}`.
    #[error("{{{{ without }}}}")]
    Unclosed,
}

/// Names that a template may use, apart from `from.NAME.text`.
pub const TEMPLATE_NAMES: [&str; 6] = ["task", "subtask", "role", "session", "round", "from.text"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplatePiece<'a> {
    Text(&'a str),
    Name(&'a str),
}

/// Checks that every name in a template is known or refers to a session.
pub fn check_template(template: &str, is_session: impl Fn(&str) -> bool) -> Result<(), TemplateError> {
    for piece in template_pieces(template) {
        if let TemplatePiece::Name(name) = piece?
            && !TEMPLATE_NAMES.contains(&name)
            && !referenced_session(name).is_some_and(&is_session)
        {
            return Err(TemplateError::UnknownName(name.to_owned()));
        }
    }
    Ok(())
}

/// The sessions whose last messages a template quotes.
pub fn quoted_sessions(template: &str) -> impl Iterator<Item = String> {
    template_pieces(template).filter_map(|piece| match piece {
        Ok(TemplatePiece::Name(name)) => referenced_session(name).map(str::to_owned),
        _ => None,
    })
}

fn referenced_session(name: &str) -> Option<&str> {
    name.strip_prefix("from.")?.strip_suffix(".text")
}

fn template_pieces(template: &str) -> impl Iterator<Item = Result<TemplatePiece<'_>, TemplateError>> {
    let mut rest = template;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(open) = rest.find("{{") else {
            return Some(Ok(TemplatePiece::Text(std::mem::take(&mut rest))));
        };
        if open > 0 {
            let (text, after) = rest.split_at(open);
            rest = after;
            return Some(Ok(TemplatePiece::Text(text)));
        }
        let inside = &rest[2..];
        let Some(close) = inside.find("}}") else {
            rest = "";
            return Some(Err(TemplateError::Unclosed));
        };
        rest = &inside[close + 2..];
        Some(Ok(TemplatePiece::Name(inside[..close].trim())))
    })
}

/// The prompt for one run of an assignment. `texts` are the last messages of the assignment's sources by session
/// name; `subtask` is the run's subtask.
pub fn compose_prompt(
    state: &FleetState,
    assignment: &FleetAssignment,
    texts: &BTreeMap<String, String>,
    subtask: Option<&str>,
) -> String {
    let member = state.spec.sessions.get(&assignment.session);
    let route = assignment.route.and_then(|at| state.spec.routes.get(at as usize));
    let task = state.spec.task.as_str();
    let default_prompt = member.and_then(|member| member.prompt.as_deref());
    let Some(template) = route.and_then(|route| route.prompt.as_deref()).or(default_prompt) else {
        return match (route, subtask) {
            (_, Some(subtask)) => subtask.to_owned(),
            (None, _) => task.to_owned(),
            (Some(_), None) => {
                let sections = source_sections(state, assignment, texts);
                [task.to_owned()].into_iter().chain(sections).collect::<Vec<_>>().join("\n\n")
            }
        };
    };
    let mut prompt = String::new();
    for piece in template_pieces(template) {
        match piece {
            Ok(TemplatePiece::Text(text)) => prompt.push_str(text),
            Ok(TemplatePiece::Name("task")) => prompt.push_str(task),
            Ok(TemplatePiece::Name("subtask")) => prompt.push_str(subtask.unwrap_or_default()),
            Ok(TemplatePiece::Name("role")) => {
                prompt.push_str(member.and_then(|member| member.role.as_deref()).unwrap_or_default());
            }
            Ok(TemplatePiece::Name("session")) => prompt.push_str(&assignment.session),
            Ok(TemplatePiece::Name("round")) => prompt.push_str(&assignment.round.to_string()),
            Ok(TemplatePiece::Name("from.text")) => {
                let sections: Vec<String> = source_sections(state, assignment, texts).collect();
                prompt.push_str(&sections.join("\n\n"));
            }
            Ok(TemplatePiece::Name(name)) => {
                let text = referenced_session(name).and_then(|session| texts.get(session));
                prompt.push_str(text.map_or("", |text| truncate_passed_text(text)));
            }
            // The template was validated when the fleet file was read.
            Err(_) => {}
        }
    }
    prompt
}

/// The last messages of the triggering sessions, each under the session's name.
fn source_sections<'a>(
    state: &'a FleetState,
    assignment: &'a FleetAssignment,
    texts: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = String> + 'a {
    let route = assignment.route.and_then(|at| state.spec.routes.get(at as usize));
    let triggers = route.map_or(&[][..], |route| &route.when);
    triggers.iter().filter_map(|trigger| {
        let text = texts.get(&trigger.session)?;
        Some(format_section(&trigger.session, text))
    })
}

/// A message under a line that names its session.
pub fn format_section(name: &str, text: &str) -> String {
    format!("--- from {name} ---\n{}", truncate_passed_text(text))
}

/// Joins several messages of one session.
pub fn join_texts<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    texts.collect::<Vec<_>>().join("\n\n")
}

/// The part of a message that is passed on. The whole text stays in its run.
fn truncate_passed_text(text: &str) -> &str {
    &text[..text.floor_char_boundary(FLEET_PASSED_MAX)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_with_an_unknown_name_is_refused() {
        let is_session = |name: &str| name == "lead";
        assert_eq!(check_template("do {{task}} as {{ from.lead.text }} {{round}}", is_session), Ok(()));
        assert_eq!(
            check_template("{{from.lad.text}}", is_session),
            Err(TemplateError::UnknownName("from.lad.text".into()))
        );
        assert_eq!(check_template("{{tusk}}", is_session), Err(TemplateError::UnknownName("tusk".into())));
        assert_eq!(check_template("{{task", is_session), Err(TemplateError::Unclosed));
        assert_eq!(check_template("{ task }} }", is_session), Ok(()));
    }
}
