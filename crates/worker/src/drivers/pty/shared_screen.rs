//! A program's screen, shared between the driver, which feeds it, and any number of people who look at it and type. A
//! viewer is given what changes the screen that it has into the screen that there is: one that is slow misses what was
//! in between, and nobody waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::screen::{TerminalScreen, TerminalSize};

/// What may wait to be typed by all viewers together; who types more waits.
const INPUT_QUEUE_MAX: usize = 64;

/// What somebody does at a terminal.
#[derive(Debug)]
pub(crate) enum TerminalInput {
    Keys(Bytes),
    Resize(TerminalSize),
}

/// A shared screen.
pub(crate) struct SharedScreen {
    screen: Mutex<TerminalScreen>,
    changed: watch::Sender<()>,
    input: mpsc::Sender<TerminalInput>,
    closed: CancellationToken,
}

impl std::fmt::Debug for SharedScreen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}

impl SharedScreen {
    /// An empty screen, and what people type at it.
    pub(super) fn new(size: TerminalSize) -> (Arc<Self>, mpsc::Receiver<TerminalInput>) {
        let (typed, keys) = mpsc::channel(INPUT_QUEUE_MAX);
        let screen = Mutex::new(TerminalScreen::new(size));
        let view =
            Self { screen, changed: watch::Sender::new(()), input: typed, closed: CancellationToken::new() };
        (Arc::new(view), keys)
    }

    /// The screen. Nothing that is done with it can leave it half changed, so a panic elsewhere does not spoil it.
    pub(super) fn lock_screen(&self) -> MutexGuard<'_, TerminalScreen> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells who looks that it has changed.
    pub(super) fn notify_viewers(&self) {
        self.changed.send_replace(());
    }

    /// The program is no more.
    pub(super) fn close(&self) {
        self.closed.cancel();
    }

    /// Somebody who looks at it; `None` if the program is no more.
    pub(crate) fn open_viewer(self: &Arc<Self>) -> Option<ScreenViewer> {
        let viewer =
            ScreenViewer { screen: Arc::clone(self), changed: self.changed.subscribe(), last_screen: None };
        (!self.closed.is_cancelled()).then_some(viewer)
    }
}

/// Somebody who looks at a screen.
#[derive(Debug)]
pub(crate) struct ScreenViewer {
    screen: Arc<SharedScreen>,
    changed: watch::Receiver<()>,
    /// The screen that it has.
    last_screen: Option<Box<vt100::Screen>>,
}

impl ScreenViewer {
    /// What to write to a terminal so that it shows what this one does; `None` when the program is no more. Nothing is
    /// lost if the wait is given up.
    pub(crate) async fn next_paint(&mut self) -> Option<String> {
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

    /// Does something at the terminal; false if the program is no more. Waits while too much is untaken.
    pub(crate) async fn send_input(&self, typed: TerminalInput) -> bool {
        self.screen.input.send(typed).await.is_ok()
    }

    fn render_changes(&mut self) -> String {
        let screen = self.screen.lock_screen();
        let shown = screen.emulator();
        let paint = match &self.last_screen {
            Some(seen) if seen.size() == shown.size() => shown.state_diff(seen),
            _ => shown.state_formatted(),
        };
        if !paint.is_empty() {
            self.last_screen = Some(Box::new(shown.clone()));
        }
        paint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_output(view: &SharedScreen, output: &str) {
        view.lock_screen().feed(output.as_bytes(), |_| {});
        view.notify_viewers();
    }

    #[tokio::test]
    async fn a_viewer_that_is_slow_is_shown_the_screen_as_it_is_and_nothing_in_between() {
        let (view, _keys) = SharedScreen::new(TerminalSize::clamped(20, 3));
        write_output(&view, "hello");
        let (mut first, mut terminal) =
            (view.open_viewer().unwrap(), TerminalScreen::new(TerminalSize::clamped(20, 3)));
        terminal.feed(first.next_paint().await.unwrap().as_bytes(), |_| {});
        assert_eq!(terminal.row(0).text, "hello");
        for n in 0..10_000 {
            write_output(&view, &format!("\r\nline {n}"));
        }
        let paint = first.next_paint().await.unwrap();
        assert!(paint.len() < 1000, "{} bytes", paint.len());
        terminal.feed(paint.as_bytes(), |_| {});
        assert_eq!(terminal.last_lines(3), ["line 9997", "line 9998", "line 9999"]);
        let mut second = view.open_viewer().unwrap();
        assert!(second.next_paint().await.unwrap().contains("9999"), "whoever comes later sees all of it");
    }

    #[tokio::test]
    async fn a_screen_of_another_size_is_painted_anew_and_its_end_is_told() {
        let (view, _keys) = SharedScreen::new(TerminalSize::clamped(20, 3));
        write_output(&view, "hello");
        let mut viewer = view.open_viewer().unwrap();
        viewer.next_paint().await.unwrap();
        view.lock_screen().resize(TerminalSize::clamped(30, 5));
        assert!(viewer.next_paint().await.unwrap().contains("hello"));
        view.close();
        assert_eq!(viewer.next_paint().await, None);
        assert!(view.open_viewer().is_none());
    }
}
