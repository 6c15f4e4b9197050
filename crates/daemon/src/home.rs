//! The home of a daemon: the paths of everything it stores, and the permissions. Folders and files are created with
//! their final mode, so nothing is ever readable by others, not even for a moment. All of it blocks for a disk access
//! or two; async callers go through `spawn_blocking`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use qd_protocol::SessionId;
use rustix::fs::OFlags;

/// Bytes of randomness in a token.
const TOKEN_BYTES: usize = 32;
/// A token that a person wrote to the file must have at least this length, or it could be guessed.
const TOKEN_CHARS_MIN: usize = 32;
/// The longest token; a larger file is not a token file.
const TOKEN_CHARS_MAX: usize = 1024;

/// The folder where a daemon stores everything. Creating this value touches nothing on disk; [`DaemonHome::prepare`]
/// does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonHome {
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// No home was given, and the user has no home directory.
    #[error("this user has no home directory; choose a home with --home DIR or QD_HOME")]
    NoUserDirectory,
    /// Another user owns it, and could read or replace its content.
    #[error("{path} belongs to user {owner}, not to you; choose another with --home DIR")]
    NotOurs { path: PathBuf, owner: u32 },
    /// There is a file or folder of another kind at this path.
    #[error("{path} is not {kind}")]
    WrongKind {
        path: PathBuf,
        /// What should be there, as in "a directory".
        kind: &'static str,
    },
    #[error(
        "{path} does not contain a token of at least {TOKEN_CHARS_MIN} characters; remove it to get a new one"
    )]
    BadToken { path: PathBuf },
    /// The stored variables of a session are not valid JSON.
    #[error("{path} does not contain valid variables: {source}")]
    BadEnv { path: PathBuf, source: serde_json::Error },
    /// The stored worker tokens are not valid JSON.
    #[error(
        "{path} does not contain valid worker tokens: {source}; remove it and create new ones with `qd workers token`"
    )]
    BadTokens { path: PathBuf, source: serde_json::Error },
    /// A file system operation failed.
    #[error("could not {action} {path}: {source}")]
    Io {
        /// The verb, as in "could not open".
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// A bearer token. It cannot leak into a log, because its debug form hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretToken(String);

impl SecretToken {
    /// The token itself, for the header or comparison that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let valid_length = (TOKEN_CHARS_MIN..=TOKEN_CHARS_MAX).contains(&text.len());
        (valid_length && text.bytes().all(|b| b.is_ascii_graphic())).then(|| Self(text.to_owned()))
    }
}

impl fmt::Debug for SecretToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(hidden)")
    }
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

    /// The hashes of the tokens with which processes on other machines join.
    pub fn worker_tokens(&self) -> PathBuf {
        self.path.join("worker_tokens.json")
    }

    /// The folder in which `qd worker join` has the spools of agents that it holds for other daemons.
    pub fn joined_spools(&self) -> PathBuf {
        self.path.join("joined")
    }

    /// The folders with the user's own agent manifests. Later folders win.
    pub fn agent_folders(&self) -> Vec<PathBuf> {
        let user =
            crate::config::user_config_file().map(|file| file.with_file_name(qd_catalog::AGENTS_FOLDER));
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

    /// The folder in which programs without HTTP leave mail for sessions.
    pub fn mail(&self) -> PathBuf {
        self.path.join("mail")
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
            self.mail(),
        ];
        for folder in folders {
            prepare_private_folder(&folder)?;
        }
        Ok(())
    }

    /// The bearer token, created on the first call.
    pub fn token(&self) -> Result<SecretToken, HomeError> {
        Self::load_or_create_secret(&self.token_file(), "")
    }

    /// The key that the workers' secrets are derived from, created on the first call.
    pub fn worker_key(&self) -> Result<SecretToken, HomeError> {
        Self::load_or_create_secret(&self.workers().join("key"), "")
    }

    /// Writes the key of the running daemon again if somebody has removed it, or the folder that it is in. Otherwise
    /// the next daemon would make another key, and could not reach the workers of this one.
    pub(crate) fn restore_worker_key(&self, key: &SecretToken) -> Result<(), HomeError> {
        let path = self.workers().join("key");
        if fs::exists(&path).unwrap_or(false) {
            return Ok(());
        }
        prepare_private_folder(&self.workers())?;
        match create_file_if_absent(&path, key.expose().as_bytes()) {
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            written => written,
        }
    }

    fn load_or_create_secret(path: &Path, prefix: &str) -> Result<SecretToken, HomeError> {
        loop {
            match open_private(path) {
                Ok(file) => return read_token(path, file),
                Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            let mut random = [0; TOKEN_BYTES];
            getrandom::fill(&mut random).map_err(|error| {
                io_error(path, "draw a random token for", io::Error::other(error.to_string()))
            })?;
            let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
            let text = format!("{prefix}{text}");
            match create_file_if_absent(path, text.as_bytes()) {
                // Another process was faster, and its token is the one.
                Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(()) => return Ok(SecretToken(text)),
            }
        }
    }

    /// Stores the values of a session's variables with mode 0600, synced before it returns.
    pub fn store_session_env(
        &self,
        session: &SessionId,
        env: &BTreeMap<String, String>,
    ) -> Result<(), HomeError> {
        if env.is_empty() {
            return self.remove_session_secrets(session);
        }
        let path = self.session_env_file(session);
        let text =
            serde_json::to_vec(env).map_err(|source| HomeError::BadEnv { path: path.clone(), source })?;
        replace_file(&path, &text)
    }

    /// The values of a session's variables; empty if it has none.
    pub fn session_env(&self, session: &SessionId) -> Result<BTreeMap<String, String>, HomeError> {
        let path = self.session_env_file(session);
        let mut text = Vec::new();
        match open_private(&path) {
            Ok(mut file) => file.read_to_end(&mut text).map_err(|source| io_error(&path, "read", source))?,
            Err(HomeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(BTreeMap::new());
            }
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&text).map_err(|source| HomeError::BadEnv { path, source })
    }

    /// Removes the values of a session's variables, and its token.
    pub fn remove_session_secrets(&self, session: &SessionId) -> Result<(), HomeError> {
        remove_file_if_present(&self.session_env_file(session))?;
        self.remove_session_token(session)
    }

    /// Removes the token of a session, so that the next call of [`Self::session_token`] creates another.
    pub(crate) fn remove_session_token(&self, session: &SessionId) -> Result<(), HomeError> {
        remove_file_if_present(&self.session_token_file(session))
    }

    /// The token of a session, which begins with its id and a dot; created on the first call.
    pub fn session_token(&self, session: &SessionId) -> Result<SecretToken, HomeError> {
        Self::load_or_create_secret(&self.session_token_file(session), &format!("{session}."))
    }

    /// The token of a session, if it has one.
    pub fn existing_session_token(&self, session: &SessionId) -> Option<SecretToken> {
        let path = self.session_token_file(session);
        read_token(&path, open_private(&path).ok()?).ok()
    }

    pub fn session_token_file(&self, session: &SessionId) -> PathBuf {
        self.secrets().join(format!("{session}.token"))
    }

    /// A session id begins with a letter or digit and contains no slash, so the path cannot leave the folder.
    fn session_env_file(&self, session: &SessionId) -> PathBuf {
        self.secrets().join(format!("{session}.json"))
    }
}

fn remove_file_if_present(path: &Path) -> Result<(), HomeError> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder_of(path),
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(io_error(path, "remove", source)),
    }
}

/// Writes `content` to `path` with mode 0600, replacing what was there. A reader finds either the old or the new
/// content, complete, even after a power cut.
pub(crate) fn replace_file(path: &Path, content: &[u8]) -> Result<(), HomeError> {
    let draft = write_draft(path, content)?;
    let renamed = fs::rename(&draft, path).map_err(|source| io_error(path, "write", source));
    if renamed.is_err() {
        drop(fs::remove_file(&draft));
    }
    renamed.and_then(|()| sync_folder_of(path))
}

/// Opens a file that must be ours and readable by nobody else; a looser mode is tightened.
pub(crate) fn open_private(path: &Path) -> Result<File, HomeError> {
    let nofollow = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nofollow.bits().cast_signed())
        .open(path)
        .map_err(|source| io_error(path, "open", source))?;
    tighten_mode(path, &file, 0o600)?;
    Ok(file)
}

pub(crate) fn user_directory(var: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let from_env = var("HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    from_env.or_else(|| std::env::home_dir().filter(|path| path.is_absolute()))
}

/// Writes `content` to `path` with mode 0600, unless something is there. Linking a finished file is as exclusive as
/// `O_EXCL`, and no reader ever finds half a token.
fn create_file_if_absent(path: &Path, content: &[u8]) -> Result<(), HomeError> {
    let draft = write_draft(path, content)?;
    let linked = fs::hard_link(&draft, path).map_err(|source| io_error(path, "create", source));
    drop(fs::remove_file(&draft));
    linked.and_then(|()| sync_folder_of(path))
}

/// Writes a synced file with this content beside `path`, under a unique name.
fn write_draft(path: &Path, content: &[u8]) -> Result<PathBuf, HomeError> {
    let mut random = [0; 8];
    getrandom::fill(&mut random)
        .map_err(|error| io_error(path, "draw a random name for", io::Error::other(error.to_string())))?;
    let draft = path.with_file_name(format!(".draft-{:016x}", u64::from_ne_bytes(random)));
    let written =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        });
    match written {
        Ok(()) => Ok(draft),
        Err(source) => {
            drop(fs::remove_file(&draft));
            Err(io_error(path, "write", source))
        }
    }
}

fn sync_folder_of(path: &Path) -> Result<(), HomeError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|source| io_error(folder, "sync", source))
}

fn read_token(path: &Path, file: File) -> Result<SecretToken, HomeError> {
    let mut text = String::new();
    let limit = u64::try_from(TOKEN_CHARS_MAX).expect("a small number") + 2;
    match file.take(limit).read_to_string(&mut text) {
        Ok(_) => SecretToken::parse(&text).ok_or_else(|| HomeError::BadToken { path: path.to_owned() }),
        Err(source) if source.kind() == io::ErrorKind::InvalidData => {
            Err(HomeError::BadToken { path: path.to_owned() })
        }
        Err(source) => Err(io_error(path, "read", source)),
    }
}

fn prepare_private_folder(path: &Path) -> Result<(), HomeError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(source) if source.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(io_error(path, "create", source)),
    }
    let open = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits().cast_signed()).open(path);
    match open {
        Ok(folder) => tighten_mode(path, &folder, 0o700),
        Err(source) if source.kind() == io::ErrorKind::NotADirectory => {
            Err(HomeError::WrongKind { path: path.to_owned(), kind: "a directory" })
        }
        // Not even its owner may read it: set the mode by name, and report the open error if that fails.
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => {
            let metadata = fs::metadata(path).map_err(|source| io_error(path, "inspect", source))?;
            check_owner(path, metadata.uid())?;
            fs::set_permissions(path, fs::Permissions::from_mode(0o700))
                .map_err(|_| io_error(path, "open", source))
        }
        Err(source) => Err(io_error(path, "open", source)),
    }
}

/// Checks the owner and tightens the mode of an open file, not of a name, so that nobody can swap it in between.
fn tighten_mode(path: &Path, open: &File, mode: u32) -> Result<(), HomeError> {
    let metadata = open.metadata().map_err(|source| io_error(path, "inspect", source))?;
    check_owner(path, metadata.uid())?;
    if mode == 0o600 && !metadata.is_file() {
        return Err(HomeError::WrongKind { path: path.to_owned(), kind: "a regular file" });
    }
    if metadata.permissions().mode() & 0o1000 != 0 {
        // A folder such as /tmp: tightening it would lock everybody else out.
        return Err(HomeError::WrongKind {
            path: path.to_owned(),
            kind: "a folder of your own: all users share it",
        });
    }
    if metadata.permissions().mode() & 0o7777 != mode {
        open.set_permissions(fs::Permissions::from_mode(mode))
            .map_err(|source| io_error(path, "tighten the mode of", source))?;
    }
    Ok(())
}

fn check_owner(path: &Path, owner: u32) -> Result<(), HomeError> {
    if owner == rustix::process::geteuid().as_raw() {
        Ok(())
    } else {
        Err(HomeError::NotOurs { path: path.to_owned(), owner })
    }
}

fn io_error(path: &Path, action: &'static str, source: io::Error) -> HomeError {
    HomeError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home() -> (tempfile::TempDir, DaemonHome) {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().join("a/b/home")));
        home.prepare().unwrap();
        (folder, home)
    }

    fn mode(path: impl AsRef<Path>) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

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
        let (_folder, home) = home();
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
        let (_folder, home) = home();
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

    #[test]
    fn a_token_is_made_once_and_kept_private() {
        let (_folder, home) = home();
        let token = home.token().unwrap();
        assert_eq!(token.expose().len(), 64);
        assert!(token.expose().bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(mode(home.token_file()), 0o600);
        fs::set_permissions(home.token_file(), fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(home.token().unwrap(), token);
        assert_eq!(mode(home.token_file()), 0o600, "a looser mode is tightened");
        assert!(!format!("{token:?}").contains(token.expose()));
        let files = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().path());
        let files: Vec<_> = files.filter(|path| path.is_file()).collect();
        assert_eq!(files, [home.token_file()], "no draft is left behind");
    }

    #[test]
    fn many_first_starts_at_once_agree_on_one_token() {
        let (_folder, home) = home();
        let tokens: Vec<SecretToken> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| home.token().unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(tokens.iter().all(|token| *token == tokens[0]));
    }

    #[test]
    fn a_token_file_that_holds_no_token_is_an_error_and_a_link_is_not_followed() {
        let (folder, home) = home();
        for text in ["", "short", "with a space in the middle of it, and long enough", &"x".repeat(5000)] {
            fs::write(home.token_file(), text).unwrap();
            assert!(matches!(home.token(), Err(HomeError::BadToken { .. })), "{text}");
        }
        fs::remove_file(home.token_file()).unwrap();
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, "a".repeat(64)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, home.token_file()).unwrap();
        assert!(home.token().is_err());
    }

    #[test]
    fn variables_of_a_session_are_kept_apart_and_forgotten_on_demand() {
        let (_folder, home) = home();
        let session = SessionId::parse("ses_1").unwrap();
        assert!(home.session_env(&session).unwrap().is_empty());
        let env = BTreeMap::from([("KEY".to_owned(), "canary\n\"ä".to_owned())]);
        home.store_session_env(&session, &env).unwrap();
        assert_eq!(home.session_env(&session).unwrap(), env);
        assert_eq!(mode(home.secrets().join("ses_1.json")), 0o600);
        let other = BTreeMap::from([("KEY".to_owned(), "other".to_owned())]);
        home.store_session_env(&session, &other).unwrap();
        assert_eq!(home.session_env(&session).unwrap(), other);
        assert!(home.existing_session_token(&session).is_none());
        let token = home.session_token(&session).unwrap();
        assert_eq!(home.existing_session_token(&session), Some(token));
        assert_eq!(mode(home.secrets().join("ses_1.token")), 0o600);
        home.remove_session_secrets(&session).unwrap();
        home.remove_session_secrets(&session).unwrap();
        assert!(home.session_env(&session).unwrap().is_empty());
        assert_eq!(fs::read_dir(home.secrets()).unwrap().count(), 0);
    }
}
