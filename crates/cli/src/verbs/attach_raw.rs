//! `qd attach --raw`: shows the terminal of a session's agent in this terminal and forwards every key. The terminal is
//! restored however this ends.

use std::io::{self, IsTerminal};

use bytes::Bytes;
use qd_link::socket::{IncomingFrame, SocketProgress};
use qd_protocol::frame::terminal::{KEYS_MAX, SUBPROTOCOL, ViewerFrame, ViewerNotice};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::{AsyncReadExt, Stdin};
use tokio::signal::unix::{SignalKind, signal};

use super::VerbContext;
use crate::client::DaemonWebSocket;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::refs;

/// The key that detaches: Ctrl-], as in telnet.
const LEAVE_KEY: u8 = 0x1d;
const KEY_BUFFER_BYTES: usize = KEYS_MAX / 16;
/// Switches to the alternate screen, so the old content is back afterwards.
const ENTER_SCREEN: &[u8] = b"\x1b[?1049h\x1b[2J\x1b[H";
/// Resets every terminal mode that a program may have set, and returns to the main screen.
const RESTORE_SCREEN: &[u8] =
    b"\x1b[?1l\x1b>\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?2004l\x1b[0 q\x1b[m\x1b[?25h\x1b[?1049l";

/// Why the raw view ended.
enum RawAttachEnd {
    /// The user pressed Ctrl-], or stdin ended.
    Detached,
    /// The agent's program exited.
    ProgramEnded,
    ConnectionLost,
}

pub(crate) async fn attach_raw(context: &VerbContext, id: &str) -> Result<CliExitCode> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(CliFailure::Usage(
            "`--raw` needs a terminal: stdin and stdout must not be redirected".to_owned(),
        ));
    }
    let client = context.client().await?;
    let session = refs::resolve_session(&client, id).await?;
    let socket = client.open_websocket(&format!("{}/terminal", session.path()), SUBPROTOCOL).await?;
    let end = {
        let _raw_mode = RawModeGuard::enter(&context.out)?;
        show_terminal(&context.out, socket).await?
    };
    match end {
        RawAttachEnd::Detached => context.out.print_note("detached; the session keeps running"),
        RawAttachEnd::ProgramEnded => context.out.print_note("the program has exited"),
        RawAttachEnd::ConnectionLost => {
            return Err(CliFailure::Unreachable("the connection to the daemon broke".to_owned()));
        }
    }
    Ok(CliExitCode::Success)
}

async fn show_terminal(out: &CliOutput, mut socket: DaemonWebSocket) -> Result<RawAttachEnd> {
    let mut resized = signal(SignalKind::window_change()).map_err(anyhow::Error::from)?;
    let mut stdin = tokio::io::stdin();
    let mut keys = vec![0; KEY_BUFFER_BYTES];
    let mut writing = send_size(&mut socket);
    loop {
        tokio::select! {
            biased;
            typed = read_keys(&mut stdin, &mut keys), if !writing => {
                let typed = &keys[..typed];
                let leaves = typed.iter().position(|key| *key == LEAVE_KEY);
                let before = &typed[..leaves.unwrap_or(typed.len())];
                if !before.is_empty() && socket.queue_binary(Bytes::copy_from_slice(before)).is_ok() {
                    writing = true;
                }
                if leaves.is_some() || typed.is_empty() {
                    // Best effort: the keys before it are lost if the connection is broken.
                    let _flushed = socket.flush().await;
                    socket.close().await;
                    return Ok(RawAttachEnd::Detached);
                }
            }
            _ = resized.recv(), if !writing => writing = send_size(&mut socket),
            moved = socket.progress(true, writing) => match moved {
                Ok(SocketProgress::Written) => writing = false,
                Ok(SocketProgress::Read(IncomingFrame::Binary(paint))) => out.print_raw(&paint)?,
                Ok(SocketProgress::Read(IncomingFrame::Text(text))) => {
                    // A newer daemon may send other notices, which are ignored.
                    if let Ok(ViewerNotice::Ended) = serde_json::from_str(text.as_str()) {
                        return Ok(RawAttachEnd::ProgramEnded);
                    }
                }
                // A ping arrived; its pong goes out with the next write.
                Ok(SocketProgress::Read(IncomingFrame::Alive)) => writing = true,
                Err(_) => return Ok(RawAttachEnd::ConnectionLost),
            }
        }
    }
}

/// Reads typed keys. Returns 0 at the end of input.
async fn read_keys(stdin: &mut Stdin, keys: &mut [u8]) -> usize {
    stdin.read(keys).await.unwrap_or_default()
}

/// Queues the size of this terminal for sending; true if there is something to write.
fn send_size(socket: &mut DaemonWebSocket) -> bool {
    let Ok(size) = tcgetwinsize(io::stdout()) else { return false };
    let size = ViewerFrame::Size { cols: size.ws_col, rows: size.ws_row };
    serde_json::to_string(&size).is_ok_and(|text| socket.queue_text(text).is_ok())
}

/// Puts the terminal into raw mode on the alternate screen, and restores it on drop.
struct RawModeGuard<'a> {
    out: &'a CliOutput,
    saved: Termios,
}

impl<'a> RawModeGuard<'a> {
    fn enter(out: &'a CliOutput) -> Result<Self> {
        let before = tcgetattr(io::stdin()).map_err(io::Error::from).map_err(anyhow::Error::from)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)
            .map_err(io::Error::from)
            .map_err(anyhow::Error::from)?;
        let entered = Self { out, saved: before };
        out.print_raw(ENTER_SCREEN)?;
        Ok(entered)
    }
}

impl Drop for RawModeGuard<'_> {
    fn drop(&mut self) {
        // Errors are ignored: if the terminal is gone, there is nothing to restore.
        let _shown = self.out.print_raw(RESTORE_SCREEN);
        let _set = tcsetattr(io::stdin(), OptionalActions::Drain, &self.saved);
    }
}
