//! Files that are created or replaced as a whole. This is for content that must survive a power cut; a file that is written anew
//! every few seconds, like the lease of a worker, needs no sync and does not belong here.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use tempfile::NamedTempFile;

/// How the names of drafts begin. A crash can leave a draft behind; who lists the folder ignores or removes it.
pub const DRAFT_PREFIX: &str = ".unfinished-";

/// Writes `content` to `path`, readable by its owner only, and replaces what was there.
///
/// A reader finds either the old content or the new, complete, whatever crashes meanwhile. On success the new content
/// also survives a power cut. On failure the old content is still there, and no draft; only if the very last step
/// failed, the sync of the folder, the new content is in place but may not survive a power cut.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    write_draft(path, content)?.persist(path).map_err(|failure| failure.error)?;
    sync_folder_of(path)
}

/// Writes `content` to `path`, readable by its owner only, unless something is there: then it fails with
/// [`io::ErrorKind::AlreadyExists`] and changes nothing. Of several processes that try at once, one succeeds.
///
/// For readers and crashes it promises the same as [`replace_file`].
pub fn create_file(path: &Path, content: &[u8]) -> io::Result<()> {
    write_draft(path, content)?.persist_noclobber(path).map_err(|failure| failure.error)?;
    sync_folder_of(path)
}

/// Syncs the folder of `path`, so that a file that was created, replaced or removed there stays so after a power cut.
pub fn sync_folder_of(path: &Path) -> io::Result<()> {
    File::open(folder_of(path))?.sync_all()
}

/// Writes a synced file with this content beside `path`. It has mode 0600 from its creation on.
fn write_draft(path: &Path, content: &[u8]) -> io::Result<NamedTempFile> {
    let mut draft = tempfile::Builder::new().prefix(DRAFT_PREFIX).tempfile_in(folder_of(path))?;
    draft.write_all(content)?;
    draft.as_file().sync_all()?;
    Ok(draft)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_replaced_file_is_private_and_leaves_no_draft() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for content in ["first, which is longer", "second"] {
            replace_file(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_replaced_stays_and_leaves_no_draft() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::create_dir(&path).unwrap();
        assert!(replace_file(&path, b"content").is_err());
        assert!(path.is_dir());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(replace_file(&folder.path().join("missing").join("file"), b"content").is_err());
    }

    #[test]
    fn a_created_file_is_private_and_replaces_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        create_file(&path, b"first").unwrap();
        assert_eq!(create_file(&path, b"second").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
