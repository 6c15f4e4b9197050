//! Our end of a terminal: what is typed into it and what the program writes to it, as bytes. It knows their bounds and
//! nothing of what they mean; there is no task behind it, so whoever waits for output also drives what is to be typed.

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
use crate::drivers::line_transport::ExitFuture;

/// What may wait to be typed before the program is no longer listened to: one that asks its terminal must also read.
const WAITING_MAX: usize = 1 << 20;
/// How much is read at once: what the kernel has of a terminal is never more.
const READ_SIZE: usize = 16 << 10;
/// Silence after which a dead program's terminal is over, even if a process that it left behind holds it open.
const DRAIN_SILENCE: Duration = Duration::from_millis(200);
/// What is still read of a dead program's terminal.
const DRAIN_MAX: usize = 1 << 20;

/// A terminal that nobody has opened yet.
#[derive(Debug)]
pub(super) struct NewTerminal {
    master: AsyncFd<OwnedFd>,
    /// The path of the other end, which a program opens.
    pub(super) path: String,
}

impl NewTerminal {
    /// Opens one of this size.
    pub(super) fn open(size: TerminalSize) -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let path = ptsname(&master, Vec::new()).map(CString::into_string)?.map_err(io::Error::other)?;
        set_window_size(&master, size)?;
        rustix::io::ioctl_fionbio(&master, true)?;
        // Not as a pipe, which would be safe to say: of those tokio takes a short read for the last, and a terminal gives
        // no more than a page at once.
        #[expect(
            unsafe_code,
            reason = "no safe call waits for a descriptor that is neither a pipe nor a socket"
        )]
        // SAFETY: the descriptor is owned by the value that waits for it, open until that is dropped, and never replaced.
        let master = unsafe { AsyncFd::register(master) }?;
        Ok(Self { master, path })
    }

    /// The terminal of a program that was started in it; `exited` tells when that is dead.
    pub(super) fn into_terminal(self, exited: ExitFuture) -> PtyTerminal {
        PtyTerminal { master: self.master, untyped: BytesMut::new(), broken: false, exited, drain_left: None }
    }
}

/// A terminal with a program in it.
pub(super) struct PtyTerminal {
    master: AsyncFd<OwnedFd>,
    /// What is to be typed.
    untyped: BytesMut,
    /// Nothing can be typed any more. That the program is over is learned from what it writes.
    broken: bool,
    exited: ExitFuture,
    /// How much may still be read, once the program is dead.
    drain_left: Option<usize>,
}

impl PtyTerminal {
    /// Types something, when somebody waits for output.
    pub(super) fn type_in(&mut self, keys: &[u8]) {
        if !self.broken {
            self.untyped.extend_from_slice(keys);
        }
    }

    /// What the program writes next, or `None` when there will be nothing. Types what waits to be typed meanwhile, and
    /// does only that if not `listening`. Nothing is lost if the wait is given up.
    pub(super) async fn next_output(&mut self, listening: bool) -> Option<Vec<u8>> {
        let listening = listening && self.can_type();
        let Self { master, untyped: waiting, broken, exited, drain_left: left } = self;
        loop {
            tokio::select! {
                biased;
                written = write_keys(master, waiting) => match written {
                    Ok(count) => waiting.advance(count),
                    Err(_) => {
                        *broken = true;
                        waiting.clear();
                    }
                },
                read = read_output(master), if listening => {
                    // A terminal that breaks is over like one that ends: the kernel tells the second as an error.
                    let output = read.unwrap_or_default();
                    *left = left.map(|left| left.saturating_sub(output.len()));
                    return (!output.is_empty() && *left != Some(0)).then_some(output);
                }
                () = &mut *exited, if listening && left.is_none() => *left = Some(DRAIN_MAX),
                () = tokio::time::sleep(DRAIN_SILENCE), if listening && left.is_some() => return None,
            }
        }
    }

    /// Whether more can be taken to be typed.
    pub(super) fn can_type(&self) -> bool {
        self.untyped.len() < WAITING_MAX
    }

    /// Gives it another size, and tells the program.
    pub(super) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        set_window_size(self.master.get_ref(), size)
    }

    /// The group of processes that the keys go to.
    pub(super) fn foreground(&self) -> Option<Pid> {
        tcgetpgrp(self.master.get_ref()).ok()
    }
}

/// Types some of what waits; for ever if nothing does.
async fn write_keys(master: &AsyncFd<OwnedFd>, waiting: &BytesMut) -> io::Result<usize> {
    if waiting.is_empty() {
        return pending().await;
    }
    loop {
        let mut ready = master.writable().await?;
        if let Ok(written) = ready.try_io(|master| Ok(rustix::io::write(master, waiting)?)) {
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
