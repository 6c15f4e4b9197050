//! The judgement: may a tool call happen, must it not, or is a person to be asked? Pure functions over a session's
//! policy and the call. Nothing is read, run or remembered here; who asks the person, and what the agent is told, is
//! the session's business.
//!
//! Caution has two directions, and every room keeps to one of them. What *allows* wants certainty: `command_line`
//! splits a line or refuses to. What *denies or asks* wants suspicion: `reading` lists every command that a line might
//! run. `risk` uses suspicion to find harm and certainty to find none.

mod argument;
mod command_line;
mod glob;
mod guess;
mod here_document;
mod line_analysis;
mod patch;
mod path;
mod risk;
mod sensitive;
#[cfg(test)]
mod tests;
mod tool;
mod trial;

use std::borrow::Cow;
use std::cell::OnceCell;

use qd_protocol::limits::RULES_MAX;
use qd_protocol::policy::{Policy, PolicyRule, PolicyVerdict, Risk};
use serde_json::Value;

pub use argument::{input_from_main_argument, main_argument};
pub use risk::assess_risk;
pub use trial::run_trial;

use argument::{ArgumentKind, ToolArguments};
use command_line::{COMMANDS_MAX, ShellCommand};

/// The longest `tool` or `match` of a rule, so that a policy stays cheap to try.
pub const PATTERN_MAX: usize = 4096;

/// A tool call that wants to happen.
#[derive(Debug, Clone, Copy)]
pub struct ProposedToolCall<'a> {
    /// The tool, by the agent's name for it.
    pub tool: &'a str,
    /// Its arguments.
    pub input: &'a Value,
    /// As [`assess`] found: the larger of our opinion and the agent's word.
    pub risk: Risk,
    /// The absolute path of the directory that the agent works in, if it is known: a rule for `src/*` is then also about
    /// files that are named from the root.
    pub workspace: Option<&'a str>,
}

/// What becomes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyJudgement {
    /// It may happen.
    Allow {
        /// The rule that says so; none if the policy is one word.
        rule: Option<PolicyRule>,
    },
    /// It may happen: a person has allowed the tool for the rest of the session.
    Granted,
    /// It must not happen.
    Deny {
        /// The rule that says so; none if the policy is one word.
        rule: Option<PolicyRule>,
        /// One sentence for the agent.
        reason: String,
    },
    /// A person decides.
    Ask,
}

/// Judges a call. `granted`: a person has allowed this tool for the rest of the session.
///
/// The first rule that speaks of the call decides. High risk is allowed by nothing but an allow rule with
/// `risk: high`. A grant turns an ask into an allow, but not where any deny rule speaks of the call: it was given for
/// the tool as such, and the rule is about this call.
pub fn judge(policy: &Policy, granted: bool, question: &ProposedToolCall<'_>) -> PolicyJudgement {
    let granted = granted && question.risk < Risk::High;
    let rules = match policy {
        Policy::Always(PolicyVerdict::Deny) => {
            let reason = "The policy of this session denies every tool call.".to_owned();
            return PolicyJudgement::Deny { rule: None, reason };
        }
        Policy::Always(PolicyVerdict::Allow) if question.risk < Risk::High => {
            return PolicyJudgement::Allow { rule: None };
        }
        Policy::Always(_) => &[],
        Policy::Rules(rules) => rules.as_slice(),
    };
    let call = RuleSubject::new(question);
    let first = rules.iter().find(|rule| call.is_matched_by(rule));
    match first {
        Some(rule) if rule.decision == PolicyVerdict::Deny => {
            PolicyJudgement::Deny { rule: Some(rule.clone()), reason: denial_reason(rule) }
        }
        Some(rule)
            if rule.decision == PolicyVerdict::Allow && question.risk <= highest_allowed_risk(rule) =>
        {
            PolicyJudgement::Allow { rule: Some(rule.clone()) }
        }
        _ => {
            let denied =
                || rules.iter().any(|rule| rule.decision == PolicyVerdict::Deny && call.is_matched_by(rule));
            if granted && !denied() { PolicyJudgement::Granted } else { PolicyJudgement::Ask }
        }
    }
}

/// Whether a policy can be used, else one sentence that says which rule is wrong and what to do.
pub fn validate_policy(policy: &Policy) -> Result<(), String> {
    let Policy::Rules(rules) = policy else { return Ok(()) };
    if rules.len() > RULES_MAX {
        let count = rules.len();
        return Err(format!(
            "The policy has {count} rules and may have {RULES_MAX}; merge some of them with `*` in `tool` or `match`."
        ));
    }
    for (rule, number) in rules.iter().zip(1..) {
        let pattern = rule.pattern.as_deref();
        if rule.tool.trim().is_empty() {
            return Err(format!(
                "Rule {number} of the policy has an empty `tool`; name a tool, or write `*` for any."
            ));
        }
        if pattern.is_some_and(|pattern| pattern.trim().is_empty()) {
            return Err(format!(
                "Rule {number} of the policy has an empty `match`; leave it out to match anything."
            ));
        }
        for (field, text) in [("tool", Some(rule.tool.as_str())), ("match", pattern)] {
            if text.is_some_and(|text| text.len() > PATTERN_MAX) {
                return Err(format!(
                    "Rule {number} of the policy has a `{field}` of more than {PATTERN_MAX} bytes; shorten it with `*`."
                ));
            }
        }
    }
    Ok(())
}

/// The highest risk that an allow rule lets pass.
fn highest_allowed_risk(rule: &PolicyRule) -> Risk {
    rule.risk.unwrap_or(Risk::Medium)
}

fn denial_reason(rule: &PolicyRule) -> String {
    match &rule.pattern {
        Some(pattern) => {
            format!("The policy of this session denies `{pattern}` for the tool `{}`.", rule.tool)
        }
        None => format!("The policy of this session denies the tool `{}`.", rule.tool),
    }
}

/// A call with what rules need to know of it, found once however many rules there are.
struct RuleSubject<'q> {
    proposed: &'q ProposedToolCall<'q>,
    arguments: ToolArguments<'q>,
    /// For each argument that is a command line, its parts as rules see them; none if it cannot be split.
    command_texts: Vec<Option<Vec<String>>>,
    /// Every text that a careful rule is tried on.
    suspected_texts: OnceCell<Vec<(ArgumentKind, String)>>,
}

impl<'q> RuleSubject<'q> {
    fn new(proposed: &'q ProposedToolCall<'q>) -> Self {
        let arguments = argument::find_arguments(proposed.tool, proposed.input);
        let lines = arguments.list.iter().filter(|argument| argument.kind == ArgumentKind::Command);
        let texts = |parts: Vec<ShellCommand>| parts.iter().map(ShellCommand::text).collect();
        let command_texts = lines.map(|line| command_line::split(&line.text).map(texts)).collect();
        Self { proposed, arguments, command_texts, suspected_texts: OnceCell::new() }
    }

    /// Whether a rule is about this call. An allow rule has to be certain of it, any other errs on the safe side.
    fn is_matched_by(&self, rule: &PolicyRule) -> bool {
        if !glob::matches(&rule.tool, self.proposed.tool) {
            return false;
        }
        if rule.decision == PolicyVerdict::Allow {
            return self.is_covered_by(rule.pattern.as_deref());
        }
        // Of a rule that refuses, `risk` is the least that it is about: `{decision: deny, risk: high}`.
        rule.risk.is_none_or(|least| self.proposed.risk >= least)
            && rule.pattern.as_deref().is_none_or(|pattern| self.may_match(pattern))
    }

    /// Whether everything that the call does is within the pattern. A line that cannot be split is within none, not
    /// even within the absence of one: nobody knows what it does.
    fn is_covered_by(&self, pattern: Option<&str>) -> bool {
        let Some(pattern) = pattern else {
            return !self.arguments.unreadable_command && self.command_texts.iter().all(Option::is_some);
        };
        let covers_line = |parts: &Option<Vec<String>>| {
            parts.as_ref().is_some_and(|parts| parts.iter().all(|part| glob::matches(pattern, part)))
        };
        !self.arguments.unreadable
            && !self.arguments.list.is_empty()
            && self.command_texts.iter().all(covers_line)
            && self.arguments.list.iter().all(|argument| match argument.kind {
                ArgumentKind::Command => true,
                ArgumentKind::Path => {
                    let (pattern, path) = (normalise_path_pattern(pattern), path::normalise(&argument.text));
                    let from_workspace = path::relative_to_workspace(&path, self.proposed.workspace);
                    glob::matches(&pattern, &path)
                        || from_workspace.is_some_and(|path| glob::matches(&pattern, path))
                }
                ArgumentKind::Address => path::normalise_address(&argument.text).is_some_and(|address| {
                    glob::matches(pattern, &address)
                        || (argument.text.eq_ignore_ascii_case(&address)
                            && glob::matches(pattern, &argument.text))
                }),
                // It may be a path all the same, and then must not climb out.
                ArgumentKind::Other => {
                    let climbs = argument.text.split('/').any(|step| step == "..");
                    glob::matches(pattern, &argument.text)
                        && (!climbs || glob::matches(pattern, &path::normalise(&argument.text)))
                }
            })
    }

    /// Whether anything that the call may do is within the pattern.
    fn may_match(&self, pattern: &str) -> bool {
        self.suspected_texts().iter().any(|(kind, text)| {
            glob::matches(pattern, text)
                || (*kind == ArgumentKind::Path && glob::matches(&normalise_path_pattern(pattern), text))
        })
    }

    fn suspected_texts(&self) -> &[(ArgumentKind, String)] {
        self.suspected_texts.get_or_init(|| {
            let mut found = Vec::new();
            for argument in &self.arguments.list {
                let text = argument.text.as_ref();
                found.push((argument.kind, text.to_owned()));
                match argument.kind {
                    ArgumentKind::Command => {
                        found.push((ArgumentKind::Command, text.trim().to_owned()));
                        if self.command_texts.iter().any(Option::is_none) {
                            let naive = text.split([';', '&', '|', '\n']).take(COMMANDS_MAX);
                            found.extend(
                                naive.map(|segment| (ArgumentKind::Command, segment.trim().to_owned())),
                            );
                        }
                        for command in line_analysis::analyse_line(text).commands {
                            let plain = command.words.join(" ");
                            let (written, program) = (&command.words[0], command.program());
                            if written != program {
                                found.push((
                                    ArgumentKind::Command,
                                    format!("{program}{}", &plain[written.len()..]),
                                ));
                            }
                            found.push((ArgumentKind::Command, plain));
                        }
                    }
                    ArgumentKind::Path | ArgumentKind::Other => {
                        let path = path::normalise(text);
                        let workspace = self.proposed.workspace;
                        found.extend(
                            path::relative_to_workspace(&path, workspace)
                                .map(|path| (argument.kind, path.to_owned())),
                        );
                        if let Some(workspace) = workspace.filter(|_| !path.starts_with(['/', '~'])) {
                            found.push((argument.kind, path::normalise(&format!("{workspace}/{path}"))));
                        }
                        found.push((argument.kind, path));
                    }
                    ArgumentKind::Address => {
                        let address = path::normalise_address(text);
                        found.push((
                            ArgumentKind::Address,
                            address.unwrap_or_else(|| text.to_ascii_lowercase()),
                        ));
                    }
                }
            }
            for part in self.command_texts.iter().flatten().flatten() {
                found.push((ArgumentKind::Command, part.clone()));
            }
            found
        })
    }
}

/// A pattern in the order of the paths that it is tried on; one for addresses stays as it is.
fn normalise_path_pattern(pattern: &str) -> Cow<'_, str> {
    if path::is_address(pattern) {
        Cow::Borrowed(pattern)
    } else {
        Cow::Owned(path::normalise_pattern(pattern))
    }
}
