//! `qd completions`: what a shell needs to complete our verbs and flags.

use clap::CommandFactory;

use super::Context;
use crate::args::Line;
use crate::failure::{Exit, Result};

/// Prints the script.
pub(crate) fn completions(context: &Context, shell: clap_complete::Shell) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Line::command(), "qd", &mut script);
    context.out.data(&String::from_utf8_lossy(&script))?;
    Ok(Exit::Well)
}
