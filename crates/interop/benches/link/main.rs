//! Benchmark of our worker's connection against the crate `bamboo-subagent`. It measures the time of a short run,
//! events per second, the memory of an idle connection and of one whose reader stops, the time to start a worker, and
//! the time to kill a turn with everything that it started. Each worker is a separate process: this binary, executed
//! again. `cargo bench -p qd-interop --bench link -- throughput` measures only one of `latency`, `throughput`, `idle`,
//! `unread`, `start` and `kill`.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

mod figures;
mod numbered;
mod peer;
mod processes;
mod served;

use std::process::ExitCode;

use tokio::runtime::Builder;

fn main() -> ExitCode {
    if let Some(code) = processes::run_child_role() {
        return code;
    }
    let (mut workers, mut client) = (Builder::new_multi_thread(), Builder::new_current_thread());
    match served::role() {
        // As `qd worker` does it.
        Some(side @ served::Side::Product) => run(&mut client, served::serve(side)),
        // A real worker has runs and connections on different threads too.
        Some(side) => run(workers.worker_threads(2), served::serve(side)),
        None => run(&mut client, figures::measure()),
    }
    ExitCode::SUCCESS
}

fn run(runtime: &mut Builder, task: impl Future<Output = ()>) {
    runtime.enable_all().build().expect("a runtime starts").block_on(task);
}
