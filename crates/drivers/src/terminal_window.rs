//! Where an agent shows its terminal to people who watch. A [`TerminalWindow`] belongs to a session and outlives its
//! agents, each of which shows its screen there. How viewers are connected is up to the worker.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::pty::shared_screen::{ScreenViewer, SharedScreen};

/// Where a session's agent shows its screen.
#[derive(Debug, Default)]
pub struct TerminalWindow {
    screen: Mutex<Weak<SharedScreen>>,
}

impl TerminalWindow {
    /// Shows this screen from now on, for as long as it exists.
    pub(crate) fn show_screen(&self, screen: &Arc<SharedScreen>) {
        *self.screen.lock() = Arc::downgrade(screen);
    }

    /// Opens a viewer; `None` if there is no terminal.
    pub fn open_viewer(&self) -> Option<ScreenViewer> {
        let screen = self.screen.lock().upgrade()?;
        screen.open_viewer()
    }
}
