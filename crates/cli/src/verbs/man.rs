//! `qd man`: writes the manual pages, generated from the same definitions as `--help`.

use std::path::Path;

use clap::CommandFactory;

use super::VerbContext;
use crate::args::CommandLine;
use crate::failure::{CliExitCode, Result};

/// Writes one page per verb into `dir`, or the main page to stdout.
pub(crate) fn man(context: &VerbContext, dir: Option<&Path>) -> Result<CliExitCode> {
    let command = CommandLine::command().disable_help_subcommand(true);
    match dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)?;
            clap_mangen::generate_to(command, dir)?;
        }
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            context.out.print_exact(&String::from_utf8_lossy(&page))?;
        }
    }
    Ok(CliExitCode::Success)
}
