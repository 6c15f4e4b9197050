//! `qd completions`: prints a shell completion script. The scripts for bash, zsh and fish ask `qd __complete` at each Tab,
//! so they offer ids; those for other shells are generated, and know verbs and flags only.

use clap::CommandFactory;
use clap_complete::Shell;

use super::VerbContext;
use crate::args::CommandLine;
use crate::failure::{CliExitCode, Result};

pub(crate) fn completions(context: &VerbContext, shell: Shell) -> Result<CliExitCode> {
    let script = match shell {
        Shell::Bash => include_str!("../completion/qd.bash").to_owned(),
        Shell::Zsh => include_str!("../completion/qd.zsh").to_owned(),
        Shell::Fish => include_str!("../completion/qd.fish").to_owned(),
        _ => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut CommandLine::command(), "qd", &mut script);
            String::from_utf8_lossy(&script).into_owned()
        }
    };
    context.out.print_exact(&script)?;
    Ok(CliExitCode::Success)
}
