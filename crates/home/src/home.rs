//! The home of a daemon: where everything that it stores is, and the folders, which nobody else can enter. Only paths
//! and folders are here; `secrets` has what the files contain. All of it blocks for a disk access or two; async callers
//! go through `spawn_blocking`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use qd_protocol::SessionId;

use crate::config::user_config_file;
use crate::private_files::{HomeError, io_error, prepare_private_folder};

/// The folder where a daemon stores everything. Creating this value touches nothing on disk; [`DaemonHome::prepare`]
/// does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonHome {
    path: PathBuf,
}

impl DaemonHome {
    /// `--home`, else `QD_HOME`, else `quarterdeck` in the XDG data directory.
    pub fn resolve(explicit: Option<PathBuf>) -> Self {
        Self::resolve_from(explicit, |name| std::env::var_os(name))
    }

    /// Like [`Self::resolve`], with the environment given. A relative path is resolved against the current directory
    /// now, because a daemon in the background runs in another one.
    fn resolve_from(explicit: Option<PathBuf>, var: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let path = explicit.or_else(|| set("QD_HOME")).or_else(|| {
            // The XDG specification says to ignore relative paths in its variables.
            let data = set("XDG_DATA_HOME").filter(|path| path.is_absolute());
            let data = data.or_else(|| Some(user_directory(&var)?.join(".local/share")));
            data.map(|data| data.join("quarterdeck"))
        });
        // An empty path means that no home was found: `prepare` reports it.
        let path = path.map(|path| std::path::absolute(&path).unwrap_or(path)).unwrap_or_default();
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket that the daemon listens on by default.
    pub fn socket(&self) -> PathBuf {
        self.path.join("qd.sock")
    }

    pub fn token_file(&self) -> PathBuf {
        self.path.join("token")
    }

    /// The folder of the daemon's and the workers' logs.
    pub fn log(&self) -> PathBuf {
        self.path.join("log")
    }

    /// The folder of the sessions' variables and tokens.
    pub fn secrets(&self) -> PathBuf {
        self.path.join("secrets")
    }

    /// The folder of texts too large for an event, each named by its hash.
    pub fn blobs(&self) -> PathBuf {
        self.path.join("blobs")
    }

    /// The folder of the certificate that `--tls self` creates.
    pub fn tls(&self) -> PathBuf {
        self.path.join("tls")
    }

    /// The folder in which the workers of this machine have their records, sockets and spools.
    pub fn workers(&self) -> PathBuf {
        self.path.join("workers")
    }

    /// The folder of the sessions' git worktrees, each named by its session's id.
    pub fn worktrees(&self) -> PathBuf {
        self.path.join("worktrees")
    }

    /// The folder of our records about worktrees and their repositories. No agent may write there.
    pub fn git(&self) -> PathBuf {
        self.path.join("git")
    }

    /// The hashes of the tokens with which processes on other machines join.
    pub fn worker_tokens(&self) -> PathBuf {
        self.path.join("worker_tokens.json")
    }

    /// The hashes of the tokens of clients, with their roles.
    pub fn client_tokens(&self) -> PathBuf {
        self.path.join("client_tokens.json")
    }

    /// The folder in which `qd worker join` has the spools of agents that it holds for other daemons.
    pub fn joined_spools(&self) -> PathBuf {
        self.path.join("joined")
    }

    /// The folders with the user's own agent manifests. Later folders win.
    pub fn agent_folders(&self) -> Vec<PathBuf> {
        let user = user_config_file().map(|file| file.with_file_name(qd_catalog::AGENTS_FOLDER));
        user.into_iter().chain([self.path.join(qd_catalog::AGENTS_FOLDER)]).collect()
    }

    /// The list of projects whose own agents and hooks are trusted.
    pub fn trust_file(&self) -> PathBuf {
        self.path.join("trust.json")
    }

    /// The folder with the configuration of agents that do not use the user's own.
    pub fn isolated_agents(&self) -> PathBuf {
        self.path.join("isolated")
    }

    /// The folder with the files that make agents ask before they act.
    pub fn policy_files(&self) -> PathBuf {
        self.path.join("policy")
    }

    /// The folder in which programs without HTTP leave mail for sessions.
    pub fn mail(&self) -> PathBuf {
        self.path.join("mail")
    }

    /// The folder with one [tool directory](Self::tool_directory) per session.
    pub fn tools(&self) -> PathBuf {
        self.path.join("tools")
    }

    /// The folder with the socket and the token with which the agent of a session reaches us. It is the only part of the
    /// home that every agent sees, and it stays as long as its session is open: a sandbox shows the folder itself.
    pub fn tool_directory(&self, session: &SessionId) -> PathBuf {
        self.tools().join(session.as_str())
    }

    /// When the user last looked at each daemon.
    pub fn last_looks_file(&self) -> PathBuf {
        self.path.join("last_looks.json")
    }

    /// The settings file of this home.
    pub fn config_file(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// Creates the home and its folders with mode 0700, or tightens the mode of existing ones.
    pub fn prepare(&self) -> Result<(), HomeError> {
        if self.path.as_os_str().is_empty() {
            return Err(HomeError::NoUserDirectory);
        }
        if let Some(parent) = self.path.parent() {
            // The folders above are not ours alone (`~/.local/share`): they get the user's default mode.
            fs::create_dir_all(parent).map_err(|source| io_error(parent, "create", source))?;
        }
        prepare_private_folder(&self.path)?;
        let folders = [
            self.log(),
            self.secrets(),
            self.blobs(),
            self.tls(),
            self.workers(),
            self.worktrees(),
            self.git(),
            self.mail(),
            self.tools(),
        ];
        for folder in folders {
            prepare_private_folder(&folder)?;
        }
        Ok(())
    }
}

pub(crate) fn user_directory(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let from_env = var("HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    from_env.or_else(|| std::env::home_dir().filter(|path| path.is_absolute()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::private_files::check_owner;
    use crate::test_home::{mode, prepared_home};

    #[test]
    fn the_home_is_named_by_flag_then_variable_then_the_data_directory() {
        let resolve = |explicit: Option<&str>, env: &[(&str, &str)]| {
            let env: BTreeMap<String, OsString> =
                env.iter().map(|(name, value)| (name.to_string(), OsString::from(value))).collect();
            DaemonHome::resolve_from(explicit.map(PathBuf::from), |name| env.get(name).cloned()).path
        };
        let all = [("QD_HOME", "/q"), ("XDG_DATA_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(resolve(Some("/e"), &all), Path::new("/e"));
        assert_eq!(resolve(None, &all), Path::new("/q"));
        assert_eq!(resolve(None, &all[1..]), Path::new("/x/quarterdeck"));
        assert_eq!(resolve(None, &all[2..]), Path::new("/h/.local/share/quarterdeck"));
        assert_eq!(
            resolve(None, &[("QD_HOME", ""), ("XDG_DATA_HOME", "x"), ("HOME", "/h")]),
            Path::new("/h/.local/share/quarterdeck"),
            "empty and relative values count as unset"
        );
        assert_eq!(resolve(Some("here"), &[]), std::env::current_dir().unwrap().join("here"));
    }

    #[test]
    fn a_home_and_its_folders_are_readable_by_their_owner_only() {
        let (_folder, home) = prepared_home();
        for path in [home.path().to_owned(), home.log(), home.secrets(), home.blobs(), home.tls()] {
            assert_eq!(mode(&path), 0o700, "{path:?}");
        }
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(home.log(), fs::Permissions::from_mode(0o750)).unwrap();
        home.prepare().unwrap();
        assert_eq!((mode(home.path()), mode(home.log())), (0o700, 0o700), "a looser mode is tightened");
        fs::set_permissions(home.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(
            matches!(home.prepare(), Err(HomeError::WrongKind { .. })),
            "a folder like /tmp is left alone"
        );
    }

    #[test]
    fn a_home_of_somebody_else_is_refused() {
        let (_folder, home) = prepared_home();
        let stranger = rustix::process::geteuid().as_raw() + 1;
        // Only root can give a folder away; other users test the rule alone.
        if std::os::unix::fs::chown(home.path(), Some(stranger), None).is_ok() {
            let error = home.prepare().unwrap_err();
            assert!(matches!(error, HomeError::NotOurs { owner, .. } if owner == stranger), "{error}");
            assert!(error.to_string().contains("--home DIR"), "{error}");
        }
        assert!(matches!(check_owner(home.path(), stranger), Err(HomeError::NotOurs { .. })));
    }

    #[test]
    fn a_file_in_the_place_of_the_home_is_a_clear_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("home");
        fs::write(&path, "").unwrap();
        let error = DaemonHome::resolve(Some(path.clone())).prepare().unwrap_err();
        assert_eq!(error.to_string(), format!("{} is not a directory", path.display()));
        assert!(matches!(DaemonHome { path: PathBuf::new() }.prepare(), Err(HomeError::NoUserDirectory)));
    }
}
