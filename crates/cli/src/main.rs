//! `qd`: the command line of Quarterdeck. It parses the arguments, runs the verb and turns the result into an exit
//! code. Verbs talk to the daemon over HTTP only. Of the daemon's crate they use `DaemonHome` and `DaemonConfig`; only
//! `serve` runs it. The daemon re-executes the same binary for its workers.

mod args;
mod client;
mod completion;
mod daemon;
mod failure;
mod local_time;
mod output;
mod past_time;
mod refs;
mod render;
mod serve;
mod terminal_echo;
mod verbs;

use std::process::ExitCode;

use clap::Parser;
use qd_home::DaemonHome;

use args::{CliVerb, CommandLine};
use daemon::DaemonLocator;
use failure::{CliExitCode, Result};
use output::CliOutput;
use verbs::VerbContext;

fn main() -> ExitCode {
    if let Some(exit) = run_internal_process() {
        return exit;
    }
    // Fails only if the kernel refuses every handler. Then a file size limit ends the process, as it ends others.
    let _installed = qd_keeper::process_setup::survive_file_size_limit();
    let CommandLine { global, verb } = CommandLine::parse();
    let out = CliOutput::new(global.json);
    let locator = DaemonLocator { home: DaemonHome::resolve(global.home), explicit_host: global.host };
    let mut context = VerbContext { out, locator };
    let result = match verb {
        // The daemon creates its own runtime.
        CliVerb::Serve(flags) => serve::serve(&context, flags),
        verb => context.locator.apply_environment().and_then(|()| run_verb_in_runtime(&context, verb)),
    };
    let exit = result.unwrap_or_else(|failure| {
        context.out.print_failure(&failure);
        failure.exit_code()
    });
    context.out.clear_spinner();
    exit.into()
}

/// Runs the hidden subcommands: worker, keeper, the first process of a sandbox, scripted agent, the helper that gives a
/// program its terminal, and what a shell asks at a Tab. The daemon and its processes start each other. They have to
/// start fast, so clap does not parse their arguments.
fn run_internal_process() -> Option<ExitCode> {
    match std::env::args_os().nth(1)?.to_str()? {
        "__worker" => Some(qd_worker::host::main()),
        "__keeper" => Some(qd_keeper::keeper_process::main()),
        qd_sandbox::SANDBOX_COMMAND => Some(qd_sandbox::main()),
        "__script" => Some(qd_worker::script::main()),
        completion::COMPLETE_COMMAND => Some(completion::main()),
        qd_worker::tty::TTY_COMMAND => Some(qd_worker::tty::main()),
        _ => None,
    }
}

fn run_verb_in_runtime(context: &VerbContext, verb: CliVerb) -> Result<CliExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(anyhow::Error::from)?;
    let result = runtime.block_on(verbs::run_verb(context, verb));
    // A blocking thread may still be reading stdin; the process must not wait for it.
    runtime.shutdown_background();
    result
}
