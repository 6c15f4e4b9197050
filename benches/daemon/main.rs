//! The whole daemon from outside, each figure beside its limit in the same run: durable events, accepted prompts, and
//! streams to many readers. Takes names of parts (`durable`, `accept`, `readers`, `latency`) to do only those. The
//! same file is, by its first argument, the two servers that it measures in processes of their own, and a worker.
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
    let named = |part: &str| args.iter().any(|arg| arg == part);
    let all = !["durable", "accept", "readers", "latency"].iter().any(|part| named(part));
    let show = |table: BenchmarkTable| println!("{table}");
    if all || named("durable") {
        show(runtime.block_on(durable::measure()));
    }
    if all || named("accept") {
        show(runtime.block_on(accept::measure()));
    }
    if all || named("readers") {
        show(runtime.block_on(streams::to_many_readers()));
    }
    if all || named("latency") {
        show(runtime.block_on(streams::agent_to_client()));
    }
}
