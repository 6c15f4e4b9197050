//! The smallest possible server of event streams: hyper, a broadcast channel, and frames as large as ours. It stores
//! nothing, checks nothing and drops slow readers. Its figures are what hyper and the kernel allow.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::UnixListener;
use tokio::sync::broadcast::{self, Receiver, Sender, error::RecvError};

use crate::stamp::{Pace, line, parse};

/// The argument that makes this program the bare server. The socket's path is the next argument.
pub(crate) const ROLE: &str = "--as-bare-server";
/// The path of the event stream.
pub(crate) const EVENTS: &str = "/events";
/// The path that starts the events. A prompt for the stamping agent follows, with a `+` for the space.
pub(crate) const GO: &str = "/go/";
/// More frames than any flood has, so that no reader is dropped.
const CHANNEL_FRAMES: usize = 1 << 17;

/// Serves until it is killed.
pub(crate) fn serve(socket: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        let listener = UnixListener::bind(Path::new(socket)).expect("the socket is free");
        println!("listening on unix:{socket}");
        let frames = broadcast::Sender::new(CHANNEL_FRAMES);
        while let Ok((stream, _)) = listener.accept().await {
            let frames = frames.clone();
            let service = service_fn(move |request| respond(frames.clone(), request));
            // Each task ends with its client, and all of them with the process.
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
}

async fn respond(
    frames: Sender<Bytes>,
    request: Request<hyper::body::Incoming>,
) -> Result<Response<FrameBody>, Infallible> {
    if let Some(prompt) = request.uri().path().strip_prefix(GO) {
        let (count, every) = parse(&prompt.replace('+', " "));
        tokio::spawn(async move {
            let mut pace = Pace::new(every);
            for seq in 0..count {
                pace.wait().await;
                // Sending fails only if there are no readers.
                let _result = frames.send(frame(seq));
                tokio::task::coop::consume_budget().await;
            }
        });
        return Ok(Response::new(FrameBody { first: Some(Bytes::from_static(b"{}")), wait: None }));
    }
    let first = Some(Bytes::from_static(b": ready\n\n"));
    Ok(Response::new(FrameBody { first, wait: Some(wait(frames.subscribe())) }))
}

/// A frame as long as one of ours, with the same fields.
fn frame(seq: usize) -> Bytes {
    let text = line();
    Bytes::from(format!(
        "id: {seq}\nevent: notice.shown\ndata: {{\"seq\":{seq},\"ts\":\"2026-11-15T20:30:45.123Z\",\"workspace_id\":\"ws_0123456789abcdef\",\"session_id\":\"ses_0123456789abcdef\",\"run_id\":\"run_0123456789abcdef\",\"kind\":\"notice.shown\",\"data\":{{\"text\":\"{text}\"}}}}\n\n"
    ))
}

type Wait = Pin<Box<dyn Future<Output = (Option<Bytes>, Receiver<Bytes>)> + Send>>;

fn wait(mut frames: Receiver<Bytes>) -> Wait {
    Box::pin(async move {
        match frames.recv().await {
            Ok(frame) => (Some(frame), frames),
            Err(RecvError::Lagged(_) | RecvError::Closed) => (None, frames),
        }
    })
}

/// A response body of frames.
struct FrameBody {
    first: Option<Bytes>,
    wait: Option<Wait>,
}

impl Body for FrameBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        let Some(waiting) = &mut self.wait else { return Poll::Ready(None) };
        let Poll::Ready((frame, frames)) = waiting.as_mut().poll(context) else { return Poll::Pending };
        self.wait = Some(wait(frames));
        Poll::Ready(frame.map(|frame| Ok(Frame::data(frame))))
    }
}
