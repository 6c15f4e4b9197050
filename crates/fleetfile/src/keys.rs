//! Reads the keys of a section. An unknown key is refused, with a suggestion of the key that was probably meant.

use qd_protocol::ids::ID_MAX;

use crate::FleetFileProblem;
use crate::yaml::{YamlKey, YamlNode, YamlValue};

/// A map whose keys are taken one by one; keys that are left over at the end are mistakes.
pub(crate) struct SectionReader<'a> {
    /// What the section is, for messages.
    description: &'a str,
    node: &'a YamlNode,
    entries: Vec<(&'a YamlKey, &'a YamlNode)>,
    known: Vec<&'static str>,
}

impl<'a> SectionReader<'a> {
    pub(crate) fn of(node: &'a YamlNode, description: &'a str) -> Result<Self, FleetFileProblem> {
        let YamlValue::Map(entries) = &node.value else {
            return Err(node.problem(format!("{description} must be a map, not {}", node.kind_name())));
        };
        let entries = entries.iter().map(|(key, value)| (key, value)).collect();
        Ok(Self { description, node, entries, known: Vec::new() })
    }

    /// Takes the value of a key, if it is there and not null.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<&'a YamlNode> {
        self.known.push(name);
        let at = self.entries.iter().position(|(key, _)| key.name == name)?;
        let (_, value) = self.entries.remove(at);
        Some(value).filter(|value| !value.is_null())
    }

    /// Finds a key without taking it.
    pub(crate) fn find_key(&self, name: &str) -> Option<&'a YamlKey> {
        self.entries.iter().find(|(key, _)| key.name == name).map(|(key, _)| *key)
    }

    /// Takes a required value. If it is missing and a similar key is there, the error is about that key.
    pub(crate) fn require(&mut self, name: &'static str) -> Result<&'a YamlNode, FleetFileProblem> {
        if let Some(value) = self.take(name) {
            return Ok(value);
        }
        let misspelled =
            self.entries.iter().find(|(key, _)| nearest_word(&key.name, [name].into_iter()).is_some());
        Err(match misspelled {
            Some((key, _)) => unknown_key(key, self.description, &[name]),
            None => FleetFileProblem {
                key: Some(name.to_owned()),
                ..self.node.problem(format!("{} needs `{name}`", self.description))
            },
        })
    }

    /// Fails if any key was not taken.
    pub(crate) fn reject_unknown_keys(self) -> Result<(), FleetFileProblem> {
        let Some((key, _)) = self.entries.first() else { return Ok(()) };
        Err(unknown_key(key, self.description, &self.known))
    }
}

fn unknown_key(key: &YamlKey, description: &str, known: &[&str]) -> FleetFileProblem {
    let nearest = nearest_word(&key.name, known.iter().copied());
    let mut message = format!("{description} has no key `{}`", key.name);
    match &nearest {
        Some(nearest) => message.push_str(&format!("; did you mean `{nearest}`?")),
        None => message.push_str(&format!("; it has: {}", known.join(", "))),
    }
    FleetFileProblem { position: key.position, message, key: Some(key.name.clone()), suggestion: nearest }
}

/// The known word that is most similar to this one, if no more than a third of it differs. Swapped neighbours count as
/// one difference. Of two that differ as much, the one of a more similar length counts.
pub(crate) fn nearest_word<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    // A word can be as long as the file, but nothing that we know is longer than this.
    let word: String = word.chars().take(ID_MAX).collect();
    let limit = (word.chars().count() / 3).max(1);
    known
        .map(|known| (strsim::osa_distance(&word, known), known.len().abs_diff(word.len()), known))
        .filter(|(distance, ..)| *distance <= limit)
        .min()
        .map(|(.., known)| known.to_owned())
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
        assert_eq!(near(&"sessions".repeat(1000)), None, "however long it is");
    }
}
