//! Where people look at an agent's terminal, if it has one: a place for the view, which outlives the agents that come and
//! go behind it, and the connection of one person to it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use qd_link::socket::{ByteStream, IncomingFrame, Socket, SocketError, SocketProgress};
use qd_protocol::frame::terminal::{KEYS_MAX, ViewerFrame, ViewerNotice};

use crate::drivers::pty::screen::TerminalSize;
use crate::drivers::pty::shared_screen::{ScreenViewer, SharedScreen, TerminalInput};

/// A place for a view.
#[derive(Debug, Default)]
pub(crate) struct TerminalWindow {
    screen: Mutex<Weak<SharedScreen>>,
}

impl TerminalWindow {
    /// From now on this is what there is to see, for as long as it is there.
    pub(crate) fn show_screen(&self, view: &Arc<SharedScreen>) {
        *self.screen.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(view);
    }

    /// Somebody looks; `None` if there is nothing to see.
    pub(crate) fn open_viewer(&self) -> Option<ScreenViewer> {
        let view = self.screen.lock().unwrap_or_else(PoisonError::into_inner).upgrade()?;
        view.open_viewer()
    }
}

/// Shows a terminal to one person until either has enough. What the person is slow to take is left out, not kept.
pub(crate) async fn serve_viewer<W: ByteStream>(
    mut socket: Socket<W>,
    mut viewer: ScreenViewer,
) -> Result<(), SocketError> {
    let mut writing = false;
    loop {
        tokio::select! {
            paint = viewer.next_paint(), if !writing => match paint {
                Some(paint) => {
                    socket.queue_binary(paint.into())?;
                    writing = true;
                }
                None => {
                    socket.send(&ViewerNotice::Ended).await?;
                    socket.close().await;
                    return Ok(());
                }
            },
            moved = socket.progress(true, writing) => {
                let typed = match moved? {
                    SocketProgress::Written => {
                        writing = false;
                        None
                    }
                    SocketProgress::Read(incoming) => decode_viewer_input(incoming)?,
                };
                if let Some(typed) = typed {
                    // If the program is no more, the viewer says so next.
                    let _taken = viewer.send_input(typed).await;
                }
            }
        }
    }
}

/// What a frame does at the terminal. What a later version may say is nothing to us.
fn decode_viewer_input(incoming: IncomingFrame) -> Result<Option<TerminalInput>, SocketError> {
    Ok(match incoming {
        IncomingFrame::Binary(keys) if keys.len() > KEYS_MAX => {
            return Err(SocketError::PeerRefused(format!("more than {KEYS_MAX} bytes of keys at once")));
        }
        IncomingFrame::Binary(keys) => Some(TerminalInput::Keys(keys)),
        IncomingFrame::Text(text) => {
            let said = serde_json::from_str(text.as_str()).ok();
            said.map(|ViewerFrame::Size { cols, rows }| {
                TerminalInput::Resize(TerminalSize::clamped(cols, rows))
            })
        }
        IncomingFrame::Alive => None,
    })
}
