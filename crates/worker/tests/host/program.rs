//! Stands in for `qd`: the tests start it as the daemon would start `qd __worker`, and the worker starts it as its
//! keeper and its scripted agent. `serve AGENT` stands in for `qd worker`.

use std::io::Write;
use std::process::ExitCode;

use qd_worker_sdk::{ServeMode, WorkerServer};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["__worker", ..] => {
            if let Ok(text) = std::env::var("QD_TEST_PANIC_ON_LOG") {
                panic_on_log(text);
            }
            qd_worker::host::main()
        }
        ["__keeper", ..] => qd_keeper::keeper_process::main(),
        [qd_sandbox::SANDBOX_COMMAND, ..] => qd_sandbox::main(),
        ["__script", ..] => qd_worker::script::main(),
        [qd_worker::tty::TTY_COMMAND, ..] => qd_worker::tty::main(),
        ["serve", agent] => serve(agent).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS),
        _ => ExitCode::FAILURE,
    }
}

/// Makes the task that logs this text panic. The worker uses the log that it finds.
fn panic_on_log(text: String) {
    let log = tracing_subscriber::fmt().with_writer(move || PanickingLog(text.clone())).finish();
    tracing::subscriber::set_global_default(log).expect("nothing has set a log yet");
}

/// See [`panic_on_log`].
struct PanickingLog(String);

impl Write for PanickingLog {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        assert!(!String::from_utf8_lossy(line).contains(&self.0), "a log line that panics");
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
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
