//! A real terminal, by tmux, on a server of its own that ends with the value. Its screen sends no event, so it is
//! looked at until it shows what is waited for.

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
    /// Starts `qd` with these arguments in a terminal; when it has ended, the screen says `exit CODE`.
    pub async fn start_qd(home: &'a TestHome, args: &[&str]) -> Self {
        // A socket of its own: a server that ends takes a moment, and would take the next one's with it.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let server = home.sibling_path(&format!("tmux{nth}.sock")).display().to_string();
        let terminal = Self { home, server };
        let mut words = vec![quoted(&binary().display().to_string())];
        words.extend(args.iter().map(|arg| quoted(arg)));
        // Ctrl-C goes to the shell as well; with a trap it lives on and tells the exit code.
        let line = format!("trap : INT; {}; printf '\\nexit %s\\n' $?; exec sleep 600", words.join(" "));
        terminal.tmux(&["new-session", "-d", "-x", "120", "-y", "40", &line]).await;
        terminal
    }

    /// Waits until the screen shows `text`, and gives all of it.
    pub async fn wait_for_text(&self, text: &str) -> String {
        self.wait_for_screen(text, |screen| screen.contains(text)).await
    }

    /// Waits until the screen is as wanted, and gives all of it.
    pub async fn wait_for_screen(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let last = std::cell::RefCell::new(String::new());
        let found = poll_until(what, async || {
            let screen = self.tmux(&["capture-pane", "-p", "-S", "-200"]).await;
            last.replace(screen.clone());
            wanted(&screen).then_some(screen)
        });
        match tokio::time::timeout(crate::WAIT_LIMIT - std::time::Duration::from_secs(1), found).await {
            Ok(screen) => screen,
            Err(_) => panic!("the screen never shows {what:?}:\n{}", last.borrow()),
        }
    }

    /// Types `text` as it is.
    pub async fn type_text(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]).await;
    }

    /// Presses a key, by tmux's name for it: `Enter`, `C-c`.
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
