//! The connection of one person who watches an agent's terminal. What the terminal shows is up to its driver.

use qd_drivers::{ScreenViewer, TerminalInput, TerminalSize};
use qd_link::socket::{ByteStream, IncomingFrame, Socket, SocketError, SocketProgress};
use qd_protocol::frame::terminal::{KEYS_MAX, ViewerFrame, ViewerNotice};

/// Shows a terminal to one person until the connection or the terminal ends. Output that the person does not take in
/// time is skipped, not stored.
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
            progress = socket.progress(true, writing) => {
                let input = match progress? {
                    SocketProgress::Written => {
                        writing = false;
                        None
                    }
                    SocketProgress::Read(incoming) => decode_viewer_input(incoming)?,
                };
                if let Some(input) = input {
                    // If the program has exited, the next paint says so.
                    let _sent = viewer.send_input(input).await;
                }
            }
        }
    }
}

/// The terminal input of a frame. Frames that only a later version knows are ignored.
fn decode_viewer_input(incoming: IncomingFrame) -> Result<Option<TerminalInput>, SocketError> {
    Ok(match incoming {
        IncomingFrame::Binary(keys) if keys.len() > KEYS_MAX => {
            return Err(SocketError::PeerRefused(format!("more than {KEYS_MAX} bytes of keys at once")));
        }
        IncomingFrame::Binary(keys) => Some(TerminalInput::Keys(keys)),
        IncomingFrame::Text(text) => {
            let frame = serde_json::from_str(text.as_str()).ok();
            frame.map(|ViewerFrame::Size { cols, rows }| {
                TerminalInput::Resize(TerminalSize::clamped(cols, rows))
            })
        }
        IncomingFrame::Alive => None,
    })
}
