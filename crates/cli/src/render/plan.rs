//! A fleet on paper: who takes part and what follows on what, before anything starts.

use std::collections::BTreeSet;

use qd_protocol::fleet::{Action, Route, Spec, Split};

use super::style::Style;
use super::text;

/// How much of a task or pattern a line shows.
const HEAD: usize = 100;

/// All of it.
pub(crate) fn plan(spec: &Spec, style: Style) -> String {
    let mut out = format!("task: {}\n", text::head(&spec.task, HEAD));
    if let Some(budget) = spec.budget_usd {
        out.push_str(&format!("budget: {}\n", text::dollars(budget)));
    }
    if let Some(seconds) = spec.timeout_s {
        out.push_str(&format!("timeout: {seconds} s\n"));
    }
    out.push('\n');
    let order = tree(spec);
    let names =
        order.iter().map(|(name, branch)| name.chars().count() + branch.chars().count()).max().unwrap_or(0);
    for (name, branch) in &order {
        let Some(member) = spec.sessions.get(name) else { continue };
        let label = format!("{branch}{name}");
        let pad = " ".repeat(names.saturating_sub(label.chars().count()));
        let mut about = vec![member.agent.clone()];
        about.extend(member.model.clone());
        about.extend(member.role.clone());
        if spec.start.contains(name) {
            about.push("starts".to_owned());
        }
        if member.worktree {
            about.push("own worktree".to_owned());
        }
        if member.retry > 0 {
            about.push(format!("retry {}", member.retry));
        }
        out.push_str(&format!("{branch}{}{pad}  {}\n", style.bold(name), style.dim(&about.join(", "))));
    }
    if !spec.routes.is_empty() || spec.mentions {
        out.push('\n');
    }
    if spec.mentions {
        out.push_str("@NAME → NAME\n");
    }
    for route in &spec.routes {
        out.push_str(&format!("{}\n", line(route)));
    }
    out
}

fn line(route: &Route) -> String {
    let when: Vec<String> = route.when.iter().map(ToString::to_string).collect();
    let mut line = when.join(" + ");
    if let Some(pattern) = &route.pattern {
        line.push_str(&format!(" matching /{}/", text::head(pattern, HEAD)));
    }
    line.push_str(&match &route.then {
        Action::RouteTo(name) => format!(" → {name}"),
        Action::FanOut { to, split: Split::Broadcast } => format!(" → each of {}", to.join(", ")),
        Action::FanOut { to, split: Split::BySubtask } => format!(" → its subtasks to {}", to.join(", ")),
        Action::CollectHuman => " → you decide".to_owned(),
    });
    if let Some(max) = route.max {
        line.push_str(&format!(" (at most {max}×)"));
    }
    line
}

/// Its sessions, each below the one that first leads to it, with what is drawn before its name. Those that nothing leads
/// to come last.
pub(crate) fn tree(spec: &Spec) -> Vec<(String, String)> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut order = Vec::new();
    let roots = spec.start.iter().chain(spec.sessions.keys());
    for root in roots {
        if seen.insert(root) {
            order.push((root.clone(), String::new()));
            below(spec, root, "", &mut seen, &mut order);
        }
    }
    order
}

fn below<'a>(
    spec: &'a Spec,
    name: &str,
    indent: &str,
    seen: &mut BTreeSet<&'a str>,
    order: &mut Vec<(String, String)>,
) {
    let mut next: Vec<&'a String> = Vec::new();
    for route in &spec.routes {
        // Of several that are waited for, the last is where the way goes on.
        if route.when.last().is_some_and(|trigger| trigger.session == name) {
            next.extend(route.then.targets().iter().filter(|target| seen.insert(target)));
        }
    }
    let last = next.len().saturating_sub(1);
    for (at, target) in next.into_iter().enumerate() {
        let (branch, deeper) = if at == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        order.push((target.clone(), format!("{indent}{branch}")));
        below(spec, target, &format!("{indent}{deeper}"), seen, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "fleet:
  task: Ship it.
  sessions:
    lead: { agent: claude, role: planner }
    dev1: { agent: codex, retry: 1 }
    dev2: { agent: script }
    review: { agent: echo }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [dev1, dev2], split: by_subtask } }
    - { when: [dev1.done, dev2.done], route_to: review }
    - { when: review.done, match: needs work, route_to: lead, max: 3 }
    - { when: review.done, collect: human }
";

    #[test]
    fn a_plan_shows_who_takes_part_and_what_follows() {
        let spec = qd_fleetfile::read(FILE, None).unwrap();
        assert_eq!(
            plan(&spec, Style::new(false)),
            "task: Ship it.\n\n\
             lead          claude, planner, starts\n\
             ├─ dev1       codex, retry 1\n\
             └─ dev2       script\n   \
             └─ review  echo\n\n\
             lead.done → its subtasks to dev1, dev2\n\
             dev1.done + dev2.done → review\n\
             review.done matching /needs work/ → lead (at most 3×)\n\
             review.done → you decide\n"
        );
    }
}
