//! The worker's connection against that of the crate `bamboo-subagent`, in one run: time to the terminal, events per
//! second, memory of an idle connection and behind a reader that does not read, time to start a worker and to end all that
//! its agent started. Each worker is a process of its own: this binary, executed again. `cargo bench -p qd-interop
//! --bench link -- throughput` measures one of `latency`, `throughput`, `idle`, `unread`, `start` and `kill` alone.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

mod figures;
mod numbered;
mod peer;
mod processes;
mod served;

use std::process::ExitCode;

use tokio::runtime::Builder;

fn main() -> ExitCode {
    if let Some(code) = processes::part() {
        return code;
    }
    let (mut workers, mut client) = (Builder::new_multi_thread(), Builder::new_current_thread());
    match served::role() {
        // As a worker would run: its runs and its connections on different threads.
        Some(side) => run(workers.worker_threads(2), served::serve(side)),
        None => run(&mut client, figures::measure()),
    }
    ExitCode::SUCCESS
}

fn run(runtime: &mut Builder, task: impl Future<Output = ()>) {
    runtime.enable_all().build().expect("a runtime starts").block_on(task);
}
