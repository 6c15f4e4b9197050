//! What `qd` is to its workers, and nothing else: the suites beside this file start it where the daemon would start
//! `qd __worker`, and the worker starts it as its keeper and its scripted agent.

use std::process::ExitCode;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("__worker") => qd_worker::host::main(),
        Some("__keeper") => qd_keeper::process::main(),
        Some("__script") => qd_worker::script::main(),
        _ => ExitCode::FAILURE,
    }
}
