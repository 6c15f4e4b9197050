//! Runs the scripted model alone, to try an agent by hand: `cargo run -p qd-testkit --example model -- 8901`. It
//! prints each request when it arrives and again when it ends.
#![expect(clippy::print_stdout, reason = "the lines are its output")]

use qd_testkit::model::{FakeModel, ModelRequestOutcome};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let port = std::env::args().nth(1).map_or(0, |port| port.parse().expect("the argument is a port"));
    let model = FakeModel::start_at(port);
    println!("{}", model.url());
    let (mut changes, mut printed, mut hosts) = (model.follow(), Vec::new(), 0);
    while let Some(requests) = changes.next().await {
        printed.resize(requests.len(), None::<ModelRequestOutcome>);
        for (n, (record, printed)) in requests.iter().zip(&mut printed).enumerate() {
            if printed.replace(record.outcome) == Some(record.outcome) {
                continue;
            }
            let (side, tools) = (if record.is_side_call { " side" } else { "" }, record.tools.join(","));
            let (users, results, text) = (record.user_count(), record.results, record.last_text());
            println!(
                "{n} {:?} {} model={} users={users} results={results}{side}",
                record.api, record.path, record.model
            );
            println!("  tools=[{tools}]\n  text={text:?}\n  {:?}", record.outcome);
        }
        let all = model.proxied_hosts();
        all[hosts..].iter().for_each(|host| println!("refused to proxy to {host}"));
        hosts = all.len();
    }
}
