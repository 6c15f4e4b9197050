//! A real terminal, in tmux, on a tmux server of its own that ends with the value. A screen sends no events, so it is
//! polled until it shows the expected text.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::home::{TestCommand, TestHome, binary};
use crate::poll_until;

/// One terminal with one program in it.
#[derive(Debug)]
pub struct TestTerminal<'a> {
    home: &'a TestHome,
    server: String,
}

impl<'a> TestTerminal<'a> {
    /// Starts `qd` with these arguments in a terminal. When it has ended, the screen shows `exit CODE`.
    pub async fn start_qd(home: &'a TestHome, args: &[&str]) -> Self {
        Self::start_qd_sized(home, args, (120, 40)).await
    }

    /// The same, in a terminal with so many columns and rows.
    pub async fn start_qd_sized(home: &'a TestHome, args: &[&str], (columns, rows): (u16, u16)) -> Self {
        // Each terminal has its own socket: a server that is shutting down would take the next one with it.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let index = NEXT.fetch_add(1, Ordering::Relaxed);
        let server = home.sibling_path(&format!("tmux{index}.sock")).display().to_string();
        let terminal = Self { home, server };
        let mut command = vec![quoted(&binary().display().to_string())];
        command.extend(args.iter().map(|arg| quoted(arg)));
        // Ctrl-C also reaches the shell; with the trap it survives and prints the exit code.
        let line = format!("trap : INT; {}; printf '\\nexit %s\\n' $?; exec sleep 600", command.join(" "));
        let (columns, rows) = (columns.to_string(), rows.to_string());
        terminal.tmux(&["new-session", "-d", "-x", &columns, "-y", &rows, &line]).await;
        terminal
    }

    /// Waits until the screen shows `text`, and returns the whole screen.
    pub async fn wait_for_text(&self, text: &str) -> String {
        self.wait_for_screen(text, |screen| screen.contains(text)).await
    }

    /// Waits until the screen matches `wanted`, and returns the whole screen, with what has scrolled off it.
    pub async fn wait_for_screen(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        self.wait_for_capture(what, &["-S", "-200"], wanted).await
    }

    /// The same, with only the rows that the window shows.
    pub async fn wait_for_visible(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        self.wait_for_capture(what, &[], wanted).await
    }

    async fn wait_for_capture(&self, what: &str, range: &[&str], wanted: impl Fn(&str) -> bool) -> String {
        let last = std::cell::RefCell::new(String::new());
        let found = poll_until(what, async || {
            let screen = self.tmux(&[&["capture-pane", "-p"], range].concat()).await;
            last.replace(screen.clone());
            wanted(&screen).then_some(screen)
        });
        match tokio::time::timeout(crate::WAIT_LIMIT - std::time::Duration::from_secs(1), found).await {
            Ok(screen) => screen,
            Err(_) => panic!("the screen never shows {what:?}:\n{}", last.borrow()),
        }
    }

    /// Makes the terminal so many columns wide and rows high, as a user does who drags the edge of its window.
    pub async fn resize(&self, (columns, rows): (u16, u16)) {
        let (columns, rows) = (columns.to_string(), rows.to_string());
        self.tmux(&["resize-window", "-x", &columns, "-y", &rows]).await;
    }

    /// Types `text` literally.
    pub async fn type_text(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]).await;
    }

    /// Presses a key, by its tmux name: `Enter`, `C-c`.
    pub async fn press_key(&self, key: &str) {
        self.tmux(&["send-keys", key]).await;
    }

    async fn tmux(&self, args: &[&str]) -> String {
        let mut command = self.home.program("tmux");
        command.env("TERM", "xterm-256color").env("LANG", "C.UTF-8").env("SHELL", "/bin/sh");
        command.args(["-S", &self.server, "-f", "/dev/null"]).args(args);
        TestCommand::spawn(command).wait().await.ok()
    }
}

impl Drop for TestTerminal<'_> {
    fn drop(&mut self) {
        let mut command = std::process::Command::new("tmux");
        command.args(["-S", &self.server, "kill-server"]);
        let _already_gone =
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).status();
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}
