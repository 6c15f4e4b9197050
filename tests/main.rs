//! The suites: the real binary, from outside, over HTTP, server-sent events and the command line. They know
//! CONTRACT.md and nothing else; each test is named after the rule that it holds the product to, starts a daemon of
//! its own in a home of its own, and ends it.

#![expect(
    clippy::unwrap_used,
    reason = "all of this is tests; clippy only spares functions that bear the attribute"
)]

mod a2a;
mod ask_policies;
mod asks;
mod cancel;
mod cancel_race;
mod cli;
mod cli_terminal;
mod crash;
mod events;
mod fleets;
mod fleets_cli;
mod fleets_crash;
mod halt;
mod http;
mod http_lists;
mod idempotency;
mod large_content;
mod lifecycle;
mod limits;
mod mail;
mod mail_fleets;
mod mail_folders;
mod manifests;
mod mcp;
mod mcp_http;
mod mcp_limits;
mod old_home;
mod openapi;
mod policy_test;
mod predecessor_bugs;
mod queue;
mod real;
mod run_events;
mod runs;
mod security;
mod sessions;
mod steer;
mod terminals;
mod worker_command;
mod workers_agent_rights;
mod workers_escapees;
mod workers_idle;
mod workers_join;
mod workers_list;
mod workers_loss;
mod workers_restart;
mod workers_secrets;
mod workers_slots;
mod workers_stale_records;
mod workers_suspend;
mod workers_url;
mod workers_versions;
mod workspaces;
mod worktrees;
mod worktrees_merge;

#[test]
fn cargo_run_means_qd() {
    let told = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .output()
        .unwrap();
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    let by_default = told["workspace_default_members"].as_array().unwrap();
    let packages = told["packages"].as_array().unwrap().iter().filter(|one| by_default.contains(&one["id"]));
    let targets = packages.flat_map(|one| one["targets"].as_array().unwrap());
    let binaries: Vec<_> = targets.filter(|one| one["kind"][0] == "bin").map(|one| &one["name"]).collect();
    assert_eq!(binaries, ["qd"], "the README's first command has one program to run");
}

#[test]
fn the_suites_drive_the_binary_that_was_built_with_them() {
    if std::env::var_os("QD_BIN").is_none() {
        assert_eq!(qd_testkit::home::binary(), std::path::Path::new(env!("CARGO_BIN_EXE_qd")));
    }
}
