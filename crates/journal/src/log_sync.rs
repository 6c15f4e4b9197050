//! Makes SQLite sync its write-ahead log with `fdatasync`. Unless it is compiled with a flag, which only an environment
//! variable can pass to its build, SQLite uses `fsync`, which also writes the time of the last change: a fifth of each
//! commit, measured. Here is a VFS that differs from SQLite's own in the sync of the log, and in nothing else.

#![expect(unsafe_code, reason = "a VFS is a table of C functions")]

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::File;
use std::mem::size_of;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use rusqlite::ffi;

/// SQLite's own VFS for Unix.
const SQLITE_VFS: &CStr = c"unix";
/// Ours.
const LOG_SYNC_VFS: &CStr = c"qd-fdatasync";

/// The name of the VFS for connections that commit or checkpoint. It is SQLite's own if ours cannot be registered: its
/// sync is slower, and as safe.
pub(crate) fn log_sync_vfs() -> &'static CStr {
    static NAME: OnceLock<&CStr> = OnceLock::new();
    NAME.get_or_init(|| match register() {
        Some(()) => LOG_SYNC_VFS,
        None => SQLITE_VFS,
    })
}

/// SQLite's own VFS, as a pointer that threads may share.
struct BaseVfs(*mut ffi::sqlite3_vfs);

// SAFETY: SQLite's own VFS is a static table that nobody changes after SQLite was initialised.
unsafe impl Send for BaseVfs {}
// SAFETY: as above.
unsafe impl Sync for BaseVfs {}

static BASE: OnceLock<BaseVfs> = OnceLock::new();

fn register() -> Option<()> {
    // SAFETY: the name is a C string. The call initialises SQLite if nothing has yet.
    let found = unsafe { ffi::sqlite3_vfs_find(SQLITE_VFS.as_ptr()) };
    // SAFETY: SQLite returns null or a VFS that is valid for ever.
    let mut vfs = unsafe { found.as_ref() }.copied()?;
    vfs.xOpen?;
    BASE.get_or_init(|| BaseVfs(found));
    vfs.pNext = std::ptr::null_mut();
    vfs.zName = LOG_SYNC_VFS.as_ptr();
    vfs.szOsFile = vfs.szOsFile.checked_add(c_int::try_from(size_of::<*mut LogFile>()).ok()?)?;
    vfs.xOpen = Some(open_file);
    // SAFETY: a VFS must stay valid as long as it is registered, and this one is never freed.
    let result = unsafe { ffi::sqlite3_vfs_register(Box::leak(Box::new(vfs)), 0) };
    (result == ffi::SQLITE_OK).then_some(())
}

/// What we keep for each open log. A pointer to it is stored behind SQLite's own data of the file.
struct LogFile {
    /// SQLite's methods, except for `xSync` and `xClose`.
    methods: ffi::sqlite3_io_methods,
    /// SQLite's methods.
    base: *const ffi::sqlite3_io_methods,
    /// A descriptor of our own, because SQLite does not show us the one it has. The kernel syncs files, not descriptors,
    /// and reports an error to every descriptor that was open when it happened.
    log: File,
    /// The first sync is left to SQLite, because it syncs the directory of a new log too.
    is_directory_synced: bool,
}

/// Where the pointer to a file's [`LogFile`] is.
///
/// # Safety
///
/// SQLite must have allocated the file for our VFS.
unsafe fn log_file_slot(file: *mut ffi::sqlite3_file) -> Option<*mut *mut LogFile> {
    let base = BASE.get()?;
    // SAFETY: the VFS is valid for ever, and its files end with room for a pointer, because `szOsFile` says so.
    unsafe {
        let size = usize::try_from((*base.0).szOsFile).ok()?;
        Some(file.cast::<u8>().add(size).cast())
    }
}

unsafe extern "C" fn open_file(
    _vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let Some(base) = BASE.get() else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: SQLite passes us what it would pass to its own VFS.
    unsafe {
        let Some(open) = (*base.0).xOpen else { return ffi::SQLITE_CANTOPEN };
        let result = open(base.0, name, file, flags, out_flags);
        if result == ffi::SQLITE_OK && flags & ffi::SQLITE_OPEN_WAL != 0 && !name.is_null() {
            replace_sync(CStr::from_ptr(name), file);
        }
        result
    }
}

/// Replaces the sync of a log that SQLite has just opened. If the log cannot be opened a second time, SQLite's own sync
/// stays.
///
/// # Safety
///
/// SQLite must have allocated the file for our VFS, and its own VFS must have opened it.
unsafe fn replace_sync(name: &CStr, file: *mut ffi::sqlite3_file) {
    let Ok(log) = File::open(OsStr::from_bytes(name.to_bytes())) else { return };
    // SAFETY: a file that was opened has methods. The slot is ours; it may be unaligned, because nothing says how SQLite
    // rounds the size of its own data.
    unsafe {
        let Some(slot) = log_file_slot(file) else { return };
        let base = (*file).pMethods;
        let mut methods = *base;
        methods.xSync = Some(sync_log);
        methods.xClose = Some(close_log);
        let state = Box::into_raw(Box::new(LogFile { methods, base, log, is_directory_synced: false }));
        slot.write_unaligned(state);
        (*file).pMethods = &raw const (*state).methods;
    }
}

unsafe extern "C" fn sync_log(file: *mut ffi::sqlite3_file, flags: c_int) -> c_int {
    // SAFETY: only files whose slot was filled by `replace_sync` have this method, and SQLite calls no two methods of one
    // file at the same time.
    unsafe {
        let Some(slot) = log_file_slot(file) else { return ffi::SQLITE_IOERR_FSYNC };
        let state = &mut *slot.read_unaligned();
        if state.is_directory_synced {
            return match state.log.sync_data() {
                Ok(()) => ffi::SQLITE_OK,
                Err(_) => ffi::SQLITE_IOERR_FSYNC,
            };
        }
        let Some(sync) = (*state.base).xSync else { return ffi::SQLITE_IOERR_FSYNC };
        let result = sync(file, flags);
        state.is_directory_synced = result == ffi::SQLITE_OK;
        result
    }
}

unsafe extern "C" fn close_log(file: *mut ffi::sqlite3_file) -> c_int {
    // SAFETY: as in `sync_log`. The state is taken back once, because SQLite closes a file once.
    unsafe {
        let Some(slot) = log_file_slot(file) else { return ffi::SQLITE_IOERR_CLOSE };
        let state = Box::from_raw(slot.read_unaligned());
        (*file).pMethods = state.base;
        match (*state.base).xClose {
            Some(close) => close(file),
            None => ffi::SQLITE_OK,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rusqlite::{Connection, OpenFlags};

    use super::log_sync_vfs;

    fn open(database: &Path) -> Connection {
        let db = Connection::open_with_flags_and_vfs(database, OpenFlags::default(), log_sync_vfs()).unwrap();
        db.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;").unwrap();
        db
    }

    fn open_descriptors(file: &Path) -> usize {
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        descriptors
            .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == file))
            .count()
    }

    #[test]
    fn a_log_has_a_descriptor_for_its_syncs_until_its_connection_is_closed() {
        assert_eq!(log_sync_vfs(), super::LOG_SYNC_VFS);
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let (database, log) = (home.join("a.db"), home.join("a.db-wal"));
        let db = open(&database);
        db.execute_batch("CREATE TABLE numbers(n)").unwrap();
        for n in 0..10 {
            db.execute("INSERT INTO numbers VALUES (?1)", [n]).unwrap();
        }
        assert_eq!(open_descriptors(&log), 2, "SQLite's and ours");
        assert_eq!(open_descriptors(&database), 1, "a second one would end SQLite's locks when it is closed");
        let reader = Connection::open(&database).unwrap();
        let sum: i64 = reader.query_row("SELECT sum(n) FROM numbers", [], |row| row.get(0)).unwrap();
        assert_eq!(sum, 45, "a connection with SQLite's own VFS reads the same log");
        drop((db, reader));
        assert_eq!(open_descriptors(&log), 0);
        assert!(!log.exists(), "the last connection moves the log into the file and removes it");
        let sum: i64 = open(&database).query_row("SELECT sum(n) FROM numbers", [], |row| row.get(0)).unwrap();
        assert_eq!(sum, 45);
    }

    #[test]
    fn a_log_that_was_emptied_and_begun_again_is_synced_and_read_back() {
        let home = tempfile::tempdir().unwrap();
        let database = home.path().join("a.db");
        let db = open(&database);
        db.execute_batch("CREATE TABLE numbers(n)").unwrap();
        for n in 0..100 {
            db.execute("INSERT INTO numbers VALUES (?1)", [n]).unwrap();
            if n % 10 == 0 {
                db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
            }
        }
        // As after a crash: the files are copied while the log is in use.
        let copy = tempfile::tempdir().unwrap();
        for file in ["a.db", "a.db-wal"] {
            std::fs::copy(home.path().join(file), copy.path().join(file)).unwrap();
        }
        let copied = Connection::open(copy.path().join("a.db")).unwrap();
        let sum: i64 = copied.query_row("SELECT sum(n) FROM numbers", [], |row| row.get(0)).unwrap();
        assert_eq!(sum, 4950);
    }
}
