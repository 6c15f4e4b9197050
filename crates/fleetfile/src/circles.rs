//! Routes that would go round for ever: each circle needs a `max` somewhere on it.

use qd_protocol::fleet::Spec;

use crate::yaml::{Node, Value};
use crate::{Place, Problem};

/// Refuses a circle of routes without any `max`.
pub(crate) fn check(root: &Node, spec: &Spec) -> Result<(), Problem> {
    let unbounded: Vec<usize> = (0..spec.routes.len()).filter(|at| spec.routes[*at].max.is_none()).collect();
    for first in &unbounded {
        if let Some(circle) = round(spec, &unbounded, *first) {
            return Err(Problem {
                place: place(root, *first).unwrap_or_default(),
                message: format!(
                    "this goes round for ever: {}; one of its routes needs `max`",
                    circle.join(" → ")
                ),
                key: Some("max".to_owned()),
                nearest: None,
            });
        }
    }
    Ok(())
}

/// The way from a route's session back to itself, if there is one over routes without a `max`.
fn round(spec: &Spec, unbounded: &[usize], first: usize) -> Option<Vec<String>> {
    for begin in &spec.routes[first].when {
        // Breadth first, so that the circle which is told is the shortest.
        let mut ways: Vec<Vec<String>> = spec.routes[first]
            .then
            .targets()
            .iter()
            .map(|target| vec![begin.session.clone(), target.clone()])
            .collect();
        let mut seen: Vec<String> = Vec::new();
        while !ways.is_empty() {
            let mut next = Vec::new();
            for way in ways {
                let Some(here) = way.last().cloned() else { continue };
                if here == begin.session {
                    return Some(way);
                }
                if seen.contains(&here) {
                    continue;
                }
                seen.push(here.clone());
                for at in unbounded {
                    let route = &spec.routes[*at];
                    if route.when.iter().any(|trigger| trigger.session == here) {
                        let on = route.then.targets().iter();
                        next.extend(on.map(|target| [way.clone(), vec![target.clone()]].concat()));
                    }
                }
            }
            ways = next;
        }
    }
    None
}

/// Where a route stands.
fn place(root: &Node, route: usize) -> Option<Place> {
    let inside = |node: &Node, name: &str| match &node.value {
        Value::Map(entries) => entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node.clone()),
        _ => None,
    };
    let fleet = inside(root, "fleet").unwrap_or_else(|| root.clone());
    match inside(&fleet, "routes")?.value {
        Value::List(routes) => routes.get(route).map(|node| node.place),
        _ => None,
    }
}
