//! A program's screen, shared between the driver, which feeds it, and any number of people who look at it and type. A
//! viewer is given what changes the screen that it has into the screen that there is: one that is slow misses what was
//! in between, and nobody waits for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::screen::{Screen, Size};

/// What may wait to be typed by all viewers together; who types more waits.
const TYPED_MAX: usize = 64;

/// What somebody does at a terminal.
#[derive(Debug)]
pub(crate) enum Typed {
    Keys(Bytes),
    Size(Size),
}

/// A shared screen.
pub(crate) struct View {
    screen: Mutex<Screen>,
    changed: watch::Sender<()>,
    typed: mpsc::Sender<Typed>,
    over: CancellationToken,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}

impl View {
    /// An empty screen, and what people type at it.
    pub(super) fn new(size: Size) -> (Arc<Self>, mpsc::Receiver<Typed>) {
        let (typed, keys) = mpsc::channel(TYPED_MAX);
        let screen = Mutex::new(Screen::new(size));
        let view = Self { screen, changed: watch::Sender::new(()), typed, over: CancellationToken::new() };
        (Arc::new(view), keys)
    }

    /// The screen. Nothing that is done with it can leave it half changed, so a panic elsewhere does not spoil it.
    pub(super) fn screen(&self) -> MutexGuard<'_, Screen> {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells who looks that it has changed.
    pub(super) fn show(&self) {
        self.changed.send_replace(());
    }

    /// The program is no more.
    pub(super) fn end(&self) {
        self.over.cancel();
    }

    /// Somebody who looks at it; `None` if the program is no more.
    pub(crate) fn look(self: &Arc<Self>) -> Option<Viewer> {
        let viewer = Viewer { view: Arc::clone(self), changed: self.changed.subscribe(), seen: None };
        (!self.over.is_cancelled()).then_some(viewer)
    }
}

/// Somebody who looks at a screen.
#[derive(Debug)]
pub(crate) struct Viewer {
    view: Arc<View>,
    changed: watch::Receiver<()>,
    /// The screen that it has.
    seen: Option<Box<vt100::Screen>>,
}

impl Viewer {
    /// What to write to a terminal so that it shows what this one does; `None` when the program is no more. Nothing is
    /// lost if the wait is given up.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            self.changed.mark_unchanged();
            let paint = self.paint();
            if !paint.is_empty() {
                return Some(paint);
            }
            tokio::select! {
                () = self.view.over.cancelled() => return None,
                changed = self.changed.changed() => changed.ok()?,
            }
        }
    }

    /// Does something at the terminal; false if the program is no more. Waits while too much is untaken.
    pub(crate) async fn act(&self, typed: Typed) -> bool {
        self.view.typed.send(typed).await.is_ok()
    }

    fn paint(&mut self) -> String {
        let screen = self.view.screen();
        let shown = screen.shown();
        let paint = match &self.seen {
            Some(seen) if seen.size() == shown.size() => shown.state_diff(seen),
            _ => shown.state_formatted(),
        };
        if !paint.is_empty() {
            self.seen = Some(Box::new(shown.clone()));
        }
        paint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(view: &View, output: &str) {
        view.screen().feed(output.as_bytes(), |_| {});
        view.show();
    }

    #[tokio::test]
    async fn a_viewer_that_is_slow_is_shown_the_screen_as_it_is_and_nothing_in_between() {
        let (view, _keys) = View::new(Size::near(20, 3));
        write(&view, "hello");
        let (mut first, mut terminal) = (view.look().unwrap(), Screen::new(Size::near(20, 3)));
        terminal.feed(first.next().await.unwrap().as_bytes(), |_| {});
        assert_eq!(terminal.row(0).text, "hello");
        for n in 0..10_000 {
            write(&view, &format!("\r\nline {n}"));
        }
        let paint = first.next().await.unwrap();
        assert!(paint.len() < 1000, "{} bytes", paint.len());
        terminal.feed(paint.as_bytes(), |_| {});
        assert_eq!(terminal.last_lines(3), ["line 9997", "line 9998", "line 9999"]);
        let mut second = view.look().unwrap();
        assert!(second.next().await.unwrap().contains("9999"), "whoever comes later sees all of it");
    }

    #[tokio::test]
    async fn a_screen_of_another_size_is_painted_anew_and_its_end_is_told() {
        let (view, _keys) = View::new(Size::near(20, 3));
        write(&view, "hello");
        let mut viewer = view.look().unwrap();
        viewer.next().await.unwrap();
        view.screen().resize(Size::near(30, 5));
        assert!(viewer.next().await.unwrap().contains("hello"));
        view.end();
        assert_eq!(viewer.next().await, None);
        assert!(view.look().is_none());
    }
}
