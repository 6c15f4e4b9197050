//! What a session of a fleet is told. A template names what it wants: `{{task}}`, `{{subtask}}`, `{{role}}`,
//! `{{session}}`, `{{round}}`, `{{from.text}}` (all that it follows on) and `{{from.NAME.text}}` (one session). Without
//! one it gets the task and the last messages that led to it, or its subtask alone.

use std::collections::BTreeMap;

use qd_protocol::limits::FLEET_PASSED_MAX;

use super::{FleetAssignment, FleetState};

/// A name in a template that stands for nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Nothing has this name.
    #[error("unknown name {{{{{0}}}}}")]
    UnknownName(String),
    /// A `{{` that is not closed.
    #[error("{{{{ without }}}}")]
    Unclosed,
}

/// Names that a template may use, beside those of sessions.
pub const TEMPLATE_NAMES: [&str; 6] = ["task", "subtask", "role", "session", "round", "from.text"];

/// A piece of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplatePiece<'a> {
    Text(&'a str),
    Name(&'a str),
}

/// Checks a template: each of its names is one that we have, or that of a session.
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

/// The sessions that a template names.
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

/// What a run of an errand is told. `texts` are the last messages of the errand's sources, by session; `subtask` is
/// that of the run.
pub fn compose_prompt(
    state: &FleetState,
    errand: &FleetAssignment,
    texts: &BTreeMap<String, String>,
    subtask: Option<&str>,
) -> String {
    let member = state.spec.sessions.get(&errand.session);
    let route = errand.route.and_then(|at| state.spec.routes.get(at as usize));
    let task = state.spec.task.as_str();
    let own = member.and_then(|member| member.prompt.as_deref());
    let Some(template) = route.and_then(|route| route.prompt.as_deref()).or(own) else {
        return match (route, subtask) {
            (_, Some(subtask)) => subtask.to_owned(),
            (None, _) => task.to_owned(),
            (Some(_), None) => {
                let sections = source_sections(state, errand, texts);
                [task.to_owned()].into_iter().chain(sections).collect::<Vec<_>>().join("\n\n")
            }
        };
    };
    let mut told = String::new();
    for piece in template_pieces(template) {
        match piece {
            Ok(TemplatePiece::Text(text)) => told.push_str(text),
            Ok(TemplatePiece::Name("task")) => told.push_str(task),
            Ok(TemplatePiece::Name("subtask")) => told.push_str(subtask.unwrap_or_default()),
            Ok(TemplatePiece::Name("role")) => {
                told.push_str(member.and_then(|member| member.role.as_deref()).unwrap_or_default());
            }
            Ok(TemplatePiece::Name("session")) => told.push_str(&errand.session),
            Ok(TemplatePiece::Name("round")) => told.push_str(&errand.round.to_string()),
            Ok(TemplatePiece::Name("from.text")) => {
                let sections: Vec<String> = source_sections(state, errand, texts).collect();
                told.push_str(&sections.join("\n\n"));
            }
            Ok(TemplatePiece::Name(name)) => {
                let text = referenced_session(name).and_then(|session| texts.get(session));
                told.push_str(text.map_or("", |text| truncate_passed_text(text)));
            }
            // It was checked when the file was read.
            Err(_) => {}
        }
    }
    told
}

/// The last messages of those that the errand follows on, each under its name.
fn source_sections<'a>(
    state: &'a FleetState,
    errand: &'a FleetAssignment,
    texts: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = String> + 'a {
    let route = errand.route.and_then(|at| state.spec.routes.get(at as usize));
    let triggers = route.map_or(&[][..], |route| &route.when);
    triggers.iter().filter_map(|trigger| {
        let text = texts.get(&trigger.session)?;
        Some(format_section(&trigger.session, text))
    })
}

/// A message under the name of whoever said it.
pub fn format_section(name: &str, text: &str) -> String {
    format!("--- from {name} ---\n{}", truncate_passed_text(text))
}

/// Several messages of one session as one.
pub fn join_texts<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    texts.collect::<Vec<_>>().join("\n\n")
}

/// As much of a message as is passed on; the whole of it is in its run.
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
