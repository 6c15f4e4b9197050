//! Routes that would go round for ever: each circle needs a `max` somewhere on it.

use std::collections::VecDeque;

use qd_protocol::fleet::FleetSpec;

use crate::yaml::{YamlNode, YamlValue};
use crate::{FilePosition, FleetFileProblem};

/// Refuses a circle of routes without any `max`. Takes as long as the file is, whatever is in it.
pub(crate) fn check_cycles(root: &YamlNode, spec: &FleetSpec) -> Result<(), FleetFileProblem> {
    let graph = RouteGraph::new(spec);
    let Some(circle) = graph.find_node_on_cycle().and_then(|on_it| graph.shortest_cycle(on_it)) else {
        return Ok(());
    };
    let (first, way) = graph.describe_cycle(circle);
    Err(FleetFileProblem {
        position: route_position(root, first).unwrap_or_default(),
        message: format!("this goes round for ever: {}; one of its routes needs `max`", way.join(" → ")),
        key: Some("max".to_owned()),
        suggestion: None,
    })
}

/// Who leads to whom over routes without a `max`. Sessions come first and routes after them, since a route with a
/// thousand triggers and a thousand targets is two thousand ways and not a million.
struct RouteGraph<'s> {
    sessions: Vec<&'s str>,
    successors: Vec<Vec<usize>>,
}

impl<'s> RouteGraph<'s> {
    fn new(spec: &'s FleetSpec) -> Self {
        let sessions: Vec<&str> = spec.sessions.keys().map(String::as_str).collect();
        let mut successors = vec![Vec::new(); sessions.len() + spec.routes.len()];
        for (at, route) in spec.routes.iter().enumerate().filter(|(_, route)| route.max.is_none()) {
            let at = sessions.len() + at;
            let place = |name: &String| sessions.binary_search(&name.as_str()).ok();
            for trigger in route.when.iter().filter_map(|trigger| place(&trigger.session)) {
                successors[trigger].push(at);
            }
            successors[at].extend(route.then.targets().iter().filter_map(place));
        }
        Self { sessions, successors }
    }

    /// A place on a circle: what nothing leads to is taken away until all is led to; from there one comes round, going
    /// from each to one that leads to it.
    fn find_node_on_cycle(&self) -> Option<usize> {
        let mut led_to = vec![0_usize; self.successors.len()];
        self.successors.iter().flatten().for_each(|next| led_to[*next] += 1);
        let mut free: Vec<usize> = (0..led_to.len()).filter(|at| led_to[*at] == 0).collect();
        while let Some(at) = free.pop() {
            for next in &self.successors[at] {
                led_to[*next] -= 1;
                if led_to[*next] == 0 {
                    free.push(*next);
                }
            }
        }
        let left = |at: usize| led_to[at] > 0;
        let mut before = vec![None; self.successors.len()];
        for at in (0..self.successors.len()).filter(|at| left(*at)) {
            self.successors[at].iter().for_each(|next| before[*next] = Some(at));
        }
        let mut here = (0..self.successors.len()).find(|at| left(*at))?;
        let mut seen = vec![false; self.successors.len()];
        while !std::mem::replace(&mut seen[here], true) {
            here = before[here]?;
        }
        Some(here)
    }

    /// The shortest way from a place back to it.
    fn shortest_cycle(&self, home: usize) -> Option<Vec<usize>> {
        let mut from = vec![None; self.successors.len()];
        let mut ways = VecDeque::from([home]);
        while let Some(here) = ways.pop_front() {
            for next in &self.successors[here] {
                if from[*next].is_none() {
                    from[*next] = Some(here);
                    ways.push_back(*next);
                }
            }
        }
        let mut way = vec![home];
        let mut here = from[home]?;
        while here != home {
            way.push(here);
            here = from[here]?;
        }
        way.reverse();
        Some(way)
    }

    /// The first route of a circle in the file, and who is on the circle, from whoever that follows on.
    fn describe_cycle(&self, mut circle: Vec<usize>) -> (usize, Vec<&'s str>) {
        let routes = circle.iter().enumerate().filter(|(_, at)| **at >= self.sessions.len());
        let (first, at) = routes.map(|(nth, at)| (*at - self.sessions.len(), nth)).min().unwrap_or_default();
        circle.rotate_left(at);
        let mut sessions: Vec<&str> =
            circle.iter().filter_map(|at| self.sessions.get(*at).copied()).collect();
        // The one before the first route is the last of all now.
        sessions.insert(0, sessions.last().copied().unwrap_or_default());
        (first, sessions)
    }
}

/// Where a route stands.
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
