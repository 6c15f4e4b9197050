//! The least that a server of event streams can be: hyper, a broadcast channel and a frame that is as large as ours.
//! It keeps nothing, checks nothing and forgets whoever is slow; what it reaches is what hyper and the kernel allow.

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

/// The argument that makes this program that server; the socket's path is the next.
pub(crate) const ROLE: &str = "--as-bare-server";
/// The path that gives a stream.
pub(crate) const EVENTS: &str = "/events";
/// Below this path, a prompt as the stamping agent takes it, with a `+` for the space.
pub(crate) const GO: &str = "/go/";
/// More frames than any flood has: nobody is left behind.
const ROOM: usize = 1 << 17;

/// Serves until it is killed.
pub(crate) fn serve(socket: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    runtime.block_on(async {
        let listener = UnixListener::bind(Path::new(socket)).expect("the socket is free");
        println!("listening on unix:{socket}");
        let frames = broadcast::Sender::new(ROOM);
        while let Ok((stream, _)) = listener.accept().await {
            let frames = frames.clone();
            let service = service_fn(move |request| answer(frames.clone(), request));
            // Each ends with its client, all of them with the process.
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
}

async fn answer(
    frames: Sender<Bytes>,
    request: Request<hyper::body::Incoming>,
) -> Result<Response<Feed>, Infallible> {
    if let Some(prompt) = request.uri().path().strip_prefix(GO) {
        let (count, every) = parse(&prompt.replace('+', " "));
        tokio::spawn(async move {
            let mut pace = Pace::new(every);
            for seq in 0..count {
                pace.wait().await;
                // Nobody who listens is nobody who waits.
                let _readers = frames.send(frame(seq));
                tokio::task::coop::consume_budget().await;
            }
        });
        return Ok(Response::new(Feed { first: Some(Bytes::from_static(b"{}")), wait: None }));
    }
    let first = Some(Bytes::from_static(b": ready\n\n"));
    Ok(Response::new(Feed { first, wait: Some(wait(frames.subscribe())) }))
}

/// As long as one of ours, and with the same fields.
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

/// A body of frames.
struct Feed {
    first: Option<Bytes>,
    wait: Option<Wait>,
}

impl Body for Feed {
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
