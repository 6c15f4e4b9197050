//! A real agent by hand, in a home of its own and with the scripted model: `cargo run -p qd-testkit --example agent --
//! gemini`. It speaks its protocol on stdin and stdout; what the model saw is on stderr at the end. More arguments are
//! the agent's; `QD_AGENT_HOME` is a home that stays.
#![expect(clippy::print_stderr, reason = "stdout is the agent's")]

use std::path::PathBuf;
use std::process::Command;

use qd_testkit::FakeModel;
use qd_testkit::real_agents::{InstalledAgents, RealAgent, isolated_environment};

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    let names = RealAgent::ALL.map(RealAgent::name);
    let cli = RealAgent::ALL.into_iter().find(|cli| cli.name() == name);
    let cli = cli.unwrap_or_else(|| panic!("the first argument is one of {names:?}"));
    let (model, scratch) = (FakeModel::start(), tempfile::tempdir().expect("there is room for a home"));
    let home = std::env::var_os("QD_AGENT_HOME").map_or(scratch.path().to_owned(), PathBuf::from);
    let argv = InstalledAgents::installed().argv(cli);
    let status = Command::new(&argv[0])
        .args(&argv[1..])
        .args(args)
        .env_clear()
        .envs(isolated_environment(cli, &home, &model))
        .status();
    for seen in model.requests() {
        let (side, tools) = (if seen.is_side_call { " side" } else { "" }, seen.tools.join(","));
        eprintln!("{:?} {}{side} {:?} {:?} tools={tools}", seen.api, seen.path, seen.texts, seen.outcome);
    }
    eprintln!("phone home: {:?}; {status:?}", model.proxied_hosts());
}
