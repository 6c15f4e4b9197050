//! Git for tests: repositories and commits in temporary directories. The user's configuration and the variables of a
//! surrounding git command have no effect.

use std::path::Path;
use std::process::Command;

const NAME: &str = "A Person";
const EMAIL: &str = "person@example.invalid";

/// Runs git in a directory and gives what it printed. Fails the test if git fails.
pub fn git(dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("GIT_")) {
        command.env_remove(name);
    }
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    for role in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{role}_NAME"), NAME).env(format!("GIT_{role}_EMAIL"), EMAIL);
    }
    let out = command.arg("-C").arg(dir).args(args).output().expect("git is installed");
    assert!(
        out.status.success(),
        "git {args:?}: {}\nconfiguration: {:?}",
        String::from_utf8_lossy(&out.stderr),
        std::fs::read_to_string(dir.join(".git/config"))
    );
    String::from_utf8(out.stdout).expect("git prints UTF-8").trim_end().to_owned()
}

/// Writes a file, commits everything and gives the commit.
pub fn commit(dir: &Path, file: &str, content: &str) -> String {
    std::fs::write(dir.join(file), content).expect("the file can be written");
    git(dir, &["add", "--all"]);
    git(dir, &["commit", "-q", "-m", file]);
    git(dir, &["rev-parse", "HEAD"])
}

/// Makes a repository in a directory, which may exist already, with one commit on `main`: seven lines in `a.txt`.
pub fn make_repository(dir: &Path) {
    std::fs::create_dir_all(dir).expect("the directory can be created");
    git(dir, &["init", "-q", "-b", "main"]);
    // For the commits of others, such as the daemon.
    git(dir, &["config", "user.name", NAME]);
    git(dir, &["config", "user.email", EMAIL]);
    commit(dir, "a.txt", "one\ntwo\nthree\nfour\nfive\nsix\nseven\n");
}
