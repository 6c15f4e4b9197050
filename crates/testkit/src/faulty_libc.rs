//! A libc that fails on command, for processes under test: it shifts the wall clock, lets writes fail with a full disk
//! or a broken one, and lets syncs fail or take long. `faulty_libc.c` is compiled with `cc` when a test first needs it,
//! and loaded with `LD_PRELOAD`. The daemon passes its environment on to its workers, which therefore obey the same
//! control file; keepers and agents start with environments of their own and are not affected.
//!
//! Rust's standard library and SQLite call libc. rustix does not, so what the product does through it (locks,
//! `fallocate` of the journal's reserve) never fails here.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::daemon::TestDaemonOptions;

/// "No space left on device".
pub const ENOSPC: i32 = 28;
/// "Input/output error".
pub const EIO: i32 = 5;

const SOURCE: &str = include_str!("faulty_libc.c");

// The offsets of the fields of `struct control`.
const CLOCK_SHIFT_MS: u64 = 0;
const WRITE_ERRNO: u64 = 8;
const WRITES_LEFT: u64 = 16;
const SYNC_ERRNO: u64 = 24;
const SYNCS_LEFT: u64 = 32;
const SYNC_DELAY_MS: u64 = 40;
const FAILED_WRITES: u64 = 48;
const FAILED_SYNCS: u64 = 56;
const DIRECTORY: u64 = 64;
const DIRECTORY_MAX: usize = 512;
const ROLE: u64 = 576;
const ROLE_MAX: usize = 64;
const SIZE: u64 = 640;

/// Counts of failures: all of them.
const ALL: i64 = -1;

/// The faults of all processes that were started with [`FaultyLibc::env`]. Without a command nothing fails.
#[derive(Debug)]
pub struct FaultyLibc {
    /// Holds the control file.
    dir: tempfile::TempDir,
    control: File,
}

impl FaultyLibc {
    /// Faults that hit every regular file.
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("qdf").tempdir_in("/tmp").expect("/tmp can be written");
        let control =
            OpenOptions::new().create_new(true).read(true).write(true).open(dir.path().join("control"));
        let control = control.expect("a fresh directory takes a file");
        control.set_len(SIZE).expect("there is room for the control file");
        Self { dir, control }
    }

    /// Faults that hit only files below this directory, such as the home.
    pub fn below(directory: &Path) -> Self {
        let faults = Self::new();
        faults.put_text(DIRECTORY, DIRECTORY_MAX, directory.to_str().expect("a plain name"));
        faults
    }

    /// From now on only processes with this first argument fail: `serve` or `__worker`. Empty means all.
    pub fn only_in(&self, role: &str) {
        self.put_text(ROLE, ROLE_MAX, role);
    }

    /// The variables that a process under test needs.
    pub fn env(&self) -> [(String, String); 2] {
        let text = |path: &Path| path.to_str().expect("a plain name").to_owned();
        [
            ("LD_PRELOAD".into(), text(shared_object())),
            ("FAULTY_LIBC_CONTROL".into(), text(&self.dir.path().join("control"))),
        ]
    }

    /// Moves the wall clock of the processes, by so many milliseconds in all. The monotonic clock goes on.
    pub fn shift_clock(&self, ms: i64) {
        self.put(CLOCK_SHIFT_MS, ms);
    }

    /// Lets all writes fail with this error ([`ENOSPC`] or [`EIO`]), and whatever else needs room in a file system.
    pub fn fail_writes(&self, errno: i32) {
        self.fail_next_writes(errno, ALL);
    }

    /// Lets the next `count` writes fail.
    pub fn fail_next_writes(&self, errno: i32, count: i64) {
        self.put(WRITE_ERRNO, 0);
        self.put(WRITES_LEFT, count);
        self.put(WRITE_ERRNO, errno.into());
    }

    /// Lets all syncs fail with [`EIO`].
    pub fn fail_syncs(&self) {
        self.fail_next_syncs(ALL);
    }

    /// Lets the next `count` syncs fail with [`EIO`].
    pub fn fail_next_syncs(&self, count: i64) {
        self.put(SYNC_ERRNO, 0);
        self.put(SYNCS_LEFT, count);
        self.put(SYNC_ERRNO, EIO.into());
    }

    /// Lets each sync take so much longer.
    pub fn delay_syncs(&self, ms: i64) {
        self.put(SYNC_DELAY_MS, ms);
    }

    /// Ends all faults of files. The clock stays where it is, because a clock that jumps back is another fault.
    pub fn heal(&self) {
        for field in [WRITE_ERRNO, SYNC_ERRNO, SYNC_DELAY_MS] {
            self.put(field, 0);
        }
    }

    /// How many writes were made to fail so far.
    pub fn failed_writes(&self) -> i64 {
        self.get(FAILED_WRITES)
    }

    /// How many syncs were made to fail so far.
    pub fn failed_syncs(&self) -> i64 {
        self.get(FAILED_SYNCS)
    }

    fn put(&self, offset: u64, value: i64) {
        self.control.write_all_at(&value.to_ne_bytes(), offset).expect("the control file can be written");
    }

    fn get(&self, offset: u64) -> i64 {
        let mut bytes = [0; 8];
        self.control.read_exact_at(&mut bytes, offset).expect("the control file can be read");
        i64::from_ne_bytes(bytes)
    }

    fn put_text(&self, offset: u64, size: usize, text: &str) {
        assert!(text.len() < size, "{text:?} is too long for the control file");
        let mut bytes = vec![0; size];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        self.control.write_all_at(&bytes, offset).expect("the control file can be written");
    }
}

impl Default for FaultyLibc {
    fn default() -> Self {
        Self::new()
    }
}

impl TestDaemonOptions {
    /// Lets the daemon and its workers obey these faults.
    pub fn faulty_libc(&mut self, faults: &FaultyLibc) -> &mut Self {
        self.env.extend(faults.env());
        self
    }
}

/// The compiled library. It is kept beside the test binary under the hash of its source, so it is compiled once.
fn shared_object() -> &'static Path {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let test_binary = std::env::current_exe().expect("a process knows its own file");
        let directory = test_binary.parent().expect("a file is in a directory");
        let library = directory.join(format!("faulty_libc-{}.so", &crate::sha256(SOURCE.as_bytes())[..16]));
        if !library.exists() {
            compile(directory, &library);
        }
        library
    })
}

fn compile(directory: &Path, library: &Path) {
    // Several test processes may compile at once; each renames a complete file into place.
    let output = tempfile::Builder::new().suffix(".so").tempfile_in(directory).expect("it can be written");
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-", "-O1", "-shared", "-fPIC", "-o"])
        .arg(output.path())
        .arg("-ldl")
        .stdin(Stdio::piped())
        .spawn()
        .expect("the tests need a C compiler named cc");
    compiler.stdin.take().expect("it is piped").write_all(SOURCE.as_bytes()).expect("cc reads its input");
    assert!(
        compiler.wait().expect("a child can be waited for").success(),
        "cc does not compile faulty_libc.c"
    );
    output.into_temp_path().persist(library).expect("a file can be renamed");
}
