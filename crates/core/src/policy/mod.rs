//! Judges tool calls: allow, deny, or ask a person. Pure functions over a session's policy and the call. Nothing is
//! read, run or stored here; asking the person and answering the agent are up to the session.
//!
//! Caution works in two directions, and each module keeps to one of them. Allowing needs certainty: `command_line`
//! splits a line or refuses to. Denying and asking need suspicion: `line_analysis` lists every command that a line
//! might run. `risk` uses suspicion to find harm, and certainty to rule it out.

mod argument;
mod changed_paths;
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
pub use changed_paths::changed_paths;
pub use risk::assess_risk;
pub use trial::run_trial;

use argument::{ArgumentKind, ToolArguments};
use command_line::{COMMANDS_MAX, ShellCommand};

/// The longest `tool` or `match` of a rule in bytes, so that matching a policy stays cheap.
pub const PATTERN_MAX: usize = 4096;

/// A tool call that an agent wants to make.
#[derive(Debug, Clone, Copy)]
pub struct ProposedToolCall<'a> {
    /// The agent's name for the tool.
    pub tool: &'a str,
    pub input: &'a Value,
    /// As [`assess_risk`] found it: the higher of our own assessment and the agent's claim.
    pub risk: Risk,
    /// Absolute path of the directory that the agent works in, if known. A rule for `src/*` then also covers files
    /// that are named by absolute path.
    pub workspace: Option<&'a str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyJudgement {
    /// The call may be made.
    Allow {
        /// The rule that decided; `None` if the policy has no rules and just says `allow`.
        rule: Option<PolicyRule>,
    },
    /// The call may be made, because a person has allowed the tool for the rest of the session.
    Granted,
    /// The call must not be made.
    Deny {
        /// The rule that decided; `None` if the policy has no rules and just says `deny`.
        rule: Option<PolicyRule>,
        /// One sentence for the agent.
        reason: String,
    },
    /// A person decides.
    Ask,
}

/// Judges a call. `granted` means that a person has allowed this tool for the rest of the session.
///
/// The first matching rule decides. High risk is only allowed by an allow rule with `risk: high`. A grant turns an
/// ask into an allow, unless any deny rule matches the call: the grant was for the tool in general, and the rule is
/// about this call.
pub fn judge(policy: &Policy, granted: bool, call: &ProposedToolCall<'_>) -> PolicyJudgement {
    let granted = granted && call.risk < Risk::High;
    let rules = match policy {
        Policy::Always(PolicyVerdict::Deny) => {
            let reason = "The policy of this session denies every tool call.".to_owned();
            return PolicyJudgement::Deny { rule: None, reason };
        }
        Policy::Always(PolicyVerdict::Allow) if call.risk < Risk::High => {
            return PolicyJudgement::Allow { rule: None };
        }
        Policy::Always(_) => &[],
        Policy::Rules(rules) => rules.as_slice(),
    };
    let subject = RuleSubject::new(call);
    let first = rules.iter().find(|rule| subject.is_matched_by(rule));
    match first {
        Some(rule) if rule.decision == PolicyVerdict::Deny => {
            PolicyJudgement::Deny { rule: Some(rule.clone()), reason: denial_reason(rule) }
        }
        Some(rule) if rule.decision == PolicyVerdict::Allow && call.risk <= highest_allowed_risk(rule) => {
            PolicyJudgement::Allow { rule: Some(rule.clone()) }
        }
        _ => {
            let denied = || {
                rules.iter().any(|rule| rule.decision == PolicyVerdict::Deny && subject.is_matched_by(rule))
            };
            if granted && !denied() { PolicyJudgement::Granted } else { PolicyJudgement::Ask }
        }
    }
}

/// Checks that a policy can be used. The error is one sentence that names the bad rule and says what to do.
pub fn validate_policy(policy: &Policy) -> Result<(), String> {
    let Policy::Rules(rules) = policy else { return Ok(()) };
    if rules.len() > RULES_MAX {
        let count = rules.len();
        return Err(format!(
            "The policy has {count} rules and the limit is {RULES_MAX}; merge some of them with `*` in `tool` or `match`."
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

/// The highest risk that an allow rule allows.
fn highest_allowed_risk(rule: &PolicyRule) -> Risk {
    rule.risk.unwrap_or(Risk::Medium)
}

/// Whether an allow rule allows everything that its tool can do, whatever the risk. Nobody has to know then what a call
/// does, so a command line that cannot be split is allowed too.
fn allows_whole_tool(rule: &PolicyRule) -> bool {
    rule.pattern.is_none() && highest_allowed_risk(rule) == Risk::High
}

fn denial_reason(rule: &PolicyRule) -> String {
    match &rule.pattern {
        Some(pattern) => {
            format!("The policy of this session denies `{pattern}` for the tool `{}`.", rule.tool)
        }
        None => format!("The policy of this session denies the tool `{}`.", rule.tool),
    }
}

/// A call with everything that rules are matched against, computed once for all rules.
struct RuleSubject<'q> {
    proposed: &'q ProposedToolCall<'q>,
    arguments: ToolArguments<'q>,
    /// For each argument that is a command line, the texts of its commands; `None` if the line cannot be split.
    command_texts: Vec<Option<Vec<String>>>,
    /// Every text that deny and ask rules are matched against.
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

    /// Whether a rule is about this call. An allow rule has to be certain; other rules err on the safe side.
    fn is_matched_by(&self, rule: &PolicyRule) -> bool {
        if !glob::matches(&rule.tool, self.proposed.tool) {
            return false;
        }
        if rule.decision == PolicyVerdict::Allow {
            return allows_whole_tool(rule) || self.is_covered_by(rule.pattern.as_deref());
        }
        // For deny and ask rules, `risk` is the lowest risk that they apply to: `{decision: deny, risk: high}`.
        rule.risk.is_none_or(|minimum| self.proposed.risk >= minimum)
            && rule.pattern.as_deref().is_none_or(|pattern| self.may_match(pattern))
    }

    /// Whether everything that the call does matches the pattern. A line that cannot be split is never covered, not
    /// even without a pattern, because nobody knows what it does, and so whether the rule's risk covers it.
    fn is_covered_by(&self, pattern: Option<&str>) -> bool {
        let Some(pattern) = pattern else {
            return !self.arguments.unreadable_command && self.command_texts.iter().all(Option::is_some);
        };
        let covers_line = |commands: &Option<Vec<String>>| {
            commands
                .as_ref()
                .is_some_and(|commands| commands.iter().all(|command| glob::matches(pattern, command)))
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
                // The text may still be a path, and then must not climb out of the pattern with `..`.
                ArgumentKind::Other => {
                    let climbs = argument.text.split('/').any(|step| step == "..");
                    glob::matches(pattern, &argument.text)
                        && (!climbs || glob::matches(pattern, &path::normalise(&argument.text)))
                }
            })
    }

    /// Whether anything that the call may do matches the pattern.
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
            for command in self.command_texts.iter().flatten().flatten() {
                found.push((ArgumentKind::Command, command.clone()));
            }
            found
        })
    }
}

/// The pattern, normalised like the paths that it is matched against. A pattern for addresses is left as it is.
fn normalise_path_pattern(pattern: &str) -> Cow<'_, str> {
    if path::is_address(pattern) {
        Cow::Borrowed(pattern)
    } else {
        Cow::Owned(path::normalise_pattern(pattern))
    }
}
