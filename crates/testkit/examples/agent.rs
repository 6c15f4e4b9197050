//! Runs a real agent by hand, in a home of its own and with the scripted model: `cargo run -p qd-testkit --example
//! agent -- gemini`. It speaks its protocol on stdin and stdout; the requests to the model are printed to stderr at
//! the end. Further arguments go to the agent. `QD_AGENT_HOME` sets a home that is kept.
#![expect(clippy::print_stderr, reason = "stdout belongs to the agent")]

use std::path::PathBuf;
use std::process::Command;

use qd_testkit::FakeModel;
use qd_testkit::real_agents::{InstalledAgents, RealAgent, isolated_environment};

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    let names = RealAgent::ALL.map(RealAgent::name);
    let agent = RealAgent::ALL.into_iter().find(|agent| agent.name() == name);
    let agent = agent.unwrap_or_else(|| panic!("the first argument is one of {names:?}"));
    let (model, scratch) =
        (FakeModel::start(), tempfile::tempdir().expect("a temporary directory can be made"));
    let home = std::env::var_os("QD_AGENT_HOME").map_or(scratch.path().to_owned(), PathBuf::from);
    let argv = InstalledAgents::installed().argv(agent);
    let status = Command::new(&argv[0])
        .args(&argv[1..])
        .args(args)
        .env_clear()
        .envs(isolated_environment(agent, &home, &model))
        .status();
    for record in model.requests() {
        let (side, tools) = (if record.is_side_call { " side" } else { "" }, record.tools.join(","));
        eprintln!(
            "{:?} {}{side} {:?} {:?} tools={tools}",
            record.api, record.path, record.texts, record.outcome
        );
    }
    eprintln!("hosts it tried to reach: {:?}; {status:?}", model.proxied_hosts());
}
