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
mod guarded;
mod guess;
mod here;
mod patch;
mod path;
mod reading;
mod risk;
#[cfg(test)]
mod tests;
mod tool;
mod trial;

use std::borrow::Cow;
use std::cell::OnceCell;

use qd_protocol::limits::RULES_MAX;
use qd_protocol::policy::{Policy, Risk, Rule, Verdict};
use serde_json::Value;

pub use argument::{from_main_argument, main_argument};
pub use risk::assess;
pub use trial::try_again;

use argument::{Arguments, Kind};
use command_line::{PARTS_MAX, Part};

/// The longest `tool` or `match` of a rule, so that a policy stays cheap to try.
pub const PATTERN_MAX: usize = 4096;

/// A tool call that wants to happen.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
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
pub enum Judgement {
    /// It may happen.
    Allow {
        /// The rule that says so; none if the policy is one word.
        rule: Option<Rule>,
    },
    /// It may happen: a person has allowed the tool for the rest of the session.
    Granted,
    /// It must not happen.
    Deny {
        /// The rule that says so; none if the policy is one word.
        rule: Option<Rule>,
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
pub fn judge(policy: &Policy, granted: bool, question: &Question<'_>) -> Judgement {
    let granted = granted && question.risk < Risk::High;
    let rules = match policy {
        Policy::Always(Verdict::Deny) => {
            let reason = "The policy of this session denies every tool call.".to_owned();
            return Judgement::Deny { rule: None, reason };
        }
        Policy::Always(Verdict::Allow) if question.risk < Risk::High => {
            return Judgement::Allow { rule: None };
        }
        Policy::Always(_) => &[],
        Policy::Rules(rules) => rules.as_slice(),
    };
    let call = Call::new(question);
    let first = rules.iter().find(|rule| call.is_spoken_of(rule));
    match first {
        Some(rule) if rule.decision == Verdict::Deny => {
            Judgement::Deny { rule: Some(rule.clone()), reason: refusal(rule) }
        }
        Some(rule) if rule.decision == Verdict::Allow && question.risk <= ceiling(rule) => {
            Judgement::Allow { rule: Some(rule.clone()) }
        }
        _ => {
            let denied =
                || rules.iter().any(|rule| rule.decision == Verdict::Deny && call.is_spoken_of(rule));
            if granted && !denied() { Judgement::Granted } else { Judgement::Ask }
        }
    }
}

/// Whether a policy can be used, else one sentence that says which rule is wrong and what to do.
pub fn validate(policy: &Policy) -> Result<(), String> {
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
fn ceiling(rule: &Rule) -> Risk {
    rule.risk.unwrap_or(Risk::Medium)
}

fn refusal(rule: &Rule) -> String {
    match &rule.pattern {
        Some(pattern) => {
            format!("The policy of this session denies `{pattern}` for the tool `{}`.", rule.tool)
        }
        None => format!("The policy of this session denies the tool `{}`.", rule.tool),
    }
}

/// A call with what rules need to know of it, found once however many rules there are.
struct Call<'q> {
    question: &'q Question<'q>,
    arguments: Arguments<'q>,
    /// For each argument that is a command line, its parts as rules see them; none if it cannot be split.
    parts: Vec<Option<Vec<String>>>,
    /// Every text that a careful rule is tried on.
    suspicions: OnceCell<Vec<(Kind, String)>>,
}

impl<'q> Call<'q> {
    fn new(question: &'q Question<'q>) -> Self {
        let arguments = argument::arguments(question.tool, question.input);
        let lines = arguments.list.iter().filter(|argument| argument.kind == Kind::Command);
        let texts = |parts: Vec<Part>| parts.iter().map(Part::text).collect();
        let parts = lines.map(|line| command_line::split(&line.text).map(texts)).collect();
        Self { question, arguments, parts, suspicions: OnceCell::new() }
    }

    /// Whether a rule is about this call. An allow rule has to be certain of it, any other errs on the safe side.
    fn is_spoken_of(&self, rule: &Rule) -> bool {
        if !glob::matches(&rule.tool, self.question.tool) {
            return false;
        }
        if rule.decision == Verdict::Allow {
            return self.is_covered_by(rule.pattern.as_deref());
        }
        // Of a rule that refuses, `risk` is the least that it is about: `{decision: deny, risk: high}`.
        rule.risk.is_none_or(|least| self.question.risk >= least)
            && rule.pattern.as_deref().is_none_or(|pattern| self.is_touched_by(pattern))
    }

    /// Whether everything that the call does is within the pattern. A line that cannot be split is within none, not
    /// even within the absence of one: nobody knows what it does.
    fn is_covered_by(&self, pattern: Option<&str>) -> bool {
        let Some(pattern) = pattern else {
            return !self.arguments.unreadable_line && self.parts.iter().all(Option::is_some);
        };
        let covers_line = |parts: &Option<Vec<String>>| {
            parts.as_ref().is_some_and(|parts| parts.iter().all(|part| glob::matches(pattern, part)))
        };
        !self.arguments.unreadable
            && !self.arguments.list.is_empty()
            && self.parts.iter().all(covers_line)
            && self.arguments.list.iter().all(|argument| match argument.kind {
                Kind::Command => true,
                Kind::Path => {
                    let (pattern, path) = (path_pattern(pattern), path::normalise(&argument.text));
                    let from_workspace = path::below(&path, self.question.workspace);
                    glob::matches(&pattern, &path)
                        || from_workspace.is_some_and(|path| glob::matches(&pattern, path))
                }
                Kind::Address => path::normalise_address(&argument.text).is_some_and(|address| {
                    glob::matches(pattern, &address)
                        || (argument.text.eq_ignore_ascii_case(&address)
                            && glob::matches(pattern, &argument.text))
                }),
                // It may be a path all the same, and then must not climb out.
                Kind::Other => {
                    let climbs = argument.text.split('/').any(|step| step == "..");
                    glob::matches(pattern, &argument.text)
                        && (!climbs || glob::matches(pattern, &path::normalise(&argument.text)))
                }
            })
    }

    /// Whether anything that the call may do is within the pattern.
    fn is_touched_by(&self, pattern: &str) -> bool {
        self.suspicions().iter().any(|(kind, text)| {
            glob::matches(pattern, text)
                || (*kind == Kind::Path && glob::matches(&path_pattern(pattern), text))
        })
    }

    fn suspicions(&self) -> &[(Kind, String)] {
        self.suspicions.get_or_init(|| {
            let mut found = Vec::new();
            for argument in &self.arguments.list {
                let text = argument.text.as_ref();
                found.push((argument.kind, text.to_owned()));
                match argument.kind {
                    Kind::Command => {
                        found.push((Kind::Command, text.trim().to_owned()));
                        if self.parts.iter().any(Option::is_none) {
                            let naive = text.split([';', '&', '|', '\n']).take(PARTS_MAX);
                            found.extend(naive.map(|segment| (Kind::Command, segment.trim().to_owned())));
                        }
                        for command in reading::read(text).commands {
                            let plain = command.words.join(" ");
                            let (written, program) = (&command.words[0], command.program());
                            if written != program {
                                found.push((Kind::Command, format!("{program}{}", &plain[written.len()..])));
                            }
                            found.push((Kind::Command, plain));
                        }
                    }
                    Kind::Path | Kind::Other => {
                        let path = path::normalise(text);
                        let workspace = self.question.workspace;
                        found.extend(
                            path::below(&path, workspace).map(|path| (argument.kind, path.to_owned())),
                        );
                        if let Some(workspace) = workspace.filter(|_| !path.starts_with(['/', '~'])) {
                            found.push((argument.kind, path::normalise(&format!("{workspace}/{path}"))));
                        }
                        found.push((argument.kind, path));
                    }
                    Kind::Address => {
                        let address = path::normalise_address(text);
                        found.push((Kind::Address, address.unwrap_or_else(|| text.to_ascii_lowercase())));
                    }
                }
            }
            for part in self.parts.iter().flatten().flatten() {
                found.push((Kind::Command, part.clone()));
            }
            found
        })
    }
}

/// A pattern in the order of the paths that it is tried on; one for addresses stays as it is.
fn path_pattern(pattern: &str) -> Cow<'_, str> {
    if path::is_address(pattern) {
        Cow::Borrowed(pattern)
    } else {
        Cow::Owned(path::normalise_pattern(pattern))
    }
}
