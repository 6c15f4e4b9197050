//! An ordinary user, who runs the daemon of a test although root runs the tests. Everything that the test needs is given to
//! the user, and the daemon is started from a copy of the program, because the user cannot read what is below root's home
//! directory. If an ordinary user runs the tests, that is the user, and nothing changes hands.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::home::{TestHome, binary};

/// Users that most machines have and that own no processes.
const CANDIDATES: [&str; 3] = ["games", "news", "nobody"];

#[derive(Debug, Clone)]
pub struct OrdinaryUser {
    /// The name and group of the user; `None` if that is who runs the tests.
    account: Option<(String, String)>,
    /// Folders that the user must be able to read, wherever they are.
    readable: Vec<PathBuf>,
    /// Lines of shell that root runs first, where nobody else sees what they mount.
    preparation: Vec<String>,
}

impl OrdinaryUser {
    /// `None` if root runs the tests on a machine without such a user.
    pub fn find() -> Option<Self> {
        let account = match rustix::process::getuid().is_root() {
            true => Some(find_account()?),
            false => None,
        };
        Some(Self { account, readable: Vec::new(), preparation: Vec::new() })
    }

    /// Whether this is another user than the one who runs the tests.
    pub fn is_other(&self) -> bool {
        self.account.is_some()
    }

    /// Lets the user read a folder, even if it is below a directory that the user cannot enter.
    #[must_use]
    pub fn reading(mut self, folder: &Path) -> Self {
        self.readable.push(folder.to_owned());
        self
    }

    /// Has root run a line of shell before the daemon starts. What it mounts is seen by this daemon alone. Nothing is run
    /// if an ordinary user runs the tests.
    #[must_use]
    pub fn prepared_by(mut self, line: &str) -> Self {
        self.preparation.push(line.to_owned());
        self
    }

    /// A command that becomes the user; empty if that is who runs the tests.
    pub fn command(&self) -> Vec<String> {
        let Some((name, group)) = &self.account else { return Vec::new() };
        let words = ["setpriv", &format!("--reuid={name}"), &format!("--regid={group}"), "--clear-groups"];
        words.map(str::to_owned).to_vec()
    }

    /// Gives the user a path and everything below it.
    pub fn give(&self, path: &Path) {
        let Some((name, group)) = &self.account else { return };
        let given = Command::new("chown").args(["-R", "-h", &format!("{name}:{group}")]).arg(path).status();
        assert!(given.expect("there is a chown").success(), "{} cannot be given to {name}", path.display());
    }

    /// Gives the user everything of a test, and a copy of the program. Returns a command that starts the daemon as the
    /// user; it takes the path of the program itself as its first argument, and ignores it.
    pub(crate) fn prepare_daemon(&self, home: &TestHome) -> Vec<String> {
        if !self.is_other() {
            return Vec::new();
        }
        let (program, spare) = (home.sibling_path("qd"), home.sibling_path("spare"));
        if !program.exists() {
            std::fs::copy(binary(), &program).expect("the program can be copied");
            std::fs::create_dir(&spare).expect("a fresh directory takes a directory");
        }
        self.give(&home.sibling_path(""));
        let mut lines = vec!["set -e; shift".to_owned()];
        lines.extend(self.readable.iter().filter_map(|folder| uncover(folder, &spare)));
        lines.extend(self.preparation.clone());
        let needs_mounts = lines.len() > 1;
        lines.push(format!("exec {} {} \"$@\"", self.command().join(" "), program.display()));
        let shell = ["sh", "-c", &lines.join("\n"), "sh"].map(str::to_owned);
        let unshare = ["unshare", "--mount"].map(str::to_owned);
        unshare.into_iter().filter(|_| needs_mounts).chain(shell).collect()
    }
}

/// The first of the candidates that this machine has, with its group.
fn find_account() -> Option<(String, String)> {
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    CANDIDATES.into_iter().find_map(|name| {
        let line = passwd.lines().find(|line| line.starts_with(&format!("{name}:")))?;
        Some((name.to_owned(), line.split(':').nth(3)?.to_owned()))
    })
}

/// Lines of shell that make a folder visible to everybody, if a directory above it is closed: an empty directory covers
/// that one, and only the folder comes back.
fn uncover(folder: &Path, spare: &Path) -> Option<String> {
    let is_closed = |path: &&Path| {
        std::fs::metadata(path).is_ok_and(|metadata| metadata.permissions().mode() & 0o001 == 0)
    };
    let closed = folder.ancestors().skip(1).filter(is_closed).last()?;
    let (folder, closed, spare) = (folder.display(), closed.display(), spare.display());
    Some(format!(
        "mount --bind '{folder}' '{spare}'\nmount -t tmpfs -o mode=755 none '{closed}'\n\
         mkdir -p '{folder}'\nmount --move '{spare}' '{folder}'"
    ))
}
