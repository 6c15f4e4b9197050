//! Reads the fleet, its sessions and its routes from the YAML tree. Each value is validated at its node, so that
//! every error has a position.

use std::collections::BTreeMap;
use std::str::FromStr;

use qd_core::fleet::prompt::{self, TemplateError};
use qd_protocol::event::SessionLimits;
use qd_protocol::fleet::{
    FanOutSplit, FleetMember, FleetRoute, FleetSpec, RouteAction, RouteTrigger, TriggerOutcome,
};
use qd_protocol::limits::{FLEET_ROUTES_MAX, FLEET_SESSIONS_MAX, RULES_MAX};
use qd_protocol::mail::MailDelivery;
use qd_protocol::policy::{Policy, PolicyRule, PolicyVerdict, Risk};
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use regex::Regex;

use crate::FleetFileProblem;
use crate::keys::{SectionReader, nearest_word};
use crate::yaml::{YamlKey, YamlNode, YamlValue};

/// The longest session name, in bytes.
pub(crate) const SESSION_NAME_MAX: usize = 64;
/// The highest `retry` that a file may ask for.
pub(crate) const RETRY_MAX: u32 = 100;

/// Reads the whole file.
pub(crate) fn read_fleet(root: &YamlNode, task: Option<&str>) -> Result<FleetSpec, FleetFileProblem> {
    let mut file = SectionReader::of(root, "a fleet file")?;
    let node = file.require("fleet")?;
    file.reject_unknown_keys()?;
    let mut section = SectionReader::of(node, "a fleet")?;
    reject_unsupported_modes(&mut section)?;
    let own_task = section.take("task").map(read_text).transpose()?;
    let base_branch = section.take("base_branch").map(read_branch).transpose()?;
    let policy = section.take("permissions").map(read_policy).transpose()?.unwrap_or_default();
    let budget_usd = section.take("budget_usd").map(read_dollars).transpose()?;
    let timeout_s = section.take("timeout").map(read_seconds).transpose()?;
    let mentions = section.take("mentions").map(read_flag).transpose()?.unwrap_or(false);
    let sandbox = section.take("sandbox").map(read_sandbox).transpose()?;
    let network = section.take("network").map(read_network).transpose()?;
    let defaults = SessionDefaults { policy, worktree: base_branch.is_some(), sandbox, network };
    let sessions = section.require("sessions")?;
    let members = read_members(sessions, &defaults)?;
    let names = SessionNames { names: members.keys().map(String::as_str).collect() };
    check_prompts(sessions, &names)?;
    let start = read_one_or_more(section.require("start")?, |node| names.require_known(node))?;
    let routes =
        section.take("routes").map(|node| read_routes(node, &names)).transpose()?.unwrap_or_default();
    section.reject_unknown_keys()?;
    let task = task.map(str::to_owned).or(own_task);
    let task = task.ok_or_else(|| node.problem("a fleet needs a `task`, in its file or with `--task`"))?;
    Ok(FleetSpec { task, base_branch, budget_usd, timeout_s, mentions, sessions: members, start, routes })
}

/// CAP can let a model decide what follows. That is not supported here, and the error says so.
fn reject_unsupported_modes(section: &mut SectionReader<'_>) -> Result<(), FleetFileProblem> {
    let llm = section.find_key("llm").map(|key| key.position);
    if let Some(node) = section.take("mode") {
        match read_text(node)?.as_str() {
            "static" => {}
            mode @ ("llm" | "hybrid") => {
                let message = format!(
                    "`mode: {mode}` is not supported: `routes` decide what follows; leave `mode` out"
                );
                return Err(FleetFileProblem { key: Some("mode".to_owned()), ..node.problem(message) });
            }
            _ => return Err(unexpected_value(node, "mode", &["static"])),
        }
    }
    match (section.take("llm"), llm) {
        (None, _) => Ok(()),
        (Some(node), position) => {
            let message = "`llm` is not supported: `routes` decide what follows; leave it out";
            let position = position.unwrap_or(node.position);
            Err(FleetFileProblem { key: Some("llm".to_owned()), position, ..node.problem(message) })
        }
    }
}

/// Settings of the fleet that apply to all of its sessions.
struct SessionDefaults {
    policy: Policy,
    worktree: bool,
    sandbox: Option<SandboxSetting>,
    network: Option<NetworkSetting>,
}

fn read_members(
    node: &YamlNode,
    defaults: &SessionDefaults,
) -> Result<BTreeMap<String, FleetMember>, FleetFileProblem> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(node.problem(format!("`sessions` must be a map of names, not {}", node.kind_name())));
    };
    if entries.is_empty() {
        return Err(node.problem("a fleet needs a session"));
    }
    if entries.len() > FLEET_SESSIONS_MAX {
        return Err(node.problem(format!("a fleet may have at most {FLEET_SESSIONS_MAX} sessions")));
    }
    let mut members = BTreeMap::new();
    for (key, node) in entries {
        check_session_name(key)?;
        members.insert(key.name.clone(), read_member(key, node, defaults)?);
    }
    Ok(members)
}

fn check_session_name(key: &YamlKey) -> Result<(), FleetFileProblem> {
    let well_formed = key.name.len() <= SESSION_NAME_MAX
        && key.name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && key.name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
    if well_formed {
        return Ok(());
    }
    let message = format!(
        "`{}` cannot be the name of a session: 1 to {SESSION_NAME_MAX} of A-Za-z0-9_-, not beginning with -",
        key.name
    );
    Err(FleetFileProblem { position: key.position, message, key: Some(key.name.clone()), suggestion: None })
}

fn read_member(
    key: &YamlKey,
    node: &YamlNode,
    defaults: &SessionDefaults,
) -> Result<FleetMember, FleetFileProblem> {
    let description = format!("session `{}`", key.name);
    let mut section = SectionReader::of(node, &description)?;
    let agents = ["agent", "driver", "manifest"].map(|name| (name, section.take(name)));
    let agent = read_agent(node, &description, &agents)?;
    let member = FleetMember {
        agent,
        model: section.take("model").map(read_text).transpose()?,
        mode: section.take("mode").map(read_text).transpose()?,
        system_prompt: section.take("system_prompt").map(read_text).transpose()?,
        role: section.take("role").map(read_text).transpose()?,
        policy: section.take("permissions").map(read_policy).transpose()?.unwrap_or(defaults.policy.clone()),
        worktree: section.take("worktree").map(read_flag).transpose()?.unwrap_or(defaults.worktree),
        limits: SessionLimits {
            max_turns: section.take("max_turns").map(|node| read_count(node, 1, u32::MAX)).transpose()?,
            run_timeout_s: section.take("timeout").map(read_seconds).transpose()?,
            budget_usd: section.take("budget_usd").map(read_dollars).transpose()?,
            ..SessionLimits::default()
        },
        retry: section.take("retry").map(|node| read_count(node, 0, RETRY_MAX)).transpose()?.unwrap_or(0),
        prompt: section.take("prompt").map(read_text).transpose()?,
        mail: section.take("mail").map(read_delivery).transpose()?.unwrap_or_default(),
        sandbox: section.take("sandbox").map(read_sandbox).transpose()?.or(defaults.sandbox),
        network: section.take("network").map(read_network).transpose()?.or(defaults.network),
    };
    section.reject_unknown_keys()?;
    Ok(member)
}

/// How mail is delivered. `hold` is not allowed: a fleet wakes the sessions that it writes to.
fn read_delivery(node: &YamlNode) -> Result<MailDelivery, FleetFileProblem> {
    match read_text(node)?.as_str() {
        "prompt" => Ok(MailDelivery::Prompt),
        "steer" => Ok(MailDelivery::Steer),
        _ => Err(unexpected_value(node, "mail", &["prompt", "steer"])),
    }
}

/// Reads a word that may be `on` or `off`. YAML 1.1 means booleans by these words, so a client that converts a file to JSON
/// may have made booleans of them.
fn read_switch(node: &YamlNode) -> Result<String, FleetFileProblem> {
    Ok(match (&node.value, read_text(node)?) {
        (YamlValue::Scalar { quoted: false, .. }, text) if text == "true" => "on".to_owned(),
        (YamlValue::Scalar { quoted: false, .. }, text) if text == "false" => "off".to_owned(),
        (_, text) => text,
    })
}

fn read_sandbox(node: &YamlNode) -> Result<SandboxSetting, FleetFileProblem> {
    match read_switch(node)?.as_str() {
        "auto" => Ok(SandboxSetting::Auto),
        "off" => Ok(SandboxSetting::Off),
        "deck" => Ok(SandboxSetting::Deck),
        "workspace" => Ok(SandboxSetting::Workspace),
        _ => Err(unexpected_value(node, "sandbox", &["auto", "off", "deck", "workspace"])),
    }
}

fn read_network(node: &YamlNode) -> Result<NetworkSetting, FleetFileProblem> {
    match read_switch(node)?.as_str() {
        "on" => Ok(NetworkSetting::On),
        "off" => Ok(NetworkSetting::Off),
        _ => Err(unexpected_value(node, "network", &["on", "off"])),
    }
}

fn read_agent(
    node: &YamlNode,
    description: &str,
    candidates: &[(&str, Option<&YamlNode>)],
) -> Result<String, FleetFileProblem> {
    let mut candidates = candidates.iter().filter_map(|(name, node)| node.map(|node| (*name, node)));
    let Some((name, value)) = candidates.next() else {
        let message = format!("{description} needs `agent` (or `driver`, which means the same)");
        return Err(FleetFileProblem { key: Some("agent".to_owned()), ..node.problem(message) });
    };
    if let Some((second, value)) = candidates.next() {
        let message = format!("{description} has both `{name}` and `{second}`; keep one of them");
        return Err(FleetFileProblem { key: Some(second.to_owned()), ..value.problem(message) });
    }
    let agent = read_text(value)?;
    if agent.trim().is_empty() {
        return Err(value.problem(format!("`{name}` is empty")));
    }
    if agent.starts_with("grpc:") {
        let message = "`grpc:` is not supported: use the agent's name, `acp:CMD`, `exec:CMD`, `pty:CMD`, `a2a:URL` or `worker:URL`";
        return Err(FleetFileProblem { key: Some(name.to_owned()), ..value.problem(message) });
    }
    Ok(if name == "manifest" { format!("manifest:{agent}") } else { agent })
}

/// Checks the templates of sessions. They refer to sessions by name, so all names must be known first.
fn check_prompts(sessions: &YamlNode, names: &SessionNames<'_>) -> Result<(), FleetFileProblem> {
    let YamlValue::Map(entries) = &sessions.value else { return Ok(()) };
    for (_, node) in entries {
        if let YamlValue::Map(settings) = &node.value
            && let Some((_, prompt)) = settings.iter().find(|(key, _)| key.name == "prompt")
        {
            names.read_template(prompt)?;
        }
    }
    Ok(())
}

fn read_routes(node: &YamlNode, names: &SessionNames<'_>) -> Result<Vec<FleetRoute>, FleetFileProblem> {
    let YamlValue::List(items) = &node.value else {
        return Err(node.problem(format!("`routes` must be a list, not {}", node.kind_name())));
    };
    if items.len() > FLEET_ROUTES_MAX {
        return Err(node.problem(format!("a fleet may have at most {FLEET_ROUTES_MAX} routes")));
    }
    items.iter().map(|node| read_route(node, names)).collect()
}

fn read_route(node: &YamlNode, names: &SessionNames<'_>) -> Result<FleetRoute, FleetFileProblem> {
    let mut section = SectionReader::of(node, "a route")?;
    let when = read_one_or_more(section.require("when")?, |node| names.read_trigger(node))?;
    let pattern = section.take("match").map(read_pattern).transpose()?;
    let max = section.take("max").map(|node| read_count(node, 1, u32::MAX)).transpose()?;
    let prompt = section.take("prompt").map(|node| names.read_template(node)).transpose()?;
    let actions = ["route_to", "fan_out", "collect"].map(|name| (name, section.take(name)));
    section.reject_unknown_keys()?;
    let mut actions = actions.into_iter().filter_map(|(name, node)| node.map(|node| (name, node)));
    let Some((name, value)) = actions.next() else {
        return Err(node.problem("a route needs `route_to`, `fan_out` or `collect`"));
    };
    if let Some((second, value)) = actions.next() {
        let message = format!("a route does one thing, but this one has both `{name}` and `{second}`");
        return Err(FleetFileProblem { key: Some(second.to_owned()), ..value.problem(message) });
    }
    let then = match name {
        "route_to" => RouteAction::RouteTo(names.require_known(value)?),
        "fan_out" => read_fan_out(value, names)?,
        _ => match read_text(value)?.as_str() {
            "human" => RouteAction::CollectHuman,
            _ => return Err(unexpected_value(value, "collect", &["human"])),
        },
    };
    if matches!(then, RouteAction::FanOut { split: FanOutSplit::BySubtask, .. }) && when.len() > 1 {
        let message = "`by_subtask` splits the work of one session: `when` must name just one";
        return Err(FleetFileProblem { key: Some("split".to_owned()), ..value.problem(message) });
    }
    if then == RouteAction::CollectHuman && prompt.is_some() {
        let message = "`collect: human` shows the results as they are; `prompt` is for sessions";
        return Err(FleetFileProblem { key: Some("prompt".to_owned()), ..value.problem(message) });
    }
    Ok(FleetRoute { when, pattern, then, max, prompt })
}

fn read_fan_out(node: &YamlNode, names: &SessionNames<'_>) -> Result<RouteAction, FleetFileProblem> {
    let mut section = SectionReader::of(node, "`fan_out`")?;
    let to = read_one_or_more(section.require("to")?, |node| names.require_known(node))?;
    let split = match section.take("split") {
        None => FanOutSplit::default(),
        Some(node) => match read_text(node)?.as_str() {
            "broadcast" => FanOutSplit::Broadcast,
            "by_subtask" => FanOutSplit::BySubtask,
            _ => return Err(unexpected_value(node, "split", &["broadcast", "by_subtask"])),
        },
    };
    section.reject_unknown_keys()?;
    Ok(RouteAction::FanOut { to, split })
}

struct SessionNames<'a> {
    names: Vec<&'a str>,
}

impl SessionNames<'_> {
    fn require_known(&self, node: &YamlNode) -> Result<String, FleetFileProblem> {
        let name = read_text(node)?;
        match self.names.contains(&name.as_str()) {
            true => Ok(name),
            false => Err(self.unknown_session(node, &name)),
        }
    }

    fn unknown_session(&self, node: &YamlNode, name: &str) -> FleetFileProblem {
        let nearest = nearest_word(name, self.names.iter().copied());
        let hint = match &nearest {
            Some(nearest) => format!("; did you mean `{nearest}`?"),
            None => format!("; there are: {}", self.names.join(", ")),
        };
        FleetFileProblem {
            key: Some(name.to_owned()),
            suggestion: nearest,
            ..node.problem(format!("there is no session `{name}`{hint}"))
        }
    }

    fn read_trigger(&self, node: &YamlNode) -> Result<RouteTrigger, FleetFileProblem> {
        let written = read_text(node)?;
        let Ok(trigger) = RouteTrigger::from_str(&written) else {
            let on = written.rsplit_once('.').map_or("", |(_, on)| on);
            let nearest = nearest_word(on, TriggerOutcome::ALL.iter().map(|(word, _)| *word));
            let hint = nearest.as_ref().map_or(String::new(), |word| format!("; did you mean `.{word}`?"));
            let message = format!(
                "`{written}` is not a trigger: write a session's name with .done, .failed or .cancelled{hint}"
            );
            return Err(FleetFileProblem {
                key: Some(written),
                suggestion: nearest,
                ..node.problem(message)
            });
        };
        match self.names.contains(&trigger.session.as_str()) {
            true => Ok(trigger),
            false => Err(self.unknown_session(node, &trigger.session)),
        }
    }

    fn read_template(&self, node: &YamlNode) -> Result<String, FleetFileProblem> {
        let template = read_text(node)?;
        match prompt::check_template(&template, |name| self.names.contains(&name)) {
            Ok(()) => Ok(template),
            Err(error) => {
                let mut problem = node.problem(error.to_string());
                if let TemplateError::UnknownName(name) = error {
                    let sessions =
                        self.names.iter().map(|name| format!("from.{name}.text")).collect::<Vec<_>>();
                    let known =
                        prompt::TEMPLATE_NAMES.iter().copied().chain(sessions.iter().map(String::as_str));
                    problem.suggestion = nearest_word(&name, known.clone());
                    match &problem.suggestion {
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

fn read_one_or_more<T: PartialEq>(
    node: &YamlNode,
    read: impl Fn(&YamlNode) -> Result<T, FleetFileProblem>,
) -> Result<Vec<T>, FleetFileProblem> {
    let YamlValue::List(items) = &node.value else { return Ok(vec![read(node)?]) };
    if items.is_empty() {
        return Err(node.problem("this list is empty"));
    }
    let mut all: Vec<T> = Vec::with_capacity(items.len());
    for item in items {
        let value = read(item)?;
        if all.contains(&value) {
            return Err(item.problem("this is in the list twice"));
        }
        all.push(value);
    }
    Ok(all)
}

fn read_text(node: &YamlNode) -> Result<String, FleetFileProblem> {
    match &node.value {
        YamlValue::Scalar { text, .. } => Ok(text.clone()),
        _ => Err(node.problem(format!("this must be a text, not {}", node.kind_name()))),
    }
}

fn read_branch(node: &YamlNode) -> Result<String, FleetFileProblem> {
    let name = read_text(node)?;
    // Refuse names that git would take for an option, or that cannot be a branch. Whether the branch exists is
    // checked when the fleet starts.
    let bad = name.is_empty()
        || name.starts_with('-')
        || name.contains("..")
        || name.contains(|c: char| c.is_whitespace() || c.is_control() || "~^:?*[\\".contains(c));
    if bad { Err(node.problem(format!("`{name}` is not a branch name"))) } else { Ok(name) }
}

fn read_flag(node: &YamlNode) -> Result<bool, FleetFileProblem> {
    match (&node.value, read_text(node)?.as_str()) {
        (YamlValue::Scalar { quoted: false, .. }, "true" | "True" | "TRUE") => Ok(true),
        (YamlValue::Scalar { quoted: false, .. }, "false" | "False" | "FALSE") => Ok(false),
        _ => Err(node.problem("this must be `true` or `false`")),
    }
}

fn read_count(node: &YamlNode, min: u32, max: u32) -> Result<u32, FleetFileProblem> {
    let written = read_text(node)?;
    match written.parse::<u32>() {
        Ok(count) if (min..=max).contains(&count) => Ok(count),
        _ if max == u32::MAX => {
            Err(node.problem(format!("`{written}` is not a whole number of at least {min}")))
        }
        _ => Err(node.problem(format!("`{written}` is not a whole number from {min} to {max}"))),
    }
}

fn read_dollars(node: &YamlNode) -> Result<f64, FleetFileProblem> {
    let written = read_text(node)?;
    match written.parse::<f64>() {
        Ok(amount) if amount.is_finite() && amount >= 0.0 => Ok(amount),
        _ => Err(node.problem(format!("`{written}` is not an amount in dollars"))),
    }
}

/// Reads a duration: seconds, or a number with `s`, `m` or `h`.
fn read_seconds(node: &YamlNode) -> Result<f64, FleetFileProblem> {
    let written = read_text(node)?;
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
        _ => {
            Err(node.problem(format!("`{written}` is not a duration: write seconds, or `90s`, `10m`, `2h`")))
        }
    }
}

fn read_pattern(node: &YamlNode) -> Result<String, FleetFileProblem> {
    let pattern = read_text(node)?;
    match Regex::new(&pattern) {
        Ok(_) => Ok(pattern),
        Err(error) => {
            let reason = error.to_string();
            let reason = reason.lines().last().unwrap_or_default().trim_start_matches("error: ");
            Err(FleetFileProblem {
                key: Some("match".to_owned()),
                ..node.problem(format!("`{pattern}` is not a valid pattern: {reason}"))
            })
        }
    }
}

fn read_policy(node: &YamlNode) -> Result<Policy, FleetFileProblem> {
    if let YamlValue::List(rules) = &node.value {
        if rules.len() > RULES_MAX {
            return Err(node.problem(format!("a policy may have at most {RULES_MAX} rules")));
        }
        return rules.iter().map(read_rule).collect::<Result<_, _>>().map(Policy::Rules);
    }
    match read_text(node)?.as_str() {
        // CAP's `bypass` allows everything; here, high-risk actions still need approval.
        "bypass" => Ok(Policy::Always(PolicyVerdict::Allow)),
        _ => read_verdict(node, "permissions").map(Policy::Always),
    }
}

fn read_verdict(node: &YamlNode, key: &str) -> Result<PolicyVerdict, FleetFileProblem> {
    match read_text(node)?.as_str() {
        "ask" => Ok(PolicyVerdict::Ask),
        "allow" => Ok(PolicyVerdict::Allow),
        "deny" => Ok(PolicyVerdict::Deny),
        _ => Err(unexpected_value(node, key, &["ask", "allow", "deny"])),
    }
}

fn read_rule(node: &YamlNode) -> Result<PolicyRule, FleetFileProblem> {
    let mut section = SectionReader::of(node, "a rule")?;
    let rule = PolicyRule {
        tool: section.take("tool").map(read_text).transpose()?.unwrap_or_else(|| "*".to_owned()),
        pattern: section.take("match").map(read_text).transpose()?,
        decision: read_verdict(section.require("decision")?, "decision")?,
        risk: section
            .take("risk")
            .map(|node| match read_text(node)?.as_str() {
                "low" => Ok(Risk::Low),
                "medium" => Ok(Risk::Medium),
                "high" => Ok(Risk::High),
                _ => Err(unexpected_value(node, "risk", &["low", "medium", "high"])),
            })
            .transpose()?,
    };
    section.reject_unknown_keys()?;
    Ok(rule)
}

fn unexpected_value(node: &YamlNode, key: &str, known: &[&str]) -> FleetFileProblem {
    let written = read_text(node).unwrap_or_default();
    let nearest = nearest_word(&written, known.iter().copied());
    let mut message = format!("`{key}` must be {}, not `{written}`", known.join(", "));
    if let Some(nearest) = &nearest {
        message.push_str(&format!("; did you mean `{nearest}`?"));
    }
    FleetFileProblem { key: Some(key.to_owned()), suggestion: nearest, ..node.problem(message) }
}
