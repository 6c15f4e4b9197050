//! Our end of a terminal: keystrokes to the program and output from it, as bytes. This module knows the size limits and
//! nothing about what the bytes mean. There is no task behind it: waiting for output also types the queued keystrokes.

use std::ffi::CString;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetpgrp, tcsetwinsize};
use tokio::io::unix::AsyncFd;

use super::screen::TerminalSize;
use crate::line_transport::ExitFuture;

/// The most bytes that may wait to be typed before the program is no longer read: a program that queries its terminal
/// must also read.
const WAITING_MAX: usize = 1 << 20;
/// The most bytes read at a time. The kernel never buffers more for a terminal.
const READ_SIZE: usize = 16 << 10;
/// Silence after which a dead program's terminal counts as closed, even if a leftover process holds it open.
const DRAIN_SILENCE: Duration = Duration::from_millis(200);
/// The most bytes still read from a dead program's terminal.
const DRAIN_MAX: usize = 1 << 20;

/// A terminal that no program has opened yet.
#[derive(Debug)]
pub(super) struct NewTerminal {
    master: AsyncFd<OwnedFd>,
    /// The path of the other end, which the program opens.
    pub(super) path: String,
}

impl NewTerminal {
    pub(super) fn open(size: TerminalSize) -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let path = ptsname(&master, Vec::new()).map(CString::into_string)?.map_err(io::Error::other)?;
        set_window_size(&master, size)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // Not registered as a pipe, although that would be a safe call: tokio takes a short read of a pipe to mean that
        // it is empty, and a terminal returns no more than a page at a time.
        #[expect(
            unsafe_code,
            reason = "no safe call waits for a descriptor that is neither a pipe nor a socket"
        )]
        // SAFETY: the `AsyncFd` owns the descriptor, which stays open until it is dropped and is never replaced.
        let master = unsafe { AsyncFd::register(master) }?;
        Ok(Self { master, path })
    }

    /// The terminal of a program that was started in it. `exited` resolves when the program has exited.
    pub(super) fn into_terminal(self, exited: ExitFuture) -> PtyTerminal {
        PtyTerminal { master: self.master, untyped: BytesMut::new(), broken: false, exited, drain_left: None }
    }
}

pub(super) struct PtyTerminal {
    master: AsyncFd<OwnedFd>,
    untyped: BytesMut,
    /// Typing has failed. The program's end is noticed on its output.
    broken: bool,
    exited: ExitFuture,
    /// How many bytes may still be read, once the program has exited.
    drain_left: Option<usize>,
}

impl PtyTerminal {
    /// Queues keystrokes, which are typed while [`Self::next_output`] waits.
    pub(super) fn type_in(&mut self, keys: &[u8]) {
        if !self.broken {
            self.untyped.extend_from_slice(keys);
        }
    }

    /// The program's next output, or `None` at the end. Types queued keystrokes meanwhile, and only that if not
    /// `listening`. Dropping the wait loses nothing.
    pub(super) async fn next_output(&mut self, listening: bool) -> Option<Vec<u8>> {
        let listening = listening && self.can_type();
        let Self { master, untyped, broken, exited, drain_left } = self;
        loop {
            tokio::select! {
                biased;
                written = write_keys(master, untyped) => match written {
                    Ok(count) => untyped.advance(count),
                    Err(_) => {
                        *broken = true;
                        untyped.clear();
                    }
                },
                read = read_output(master), if listening => {
                    // A read error ends the terminal as well: the kernel reports a hang-up as an error.
                    let output = read.unwrap_or_default();
                    *drain_left = drain_left.map(|drain_left| drain_left.saturating_sub(output.len()));
                    return (!output.is_empty() && *drain_left != Some(0)).then_some(output);
                }
                () = &mut *exited, if listening && drain_left.is_none() => *drain_left = Some(DRAIN_MAX),
                () = tokio::time::sleep(DRAIN_SILENCE), if listening && drain_left.is_some() => return None,
            }
        }
    }

    /// Whether more keystrokes can be queued.
    pub(super) fn can_type(&self) -> bool {
        self.untyped.len() < WAITING_MAX
    }

    /// Changes the size, and notifies the program.
    pub(super) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        set_window_size(self.master.get_ref(), size)
    }

    /// The process group that receives the keystrokes.
    pub(super) fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self.master.get_ref()).ok()
    }
}

/// Types some of the queued bytes; waits for ever if there are none.
async fn write_keys(master: &AsyncFd<OwnedFd>, untyped: &BytesMut) -> io::Result<usize> {
    if untyped.is_empty() {
        return pending().await;
    }
    loop {
        let mut ready = master.writable().await?;
        if let Ok(written) = ready.try_io(|master| Ok(rustix::io::write(master, untyped)?)) {
            return written;
        }
    }
}

async fn read_output(master: &AsyncFd<OwnedFd>) -> io::Result<Vec<u8>> {
    let mut output = vec![0; READ_SIZE];
    loop {
        let mut ready = master.readable().await?;
        match ready.try_io(|master| Ok(rustix::io::read(master, &mut output[..])?)) {
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
            Ok(read) => {
                output.truncate(read?);
                return Ok(output);
            }
            Err(_) => {}
        }
    }
}

fn set_window_size(master: &OwnedFd, TerminalSize { cols, rows }: TerminalSize) -> io::Result<()> {
    let size = Winsize { ws_row: rows.get(), ws_col: cols.get(), ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(master, size)?)
}
