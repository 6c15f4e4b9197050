//! End-to-end tests: they drive the real binary over HTTP, server-sent events and the command line, and use none of the
//! product's crates. Each test is named after the promise that it checks, and starts its own daemon in its own home.

#![expect(
    clippy::unwrap_used,
    reason = "all of this is tests; clippy only spares functions that bear the attribute"
)]

mod a2a;
mod adopt;
mod agent_limits;
mod ask_policies;
mod asks;
mod asks_cli;
mod audit;
mod cancel;
mod cancel_race;
mod cli;
mod cli_sessions;
mod cli_status;
mod cli_terminal;
mod completions;
mod cost;
mod crash;
mod descriptors;
mod events;
mod faulty_libc;
mod fleets;
mod fleets_cli;
mod fleets_crash;
mod full_disk;
mod git_over_ssh;
mod halt;
mod hostile;
mod http;
mod http_lists;
mod idempotency;
mod journal_damage;
mod large_content;
mod lifecycle;
mod limits;
mod live_display;
mod liveness;
mod mail;
mod mail_fleets;
mod mail_folders;
mod manifests;
mod mcp;
mod mcp_http;
mod mcp_limits;
mod mcp_permissions;
mod mcp_sandbox;
mod model_proxy;
mod modes;
mod old_home;
mod openapi;
mod packaging;
mod policy_test;
mod predecessor_bugs;
mod queue;
mod quota;
mod readme;
mod real;
mod run_events;
mod runs;
mod sandbox_settings;
mod schemathesis;
mod search;
mod security;
mod sessions;
mod short_storms;
mod steer;
mod stopped_daemon;
mod storm;
mod terminals;
mod text_merging;
mod tokens;
mod tool_directories;
mod turn_ends;
mod wall_clock;
mod worker_command;
mod workers_agent_rights;
mod workers_escapees;
mod workers_idle;
mod workers_join;
mod workers_join_env;
mod workers_list;
mod workers_loss;
mod workers_restart;
mod workers_secrets;
mod workers_slots;
mod workers_stale_records;
mod workers_stopped;
mod workers_suspend;
mod workers_unreachable;
mod workers_url;
mod workers_versions;
mod workspaces;
mod worktrees;
mod worktrees_hostile;
mod worktrees_merge;

#[test]
fn cargo_run_means_qd() {
    let metadata = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let by_default = metadata["workspace_default_members"].as_array().unwrap();
    let packages =
        metadata["packages"].as_array().unwrap().iter().filter(|item| by_default.contains(&item["id"]));
    let targets = packages.flat_map(|item| item["targets"].as_array().unwrap());
    let binaries: Vec<_> =
        targets.filter(|item| item["kind"][0] == "bin").map(|item| &item["name"]).collect();
    assert_eq!(binaries, ["qd"], "the README's first command has one program to run");
}

#[test]
fn the_suites_drive_the_binary_that_was_built_with_them() {
    if std::env::var_os("QD_BIN").is_none() {
        assert_eq!(qd_testkit::home::binary(), std::path::Path::new(env!("CARGO_BIN_EXE_qd")));
    }
}
