//! `qd completions`: prints a shell completion script.

use clap::CommandFactory;

use super::VerbContext;
use crate::args::CommandLine;
use crate::failure::{CliExitCode, Result};

pub(crate) fn completions(context: &VerbContext, shell: clap_complete::Shell) -> Result<CliExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut CommandLine::command(), "qd", &mut script);
    context.out.print_data(&String::from_utf8_lossy(&script))?;
    Ok(CliExitCode::Success)
}
