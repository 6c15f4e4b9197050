//! A home, a project and the user that a sandbox is made for.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use qd_protocol::sandbox::SandboxLevel;
use qd_protocol::sandbox_spec::SandboxSupport;
use qd_sandbox::SandboxPlan;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sandbox-under-test");
/// An ordinary user that every system has. Not `nobody`: to it, files of users that do not exist inside would be its own.
const DAEMON: u32 = 1;

/// Who makes the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TestUser {
    Present,
    /// Only root can become another user.
    Ordinary,
}

#[derive(Debug)]
pub(crate) struct Fixture {
    user: TestUser,
    level: SandboxLevel,
    folder: tempfile::TempDir,
}

/// Runs a test as each user that this process can be. Where the machine cannot give the level, a start must fail with
/// the reason that the probe gives.
#[track_caller]
pub(crate) fn on_each_user(level: SandboxLevel, test: impl Fn(&Fixture)) {
    let is_root = rustix::process::geteuid().is_root();
    let users = if is_root { vec![TestUser::Present, TestUser::Ordinary] } else { vec![TestUser::Present] };
    for user in users {
        let fixture = Fixture::new(user, level);
        let support = fixture.probe();
        if support.strongest >= level {
            test(&fixture);
        } else {
            let missing = support.missing.expect("a level that cannot be had has a reason");
            let output = fixture.start("run", &fixture.plan(), Path::new("/"), "true").output().unwrap();
            let output = String::from_utf8(output.stdout).unwrap();
            assert!(output.starts_with("no sandbox: "), "{user:?}: {missing}, but it started: {output}");
        }
    }
}

impl Fixture {
    fn new(user: TestUser, level: SandboxLevel) -> Self {
        let folder = tempfile::Builder::new().prefix("qdsb").tempdir_in("/var/tmp").unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::copy(PROGRAM, folder.path().join("program")).unwrap();
        let fixture = Self { user, level, folder };
        fixture.own(|| {
            let root = fixture.root();
            for path in [
                "home/worktrees/mine",
                "home/worktrees/theirs",
                "home/mail/mine",
                "home/tools/mine",
                "home/log",
            ] {
                fs::create_dir_all(root.join(path)).unwrap();
            }
            for path in ["project/.git", "state", "keys"] {
                fs::create_dir_all(root.join(path)).unwrap();
            }
            fs::write(root.join("home/token"), "secret\n").unwrap();
            fs::write(root.join("home/tools/mine/token"), "session token\n").unwrap();
            fs::write(root.join("project/.git/config"), "").unwrap();
            fs::write(root.join("keys/id"), "key\n").unwrap();
        });
        fixture
    }

    pub(crate) fn is_root(&self) -> bool {
        self.user == TestUser::Present && rustix::process::geteuid().is_root()
    }

    pub(crate) fn root(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.root().join("home")
    }

    /// The program that serves these tests, where every user can start it.
    pub(crate) fn program(&self) -> PathBuf {
        self.root().join("program")
    }

    /// Makes files that then belong to the user.
    pub(crate) fn own(&self, make: impl FnOnce()) {
        make();
        if self.user == TestUser::Ordinary {
            let owner = format!("{DAEMON}:{DAEMON}");
            let status = Command::new("chown").args(["-R", &owner]).arg(self.root()).status().unwrap();
            assert!(status.success());
        }
    }

    pub(crate) fn plan(&self) -> SandboxPlan {
        let home = self.home();
        SandboxPlan {
            level: self.level,
            workspace: self.root().join("project"),
            writable: vec![home.join("worktrees/mine"), home.join("mail/mine")],
            readable: vec![home.join("tools/mine")],
            home,
            ..SandboxPlan::default()
        }
    }

    /// What a shell in the sandbox prints.
    #[track_caller]
    pub(crate) fn run(&self, plan: &SandboxPlan, script: &str) -> String {
        self.run_in(plan, &self.home().join("worktrees/mine"), script)
    }

    #[track_caller]
    pub(crate) fn run_in(&self, plan: &SandboxPlan, cwd: &Path, script: &str) -> String {
        let Output { stdout, stderr, .. } = self.start("run", plan, cwd, script).output().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        String::from_utf8(stdout).unwrap() + &stderr
    }

    /// The command that starts a shell in the sandbox, in the way that the test's program calls `how`.
    pub(crate) fn start(&self, how: &str, plan: &SandboxPlan, cwd: &Path, script: &str) -> Command {
        let plan = serde_json::to_string(plan).unwrap();
        let mut command = self.command();
        command.args([how, &plan]).arg(cwd).args(["/bin/sh", "-c", script]);
        command.env("H", self.home());
        command
    }

    pub(crate) fn probe(&self) -> SandboxSupport {
        let output = self.command().args([qd_sandbox::SANDBOX_COMMAND, "probe"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The test's program, as the user.
    fn command(&self) -> Command {
        let mut command = match self.user {
            TestUser::Present => Command::new(self.program()),
            TestUser::Ordinary => {
                let user = DAEMON.to_string();
                let mut command = Command::new("setpriv");
                command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(self.program());
                command
            }
        };
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", self.root());
        command.current_dir("/").stdin(Stdio::null());
        command
    }
}
