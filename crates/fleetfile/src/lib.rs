//! Reads fleet files. [`parse_fleet_file`] turns YAML into a validated [`FleetSpec`], or reports where the mistake
//! is, what it is and what was probably meant.
//!
//! Layout, in reading order:
//! - `yaml`: the text as a tree in which every node knows its position.
//! - `keys`: known keys, and suggestions for unknown ones.
//! - `sections`: reads the fleet, its sessions and its routes from the tree.
//! - `cycles`: finds routes that would repeat for ever.
//! - [`schema`]: the JSON Schema for editors.
//!
//! The meaning of the keys is in `docs/fleets.md`. The format is a superset of CAP's `fleet.yaml`.

mod cycles;
mod keys;
pub mod schema;
mod sections;
mod yaml;

use std::fmt;

use qd_protocol::fleet::FleetSpec;

/// A position in a file. Both numbers count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FilePosition {
    pub line: usize,
    /// In characters, not bytes.
    pub column: usize,
}

/// What is wrong with a fleet file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct FleetFileProblem {
    pub position: FilePosition,
    /// The problem in words, for people.
    pub message: String,
    /// The key or name that the problem is about.
    pub key: Option<String>,
    /// What was probably meant.
    pub suggestion: Option<String>,
}

impl fmt::Display for FleetFileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.position.line, self.position.column, self.message)
    }
}

/// Where a file names this setting of a session, else the session itself, else the key of the whole fleet with that name.
/// For problems that only show where the fleet would run, such as an agent that is not installed there.
pub fn position_of(text: &str, session: Option<&str>, setting: &str) -> Option<FilePosition> {
    let root = yaml::parse_document(text).ok()?;
    let fleet = root.child("fleet")?.1;
    let of_fleet = || fleet.child(setting).map(|(key, _)| key.position);
    let Some(session) = session else { return of_fleet() };
    let (name, member) = fleet.child("sessions")?.1.child(session)?;
    let of_session = member.child(setting).map(|(key, _)| key.position);
    of_session.or_else(of_fleet).or(Some(name.position))
}

/// Reads a fleet file. `task` replaces the task in the file.
pub fn parse_fleet_file(text: &str, task: Option<&str>) -> Result<FleetSpec, FleetFileProblem> {
    let root = yaml::parse_document(text)?;
    let mut spec = sections::read_fleet(&root, task)?;
    cycles::check_cycles(&root, &spec)?;
    // The order of equal sessions in a file means nothing, so keep only one.
    spec.start.dedup();
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_found_at_its_session_then_at_the_fleet_then_at_the_name() {
        let text = "fleet:\n  base_branch: main\n  sessions:\n    a: { agent: echo, worktree: true }\n    b: { agent: x }\n";
        let position = |session, setting| position_of(text, session, setting).map(|at| (at.line, at.column));
        assert_eq!(position(Some("a"), "worktree"), Some((4, 23)));
        assert_eq!(position(Some("b"), "agent"), Some((5, 10)));
        assert_eq!(position(Some("b"), "base_branch"), Some((2, 3)));
        assert_eq!(position(Some("b"), "worktree"), Some((5, 5)));
        assert_eq!(position(None, "base_branch"), Some((2, 3)));
        assert_eq!(position(Some("c"), "agent"), None);
        assert_eq!(position_of("- no\n- fleet", None, "task"), None);
    }
}
