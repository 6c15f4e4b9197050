//! The keys that there are. One that there is not is refused, with the nearest that was probably meant.

use qd_protocol::ids::ID_MAX;

use crate::FleetFileProblem;
use crate::yaml::{YamlKey, YamlNode, YamlValue};

/// A map whose keys are taken out one by one; what is left over at the end is a mistake.
pub(crate) struct SectionReader<'a> {
    /// What it is, for people.
    description: &'a str,
    node: &'a YamlNode,
    entries: Vec<(&'a YamlKey, &'a YamlNode)>,
    known: Vec<&'static str>,
}

impl<'a> SectionReader<'a> {
    pub(crate) fn of(node: &'a YamlNode, what: &'a str) -> Result<Self, FleetFileProblem> {
        let YamlValue::Map(entries) = &node.value else {
            return Err(node.problem(format!("{what} is a map, not {}", node.kind_name())));
        };
        let entries = entries.iter().map(|(key, value)| (key, value)).collect();
        Ok(Self { description: what, node, entries, known: Vec::new() })
    }

    /// The value of a key, if it is there and says something.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<&'a YamlNode> {
        self.known.push(name);
        let at = self.entries.iter().position(|(key, _)| key.name == name)?;
        let (_, value) = self.entries.remove(at);
        Some(value).filter(|value| !value.is_null())
    }

    /// The same, with the key.
    pub(crate) fn find_key(&self, name: &str) -> Option<&'a YamlKey> {
        self.entries.iter().find(|(key, _)| key.name == name).map(|(key, _)| *key)
    }

    /// A value that has to be there. Where one with nearly that name is, that is the mistake.
    pub(crate) fn require(&mut self, name: &'static str) -> Result<&'a YamlNode, FleetFileProblem> {
        if let Some(value) = self.take(name) {
            return Ok(value);
        }
        let meant =
            self.entries.iter().find(|(key, _)| nearest_word(&key.name, [name].into_iter()).is_some());
        Err(match meant {
            Some((key, _)) => unknown_key(key, self.description, &[name]),
            None => FleetFileProblem {
                key: Some(name.to_owned()),
                ..self.node.problem(format!("{} needs `{name}`", self.description))
            },
        })
    }

    /// Nothing else may be there.
    pub(crate) fn reject_unknown_keys(self) -> Result<(), FleetFileProblem> {
        let Some((key, _)) = self.entries.first() else { return Ok(()) };
        Err(unknown_key(key, self.description, &self.known))
    }
}

fn unknown_key(key: &YamlKey, what: &str, known: &[&str]) -> FleetFileProblem {
    let nearest = nearest_word(&key.name, known.iter().copied());
    let mut message = format!("{what} has no key `{}`", key.name);
    match &nearest {
        Some(nearest) => message.push_str(&format!("; did you mean `{nearest}`?")),
        None => message.push_str(&format!("; it has: {}", known.join(", "))),
    }
    FleetFileProblem { position: key.position, message, key: Some(key.name.clone()), suggestion: nearest }
}

/// Of several words the one that is nearest to another, if it is near at all: no more than a third of it differs.
pub(crate) fn nearest_word<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let limit = (word.chars().count() / 3).max(1);
    known
        .map(|known| (edit_distance(word, known), known))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, known)| known.to_owned())
}

/// How many letters have to be put in, left out, exchanged or swapped with their neighbour to make one of the other.
fn edit_distance(one: &str, other: &str) -> usize {
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
        let near = |word| nearest_word(word, known.iter().copied());
        assert_eq!(near("session").as_deref(), Some("sessions"));
        assert_eq!(near("rotues").as_deref(), Some("routes"));
        assert_eq!(near("statr").as_deref(), Some("start"));
        assert_eq!(near("budget"), None);
    }
}
