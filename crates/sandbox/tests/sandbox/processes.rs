//! Processes in and around a sandbox: who sees whom, and what ends with what.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use qd_protocol::sandbox::SandboxLevel;
use qd_sandbox::{PidNamespaceId, pid_namespaces_below_ours};

use crate::fixture::{Fixture, on_each_user};

/// The pause between two checks whether processes are gone.
const POLL: Duration = Duration::from_millis(5);

#[test]
fn processes_outside_are_not_there() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut outside = Command::new("sleep").arg("1000").env("SECRET", "x").spawn().unwrap();
        let pid = outside.id();
        let script = format!(
            "kill -0 {pid} 2>/dev/null && echo signalled; test -e /proc/{pid} && echo seen; \
             set -- /proc/[0-9]*; echo $#; test $$ -lt 100 && echo small"
        );
        let output = fixture.run(&fixture.plan(), &script);
        outside.kill().unwrap();
        outside.wait().unwrap();
        // The init and the shell.
        assert_eq!(output, "2\nsmall\n");
    });
}

#[test]
fn nothing_is_inherited_and_the_init_has_nothing() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let script = "ls /proc/self/fd | tr '\\n' ' '; cat /proc/1/environ 2>/dev/null | wc -c; \
                      ls /proc/1/fd 2>/dev/null | wc -l; kill -9 1; kill -STOP 1; sleep 0; echo alive";
        // The fourth is the directory that `ls` lists.
        assert_eq!(fixture.run(&fixture.plan(), script), "0 1 2 3 0\n0\nalive\n");
    });
}

#[test]
fn an_exit_status_and_a_signal_are_seen_outside() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let status = |script: &str| {
            let mut command = fixture.start("run", &fixture.plan(), fixture.root(), script);
            command.status().unwrap().code()
        };
        assert_eq!(status("exit 7"), Some(7));
        assert_eq!(status("kill -TERM $$"), Some(128 + 15));
        let missing = fixture.start("run", &fixture.plan(), &fixture.root().join("nowhere"), "true").output();
        assert!(String::from_utf8(missing.unwrap().stdout).unwrap().starts_with("not started: No such file"));
    });
}

/// A sandbox whose program has left a process behind, with the process that started it.
struct LeftSandbox {
    starter: Child,
    init: u32,
    /// The processes inside, as the host counts.
    inside: Vec<u32>,
}

fn leave_process(fixture: &Fixture) -> LeftSandbox {
    let script = "(setsid sh -c 'trap \"\" TERM HUP; echo ready; sleep 1000' &) & exec sleep 1000";
    let mut command = fixture.start("leave", &fixture.plan(), fixture.root(), script);
    let mut starter = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(starter.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut pids = None;
    let mut is_ready = false;
    while pids.is_none() || !is_ready {
        match lines.next().unwrap().as_str() {
            "ready" => is_ready = true,
            line => pids = line.split_once(' ').map(|(init, _)| init.parse().unwrap()),
        }
    }
    let init = pids.unwrap();
    let namespace = PidNamespaceId::of_process(init).unwrap();
    let inside = processes().filter(|pid| PidNamespaceId::of_process(*pid).is_ok_and(|id| id == namespace));
    LeftSandbox { starter, init, inside: inside.collect() }
}

fn processes() -> impl Iterator<Item = u32> {
    std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
}

fn wait_until_gone(pids: &[u32]) {
    let is_alive = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        !status.is_empty() && !status.contains("State:\tZ")
    };
    while pids.iter().any(is_alive) {
        std::thread::sleep(POLL);
    }
}

#[test]
fn when_the_init_is_killed_everything_inside_dies() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut left = leave_process(fixture);
        assert!(left.inside.len() >= 3, "{:?}", left.inside);
        let status = Command::new("kill").args(["-9", &left.init.to_string()]).status().unwrap();
        assert!(status.success());
        wait_until_gone(&left.inside);
        left.starter.kill().unwrap();
        left.starter.wait().unwrap();
    });
}

#[test]
fn when_the_process_that_started_it_dies_everything_inside_dies() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut left = leave_process(fixture);
        left.starter.kill().unwrap();
        left.starter.wait().unwrap();
        wait_until_gone(&left.inside);
    });
}

#[test]
fn a_process_is_known_by_its_namespace_whatever_it_does() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut left = leave_process(fixture);
        let namespace = PidNamespaceId::of_process(left.init).unwrap();
        for pid in &left.inside {
            assert_eq!(pid_namespaces_below_ours(*pid).unwrap(), [namespace]);
        }
        left.starter.kill().unwrap();
        left.starter.wait().unwrap();
        wait_until_gone(&left.inside);
    });
}
