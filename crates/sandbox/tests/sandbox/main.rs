//! Tests of real sandboxes: what a shell inside can see and do. Each test runs as the present user and, if that is root,
//! as an ordinary user too. A machine that cannot give a level has to say so in its probe, and then refuse to start.
#![expect(clippy::unwrap_used, reason = "every function here serves a test")]

mod fixture;
mod processes;

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Command;

use fixture::on_each_user;
use qd_protocol::sandbox::{NetworkSetting, SandboxLevel};
use qd_sandbox::SandboxPlan;

#[test]
fn the_home_shows_only_what_belongs_to_the_session() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let script = "cd \"$H\"; cat token 2>/dev/null || echo hidden; ls; ls worktrees ..; ls -a worktrees/..; \
                      echo new > worktrees/mine/file && echo written; cat tools/mine/token; \
                      touch tools/mine/x 2>/dev/null || echo fixed; touch x 2>/dev/null || echo fixed";
        let output = fixture.run(&fixture.plan(), script);
        let expected = "hidden\nmail\ntools\nworktrees\n";
        assert!(output.starts_with(expected), "{output}");
        assert!(output.contains("written\nsession token\nfixed\nfixed"), "{output}");
        assert!(!output.contains("theirs"), "another session's worktree is seen: {output}");
        assert_eq!(fs::read_to_string(fixture.home().join("worktrees/mine/file")).unwrap(), "new\n");
    });
}

#[test]
fn a_directory_above_the_working_directory_shows_no_siblings() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let output =
            fixture.run_in(&fixture.plan(), &fixture.home().join("worktrees/mine"), "ls ..; ls -d $PWD");
        assert!(!output.contains("theirs") && output.contains("worktrees/mine"), "{output}");
    });
}

#[test]
fn the_daemons_socket_leads_to_the_sessions_own() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let (socket, own) = (fixture.home().join("qd.sock"), fixture.home().join("tools/mine/qd.sock"));
        fixture.own(|| {
            fs::write(&socket, "everybody's").unwrap();
            fs::write(&own, "own\n").unwrap();
        });
        let plan = SandboxPlan { links: vec![(socket, own)], ..fixture.plan() };
        let script = "cat \"$H/qd.sock\"; rm -f \"$H/qd.sock\" 2>/dev/null || echo fixed";
        assert_eq!(fixture.run(&plan, script), "own\nfixed\n");
    });
}

#[test]
fn an_agent_whose_directory_is_the_home_itself_sees_it_empty() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut plan = fixture.plan();
        plan.writable.push(fixture.home());
        let output = fixture.run_in(&plan, &fixture.home(), "cat token 2>/dev/null || echo hidden; ls");
        assert_eq!(output, "hidden\nmail\ntools\nworktrees\n");
    });
}

#[test]
fn what_the_agent_needs_is_kept_also_below_a_directory_that_is_hidden_for_its_sockets() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let mut plan = fixture.plan();
        plan.private_directories.push(fixture.root().to_owned());
        plan.writable.push(fixture.root().join("project"));
        plan.readable.push(fixture.root().join("keys"));
        let project = fixture.root().join("project");
        let script = "echo x > made; ls ..; cat ../keys/id; (echo x > ../keys/y) 2>/dev/null || echo fixed";
        assert_eq!(fixture.run_in(&plan, &project, script), "home\nkeys\nproject\nkey\nfixed\n");
        assert_eq!(fs::read_to_string(project.join("made")).unwrap(), "x\n");
    });
}

#[test]
fn a_link_in_place_of_what_the_agent_may_write_uncovers_nothing() {
    for level in [SandboxLevel::Deck, SandboxLevel::Workspace] {
        on_each_user(level, |fixture| {
            let (state, below_home) =
                (fixture.root().join("linked"), fixture.home().join("worktrees/mine/state"));
            let keys = fixture.root().join("linked-keys");
            fixture.own(|| {
                fs::write(fixture.home().join("log/secret"), "secret\n").unwrap();
                std::os::unix::fs::symlink(fixture.home().join("log"), &state).unwrap();
                std::os::unix::fs::symlink(fixture.home().join("token"), &below_home).unwrap();
                std::os::unix::fs::symlink(fixture.root().join("keys"), &keys).unwrap();
            });
            let mut plan = fixture.plan();
            plan.writable.extend([state, below_home, keys]);
            plan.credentials.push(fixture.root().join("keys"));
            let script = "for file in linked/secret home/log/secret home/token linked-keys/id; do \
                          cat \"$H/../$file\" 2>/dev/null || echo hidden; done";
            assert_eq!(fixture.run(&plan, script), "hidden\n".repeat(4));
        });
    }
}

#[test]
fn what_is_hidden_cannot_be_uncovered() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let script = "for try in 'umount -l \"$H\"' 'umount -l /proc' 'mount -o remount,rw \"$H\"' \
                      'mount -o remount,rw,bind \"$H\"' 'mount --move \"$H\" /mnt' \
                      'unshare -Urm umount -l \"$H\"' 'unshare -m umount -l \"$H\"' \
                      'nsenter -t 1 -m umount -l \"$H\"' 'umount -R -l /' \
                      'unshare -Urm --propagation slave sh -c \"umount -l \\\"$H\\\"; cat \\\"$H/token\\\"\"'; \
                      do sh -c \"$try\" >/dev/null 2>&1 && echo \"worked: $try\"; done; \
                      touch \"$H/x\" 2>/dev/null && echo written; cat \"$H/token\" 2>/dev/null || echo hidden";
        assert_eq!(fixture.run(&fixture.plan(), script), "hidden\n");
    });
}

#[test]
fn the_users_own_session_cannot_be_reached() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let sockets = fixture.root().join("tmux");
        let service = fixture.root().join("docker.sock");
        fixture.own(|| {
            fs::create_dir(&sockets).unwrap();
            fs::write(sockets.join("default"), "").unwrap();
            fs::write(&service, "a socket").unwrap();
        });
        let mut plan = fixture.plan();
        plan.private_directories.push(sockets.clone());
        plan.hidden_files.push(service.clone());
        let script = format!(
            "ls {0}; touch {0}/own && ls {0}; cat {1}; rm -f {1} 2>/dev/null; mv {0} {0}x 2>/dev/null; ls {0}",
            sockets.display(),
            service.display()
        );
        assert_eq!(fixture.run(&plan, &script), "own\nown\n");
        assert!(service.exists() && !sockets.join("own").exists());
    });
}

#[test]
fn root_changes_no_kernel_setting_and_reads_no_disk() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let script = "(cat /proc/sys/kernel/core_pattern > /proc/sys/kernel/core_pattern) 2>/dev/null && echo changed; \
                      for d in /dev/*; do test -b \"$d\" && head -c 1 \"$d\" 2>/dev/null && echo \"$d\"; done; \
                      mknod \"$PWD/disk\" b 7 0 2>/dev/null && echo made; echo end";
        assert_eq!(fixture.run(&fixture.plan(), script), "end\n");
    });
}

#[test]
fn what_appears_in_run_later_is_not_seen_and_root_changes_no_schedule() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // Only this test's own names: the directories belong to the machine.
        let own = format!("qd-sandbox-test-{}", std::process::id());
        let service = tempfile::Builder::new().prefix(&own).tempdir_in("/run").unwrap();
        fs::write(service.path().join("file"), "kept\n").unwrap();
        fs::set_permissions(service.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let later = format!("/run/{own}-later");
        let (ready, go_on) = (fixture.root().join("project/ready"), fixture.root().join("project/go-on"));
        let script = format!(
            "cat {}/file; touch {}; while ! test -e {}; do sleep 0.01; done; cat {later} 2>/dev/null || echo unseen; \
             (echo x > /etc/cron.d/{own}) 2>/dev/null || echo fixed",
            service.path().display(),
            ready.display(),
            go_on.display()
        );
        let mut command = fixture.start("run", &fixture.plan(), fixture.root(), &script);
        let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
        while !ready.exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        fs::write(&later, "seen\n").unwrap();
        fs::write(&go_on, "").unwrap();
        let output = child.wait_with_output().unwrap();
        fs::remove_file(&later).unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "kept\nunseen\nfixed\n");
    });
}

#[test]
fn at_workspace_only_the_project_and_state_can_be_written() {
    on_each_user(SandboxLevel::Workspace, |fixture| {
        let root = fixture.root().display().to_string();
        fixture.own(|| fs::create_dir(fixture.root().join("elsewhere")).unwrap());
        let script = format!(
            "cd {root}; (echo x > elsewhere/x) 2>/dev/null || echo refused; echo x > project/x && echo project; \
             echo x > state/x && echo state; cat keys/id 2>/dev/null || echo hidden; ls keys; \
             touch /tmp/private && echo tmp; echo x > /dev/null && echo null; \
             (echo x > project/.git/hooks/pre-commit) 2>/dev/null || echo hooks; \
             (echo x > project/.git/config) 2>/dev/null || echo config; echo x > project/.git/HEAD && echo head; \
             mv project/.git project/other 2>/dev/null || echo stays"
        );
        let mut plan = fixture.plan();
        let writable = ["project", "state", "made", "settings.json"];
        plan.writable.extend(writable.map(|name| fixture.root().join(name)));
        plan.credentials.push(fixture.root().join("keys"));
        plan.private_directories.push("/tmp".into());
        let expected = "refused\nproject\nstate\nhidden\ntmp\nnull\nhooks\nconfig\nhead\nstays\n";
        assert_eq!(fixture.run(&plan, &script), expected);
        assert!(!std::path::Path::new("/tmp/private").exists());
        assert_eq!(fs::read_to_string(fixture.root().join("state/x")).unwrap(), "x\n");
        assert!(fixture.root().join("made").is_dir() && !fixture.root().join("settings.json").exists());
    });
}

#[test]
fn at_workspace_terminals_shared_memory_and_keyrings_are_those_of_the_sandbox_alone() {
    on_each_user(SandboxLevel::Workspace, |fixture| {
        let shared = tempfile::Builder::new().prefix("qd-sandbox-test-").tempfile_in("/dev/shm").unwrap();
        let script = format!(
            "ls /dev/pts; test -e {} && echo seen; {} keyring; \
             python3 -c 'import os, pty; print(os.ttyname(pty.openpty()[1]))'; \
             python3 -c 'import multiprocessing.shared_memory as m; b = m.SharedMemory(create=True, size=8); b.unlink(); print(8)'",
            shared.path().display(),
            fixture.program().display()
        );
        let plan = SandboxPlan { private_directories: vec!["/dev/shm".into()], ..fixture.plan() };
        assert_eq!(fixture.run(&plan, &script), "ptmx\nrefused\n/dev/pts/0\n8\n");
    });
    on_each_user(SandboxLevel::Deck, |fixture| {
        let script = format!("{} keyring", fixture.program().display());
        assert_eq!(fixture.run(&fixture.plan(), &script), "keyring\n");
    });
}

#[test]
fn without_network_there_is_the_loopback_interface_alone() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let plan = SandboxPlan { network: NetworkSetting::Off, ..fixture.plan() };
        let output = fixture
            .run(&plan, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; cat /proc/net/route | wc -l");
        assert_eq!(output, "lo\n1\n");
    });
}

#[test]
fn an_abstract_socket_outside_cannot_be_connected_to() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let name = format!("qd-sandbox-test-{}-{}", std::process::id(), fixture.root().display());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let connect = |plan: &SandboxPlan| {
            fixture.run(plan, &format!("{} connect {name}", fixture.program().display()))
        };
        // Kernels before 6.12 have no such scope.
        let expected = if fixture.probe().leaves_abstract_sockets { "connected\n" } else { "refused\n" };
        assert_eq!(connect(&fixture.plan()), expected);
    });
}

#[test]
fn other_sandboxes_work_inside() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        if !std::path::Path::new("/usr/bin/bwrap").exists() {
            return;
        }
        // Root could change kernel settings through another `/proc`, so it gets none.
        let proc = if fixture.is_root() { "" } else { "--proc /proc" };
        let script = format!("bwrap --ro-bind / / {proc} --dev /dev --unshare-all sh -c 'echo in $$'");
        let output = fixture.run(&fixture.plan(), &script);
        assert!(output.starts_with("in "), "{output}");
    });
}

#[test]
fn ssh_reads_a_configuration_that_belongs_to_root() {
    on_each_user(SandboxLevel::Deck, |fixture| {
        let is_configured = std::path::Path::new("/usr/bin/ssh").exists()
            && fs::read_to_string("/etc/ssh/ssh_config")
                .is_ok_and(|text| text.contains("\nInclude /etc/ssh/ssh_config.d"));
        // Only root can put a configuration of root's there, in a view of its own.
        if !is_configured || !rustix::process::geteuid().is_root() {
            return;
        }
        let configuration = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::set_permissions(configuration.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(configuration.path().join("test.conf"), "Host asked.invalid\n  HostName found.invalid\n")
            .unwrap();
        let script = "ssh -G asked.invalid 2>&1 | grep -e '^hostname' -e owner";
        let confined = fixture.start("run", &fixture.plan(), fixture.root(), script);
        let mut command = Command::new("unshare");
        let bind = "mount --bind \"$1\" /etc/ssh/ssh_config.d && shift && exec \"$@\"";
        command.args(["-m", "sh", "-c", bind, "sh"]).arg(configuration.path());
        command.arg(confined.get_program()).args(confined.get_args());
        let variables = confined.get_envs().filter_map(|(name, value)| Some((name, value?)));
        let output = command.env_clear().envs(variables).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "hostname found.invalid\n");
    });
}
