//! The echo of typed keys, which a live display turns off: an Enter would move the rows that it draws over. Only the
//! terminal's settings are touched here; nothing is read or printed.

use std::io;

use parking_lot::Mutex;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// Turns the echo off and on again. When the value is dropped, the terminal is as it was before.
#[derive(Debug, Default)]
pub(crate) struct TerminalEcho {
    /// The settings from before the echo was turned off.
    saved: Mutex<Option<Termios>>,
}

impl TerminalEcho {
    /// Turns the echo off, if stdin is a terminal. A process in the background leaves it alone: the kernel would stop it.
    pub(crate) fn turn_off(&self) {
        let mut saved = self.saved.lock();
        let in_foreground = || tcgetpgrp(io::stdin()).is_ok_and(|group| group == rustix::process::getpgrp());
        if saved.is_some() || !in_foreground() {
            return;
        }
        let Ok(before) = tcgetattr(io::stdin()) else { return };
        let mut silent = before.clone();
        silent.local_modes -= LocalModes::ECHO | LocalModes::ECHONL;
        if tcsetattr(io::stdin(), OptionalActions::Now, &silent).is_ok() {
            *saved = Some(before);
        }
    }

    /// Turns the echo on again and discards what was typed meanwhile, so that it answers no question that comes next.
    pub(crate) fn restore(&self) {
        if let Some(before) = self.saved.lock().take() {
            // Errors are ignored: if the terminal is gone, there is nothing to restore.
            let _set = tcsetattr(io::stdin(), OptionalActions::Flush, &before);
        }
    }
}

impl Drop for TerminalEcho {
    fn drop(&mut self) {
        self.restore();
    }
}
