//! What surrounds a hostile agent: a project, a user's home directory, the programs of both sides, and the processes that
//! run outside the agent as the same user. The user may be another than the one who runs the tests.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use qd_testkit::git::make_repository;
use qd_testkit::home::{binary, signal};
use qd_testkit::processes::all_processes;
use qd_testkit::{OrdinaryUser, TestHome};
use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::table::AttackUser;
use super::{ATTACK_LIMIT, ROOT_SECRET};

/// The programs of both sides.
const SCRIPTS: [(&str, &str); 9] = [
    ("attack_daemon.py", include_str!("attack_daemon.py")),
    ("attack_files.py", include_str!("attack_files.py")),
    ("attack_processes.py", include_str!("attack_processes.py")),
    ("attack_system.py", include_str!("attack_system.py")),
    ("attack_tools.py", include_str!("attack_tools.py")),
    ("attacker.py", include_str!("attacker.py")),
    ("kernel.py", include_str!("kernel.py")),
    ("machine.py", include_str!("machine.py")),
    ("outside.py", include_str!("outside.py")),
];

pub(super) struct HostileWorld {
    /// Everything of the test is below it.
    root: PathBuf,
    /// A command that becomes the user; empty if that is who runs the tests.
    become_user: Vec<String>,
    pub(super) python: PathBuf,
    /// A copy of the binary that the user can run.
    pub(super) qd: PathBuf,
    /// In the project, because a confined agent sees no other files of the temporary directory.
    pub(super) scripts: PathBuf,
    pub(super) runtime: PathBuf,
    /// Folder for what is neither in the project nor in a home.
    pub(super) folder: PathBuf,
    pub(super) facts: PathBuf,
    /// In the project, because the attacker must be able to write there at every level.
    pub(super) out: PathBuf,
}

impl HostileWorld {
    /// `None` if this machine has no such user, or no Python for it.
    pub(super) fn make(home: &TestHome, user: AttackUser) -> Option<Self> {
        let is_root = rustix::process::getuid().is_root();
        let become_user = match (user, is_root) {
            (AttackUser::Root, true) => Vec::new(),
            (AttackUser::Ordinary, _) => OrdinaryUser::find()?.command(),
            (AttackUser::Root, false) => return None,
        };
        let project = home.project_dir();
        let world = Self {
            python: find_python(&become_user)?,
            become_user,
            qd: home.sibling_path("qd"),
            scripts: project.join("attack-scripts"),
            runtime: home.sibling_path("runtime"),
            folder: home.sibling_path("world"),
            facts: project.join("facts.json"),
            out: project.join("out"),
            root: project.parent().expect("a project is in the test's folder").to_owned(),
        };
        make_repository(&project);
        for folder in [&world.out, &world.scripts, &world.runtime, &home.sibling_path("user")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        for folder in ["other-project", "mounted"] {
            std::fs::create_dir_all(world.folder.join(folder)).unwrap();
        }
        for (name, text) in SCRIPTS {
            std::fs::write(world.scripts.join(name), text).unwrap();
        }
        std::fs::copy(binary(), &world.qd).unwrap();
        world.give_to_user();
        Some(world)
    }

    /// Gives everything to the user, except a file and a setuid program of root's.
    fn give_to_user(&self) {
        let Some(user) = self.become_user.iter().find_map(|arg| arg.strip_prefix("--reuid=")) else { return };
        let owner =
            std::process::Command::new("chown").args(["-R", &format!("{user}:")]).arg(&self.root).status();
        assert!(owner.unwrap().success());
        let file = self.folder.join("root-file");
        std::fs::write(&file, ROOT_SECRET).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        let program = self.folder.join("setuid-cat");
        std::fs::copy("/bin/cat", &program).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o4755)).unwrap();
    }

    /// A command that starts the daemon as the user, from the copy. It is given the path of the original first.
    pub(super) fn daemon_wrapper(&self) -> Vec<String> {
        let script = format!("shift; exec {} {} \"$@\"", self.become_user.join(" "), self.qd.display());
        ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
    }

    /// Starts what is outside the agent.
    pub(super) fn start_outside(&self, config: &Value) -> OutsideProcess {
        let command: Vec<&str> = self.become_user.iter().map(String::as_str).collect();
        let (program, args) = match command.split_first() {
            Some((program, args)) => (*program, args.to_vec()),
            None => ("env", Vec::new()),
        };
        let mut child = Command::new(program)
            .args(args)
            .arg(&self.python)
            .arg(self.scripts.join("outside.py"))
            .env_remove("QD_MARK")
            .current_dir(&self.folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let input = child.stdin.take().unwrap();
        OutsideProcess { child, input, output, first: Some(config.to_string()) }
    }

    /// Kills, by pid, whatever of this test is left, such as a daemon that the attacker started.
    pub(super) fn end_processes(&self) {
        let root = self.root.display().to_string();
        let is_ours = |args: &[String]| args.iter().any(|arg| arg.starts_with(&root));
        for process in all_processes().iter().filter(|process| is_ours(&process.args)) {
            if !process.args.iter().any(|arg| arg.ends_with("outside.py")) {
                signal(process.pid, Signal::KILL);
            }
        }
    }
}

/// The processes outside the agent. It answers each line with a line, and cleans up when its input ends.
pub(super) struct OutsideProcess {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    /// The configuration, until it is sent.
    first: Option<String>,
}

impl OutsideProcess {
    /// Waits until it has cleaned up.
    pub(super) async fn end(self) {
        let Self { mut child, input, output: _, first: _ } = self;
        drop(input);
        tokio::time::timeout(ATTACK_LIMIT, child.wait()).await.expect("it ends").unwrap();
    }

    /// Sends a line, the configuration first, and gives the answer.
    pub(super) async fn exchange(&mut self, line: Option<&str>) -> Value {
        let line = self.first.take().or(line.map(str::to_owned)).expect("there is something to send");
        self.input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let answer =
            tokio::time::timeout(ATTACK_LIMIT, self.output.next_line()).await.expect("it answers").unwrap();
        serde_json::from_str(&answer.expect("it lives")).unwrap()
    }
}

/// A Python that the user can run. The first one in the path may be below root's home directory.
fn find_python(become_user: &[String]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let folders = std::env::split_paths(&path).chain(["/usr/bin".into(), "/usr/local/bin".into()]);
    let runs = |python: &Path| {
        let python = python.display().to_string();
        let words: Vec<&str> =
            become_user.iter().map(String::as_str).chain([python.as_str(), "-c", ""]).collect();
        std::process::Command::new(words[0])
            .args(&words[1..])
            .output()
            .is_ok_and(|ended| ended.status.success())
    };
    folders.map(|folder| folder.join("python3")).find(|python| runs(python))
}
