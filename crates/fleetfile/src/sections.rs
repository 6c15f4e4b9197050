//! A fleet, its sessions and its routes, out of the tree. Each value is checked where it stands, so that a mistake is
//! told with its place.

use std::collections::BTreeMap;
use std::str::FromStr;

use qd_core::fleet::prompt::{self, BadTemplate};
use qd_protocol::event::Limits;
use qd_protocol::fleet::{Action, Ending, Member, Route, Spec, Split, Trigger};
use qd_protocol::limits::{FLEET_ROUTES_MAX, FLEET_SESSIONS_MAX, RULES_MAX};
use qd_protocol::mail::Deliver;
use qd_protocol::policy::{Policy, Risk, Rule, Verdict};
use regex::Regex;

use crate::Problem;
use crate::keys::{Section, nearest};
use crate::yaml::{Key, Node, Value};

/// The longest name of a session.
pub(crate) const NAME_MAX: usize = 64;
/// The most attempts that a file may ask for.
pub(crate) const RETRY_MAX: u32 = 100;

/// All of it.
pub(crate) fn fleet(root: &Node, task: Option<&str>) -> Result<Spec, Problem> {
    let mut file = Section::of(root, "a fleet's file")?;
    let node = file.need("fleet")?;
    file.end()?;
    let mut section = Section::of(node, "a fleet")?;
    refuse_modes(&mut section)?;
    let own_task = section.take("task").map(text).transpose()?;
    let base_branch = section.take("base_branch").map(branch).transpose()?;
    let policy = section.take("permissions").map(policy).transpose()?.unwrap_or_default();
    let budget_usd = section.take("budget_usd").map(money).transpose()?;
    let timeout_s = section.take("timeout").map(seconds).transpose()?;
    let mentions = section.take("mentions").map(flag).transpose()?.unwrap_or(false);
    let defaults = Defaults { policy, worktree: base_branch.is_some() };
    let sessions = section.need("sessions")?;
    let members = members(sessions, &defaults)?;
    let names = Names { names: members.keys().map(String::as_str).collect() };
    check_prompts(sessions, &names)?;
    let start = one_or_more(section.need("start")?, |node| names.known(node))?;
    let routes = section.take("routes").map(|node| routes(node, &names)).transpose()?.unwrap_or_default();
    section.end()?;
    let task = task.map(str::to_owned).or(own_task);
    let task = task.ok_or_else(|| node.problem("a fleet needs a `task`, in its file or by `--task`"))?;
    Ok(Spec { task, base_branch, budget_usd, timeout_s, mentions, sessions: members, start, routes })
}

/// CAP can let a model decide what follows; we do not, and say so.
fn refuse_modes(section: &mut Section<'_>) -> Result<(), Problem> {
    let llm = section.key("llm").map(|key| key.place);
    if let Some(node) = section.take("mode") {
        match text(node)?.as_str() {
            "static" => {}
            mode @ ("llm" | "hybrid") => {
                let message = format!(
                    "`mode: {mode}` is not supported: what follows on what stands in `routes`; leave `mode` out"
                );
                return Err(Problem { key: Some("mode".to_owned()), ..node.problem(message) });
            }
            _ => return Err(one_of(node, "mode", &["static"])),
        }
    }
    match (section.take("llm"), llm) {
        (None, _) => Ok(()),
        (Some(node), place) => {
            let message = "`llm` is not supported: what follows on what stands in `routes`; leave it out";
            let place = place.unwrap_or(node.place);
            Err(Problem { key: Some("llm".to_owned()), place, ..node.problem(message) })
        }
    }
}

/// What the file says for all of its sessions.
struct Defaults {
    policy: Policy,
    worktree: bool,
}

fn members(node: &Node, defaults: &Defaults) -> Result<BTreeMap<String, Member>, Problem> {
    let Value::Map(entries) = &node.value else {
        return Err(node.problem(format!("`sessions` is a map of names, not {}", node.what())));
    };
    if entries.is_empty() {
        return Err(node.problem("a fleet needs a session"));
    }
    if entries.len() > FLEET_SESSIONS_MAX {
        return Err(node.problem(format!("a fleet has {FLEET_SESSIONS_MAX} sessions at most")));
    }
    let mut members = BTreeMap::new();
    for (key, node) in entries {
        check_name(key)?;
        members.insert(key.name.clone(), member(key, node, defaults)?);
    }
    Ok(members)
}

fn check_name(key: &Key) -> Result<(), Problem> {
    let well_formed = key.name.len() <= NAME_MAX
        && key.name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && key.name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if well_formed {
        return Ok(());
    }
    let message = format!(
        "`{}` cannot be the name of a session: 1 to {NAME_MAX} of A-Za-z0-9_-, not beginning with -",
        key.name
    );
    Err(Problem { place: key.place, message, key: Some(key.name.clone()), nearest: None })
}

fn member(key: &Key, node: &Node, defaults: &Defaults) -> Result<Member, Problem> {
    let what = format!("session `{}`", key.name);
    let mut section = Section::of(node, &what)?;
    let agents = ["agent", "driver", "manifest"].map(|name| (name, section.take(name)));
    let agent = agent(node, &what, &agents)?;
    let member = Member {
        agent,
        model: section.take("model").map(text).transpose()?,
        system_prompt: section.take("system_prompt").map(text).transpose()?,
        role: section.take("role").map(text).transpose()?,
        policy: section.take("permissions").map(policy).transpose()?.unwrap_or(defaults.policy.clone()),
        worktree: section.take("worktree").map(flag).transpose()?.unwrap_or(defaults.worktree),
        limits: Limits {
            max_turns: section.take("max_turns").map(|node| count(node, 1, u32::MAX)).transpose()?,
            run_timeout_s: section.take("timeout").map(seconds).transpose()?,
            budget_usd: section.take("budget_usd").map(money).transpose()?,
            ..Limits::default()
        },
        retry: section.take("retry").map(|node| count(node, 0, RETRY_MAX)).transpose()?.unwrap_or(0),
        prompt: section.take("prompt").map(text).transpose()?,
        mail: section.take("mail").map(delivery).transpose()?.unwrap_or_default(),
    };
    section.end()?;
    Ok(member)
}

/// A fleet wakes whom it writes to, so what is held until somebody claims it has no place in its file.
fn delivery(node: &Node) -> Result<Deliver, Problem> {
    match text(node)?.as_str() {
        "prompt" => Ok(Deliver::Prompt),
        "steer" => Ok(Deliver::Steer),
        _ => Err(one_of(node, "mail", &["prompt", "steer"])),
    }
}

fn agent(node: &Node, what: &str, given: &[(&str, Option<&Node>)]) -> Result<String, Problem> {
    let mut given = given.iter().filter_map(|(name, node)| node.map(|node| (*name, node)));
    let Some((name, value)) = given.next() else {
        let message = format!("{what} needs `agent` (or `driver`, which means the same)");
        return Err(Problem { key: Some("agent".to_owned()), ..node.problem(message) });
    };
    if let Some((second, value)) = given.next() {
        let message = format!("{what} has both `{name}` and `{second}`: one of them says who it is");
        return Err(Problem { key: Some(second.to_owned()), ..value.problem(message) });
    }
    let agent = text(value)?;
    if agent.trim().is_empty() {
        return Err(value.problem(format!("`{name}` is empty")));
    }
    if agent.starts_with("grpc:") {
        let message = "`grpc:` is not supported: use the agent's name, `acp:CMD`, `exec:CMD`, `pty:CMD`, `a2a:URL` or `worker:URL`";
        return Err(Problem { key: Some(name.to_owned()), ..value.problem(message) });
    }
    Ok(if name == "manifest" { format!("manifest:{agent}") } else { agent })
}

/// Templates name sessions, so they are looked at when all of them are known.
fn check_prompts(sessions: &Node, names: &Names<'_>) -> Result<(), Problem> {
    let Value::Map(entries) = &sessions.value else { return Ok(()) };
    for (_, node) in entries {
        if let Value::Map(settings) = &node.value
            && let Some((_, prompt)) = settings.iter().find(|(key, _)| key.name == "prompt")
        {
            names.template(prompt)?;
        }
    }
    Ok(())
}

fn routes(node: &Node, names: &Names<'_>) -> Result<Vec<Route>, Problem> {
    let Value::List(items) = &node.value else {
        return Err(node.problem(format!("`routes` is a list, not {}", node.what())));
    };
    if items.len() > FLEET_ROUTES_MAX {
        return Err(node.problem(format!("a fleet has {FLEET_ROUTES_MAX} routes at most")));
    }
    items.iter().map(|node| route(node, names)).collect()
}

fn route(node: &Node, names: &Names<'_>) -> Result<Route, Problem> {
    let mut section = Section::of(node, "a route")?;
    let when = one_or_more(section.need("when")?, |node| names.trigger(node))?;
    let pattern = section.take("match").map(pattern).transpose()?;
    let max = section.take("max").map(|node| count(node, 1, u32::MAX)).transpose()?;
    let prompt = section.take("prompt").map(|node| names.template(node)).transpose()?;
    let given = ["route_to", "fan_out", "collect"].map(|name| (name, section.take(name)));
    section.end()?;
    let mut given = given.into_iter().filter_map(|(name, node)| node.map(|node| (name, node)));
    let Some((name, value)) = given.next() else {
        return Err(node.problem("a route needs `route_to`, `fan_out` or `collect`"));
    };
    if let Some((second, value)) = given.next() {
        let message = format!("a route does one thing, and this has `{name}` and `{second}`");
        return Err(Problem { key: Some(second.to_owned()), ..value.problem(message) });
    }
    let then = match name {
        "route_to" => Action::RouteTo(names.known(value)?),
        "fan_out" => fan_out(value, names)?,
        _ => match text(value)?.as_str() {
            "human" => Action::CollectHuman,
            _ => return Err(one_of(value, "collect", &["human"])),
        },
    };
    if matches!(then, Action::FanOut { split: Split::BySubtask, .. }) && when.len() > 1 {
        let message = "`by_subtask` deals out the work of one session: `when` has to name just one";
        return Err(Problem { key: Some("split".to_owned()), ..value.problem(message) });
    }
    if then == Action::CollectHuman && prompt.is_some() {
        let message = "`collect: human` shows the results as they are; `prompt` is for sessions";
        return Err(Problem { key: Some("prompt".to_owned()), ..value.problem(message) });
    }
    Ok(Route { when, pattern, then, max, prompt })
}

fn fan_out(node: &Node, names: &Names<'_>) -> Result<Action, Problem> {
    let mut section = Section::of(node, "`fan_out`")?;
    let to = one_or_more(section.need("to")?, |node| names.known(node))?;
    let split = match section.take("split") {
        None => Split::default(),
        Some(node) => match text(node)?.as_str() {
            "broadcast" => Split::Broadcast,
            "by_subtask" => Split::BySubtask,
            _ => return Err(one_of(node, "split", &["broadcast", "by_subtask"])),
        },
    };
    section.end()?;
    Ok(Action::FanOut { to, split })
}

/// The sessions that there are.
struct Names<'a> {
    names: Vec<&'a str>,
}

impl Names<'_> {
    fn known(&self, node: &Node) -> Result<String, Problem> {
        let name = text(node)?;
        match self.names.contains(&name.as_str()) {
            true => Ok(name),
            false => Err(self.unknown(node, &name)),
        }
    }

    fn unknown(&self, node: &Node, name: &str) -> Problem {
        let nearest = nearest(name, self.names.iter().copied());
        let hint = match &nearest {
            Some(nearest) => format!("; did you mean `{nearest}`?"),
            None => format!("; there are: {}", self.names.join(", ")),
        };
        Problem {
            key: Some(name.to_owned()),
            nearest,
            ..node.problem(format!("there is no session `{name}`{hint}"))
        }
    }

    fn trigger(&self, node: &Node) -> Result<Trigger, Problem> {
        let written = text(node)?;
        let Ok(trigger) = Trigger::from_str(&written) else {
            let on = written.rsplit_once('.').map_or("", |(_, on)| on);
            let nearest = nearest(on, Ending::ALL.iter().map(|(word, _)| *word));
            let hint = nearest.as_ref().map_or(String::new(), |word| format!("; did you mean `.{word}`?"));
            let message = format!(
                "`{written}` is no trigger: a session's name with .done, .failed or .cancelled{hint}"
            );
            return Err(Problem { key: Some(written), nearest, ..node.problem(message) });
        };
        match self.names.contains(&trigger.session.as_str()) {
            true => Ok(trigger),
            false => Err(self.unknown(node, &trigger.session)),
        }
    }

    fn template(&self, node: &Node) -> Result<String, Problem> {
        let template = text(node)?;
        match prompt::check(&template, |name| self.names.contains(&name)) {
            Ok(()) => Ok(template),
            Err(error) => {
                let mut problem = node.problem(error.to_string());
                if let BadTemplate::Unknown(name) = error {
                    let sessions =
                        self.names.iter().map(|name| format!("from.{name}.text")).collect::<Vec<_>>();
                    let known = prompt::NAMES.iter().copied().chain(sessions.iter().map(String::as_str));
                    problem.nearest = nearest(&name, known.clone());
                    match &problem.nearest {
                        Some(nearest) => {
                            problem.message.push_str(&format!("; did you mean {{{{{nearest}}}}}?"))
                        }
                        None => {
                            let known = known.map(|name| format!("{{{{{name}}}}}")).collect::<Vec<_>>();
                            problem.message.push_str(&format!("; there are: {}", known.join(", ")));
                        }
                    }
                    problem.key = Some(name);
                }
                Err(problem)
            }
        }
    }
}

fn one_or_more<T: PartialEq>(
    node: &Node,
    read: impl Fn(&Node) -> Result<T, Problem>,
) -> Result<Vec<T>, Problem> {
    let Value::List(items) = &node.value else { return Ok(vec![read(node)?]) };
    if items.is_empty() {
        return Err(node.problem("this list is empty"));
    }
    let mut all: Vec<T> = Vec::with_capacity(items.len());
    for item in items {
        let one = read(item)?;
        if all.contains(&one) {
            return Err(item.problem("this is in the list twice"));
        }
        all.push(one);
    }
    Ok(all)
}

fn text(node: &Node) -> Result<String, Problem> {
    match &node.value {
        Value::Scalar { text, .. } => Ok(text.clone()),
        _ => Err(node.problem(format!("this is a text, not {}", node.what()))),
    }
}

fn branch(node: &Node) -> Result<String, Problem> {
    let name = text(node)?;
    // What git would take for an option, or could not mean a branch. Whether there is one is seen when it starts.
    let bad = name.is_empty()
        || name.starts_with('-')
        || name.contains("..")
        || name.contains(|c: char| c.is_whitespace() || c.is_control() || "~^:?*[\\".contains(c));
    if bad { Err(node.problem(format!("`{name}` is no name of a branch"))) } else { Ok(name) }
}

fn flag(node: &Node) -> Result<bool, Problem> {
    match (&node.value, text(node)?.as_str()) {
        (Value::Scalar { quoted: false, .. }, "true" | "True" | "TRUE") => Ok(true),
        (Value::Scalar { quoted: false, .. }, "false" | "False" | "FALSE") => Ok(false),
        _ => Err(node.problem("this is `true` or `false`")),
    }
}

fn count(node: &Node, least: u32, most: u32) -> Result<u32, Problem> {
    let written = text(node)?;
    match written.parse::<u32>() {
        Ok(count) if (least..=most).contains(&count) => Ok(count),
        _ if most == u32::MAX => {
            Err(node.problem(format!("`{written}` is not a whole number of at least {least}")))
        }
        _ => Err(node.problem(format!("`{written}` is not a whole number from {least} to {most}"))),
    }
}

fn money(node: &Node) -> Result<f64, Problem> {
    let written = text(node)?;
    match written.parse::<f64>() {
        Ok(amount) if amount.is_finite() && amount >= 0.0 => Ok(amount),
        _ => Err(node.problem(format!("`{written}` is no amount of dollars"))),
    }
}

/// Seconds, or a number with `s`, `m` or `h`.
fn seconds(node: &Node) -> Result<f64, Problem> {
    let written = text(node)?;
    let (number, unit) = match written.trim_end().strip_suffix(['s', 'm', 'h']) {
        Some(number) => (number, written.trim_end().chars().last()),
        None => (written.as_str(), None),
    };
    let factor = match unit {
        Some('m') => 60.0,
        Some('h') => 3600.0,
        _ => 1.0,
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number * factor),
        _ => Err(node.problem(format!("`{written}` is no time: seconds, or as `90s`, `10m`, `2h`"))),
    }
}

fn pattern(node: &Node) -> Result<String, Problem> {
    let pattern = text(node)?;
    match Regex::new(&pattern) {
        Ok(_) => Ok(pattern),
        Err(error) => {
            let why = error.to_string();
            let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ");
            Err(Problem {
                key: Some("match".to_owned()),
                ..node.problem(format!("`{pattern}` is no pattern: {why}"))
            })
        }
    }
}

fn policy(node: &Node) -> Result<Policy, Problem> {
    if let Value::List(rules) = &node.value {
        if rules.len() > RULES_MAX {
            return Err(node.problem(format!("a policy has {RULES_MAX} rules at most")));
        }
        return rules.iter().map(rule).collect::<Result<_, _>>().map(Policy::Rules);
    }
    match text(node)?.as_str() {
        // CAP's `bypass` let everything happen; what is of high risk is asked here all the same.
        "bypass" => Ok(Policy::Always(Verdict::Allow)),
        _ => verdict(node, "permissions").map(Policy::Always),
    }
}

fn verdict(node: &Node, key: &str) -> Result<Verdict, Problem> {
    match text(node)?.as_str() {
        "ask" => Ok(Verdict::Ask),
        "allow" => Ok(Verdict::Allow),
        "deny" => Ok(Verdict::Deny),
        _ => Err(one_of(node, key, &["ask", "allow", "deny"])),
    }
}

fn rule(node: &Node) -> Result<Rule, Problem> {
    let mut section = Section::of(node, "a rule")?;
    let rule = Rule {
        tool: section.take("tool").map(text).transpose()?.unwrap_or_else(|| "*".to_owned()),
        pattern: section.take("match").map(text).transpose()?,
        decision: verdict(section.need("decision")?, "decision")?,
        risk: section
            .take("risk")
            .map(|node| match text(node)?.as_str() {
                "low" => Ok(Risk::Low),
                "medium" => Ok(Risk::Medium),
                "high" => Ok(Risk::High),
                _ => Err(one_of(node, "risk", &["low", "medium", "high"])),
            })
            .transpose()?,
    };
    section.end()?;
    Ok(rule)
}

fn one_of(node: &Node, key: &str, known: &[&str]) -> Problem {
    let written = text(node).unwrap_or_default();
    let nearest = nearest(&written, known.iter().copied());
    let mut message = format!("`{key}` is {}, not `{written}`", known.join(", "));
    if let Some(nearest) = &nearest {
        message.push_str(&format!("; did you mean `{nearest}`?"));
    }
    Problem { key: Some(key.to_owned()), nearest, ..node.problem(message) }
}
