//! What a process of ours does first, whichever part of the program it plays: it takes a name that people know, and lets
//! go of what it was given by accident.

use std::ffi::CStr;
use std::io;

/// The first word of every process of ours; the second tells which part it plays.
pub const PROGRAM_NAME: &str = "qd";

/// Shows this process under a name in lists of processes, where the kernel has the name of the file that it was started
/// from, which is `exe`. To be called on the first thread.
pub fn set_process_name(name: &CStr) {
    // It fails for no name of ours, and nothing depends on it.
    let _shown = rustix::thread::set_name(name);
}

/// Closes every descriptor but standard input, output and error: what whoever started us had open without a mark that it
/// is not for us, and would never see the end of while we live. To be called before anything else has opened any.
pub fn close_inherited_descriptors() -> io::Result<()> {
    let listed: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2)
        .collect();
    for number in listed {
        // The folder itself was among them while it was read.
        if std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_ok() {
            #[expect(unsafe_code, reason = "no safe call closes a descriptor that somebody else opened")]
            // SAFETY: nothing of ours is open yet: this is among the first things that the process does.
            unsafe {
                rustix::io::close(number);
            }
        }
    }
    Ok(())
}
