//! A home for the unit tests of this crate.

use qd_home::DaemonHome;
use tempfile::TempDir;

/// An empty home that is ready to use. It is removed with its folder.
pub(crate) fn temporary_home() -> (TempDir, DaemonHome) {
    let folder = tempfile::tempdir().unwrap();
    let home = DaemonHome::resolve(Some(folder.path().join("home")));
    home.prepare().unwrap();
    (folder, home)
}
