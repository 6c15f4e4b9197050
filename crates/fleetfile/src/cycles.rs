//! Finds routes that would repeat for ever: every cycle needs a `max` on one of its routes.

use std::collections::VecDeque;

use qd_protocol::fleet::FleetSpec;

use crate::yaml::{YamlNode, YamlValue};
use crate::{FilePosition, FleetFileProblem};

/// Refuses a cycle of routes without any `max`. The time is linear in the size of the file.
pub(crate) fn check_cycles(root: &YamlNode, spec: &FleetSpec) -> Result<(), FleetFileProblem> {
    let graph = RouteGraph::new(spec);
    let Some(cycle) = graph.find_node_on_cycle().and_then(|node| graph.shortest_cycle(node)) else {
        return Ok(());
    };
    let (first, names) = graph.describe_cycle(cycle);
    Err(FleetFileProblem {
        position: route_position(root, first).unwrap_or_default(),
        message: format!("these routes repeat for ever: {}; one of them needs `max`", names.join(" → ")),
        key: Some("max".to_owned()),
        suggestion: None,
    })
}

/// The graph of routes without a `max`. Sessions come first and routes after them, as nodes of their own: a route
/// with a thousand triggers and a thousand targets then has two thousand edges and not a million.
struct RouteGraph<'s> {
    sessions: Vec<&'s str>,
    successors: Vec<Vec<usize>>,
}

impl<'s> RouteGraph<'s> {
    fn new(spec: &'s FleetSpec) -> Self {
        let sessions: Vec<&str> = spec.sessions.keys().map(String::as_str).collect();
        let mut successors = vec![Vec::new(); sessions.len() + spec.routes.len()];
        for (index, route) in spec.routes.iter().enumerate().filter(|(_, route)| route.max.is_none()) {
            let node = sessions.len() + index;
            let position = |name: &String| sessions.binary_search(&name.as_str()).ok();
            for trigger in route.when.iter().filter_map(|trigger| position(&trigger.session)) {
                successors[trigger].push(node);
            }
            successors[node].extend(route.then.targets().iter().filter_map(position));
        }
        Self { sessions, successors }
    }

    /// Any node on a cycle. Nodes without predecessors are removed until every remaining node has one; walking back
    /// along predecessors from there must come to a cycle.
    fn find_node_on_cycle(&self) -> Option<usize> {
        let mut predecessors = vec![0_usize; self.successors.len()];
        self.successors.iter().flatten().for_each(|next| predecessors[*next] += 1);
        let mut free: Vec<usize> = (0..predecessors.len()).filter(|at| predecessors[*at] == 0).collect();
        while let Some(at) = free.pop() {
            for next in &self.successors[at] {
                predecessors[*next] -= 1;
                if predecessors[*next] == 0 {
                    free.push(*next);
                }
            }
        }
        let remains = |at: usize| predecessors[at] > 0;
        let mut predecessor = vec![None; self.successors.len()];
        for at in (0..self.successors.len()).filter(|at| remains(*at)) {
            self.successors[at].iter().for_each(|next| predecessor[*next] = Some(at));
        }
        let mut here = (0..self.successors.len()).find(|at| remains(*at))?;
        let mut seen = vec![false; self.successors.len()];
        while !std::mem::replace(&mut seen[here], true) {
            here = predecessor[here]?;
        }
        Some(here)
    }

    /// The shortest path from a node back to itself.
    fn shortest_cycle(&self, start: usize) -> Option<Vec<usize>> {
        let mut from = vec![None; self.successors.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(here) = queue.pop_front() {
            for next in &self.successors[here] {
                if from[*next].is_none() {
                    from[*next] = Some(here);
                    queue.push_back(*next);
                }
            }
        }
        let mut path = vec![start];
        let mut here = from[start]?;
        while here != start {
            path.push(here);
            here = from[here]?;
        }
        path.reverse();
        Some(path)
    }

    /// The index of the cycle's first route in the file, and the sessions on the cycle, starting with the one that
    /// triggers this route.
    fn describe_cycle(&self, mut cycle: Vec<usize>) -> (usize, Vec<&'s str>) {
        let routes = cycle.iter().enumerate().filter(|(_, at)| **at >= self.sessions.len());
        let (first, offset) =
            routes.map(|(nth, at)| (*at - self.sessions.len(), nth)).min().unwrap_or_default();
        cycle.rotate_left(offset);
        let mut sessions: Vec<&str> = cycle.iter().filter_map(|at| self.sessions.get(*at).copied()).collect();
        // After the rotation, the session before the first route is the last one.
        sessions.insert(0, sessions.last().copied().unwrap_or_default());
        (first, sessions)
    }
}

/// The position of a route in the file.
fn route_position(root: &YamlNode, route: usize) -> Option<FilePosition> {
    let inside = |node: &YamlNode, name: &str| match &node.value {
        YamlValue::Map(entries) => {
            entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node.clone())
        }
        _ => None,
    };
    let fleet = inside(root, "fleet").unwrap_or_else(|| root.clone());
    match inside(&fleet, "routes")?.value {
        YamlValue::List(routes) => routes.get(route).map(|node| node.position),
        _ => None,
    }
}
