//! `qd attach --raw`: the screen of a session's terminal in this one, key by key. The terminal is given back as it was,
//! however this ends.

use std::io::{self, IsTerminal};

use bytes::Bytes;
use qd_link::socket::{Incoming, Moved};
use qd_protocol::frame::terminal::{FromViewer, KEYS_MAX, SUBPROTOCOL, ToViewer};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::{AsyncReadExt, Stdin};
use tokio::signal::unix::{SignalKind, signal};

use super::Context;
use crate::client::WebSocket;
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;
use crate::refs;

/// The key that leaves: Ctrl-], as everywhere.
const LEAVE: u8 = 0x1d;
/// What is read of the keyboard at once.
const KEYS: usize = KEYS_MAX / 16;
/// A screen of our own, so that what stood here is there again afterwards.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[2J\x1b[H";
/// Takes back whatever a program may have asked of a terminal, and gives the old screen back.
const RESTORE: &[u8] =
    b"\x1b[?1l\x1b>\x1b[?9l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1005l\x1b[?1006l\x1b[?2004l\x1b[0 q\x1b[m\x1b[?25h\x1b[?1049l";

/// Why one stops looking.
enum Left {
    /// The person has enough.
    Detached,
    /// The program is no more.
    Over,
    /// The daemon is, or the connection to it.
    Lost,
}

/// Shows a session's terminal and takes keys for it.
pub(crate) async fn attach(context: &Context, id: &str) -> Result<Exit> {
    if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(Failure::Usage(
            "`--raw` shows a screen, and so needs a terminal to show it in".to_owned(),
        ));
    }
    let client = context.client().await?;
    let session = refs::session(&client, id).await?;
    let socket = client.socket(&format!("{}/terminal", session.path()), SUBPROTOCOL).await?;
    let left = {
        let _restored = Raw::enter(&context.out)?;
        look(&context.out, socket).await?
    };
    match left {
        Left::Detached => context.out.note("detached; the session goes on"),
        Left::Over => context.out.note("the program has ended"),
        Left::Lost => return Err(Failure::Unreachable("the connection to the daemon broke".to_owned())),
    }
    Ok(Exit::Well)
}

async fn look(out: &Output, mut socket: WebSocket) -> Result<Left> {
    let mut resized = signal(SignalKind::window_change()).map_err(anyhow::Error::from)?;
    let mut stdin = tokio::io::stdin();
    let mut keys = vec![0; KEYS];
    let mut writing = tell_size(&mut socket);
    loop {
        tokio::select! {
            biased;
            typed = read(&mut stdin, &mut keys), if !writing => {
                let typed = &keys[..typed];
                let leaves = typed.iter().position(|key| *key == LEAVE);
                let before = &typed[..leaves.unwrap_or(typed.len())];
                if !before.is_empty() && socket.start_binary(Bytes::copy_from_slice(before)).is_ok() {
                    writing = true;
                }
                if leaves.is_some() || typed.is_empty() {
                    // Whether what came before is heard is up to the connection.
                    let _heard = socket.flush().await;
                    socket.close().await;
                    return Ok(Left::Detached);
                }
            }
            _ = resized.recv(), if !writing => writing = tell_size(&mut socket),
            moved = socket.moves(true, writing) => match moved {
                Ok(Moved::Written) => writing = false,
                Ok(Moved::Read(Incoming::Binary(paint))) => out.paint(&paint)?,
                Ok(Moved::Read(Incoming::Text(text))) => {
                    // What a later daemon may say besides is nothing to us.
                    if let Ok(ToViewer::Over) = serde_json::from_str(text.as_str()) {
                        return Ok(Left::Over);
                    }
                }
                // A sign of life was asked for, and goes out with the next that is written.
                Ok(Moved::Read(Incoming::Alive)) => writing = true,
                Err(_) => return Ok(Left::Lost),
            }
        }
    }
}

/// What is typed; nothing when there will be no more.
async fn read(stdin: &mut Stdin, keys: &mut [u8]) -> usize {
    stdin.read(keys).await.unwrap_or_default()
}

/// Says how large our terminal is; true if that has to be written.
fn tell_size(socket: &mut WebSocket) -> bool {
    let Ok(size) = tcgetwinsize(io::stdout()) else { return false };
    let size = FromViewer::Size { cols: size.ws_col, rows: size.ws_row };
    serde_json::to_string(&size).is_ok_and(|text| socket.start(text).is_ok())
}

/// A terminal that gives every key as it is, with a screen of our own; as it was when this is dropped.
struct Raw<'a> {
    out: &'a Output,
    before: Termios,
}

impl<'a> Raw<'a> {
    fn enter(out: &'a Output) -> Result<Self> {
        let before = tcgetattr(io::stdin()).map_err(io::Error::from).map_err(anyhow::Error::from)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)
            .map_err(io::Error::from)
            .map_err(anyhow::Error::from)?;
        let entered = Self { out, before };
        out.paint(ENTER)?;
        Ok(entered)
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // There is nobody to tell if the terminal is gone.
        let _shown = self.out.paint(RESTORE);
        let _set = tcsetattr(io::stdin(), OptionalActions::Drain, &self.before);
    }
}
