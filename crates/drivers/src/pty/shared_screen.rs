//! A program's screen, shared between the driver, which feeds it, and any number of people who watch it and type. A
//! viewer gets the difference between the screen it last saw and the current one: a slow viewer misses what was in
//! between, and nobody waits for it.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::screen::{TerminalScreen, TerminalSize};

/// The most inputs of all viewers together that may wait to be typed. A viewer that sends more has to wait.
const INPUT_QUEUE_MAX: usize = 64;

/// Input of a person at a terminal.
#[derive(Debug)]
pub enum TerminalInput {
    Keys(Bytes),
    Resize(TerminalSize),
}

pub(crate) struct SharedScreen {
    screen: Mutex<TerminalScreen>,
    changed: watch::Sender<()>,
    input: mpsc::Sender<TerminalInput>,
    closed: CancellationToken,
}

impl std::fmt::Debug for SharedScreen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedScreen").finish_non_exhaustive()
    }
}

impl SharedScreen {
    /// An empty screen, and the receiver of its viewers' input.
    pub(super) fn new(size: TerminalSize) -> (Arc<Self>, mpsc::Receiver<TerminalInput>) {
        let (input_sender, input) = mpsc::channel(INPUT_QUEUE_MAX);
        let screen = Mutex::new(TerminalScreen::new(size));
        let shared = Self {
            screen,
            changed: watch::Sender::new(()),
            input: input_sender,
            closed: CancellationToken::new(),
        };
        (Arc::new(shared), input)
    }

    /// The screen. No operation leaves it half changed, so a panic elsewhere does not spoil it.
    pub(super) fn lock_screen(&self) -> MutexGuard<'_, TerminalScreen> {
        self.screen.lock()
    }

    pub(super) fn notify_viewers(&self) {
        self.changed.send_replace(());
    }

    /// Ends all viewers, because the program has exited.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Opens a viewer; `None` if the program has exited.
    pub(crate) fn open_viewer(self: &Arc<Self>) -> Option<ScreenViewer> {
        let viewer =
            ScreenViewer { screen: Arc::clone(self), changed: self.changed.subscribe(), last_screen: None };
        (!self.closed.is_cancelled()).then_some(viewer)
    }
}

/// One person who watches a screen.
#[derive(Debug)]
pub struct ScreenViewer {
    screen: Arc<SharedScreen>,
    changed: watch::Receiver<()>,
    /// The screen that the viewer last saw.
    last_screen: Option<Box<vt100::Screen>>,
}

impl ScreenViewer {
    /// The bytes that make the viewer's terminal show the current screen; `None` when the program has exited. Dropping
    /// the wait loses nothing.
    pub async fn next_paint(&mut self) -> Option<String> {
        loop {
            self.changed.mark_unchanged();
            let paint = self.render_changes();
            if !paint.is_empty() {
                return Some(paint);
            }
            tokio::select! {
                () = self.screen.closed.cancelled() => return None,
                changed = self.changed.changed() => changed.ok()?,
            }
        }
    }

    /// Sends input to the terminal; returns false if the program has exited. Waits while too much input is queued.
    pub async fn send_input(&self, input: TerminalInput) -> bool {
        self.screen.input.send(input).await.is_ok()
    }

    fn render_changes(&mut self) -> String {
        let screen = self.screen.lock_screen();
        let current = screen.emulator();
        let paint = match &self.last_screen {
            Some(seen) if seen.size() == current.size() => current.state_diff(seen),
            _ => current.state_formatted(),
        };
        if !paint.is_empty() {
            self.last_screen = Some(Box::new(current.clone()));
        }
        paint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_output(screen: &SharedScreen, output: &str) {
        screen.lock_screen().feed(output.as_bytes(), |_| {});
        screen.notify_viewers();
    }

    #[tokio::test]
    async fn a_viewer_that_is_slow_is_shown_the_screen_as_it_is_and_nothing_in_between() {
        let (screen, _keys) = SharedScreen::new(TerminalSize::clamped(20, 3));
        write_output(&screen, "hello");
        let (mut first, mut terminal) =
            (screen.open_viewer().unwrap(), TerminalScreen::new(TerminalSize::clamped(20, 3)));
        terminal.feed(first.next_paint().await.unwrap().as_bytes(), |_| {});
        assert_eq!(terminal.row(0).text, "hello");
        for n in 0..10_000 {
            write_output(&screen, &format!("\r\nline {n}"));
        }
        let paint = first.next_paint().await.unwrap();
        assert!(paint.len() < 1000, "{} bytes", paint.len());
        terminal.feed(paint.as_bytes(), |_| {});
        assert_eq!(terminal.last_lines(3), ["line 9997", "line 9998", "line 9999"]);
        let mut second = screen.open_viewer().unwrap();
        assert!(second.next_paint().await.unwrap().contains("9999"), "whoever comes later sees all of it");
    }

    #[tokio::test]
    async fn a_resized_screen_is_repainted_and_a_closed_one_ends_its_viewers() {
        let (screen, _keys) = SharedScreen::new(TerminalSize::clamped(20, 3));
        write_output(&screen, "hello");
        let mut viewer = screen.open_viewer().unwrap();
        viewer.next_paint().await.unwrap();
        screen.lock_screen().resize(TerminalSize::clamped(30, 5));
        assert!(viewer.next_paint().await.unwrap().contains("hello"));
        screen.close();
        assert_eq!(viewer.next_paint().await, None);
        assert!(screen.open_viewer().is_none());
    }
}
