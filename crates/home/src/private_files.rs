//! Files and folders that only their owner can read. They are created with their final mode, so nothing is readable by
//! others, not even for a moment; what exists with a looser mode is tightened, and what belongs to others is refused.
//! Nothing here knows what the files contain.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::secrets::TOKEN_CHARS_MIN;

/// Why something in a home cannot be used.
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

/// Writes `content` to `path` with mode 0600, replacing what was there. A reader finds either the old or the new
/// content, complete, even after a power cut.
pub fn replace_file(path: &Path, content: &[u8]) -> Result<(), HomeError> {
    qd_files::replace_file(path, content).map_err(|source| io_error(path, "write", source))
}

/// Opens a file that must be ours and readable by nobody else; a looser mode is tightened.
pub fn open_private(path: &Path) -> Result<File, HomeError> {
    let nofollow = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nofollow.bits().cast_signed())
        .open(path)
        .map_err(|source| io_error(path, "open", source))?;
    tighten_mode(path, &file, 0o600)?;
    Ok(file)
}

pub(crate) fn remove_file_if_present(path: &Path) -> Result<(), HomeError> {
    match fs::remove_file(path) {
        Ok(()) => {
            qd_files::sync_folder_of(path).map_err(|source| io_error(path, "sync the folder of", source))
        }
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(io_error(path, "remove", source)),
    }
}

/// Writes `content` to `path` with mode 0600, unless something is there. No reader ever finds half a token.
pub(crate) fn create_file_if_absent(path: &Path, content: &[u8]) -> Result<(), HomeError> {
    qd_files::create_file(path, content).map_err(|source| io_error(path, "create", source))
}

pub(crate) fn prepare_private_folder(path: &Path) -> Result<(), HomeError> {
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

pub(crate) fn check_owner(path: &Path, owner: u32) -> Result<(), HomeError> {
    if owner == rustix::process::geteuid().as_raw() {
        Ok(())
    } else {
        Err(HomeError::NotOurs { path: path.to_owned(), owner })
    }
}

pub(crate) fn io_error(path: &Path, action: &'static str, source: io::Error) -> HomeError {
    HomeError::Io { action, path: path.to_owned(), source }
}
