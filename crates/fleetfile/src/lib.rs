//! Fleets as people write them. [`read`] turns a file into a [`Spec`] in which nothing can be wrong any more, or says
//! where the mistake is, what it is and what was probably meant.
//!
//! Layout, in reading order:
//! - `yaml`: the text as a tree in which every node knows its place.
//! - `keys`: the keys that there are, and the nearest of them to one that there is not.
//! - `sections`: a fleet, its sessions and its routes, out of that tree.
//! - `circles`: routes that would go round for ever.
//! - [`schema`]: the same for editors.
//!
//! What the words mean is in `docs/fleets.md`; the reading is a superset of CAP's `fleet.yaml`.

mod cycles;
mod keys;
pub mod schema;
mod sections;
mod yaml;

use std::fmt;

use qd_protocol::fleet::FleetSpec;

/// Where something stands in a file. Both count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FilePosition {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

/// What is wrong with a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct FleetFileProblem {
    /// Where.
    pub position: FilePosition,
    /// What, for people.
    pub message: String,
    /// The key that it is about.
    pub key: Option<String>,
    /// What was probably meant.
    pub suggestion: Option<String>,
}

impl fmt::Display for FleetFileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.position.line, self.position.column, self.message)
    }
}

/// Reads a file. `task` replaces that of the file.
pub fn parse_fleet_file(text: &str, task: Option<&str>) -> Result<FleetSpec, FleetFileProblem> {
    let root = yaml::parse_document(text)?;
    let mut spec = sections::read_fleet(&root, task)?;
    cycles::check_cycles(&root, &spec)?;
    // One way to say it: the order of equal things in a file means nothing.
    spec.start.dedup();
    Ok(spec)
}
