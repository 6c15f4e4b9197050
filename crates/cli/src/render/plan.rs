//! The plan of a fleet for `qd up --plan`: its sessions and routes, before anything starts.

use std::collections::BTreeSet;

use qd_protocol::fleet::{FanOutSplit, FleetRoute, FleetSpec, RouteAction};

use super::style::TextStyle;
use super::text;

/// How much of a task or pattern one line shows.
const PREVIEW_CHARS: usize = 100;

pub(crate) fn render_plan(spec: &FleetSpec, style: TextStyle) -> String {
    let mut out = format!("task: {}\n", text::first_line(&spec.task, PREVIEW_CHARS));
    if let Some(budget) = spec.budget_usd {
        out.push_str(&format!("budget: {}\n", text::format_dollars(budget)));
    }
    if let Some(seconds) = spec.timeout_s {
        out.push_str(&format!("timeout: {seconds} s\n"));
    }
    out.push('\n');
    let order = session_tree(spec);
    let names =
        order.iter().map(|(name, branch)| name.chars().count() + branch.chars().count()).max().unwrap_or(0);
    for (name, branch) in &order {
        let Some(member) = spec.sessions.get(name) else { continue };
        let label = format!("{branch}{name}");
        let pad = " ".repeat(names.saturating_sub(label.chars().count()));
        let mut about = vec![member.agent.clone()];
        about.extend(member.model.clone());
        about.extend(member.mode.as_ref().map(|mode| format!("mode {mode}")));
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
        out.push_str(&format!("{}\n", describe_route(route)));
    }
    out
}

fn describe_route(route: &FleetRoute) -> String {
    let when: Vec<String> = route.when.iter().map(ToString::to_string).collect();
    let mut line = when.join(" + ");
    if let Some(pattern) = &route.pattern {
        line.push_str(&format!(" matching /{}/", text::first_line(pattern, PREVIEW_CHARS)));
    }
    line.push_str(&match &route.then {
        RouteAction::RouteTo(name) => format!(" → {name}"),
        RouteAction::FanOut { to, split: FanOutSplit::Broadcast } => format!(" → each of {}", to.join(", ")),
        RouteAction::FanOut { to, split: FanOutSplit::BySubtask } => {
            format!(" → its subtasks to {}", to.join(", "))
        }
        RouteAction::CollectHuman => " → you decide".to_owned(),
    });
    if let Some(max) = route.max {
        line.push_str(&format!(" (at most {max}×)"));
    }
    line
}

/// The fleet's sessions as (name, tree lines before the name), each below the first session whose route leads to it.
/// Sessions that no route leads to come last.
pub(crate) fn session_tree(spec: &FleetSpec) -> Vec<(String, String)> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut order = Vec::new();
    let roots = spec.start.iter().chain(spec.sessions.keys());
    for root in roots {
        if seen.insert(root) {
            order.push((root.clone(), String::new()));
            add_successors(spec, root, "", &mut seen, &mut order);
        }
    }
    order
}

fn add_successors<'a>(
    spec: &'a FleetSpec,
    name: &str,
    indent: &str,
    seen: &mut BTreeSet<&'a str>,
    order: &mut Vec<(String, String)>,
) {
    let mut next: Vec<&'a String> = Vec::new();
    for route in &spec.routes {
        // A join is drawn below the last of the sessions that it waits for.
        if route.when.last().is_some_and(|trigger| trigger.session == name) {
            next.extend(route.then.targets().iter().filter(|target| seen.insert(target)));
        }
    }
    let last = next.len().saturating_sub(1);
    for (i, target) in next.into_iter().enumerate() {
        let (branch, deeper) = if i == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        order.push((target.clone(), format!("{indent}{branch}")));
        add_successors(spec, target, &format!("{indent}{deeper}"), seen, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

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
        let spec = qd_fleetfile::parse_fleet_file(FILE, None).unwrap();
        let plan = render_plan(&spec, TextStyle::new(false));
        assert!(plan.ends_with('\n'), "a snapshot does not show this");
        insta::assert_snapshot!(plan);
        assert_view("plan", |style, _| render_plan(&spec, style));
    }
}
