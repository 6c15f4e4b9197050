//! Mail folders, for programs that know no HTTP: `mail/SESSION/{tmp,new,cur,corrupt}` below the home. A file that is
//! written in `tmp` and renamed to `new` is a message, taken up once: it is known by its id, else by its name and content,
//! and goes to `cur` after the journal has it. Between the two any crash is harmless, since the next look finds the file
//! again and the journal the message. What is no message goes to `corrupt`, with the reason beside it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use qd_journal::SessionFilter;
use qd_protocol::limits::{MAIL_FILE_MAX, MAIL_LOOK_S};
use qd_protocol::mail::{MailDelivery, MailKind};
use qd_protocol::{ApiError, ErrorCode, MailId, SessionId};
use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};

use crate::daemon::Daemon;
use crate::home::DaemonHome;
use crate::mail::{MailSender, OutgoingMail};

const TMP: &str = "tmp";
const NEW: &str = "new";
const CUR: &str = "cur";
const CORRUPT: &str = "corrupt";

/// A folder whose last change is older than this and was seen has nothing new: no file system's clock is coarser.
const SETTLED_AFTER: Duration = Duration::from_secs(2);
/// The longest name that a file system takes.
const NAME_MAX: usize = 255;
/// What is put behind the name of a corrupt file, at most: the reason's ending and a number.
const SUFFIX_MAX: usize = 16;

/// Makes the folders of a session's mail, each mode 0700.
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

/// Removes what is empty of a closed session's folders; what somebody put there stays.
pub(crate) fn remove_empty_folders(home: &DaemonHome, session: &SessionId) {
    let folder = home.mail().join(session.as_str());
    for name in [TMP, NEW, CUR, CORRUPT] {
        // One that is not empty, or not there, is nobody's mistake.
        drop(fs::remove_dir(folder.join(name)));
    }
    drop(fs::remove_dir(folder));
}

/// Removes a purged session's folders with all that is in them: its words are in `cur` too.
pub(crate) fn remove_folders(home: &DaemonHome, session: &SessionId) {
    let folder = home.mail().join(session.as_str());
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(%session, %error, "the mail folder of a purged session is left over");
        }
        Ok(()) | Err(_) => {}
    }
}

impl Daemon {
    /// Makes the mail folders of new sessions. One that cannot be made now is made at the next start; the session does
    /// not depend on it.
    pub(crate) async fn make_mail_folders(&self, sessions: Vec<SessionId>) {
        let home = self.home.clone();
        let made = tokio::task::spawn_blocking(move || {
            for session in &sessions {
                if let Err(error) = make_folders(&home, session) {
                    tracing::warn!(%session, %error, "a mail folder could not be made");
                }
            }
        });
        // It only fails when the daemon ends.
        drop(made.await);
    }

    /// Takes up what is in the mail folders, now and again and again.
    pub(crate) async fn watch_mail_folders(self: Arc<Self>) {
        let open = SessionFilter { open_only: true, ..SessionFilter::default() };
        match self.journal.sessions(open, None, usize::MAX).await {
            Ok(rows) => self.make_mail_folders(rows.into_iter().map(|row| row.id).collect()).await,
            Err(error) => tracing::warn!(%error, "mail folders could not be made"),
        }
        let mut stopping = self.stop_signal();
        let mut looker = MailFolderScanner::default();
        while !self.is_stopping() {
            looker = self.scan_mail_folders(looker).await;
            tokio::select! {
                _ = stopping.wait_for(|stop| *stop) => return,
                () = tokio::time::sleep(Duration::from_secs(MAIL_LOOK_S)) => {}
            }
        }
    }

    async fn scan_mail_folders(self: &Arc<Self>, mut looker: MailFolderScanner) -> MailFolderScanner {
        let root = self.home.mail();
        let looked = tokio::task::spawn_blocking(move || {
            let found = looker.scan(&root);
            (looker, found)
        });
        let Ok((looker, found)) = looked.await else { return MailFolderScanner::default() };
        for (folder, names) in found {
            for name in names {
                // What has to wait holds up what came after it: the order of arrival is kept.
                if self.is_stopping() || !self.take_mail_file(&folder, &name).await {
                    break;
                }
            }
        }
        looker
    }

    /// Takes up one file; `false` if it has to wait.
    async fn take_mail_file(self: &Arc<Self>, folder: &Path, name: &OsStr) -> bool {
        let (path, of) = (folder.join(NEW).join(name), folder.file_name().unwrap_or_default().to_owned());
        let named = name.to_owned();
        let read = tokio::task::spawn_blocking(move || read_mail_file(&path, &of, &named)).await;
        let sent = match read {
            Ok(Ok((session, mail))) => self.post_file_mail(&session, mail).await,
            Ok(Err(MailFileError::Corrupt(why))) => Err(ApiError::new(ErrorCode::InvalidValue, why)),
            Ok(Err(MailFileError::Gone)) => return true,
            Ok(Err(MailFileError::RetryLater(error))) => {
                tracing::warn!(folder = %folder.display(), ?name, %error, "a file of mail could not be read; it is tried again");
                return false;
            }
            Err(_) => return false,
        };
        let (folder, name) = (folder.to_owned(), name.to_owned());
        let moved = match sent {
            Ok(()) => tokio::task::spawn_blocking(move || move_to_cur(&folder, &name)).await,
            Err(error) if is_retryable(&error) => {
                tracing::debug!(folder = %folder.display(), ?name, %error, "a file of mail waits");
                return false;
            }
            Err(error) => {
                let why = error.message;
                tokio::task::spawn_blocking(move || quarantine(&folder, &name, &why)).await
            }
        };
        match moved {
            Ok(Ok(())) => true,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a file of mail that was taken up could not be moved; it is tried again");
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
        self.post_mail(&session, mail, None).await.map(drop)
    }
}

/// Whether a file may be taken later, as it is.
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

/// Which folders have been seen as they are, and need not be read again until they change.
#[derive(Default)]
struct MailFolderScanner {
    seen: HashMap<OsString, (i64, i64)>,
}

impl MailFolderScanner {
    /// The files in every folder's `new`, in the order in which they came there.
    fn scan(&mut self, root: &Path) -> Vec<(PathBuf, Vec<OsString>)> {
        let mut found = Vec::new();
        let Ok(folders) = fs::read_dir(root) else { return found };
        let mut still = HashMap::new();
        for entry in folders.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let new = entry.path().join(NEW);
            // Before it is read: what comes meanwhile is a change after this.
            let Ok(about) = fs::symlink_metadata(&new) else { continue };
            let changed = (about.mtime(), about.mtime_nsec());
            if !about.is_dir() {
                continue;
            }
            if self.seen.get(&entry.file_name()) == Some(&changed) {
                still.insert(entry.file_name(), changed);
                continue;
            }
            let names = files_by_arrival(&new);
            let age = about.modified().ok().and_then(|at| SystemTime::now().duration_since(at).ok());
            if names.is_empty() {
                if age.is_some_and(|age| age > SETTLED_AFTER) {
                    still.insert(entry.file_name(), changed);
                }
            } else {
                found.push((entry.path(), names));
            }
        }
        self.seen = still;
        found
    }
}

/// The files in a folder, by when they were renamed into it. Hidden ones are not meant, as in any Maildir.
fn files_by_arrival(new: &Path) -> Vec<OsString> {
    let Ok(entries) = fs::read_dir(new) else { return Vec::new() };
    let mut files: Vec<_> = entries
        .flatten()
        .filter(|entry| !entry.file_name().as_bytes().starts_with(b"."))
        .filter_map(|entry| {
            let about = fs::symlink_metadata(entry.path()).ok()?;
            Some((about.ctime(), about.ctime_nsec(), entry.file_name()))
        })
        .collect();
    files.sort();
    files.into_iter().map(|(_, _, name)| name).collect()
}

/// Why a file is no message.
enum MailFileError {
    /// It never will be.
    Corrupt(String),
    /// It is not there any more.
    Gone,
    /// Perhaps later.
    RetryLater(io::Error),
}

impl From<io::Error> for MailFileError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound { Self::Gone } else { Self::RetryLater(error) }
    }
}

/// What a file may say. Whom it is from and when it was sent is not for it to say: it may, and is not believed.
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

/// The message in a file, and whose folder it lies in.
fn read_mail_file(
    path: &Path,
    folder: &OsStr,
    name: &OsStr,
) -> Result<(SessionId, OutgoingMail), MailFileError> {
    let corrupt = |why: &str| MailFileError::Corrupt(why.to_owned());
    let session = folder.to_str().and_then(|name| SessionId::parse(name).ok());
    let session = session.ok_or_else(|| corrupt("its folder is not named by a session"))?;
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(corrupt("it is not a regular file"));
    }
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = match file {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(corrupt("it is not a regular file"));
        }
        file => file?,
    };
    // Looked at again through the open file: between the two somebody may have swapped it.
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(corrupt("it is not a regular file"));
    }
    let mut content = Vec::new();
    file.take(MAIL_FILE_MAX + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAIL_FILE_MAX {
        return Err(MailFileError::Corrupt(format!("it is larger than {MAIL_FILE_MAX} bytes")));
    }
    let dropped: MailFileContent = serde_json::from_slice(&content)
        .map_err(|error| MailFileError::Corrupt(format!("it is not a message in JSON: {error}")))?;
    let MailFileContent { text, id, kind, deliver, in_reply_to, correlation_id, to, .. } = dropped;
    if to.is_some_and(|to| to != session.as_str()) {
        return Err(corrupt("`to` is another session than the one whose folder it lies in"));
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

/// What a file without an id is known by: its name and content, in this folder.
fn derived_mail_id(session: &SessionId, name: &OsStr, content: &[u8]) -> MailId {
    let mut hash = Sha256::new();
    for part in [session.as_str().as_bytes(), name.as_bytes(), content] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    MailId::from_random(&hash.finalize()[..26])
}

/// The journal has it.
fn move_to_cur(folder: &Path, name: &OsStr) -> io::Result<()> {
    make_private_folder(&folder.join(CUR))?;
    ignore_missing(fs::rename(folder.join(NEW).join(name), folder.join(CUR).join(name)))
}

/// Moves a file that is no message out of the way, with the reason beside it. The reason first: if we die between the two,
/// it is written again.
fn quarantine(folder: &Path, name: &OsStr, why: &str) -> io::Result<()> {
    let corrupt = folder.join(CORRUPT);
    make_private_folder(&corrupt)?;
    let mut kept = name.to_owned();
    if kept.len() + SUFFIX_MAX > NAME_MAX {
        let hash: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
        kept = OsString::from(format!("long-{hash}"));
    }
    let base = kept.clone();
    let mut nth = 1_u32;
    while fs::symlink_metadata(corrupt.join(&kept)).is_ok() {
        nth += 1;
        kept = base.clone();
        kept.push(format!(".{nth}"));
    }
    let mut reason = kept.clone();
    reason.push(".reason");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(corrupt.join(reason))?;
    writeln!(file, "{why}")?;
    ignore_missing(fs::rename(folder.join(NEW).join(name), corrupt.join(kept)))
}

/// Somebody may have taken the file away meanwhile; that is as good.
fn ignore_missing(moved: io::Result<()>) -> io::Result<()> {
    moved.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

fn make_private_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, DaemonHome, SessionId, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(dir.path().join("home")));
        home.prepare().unwrap();
        let session = SessionId::from_random(&[7; 8]);
        make_folders(&home, &session).unwrap();
        let folder = home.mail().join(session.as_str());
        (dir, home, session, folder)
    }

    fn corrupt_reason(folder: &Path, name: &str) -> String {
        let of = folder.file_name().unwrap();
        match read_mail_file(&folder.join(NEW).join(name), of, OsStr::new(name)) {
            Err(MailFileError::Corrupt(why)) => why,
            Err(_) => panic!("{name} cannot be read"),
            Ok((_, mail)) => panic!("{name} is a message: {mail:?}"),
        }
    }

    #[test]
    fn a_file_is_known_by_its_id_else_by_its_name_and_content() {
        let (_dir, _, session, folder) = folder();
        let id = |name: &str, content: &str| {
            fs::write(folder.join(NEW).join(name), content).unwrap();
            let of = OsStr::new(session.as_str());
            let Ok((_, mail)) = read_mail_file(&folder.join(NEW).join(name), of, OsStr::new(name)) else {
                panic!("{content}")
            };
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
    fn files_come_in_the_order_of_their_renames_and_not_of_their_names() {
        let (_dir, home, _, folder) = folder();
        for name in ["2", "3", "1", ".hidden"] {
            fs::write(folder.join(TMP).join(name), "{}").unwrap();
        }
        for name in ["3", ".hidden", "1", "2"] {
            fs::rename(folder.join(TMP).join(name), folder.join(NEW).join(name)).unwrap();
            // The clock of a file system ticks in milliseconds; the order is that of its ticks.
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
        let mut kept: Vec<_> = fs::read_dir(folder.join(CORRUPT)).unwrap().flatten().collect();
        kept.sort_by_key(fs::DirEntry::file_name);
        assert_eq!(kept.len(), 6, "{kept:?}");
        assert_eq!(fs::read_to_string(folder.join(CORRUPT).join("x.2.reason")).unwrap(), "why not\n");
        remove_empty_folders(&home, &session);
        assert!(folder.join(CORRUPT).exists() && !folder.join(NEW).exists());
        remove_folders(&home, &session);
        assert!(!folder.exists());
    }
}
