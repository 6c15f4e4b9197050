//! What each of our own processes does first, whatever its role: it sets a recognizable name, closes descriptors that it
//! inherited by accident, and makes a file size limit an error instead of its death.

use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGXFSZ;

/// `argv[0]` of all our processes. The second one tells their role.
pub const PROGRAM_NAME: &str = "qd";

/// Sets the name of this process in process lists. The kernel's default is the name of the file that it was started
/// from, which is `exe`. Must be called on the main thread.
pub fn set_process_name(name: &CStr) {
    // None of our names can fail, and nothing depends on it.
    let _result = rustix::thread::set_name(name);
}

/// Closes every descriptor except standard input, output and error. The process that started us may have had
/// descriptors open without close-on-exec; while we hold them, their other ends never see end-of-file. Must be called
/// before anything else opens a descriptor.
pub fn close_inherited_descriptors() -> io::Result<()> {
    let listed: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2)
        .collect();
    for number in listed {
        // The list contains the descriptor of `/proc/self/fd` itself, which is closed by now.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok() {
            #[expect(unsafe_code, reason = "no safe call closes a descriptor that somebody else opened")]
            // SAFETY: nothing of ours is open yet: this is one of the first things that the process does.
            unsafe {
                rustix::io::close(number);
            }
        }
    }
    Ok(())
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail with an error, like a write to a full disk. By default
/// the kernel ends the process with SIGXFSZ. A handler is installed, because an ignored signal would stay ignored in
/// every agent that the process starts.
pub fn survive_file_size_limit() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}
