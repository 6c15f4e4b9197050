//! Measures the whole daemon from outside, each figure next to its limit in the same run: durable events, accepted
//! prompts, and streams to many readers. Arguments (`durable`, `accept`, `readers`, `latency`) select parts. With other
//! first arguments, this program is one of the two servers that it measures, or a worker.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

mod accept;
mod bare;
mod durable;
mod readers;
mod stamp;
mod streams;

use qd_testkit::BenchmarkTable;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [stamp::ROLE, ..] => return stamp::serve(),
        [stamp::WORKER] => return stamp::work(),
        [bare::ROLE, socket] => return bare::serve(socket),
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime starts");
    let is_selected = |part: &str| args.iter().any(|arg| arg == part);
    let run_all = !["durable", "accept", "readers", "latency"].iter().any(|part| is_selected(part));
    let show = |table: BenchmarkTable| println!("{table}");
    if run_all || is_selected("durable") {
        show(runtime.block_on(durable::measure()));
    }
    if run_all || is_selected("accept") {
        show(runtime.block_on(accept::measure()));
    }
    if run_all || is_selected("readers") {
        show(runtime.block_on(streams::to_many_readers()));
    }
    if run_all || is_selected("latency") {
        show(runtime.block_on(streams::agent_to_client()));
    }
}
