//! What each of our own processes does first, whatever its role: it sets a recognizable name and closes descriptors
//! that it inherited by accident.

use std::ffi::CStr;
use std::io;

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
