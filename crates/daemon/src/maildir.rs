//! Mail folders, for programs without HTTP: `mail/SESSION/{tmp,new,cur,corrupt}` below the home. A file that is
//! written in `tmp` and renamed to `new` is a message, accepted once: it is identified by its id, or else by its name
//! and content, and moves to `cur` after it is journalled. A crash in between is harmless, because the next scan
//! finds the file again and the journal knows the message. A file that is not a message moves to `corrupt`, with the
//! reason beside it.
//!
//! An agent can write to the folders of its session, also from inside a sandbox, and put links in their place. Therefore
//! each folder is opened without following links, and files are only named within an open folder.
//!
//! Design: docs/design/mail-becomes-a-run.md

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use qd_home::DaemonHome;
use qd_journal::SessionFilter;
use qd_protocol::event::EventActor;
use qd_protocol::limits::{MAIL_FILE_MAX, MAIL_LOOK_S};
use qd_protocol::mail::{MailDelivery, MailKind};
use qd_protocol::{ApiError, ErrorCode, MailId, SessionId};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, mkdirat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use serde::Deserialize;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};

use crate::daemon::Daemon;
use crate::mail::{MailSender, OutgoingMail};

const TMP: &str = "tmp";
const NEW: &str = "new";
const CUR: &str = "cur";
const CORRUPT: &str = "corrupt";

/// A folder that was scanned and last changed longer ago than this has nothing new: no file system's clock is coarser.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
/// The longest file name that a file system takes.
const NAME_MAX: usize = 255;
/// The most bytes appended to the name of a corrupt file: a number and the suffix of its reason.
const SUFFIX_MAX: usize = 16;

/// Creates the mail folders of a session, each with mode 0700.
pub(crate) fn make_folders(home: &DaemonHome, session: &SessionId) -> io::Result<()> {
    let folder = home.mail().join(session.as_str());
    for path in [folder.clone()].into_iter().chain([TMP, NEW, CUR, CORRUPT].map(|name| folder.join(name))) {
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Removes the empty mail folders of a closed session; files in them stay.
pub(crate) fn remove_empty_folders(home: &DaemonHome, session: &SessionId) {
    let folder = home.mail().join(session.as_str());
    for name in [TMP, NEW, CUR, CORRUPT] {
        // A folder that is not empty or does not exist is fine.
        drop(fs::remove_dir(folder.join(name)));
    }
    drop(fs::remove_dir(folder));
}

/// Removes the mail folders of a purged session with their content, because `cur` has its messages too.
pub(crate) fn remove_folders(home: &DaemonHome, session: &SessionId) {
    let folder = home.mail().join(session.as_str());
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%session, %error, "could not remove the mail folder of a purged session");
        }
        Ok(()) | Err(_) => {}
    }
}

impl Daemon {
    /// Creates the mail folders of new sessions. A failure is not fatal: the session works without them, and the next
    /// start tries again.
    pub(crate) async fn make_mail_folders(&self, sessions: Vec<SessionId>) {
        let home = self.home.clone();
        let task = tokio::task::spawn_blocking(move || {
            for session in &sessions {
                if let Err(error) = make_folders(&home, session) {
                    tracing::warn!(%session, %error, "could not create the mail folders of a session");
                }
            }
        });
        // The task only fails when the daemon stops.
        drop(task.await);
    }

    /// Creates missing mail folders, then accepts mail from them periodically until the daemon stops.
    pub(crate) async fn watch_mail_folders(self: Arc<Self>) {
        let open = SessionFilter { open_only: true, ..SessionFilter::default() };
        match self.journal.sessions(open, None, usize::MAX).await {
            Ok(rows) => self.make_mail_folders(rows.into_iter().map(|row| row.id).collect()).await,
            Err(error) => tracing::warn!(%error, "could not create mail folders"),
        }
        let mut stopping = self.stop_signal();
        let mut scanner = MailFolderScanner::default();
        while !self.is_stopping() {
            scanner = self.scan_mail_folders(scanner).await;
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(Duration::from_secs(MAIL_LOOK_S)) => {}
            }
        }
    }

    async fn scan_mail_folders(self: &Arc<Self>, mut scanner: MailFolderScanner) -> MailFolderScanner {
        let root = self.home.mail();
        let scan = tokio::task::spawn_blocking(move || {
            let found = scanner.scan(&root);
            (scanner, found)
        });
        let Ok((scanner, found)) = scan.await else { return MailFolderScanner::default() };
        for (folder, names) in found {
            for name in names {
                // A file that has to wait holds up the files after it, so that the order of arrival is kept.
                if self.is_stopping() || !self.take_mail_file(&folder, &name).await {
                    break;
                }
            }
        }
        scanner
    }

    /// Accepts one file; returns `false` if it has to wait.
    async fn take_mail_file(self: &Arc<Self>, folder: &Path, name: &OsStr) -> bool {
        let (path, file_name) = (folder.to_owned(), name.to_owned());
        let read = tokio::task::spawn_blocking(move || read_mail_file(&path, &file_name)).await;
        let sent = match read {
            Ok(Ok((session, mail))) => self.post_file_mail(&session, mail).await,
            Ok(Err(MailFileError::Corrupt(reason))) => Err(ApiError::new(ErrorCode::InvalidValue, reason)),
            Ok(Err(MailFileError::Gone)) => return true,
            Ok(Err(MailFileError::RetryLater(error))) => {
                tracing::warn!(folder = %folder.display(), ?name, %error, "could not read a mail file; trying again");
                return false;
            }
            Err(_) => return false,
        };
        let (folder, name) = (folder.to_owned(), name.to_owned());
        let moved = match sent {
            Ok(()) => tokio::task::spawn_blocking(move || move_to_cur(&folder, &name)).await,
            Err(error) if is_retryable(&error) => {
                tracing::debug!(folder = %folder.display(), ?name, %error, "a mail file has to wait");
                return false;
            }
            Err(error) => {
                let reason = error.message;
                tokio::task::spawn_blocking(move || quarantine(&folder, &name, &reason)).await
            }
        };
        match moved {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::warn!(%error, "could not move a mail file after handling it; trying again");
                false
            }
            Err(_) => false,
        }
    }

    async fn post_file_mail(
        self: &Arc<Self>,
        session: &SessionId,
        mail: OutgoingMail,
    ) -> Result<(), ApiError> {
        let session = self.find_session(session).await?;
        // Nobody knows who wrote the file.
        let actor = Arc::new(EventActor::DAEMON);
        self.post_mail(&session, &actor, mail, None).await.map(drop)
    }
}

/// Whether the same file may be accepted later.
fn is_retryable(error: &ApiError) -> bool {
    matches!(
        error.code,
        ErrorCode::QueueFull
            | ErrorCode::MailboxFull
            | ErrorCode::Overloaded
            | ErrorCode::Stopping
            | ErrorCode::StorageFailed
            | ErrorCode::Internal
    )
}

/// Remembers which folders have not changed since they were scanned, and need not be read again.
#[derive(Default)]
struct MailFolderScanner {
    seen: HashMap<OsString, (i64, i64)>,
}

impl MailFolderScanner {
    /// The files in every folder's `new`, in the order in which they arrived.
    fn scan(&mut self, root: &Path) -> Vec<(PathBuf, Vec<OsString>)> {
        let mut found = Vec::new();
        let Ok(folders) = fs::read_dir(root) else { return found };
        let mut unchanged = HashMap::new();
        for entry in folders.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let new = entry.path().join(NEW);
            // The time is read before the folder, so that a file that arrives meanwhile counts as a later change.
            let Ok(metadata) = fs::symlink_metadata(&new) else { continue };
            let changed = (metadata.mtime(), metadata.mtime_nsec());
            if !metadata.is_dir() {
                continue;
            }
            if self.seen.get(&entry.file_name()) == Some(&changed) {
                unchanged.insert(entry.file_name(), changed);
                continue;
            }
            let names = files_by_arrival(&entry.path()).unwrap_or_default();
            let age = metadata.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
            if names.is_empty() {
                if age.is_some_and(|age| age > SETTLED_AFTER) {
                    unchanged.insert(entry.file_name(), changed);
                }
            } else {
                found.push((entry.path(), names));
            }
        }
        self.seen = unchanged;
        found
    }
}

/// The files in a folder's `new`, by when they were renamed into it. Hidden files are skipped, as in any Maildir.
fn files_by_arrival(folder: &Path) -> io::Result<Vec<OsString>> {
    let new = open_folder(folder)?.open(NEW)?;
    let mut files = Vec::new();
    for entry in Dir::read_from(&new)?.flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        let Some(stat) = (!name.as_bytes().starts_with(b".")).then(|| stat_in(&new, name)) else { continue };
        if let Ok(stat) = stat {
            files.push(((stat.st_ctime, stat.st_ctime_nsec), name.to_owned()));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, name)| name).collect())
}

/// The mail folder of a session, open.
struct OpenMailFolder(OwnedFd);

/// Opens the mail folder of a session. It is the only one that is found by its path: nobody but us can write where it is.
fn open_folder(folder: &Path) -> io::Result<OpenMailFolder> {
    Ok(OpenMailFolder(openat(CWD, folder, FOLDER, Mode::empty())?))
}

/// How a folder is opened: not if it is a link.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl OpenMailFolder {
    /// Opens one of the folders in it. Fails if that is a link, wherever it leads.
    fn open(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(openat(&self.0, name, FOLDER, Mode::empty())?)
    }

    /// The same, and makes the folder if it is missing. What somebody put in its place is removed.
    fn open_or_make(&self, name: &str) -> io::Result<OwnedFd> {
        let opened = self.open(name);
        if opened.is_ok() {
            return opened;
        }
        if stat_in(&self.0, OsStr::new(name)).is_ok_and(|stat| kind_of(&stat) != FileType::Directory) {
            unlinkat(&self.0, name, AtFlags::empty())?;
        }
        match mkdirat(&self.0, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => self.open(name),
            Err(error) => Err(error.into()),
        }
    }
}

/// What a file in an open folder is; of a link, the link itself.
fn stat_in(folder: impl AsFd, name: &OsStr) -> io::Result<Stat> {
    Ok(statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Why a file was not accepted as a message.
enum MailFileError {
    /// It can never be a message.
    Corrupt(String),
    /// It does not exist any more.
    Gone,
    /// It may be readable later.
    RetryLater(io::Error),
}

impl From<io::Error> for MailFileError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound { Self::Gone } else { Self::RetryLater(error) }
    }
}

/// The content of a mail file. `from` and `sent_at` are allowed but ignored, because the file cannot be trusted on
/// them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MailFileContent {
    text: String,
    id: Option<MailId>,
    kind: Option<MailKind>,
    deliver: Option<MailDelivery>,
    in_reply_to: Option<MailId>,
    correlation_id: Option<String>,
    to: Option<String>,
    #[serde(rename = "from")]
    _from: Option<IgnoredAny>,
    #[serde(rename = "sent_at")]
    _sent_at: Option<IgnoredAny>,
}

/// Reads the message in a file of a folder's `new`, and the session whose folder it is.
fn read_mail_file(folder: &Path, name: &OsStr) -> Result<(SessionId, OutgoingMail), MailFileError> {
    let corrupt = |reason: &str| MailFileError::Corrupt(reason.to_owned());
    let session = folder.file_name().and_then(OsStr::to_str).and_then(|name| SessionId::parse(name).ok());
    let session = session.ok_or_else(|| corrupt("the name of its folder is not a session id"))?;
    let new = open_folder(folder)?.open(NEW)?;
    if kind_of(&stat_in(&new, name)?) != FileType::RegularFile {
        return Err(corrupt("it is not a regular file"));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(&new, name, flags, Mode::empty()) {
        Err(Errno::LOOP) => return Err(corrupt("it is not a regular file")),
        file => File::from(file.map_err(io::Error::from)?),
    };
    // Checked again on the open file, because it may have been swapped in between.
    if !file.metadata()?.is_file() {
        return Err(corrupt("it is not a regular file"));
    }
    let mut content = Vec::new();
    file.take(MAIL_FILE_MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAIL_FILE_MAX {
        return Err(MailFileError::Corrupt(format!("it is larger than {MAIL_FILE_MAX} bytes")));
    }
    let parsed: MailFileContent = serde_json::from_slice(&content)
        .map_err(|error| MailFileError::Corrupt(format!("it is not a message in JSON: {error}")))?;
    let MailFileContent { text, id, kind, deliver, in_reply_to, correlation_id, to, .. } = parsed;
    if to.is_some_and(|to| to != session.as_str()) {
        return Err(corrupt("`to` names another session than the folder it is in"));
    }
    let mail = OutgoingMail {
        from: MailSender::File,
        id: Some(id.unwrap_or_else(|| derived_mail_id(&session, name, &content))),
        kind: kind.unwrap_or_default(),
        text,
        in_reply_to,
        correlation_id,
        deliver,
        run: None,
    };
    Ok((session, mail))
}

/// The id of a message in a file without an id: derived from its folder, name and content.
fn derived_mail_id(session: &SessionId, name: &OsStr, content: &[u8]) -> MailId {
    let mut hash = Sha256::new();
    for part in [session.as_str().as_bytes(), name.as_bytes(), content] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    MailId::from_random(&hash.finalize()[..26])
}

/// Moves a file whose message is journalled to `cur`.
fn move_to_cur(folder: &Path, name: &OsStr) -> io::Result<()> {
    let folder = open_folder(folder)?;
    ignore_missing(renameat(folder.open(NEW)?, name, folder.open_or_make(CUR)?, name))
}

/// Moves a file that is not a message to `corrupt`, with the reason beside it. The reason is written first: if we die
/// in between, it is written again.
fn quarantine(folder: &Path, name: &OsStr, reason: &str) -> io::Result<()> {
    let folder = open_folder(folder)?;
    let corrupt = folder.open_or_make(CORRUPT)?;
    let mut target = name.to_owned();
    if target.len() + SUFFIX_MAX > NAME_MAX {
        target = OsString::from(format!("long-{}", hex::encode(Sha256::digest(name.as_bytes()))));
    }
    let base = target.clone();
    let mut nth = 1_u32;
    while stat_in(&corrupt, &target).is_ok() {
        nth += 1;
        target = base.clone();
        target.push(format!(".{nth}"));
    }
    let mut reason_file = target.clone();
    reason_file.push(".reason");
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // A pipe with this name, which nobody reads, must not hold us up.
    let file = openat(&corrupt, &reason_file, flags | OFlags::NONBLOCK, Mode::RUSR | Mode::WUSR)?;
    writeln!(File::from(file), "{reason}")?;
    ignore_missing(renameat(folder.open(NEW)?, name, &corrupt, &target))
}

/// A file that disappeared meanwhile is fine.
fn ignore_missing(moved: rustix::io::Result<()>) -> io::Result<()> {
    match moved {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temporary_home::temporary_home;

    fn folder() -> (tempfile::TempDir, DaemonHome, SessionId, PathBuf) {
        let (dir, home) = temporary_home();
        let session = SessionId::from_random(&[7; 8]);
        make_folders(&home, &session).unwrap();
        let folder = home.mail().join(session.as_str());
        (dir, home, session, folder)
    }

    fn corrupt_reason(folder: &Path, name: &str) -> String {
        match read_mail_file(folder, OsStr::new(name)) {
            Err(MailFileError::Corrupt(reason)) => reason,
            Err(_) => panic!("{name} cannot be read"),
            Ok((_, mail)) => panic!("{name} is a message: {mail:?}"),
        }
    }

    #[test]
    fn a_file_is_known_by_its_id_else_by_its_name_and_content() {
        let (_dir, _, _, folder) = folder();
        let id = |name: &str, content: &str| {
            fs::write(folder.join(NEW).join(name), content).unwrap();
            let Ok((_, mail)) = read_mail_file(&folder, OsStr::new(name)) else { panic!("{content}") };
            assert_eq!(mail.from, MailSender::File, "whatever it says");
            mail.id.unwrap()
        };
        let (a, b) = (r#"{"text":"a","from":"lead"}"#, r#"{"text":"b","sent_at":1}"#);
        assert_eq!(id("1", a), id("1", a));
        assert_ne!(id("1", a), id("1", b));
        assert_ne!(id("1", a), id("2", a));
        assert_eq!(id("3", r#"{"text":"a","id":"mine"}"#).as_str(), "mine");
    }

    #[test]
    fn what_is_no_message_is_told_apart() {
        let (dir, _, _, folder) = folder();
        let new = folder.join(NEW);
        fs::write(new.join("broken"), "{").unwrap();
        fs::write(new.join("field"), r#"{"text":"x","colour":1}"#).unwrap();
        fs::write(new.join("other"), r#"{"text":"x","to":"ses_other"}"#).unwrap();
        fs::write(new.join("large"), vec![b' '; MAIL_FILE_MAX as usize + 1]).unwrap();
        fs::write(dir.path().join("secret"), r#"{"text":"x"}"#).unwrap();
        std::os::unix::fs::symlink(dir.path().join("secret"), new.join("link")).unwrap();
        fs::create_dir(new.join("directory")).unwrap();
        for (name, hint) in [
            ("broken", "not a message in JSON"),
            ("field", "unknown field `colour`"),
            ("other", "another session"),
            ("large", "larger than"),
            ("link", "not a regular file"),
            ("directory", "not a regular file"),
        ] {
            assert!(corrupt_reason(&folder, name).contains(hint), "{name}");
        }
    }

    #[test]
    fn links_in_place_of_the_folders_lead_nowhere() {
        let (dir, home, _, folder) = folder();
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("secret"), r#"{"text":"x"}"#).unwrap();
        for name in [CUR, CORRUPT] {
            fs::remove_dir(folder.join(name)).unwrap();
            std::os::unix::fs::symlink(&elsewhere, folder.join(name)).unwrap();
        }
        fs::write(folder.join(NEW).join("mail"), r#"{"text":"x"}"#).unwrap();
        fs::write(folder.join(NEW).join("manifest"), "[agent]").unwrap();
        move_to_cur(&folder, OsStr::new("mail")).unwrap();
        quarantine(&folder, OsStr::new("manifest"), "why not").unwrap();
        assert!(folder.join(CUR).join("mail").exists() && folder.join(CORRUPT).join("manifest").exists());
        let names = |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names(&elsewhere).collect::<Vec<_>>(), ["secret"], "nothing was moved through a link");

        fs::remove_dir(folder.join(NEW)).unwrap();
        std::os::unix::fs::symlink(&elsewhere, folder.join(NEW)).unwrap();
        assert!(MailFolderScanner::default().scan(&home.mail()).is_empty());
        assert!(files_by_arrival(&folder).is_err());
        let secret = OsStr::new("secret");
        assert!(matches!(read_mail_file(&folder, secret), Err(MailFileError::RetryLater(_))));
        assert!(move_to_cur(&folder, secret).is_err() && quarantine(&folder, secret, "").is_err());
        assert_eq!(names(&elsewhere).collect::<Vec<_>>(), ["secret"], "nothing was taken through a link");
    }

    #[test]
    fn a_pipe_in_place_of_a_reason_holds_up_nobody() {
        let (_dir, _, _, folder) = folder();
        let pipe = folder.join(CORRUPT).join("x.reason");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        fs::write(folder.join(NEW).join("x"), "{").unwrap();
        assert!(quarantine(&folder, OsStr::new("x"), "why not").is_err());
    }

    #[test]
    fn files_come_in_the_order_of_their_renames_and_not_of_their_names() {
        let (_dir, home, _, folder) = folder();
        for name in ["2", "3", "1", ".hidden"] {
            fs::write(folder.join(TMP).join(name), "{}").unwrap();
        }
        for name in ["3", ".hidden", "1", "2"] {
            fs::rename(folder.join(TMP).join(name), folder.join(NEW).join(name)).unwrap();
            // The clock of a file system ticks in milliseconds, and the order is only as precise as its ticks.
            std::thread::sleep(Duration::from_millis(20));
        }
        let found = MailFolderScanner::default().scan(&home.mail());
        assert_eq!(found, [(folder, vec!["3".into(), "1".into(), "2".into()])]);
    }

    #[test]
    fn a_corrupt_file_replaces_no_other_and_keeps_its_reason() {
        let (_dir, home, session, folder) = folder();
        let long = "n".repeat(NAME_MAX);
        for name in ["x", "x", &long] {
            fs::write(folder.join(NEW).join(name), "{").unwrap();
            quarantine(&folder, OsStr::new(name), "why not").unwrap();
        }
        let mut files: Vec<_> = fs::read_dir(folder.join(CORRUPT)).unwrap().flatten().collect();
        files.sort_by_key(fs::DirEntry::file_name);
        assert_eq!(files.len(), 6, "{files:?}");
        assert_eq!(fs::read_to_string(folder.join(CORRUPT).join("x.2.reason")).unwrap(), "why not\n");
        remove_empty_folders(&home, &session);
        assert!(folder.join(CORRUPT).exists() && !folder.join(NEW).exists());
        remove_folders(&home, &session);
        assert!(!folder.exists());
    }
}
