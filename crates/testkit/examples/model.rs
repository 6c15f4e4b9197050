//! The scripted model by itself, to try an agent by hand: `cargo run -p qd-testkit --example model -- 8901`. It prints
//! a line for every request and another when it ends.
#![expect(clippy::print_stdout, reason = "the lines are its output")]

use qd_testkit::model::{FakeModel, ModelRequestOutcome};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let port = std::env::args().nth(1).map_or(0, |port| port.parse().expect("the argument is a port"));
    let model = FakeModel::start_at(port);
    println!("{}", model.url());
    let (mut changes, mut told, mut hosts) = (model.follow(), Vec::new(), 0);
    while let Some(requests) = changes.next().await {
        told.resize(requests.len(), None::<ModelRequestOutcome>);
        for (n, (seen, told)) in requests.iter().zip(&mut told).enumerate() {
            if told.replace(seen.outcome) == Some(seen.outcome) {
                continue;
            }
            let (side, tools) = (if seen.is_side_call { " side" } else { "" }, seen.tools.join(","));
            let (users, results, text) = (seen.user_count(), seen.results, seen.last_text());
            println!(
                "{n} {:?} {} model={} users={users} results={results}{side}",
                seen.api, seen.path, seen.model
            );
            println!("  tools=[{tools}]\n  text={text:?}\n  {:?}", seen.outcome);
        }
        let all = model.proxied_hosts();
        all[hosts..].iter().for_each(|host| println!("refused a way to {host}"));
        hosts = all.len();
    }
}
