//! Stands in for `qd`: the tests start it as the daemon would start `qd __worker`, and the worker starts it as its
//! keeper and its scripted agent. `serve AGENT` stands in for `qd worker`.

use std::io::Write;
use std::process::ExitCode;

use qd_link::{ServeMode, WorkerServer};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["__worker", ..] => qd_worker::host::main(),
        ["__keeper", ..] => qd_keeper::keeper_process::main(),
        ["__script", ..] => qd_worker::script::main(),
        [qd_worker::tty::TTY_COMMAND, ..] => qd_worker::tty::main(),
        ["serve", agent] => serve(agent).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS),
        _ => ExitCode::FAILURE,
    }
}

/// Serves an agent to any client, prints its address, and exits after the first connection.
fn serve(agent: &str) -> Option<()> {
    let executor = qd_worker::executor(qd_catalog::Catalog::built_in().get(agent)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async {
        let server = WorkerServer::bind("127.0.0.1:0").await.ok()?;
        writeln!(std::io::stdout(), "{}", server.endpoint()).ok()?;
        server.serve(executor, ServeMode::One { accept_timeout: None }).await.ok()
    })
}
