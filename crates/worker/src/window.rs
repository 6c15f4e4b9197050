//! Where people look at an agent's terminal, if it has one: a place for the view, which outlives the agents that come and
//! go behind it, and the connection of one person to it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use qd_link::socket::{Incoming, Moved, Socket, SocketError, Wire};
use qd_protocol::frame::terminal::{FromViewer, KEYS_MAX, ToViewer};

use crate::drivers::pty::screen::Size;
use crate::drivers::pty::view::{Typed, View, Viewer};

/// A place for a view.
#[derive(Debug, Default)]
pub(crate) struct Window {
    view: Mutex<Weak<View>>,
}

impl Window {
    /// From now on this is what there is to see, for as long as it is there.
    pub(crate) fn open(&self, view: &Arc<View>) {
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(view);
    }

    /// Somebody looks; `None` if there is nothing to see.
    pub(crate) fn look(&self) -> Option<Viewer> {
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner).upgrade()?;
        view.look()
    }
}

/// Shows a terminal to one person until either has enough. What the person is slow to take is left out, not kept.
pub(crate) async fn show<W: Wire>(mut socket: Socket<W>, mut viewer: Viewer) -> Result<(), SocketError> {
    let mut writing = false;
    loop {
        tokio::select! {
            paint = viewer.next(), if !writing => match paint {
                Some(paint) => {
                    socket.start_binary(paint.into())?;
                    writing = true;
                }
                None => {
                    socket.send(&ToViewer::Over).await?;
                    socket.close().await;
                    return Ok(());
                }
            },
            moved = socket.moves(true, writing) => {
                let typed = match moved? {
                    Moved::Written => {
                        writing = false;
                        None
                    }
                    Moved::Read(incoming) => typed(incoming)?,
                };
                if let Some(typed) = typed {
                    // If the program is no more, the viewer says so next.
                    let _taken = viewer.act(typed).await;
                }
            }
        }
    }
}

/// What a frame does at the terminal. What a later version may say is nothing to us.
fn typed(incoming: Incoming) -> Result<Option<Typed>, SocketError> {
    Ok(match incoming {
        Incoming::Binary(keys) if keys.len() > KEYS_MAX => {
            return Err(SocketError::Unwelcome(format!("more than {KEYS_MAX} bytes of keys at once")));
        }
        Incoming::Binary(keys) => Some(Typed::Keys(keys)),
        Incoming::Text(text) => {
            let said = serde_json::from_str(text.as_str()).ok();
            said.map(|FromViewer::Size { cols, rows }| Typed::Size(Size::near(cols, rows)))
        }
        Incoming::Alive => None,
    })
}
