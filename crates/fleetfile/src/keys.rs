//! The keys that there are. One that there is not is refused, with the nearest that was probably meant.

use qd_protocol::ids::ID_MAX;

use crate::Problem;
use crate::yaml::{Key, Node, Value};

/// A map whose keys are taken out one by one; what is left over at the end is a mistake.
pub(crate) struct Section<'a> {
    /// What it is, for people.
    what: &'a str,
    node: &'a Node,
    entries: Vec<(&'a Key, &'a Node)>,
    known: Vec<&'static str>,
}

impl<'a> Section<'a> {
    pub(crate) fn of(node: &'a Node, what: &'a str) -> Result<Self, Problem> {
        let Value::Map(entries) = &node.value else {
            return Err(node.problem(format!("{what} is a map, not {}", node.what())));
        };
        let entries = entries.iter().map(|(key, value)| (key, value)).collect();
        Ok(Self { what, node, entries, known: Vec::new() })
    }

    /// The value of a key, if it is there and says something.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<&'a Node> {
        self.known.push(name);
        let at = self.entries.iter().position(|(key, _)| key.name == name)?;
        let (_, value) = self.entries.remove(at);
        Some(value).filter(|value| !value.is_nothing())
    }

    /// The same, with the key.
    pub(crate) fn key(&self, name: &str) -> Option<&'a Key> {
        self.entries.iter().find(|(key, _)| key.name == name).map(|(key, _)| *key)
    }

    /// A value that has to be there. Where one with nearly that name is, that is the mistake.
    pub(crate) fn need(&mut self, name: &'static str) -> Result<&'a Node, Problem> {
        if let Some(value) = self.take(name) {
            return Ok(value);
        }
        let meant = self.entries.iter().find(|(key, _)| nearest(&key.name, [name].into_iter()).is_some());
        Err(match meant {
            Some((key, _)) => unknown(key, self.what, &[name]),
            None => Problem {
                key: Some(name.to_owned()),
                ..self.node.problem(format!("{} needs `{name}`", self.what))
            },
        })
    }

    /// Nothing else may be there.
    pub(crate) fn end(self) -> Result<(), Problem> {
        let Some((key, _)) = self.entries.first() else { return Ok(()) };
        Err(unknown(key, self.what, &self.known))
    }
}

fn unknown(key: &Key, what: &str, known: &[&str]) -> Problem {
    let nearest = nearest(&key.name, known.iter().copied());
    let mut message = format!("{what} has no key `{}`", key.name);
    match &nearest {
        Some(nearest) => message.push_str(&format!("; did you mean `{nearest}`?")),
        None => message.push_str(&format!("; it has: {}", known.join(", "))),
    }
    Problem { place: key.place, message, key: Some(key.name.clone()), nearest }
}

/// Of several words the one that is nearest to another, if it is near at all: no more than a third of it differs.
pub(crate) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let limit = (word.chars().count() / 3).max(1);
    known
        .map(|known| (distance(word, known), known))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, known)| known.to_owned())
}

/// How many letters have to be put in, left out, exchanged or swapped with their neighbour to make one of the other.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) =
        (one.chars().take(ID_MAX).collect(), other.chars().take(ID_MAX).collect());
    let mut before = Vec::new();
    let mut above: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in other.iter().enumerate() {
            let mut cost = (above[j + 1] + 1).min(row[j] + 1).min(above[j] + usize::from(a != b));
            if i > 0 && j > 0 && one[i - 1] == *b && *a == other[j - 1] {
                let swapped: &Vec<usize> = &before;
                cost = cost.min(swapped[j - 1] + 1);
            }
            row.push(cost);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found_and_a_far_one_is_not() {
        let known = ["sessions", "start", "routes", "task"];
        let near = |word| nearest(word, known.iter().copied());
        assert_eq!(near("session").as_deref(), Some("sessions"));
        assert_eq!(near("rotues").as_deref(), Some("routes"));
        assert_eq!(near("statr").as_deref(), Some("start"));
        assert_eq!(near("budget"), None);
    }
}
