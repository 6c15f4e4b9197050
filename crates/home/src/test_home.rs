//! Homes for this crate's tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::home::DaemonHome;

/// A home that is prepared, and the folder that it is removed with.
pub(crate) fn prepared_home() -> (tempfile::TempDir, DaemonHome) {
    let folder = tempfile::tempdir().unwrap();
    let home = DaemonHome::resolve(Some(folder.path().join("a/b/home")));
    home.prepare().unwrap();
    (folder, home)
}

/// The permission bits of a file or folder.
pub(crate) fn mode(path: impl AsRef<Path>) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}
