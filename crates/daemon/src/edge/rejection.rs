//! Connections that cannot be served: they get a short error before they are closed, even if the process has no
//! descriptor left.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::BodyExt;
use qd_protocol::api::VERSION_HEADER;
use qd_protocol::{ApiError, ErrorCode};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::error::HttpError;
use super::guarded_router::VERSION;
use super::serve::AcceptedStream;

/// How long sending the response may take.
const REJECTION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait for the request. A client that gets a response before it has sent a request may not read it.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(200);
/// The same if no other connection is accepted meanwhile. Clients send their request at once, unless they are to block us.
const SHORT_REQUEST_TIMEOUT: Duration = Duration::from_millis(50);
/// The most bytes of a request that are read before it is refused without waiting for the rest.
const UNREAD_MAX: usize = 16 << 10;

/// The response to a connection over the limit, with its headers.
#[derive(Debug, Clone)]
pub(super) struct OverloadedResponse(Bytes);

impl OverloadedResponse {
    pub(super) async fn new() -> Self {
        let refusal =
            ApiError::new(ErrorCode::Overloaded, "too many connections are open; try again in a moment");
        let (head, body) = HttpError(refusal).into_response().into_parts();
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let mut text = format!("HTTP/1.1 {}\r\n", head.status);
        for (name, value) in &head.headers {
            text.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap_or_default()));
        }
        text.push_str(&format!("{VERSION_HEADER}: {VERSION}\r\nconnection: close\r\n"));
        if !head.headers.contains_key("content-length") {
            text.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        text.push_str("\r\n");
        Self([text.as_bytes(), &body].concat().into())
    }

    /// Sends the response and waits until the client has read it. Over TLS that would cost a handshake, so the
    /// connection is only closed.
    pub(super) async fn send(&self, caller: AcceptedStream) {
        wait_for_request(&caller, REQUEST_TIMEOUT).await;
        let rejection = async {
            match caller {
                AcceptedStream::Unix(mut stream, _) => self.write_to(&mut stream).await,
                AcceptedStream::Tcp(mut stream, _, None) => self.write_to(&mut stream).await,
                AcceptedStream::Tcp(_, _, Some(_)) => Ok(()),
            }
        };
        drop(tokio::time::timeout(REJECTION_TIMEOUT, rejection).await);
    }

    async fn write_to<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: &mut S) -> io::Result<()> {
        stream.write_all(&self.0).await?;
        stream.shutdown().await?;
        // Closing with unread input would reset the connection, and the response would be lost.
        let mut ignored = [0; 1024];
        while stream.read(&mut ignored).await? > 0 {}
        Ok(())
    }

    /// Sends the response almost without waiting, and closes the connection. A client that is still sending its request
    /// may see a broken connection instead.
    pub(super) async fn send_quickly(&self, caller: AcceptedStream) {
        wait_for_request(&caller, SHORT_REQUEST_TIMEOUT).await;
        let sent = match &caller {
            AcceptedStream::Unix(stream, _) => self.write_at_once(stream),
            AcceptedStream::Tcp(stream, _, None) => self.write_at_once(stream),
            AcceptedStream::Tcp(_, _, Some(_)) => Ok(()),
        };
        tracing::debug!(?sent, "closed a connection over the limit");
    }

    fn write_at_once(&self, stream: impl AsFd) -> Result<(), Errno> {
        // The socket does not block. Input is read first, because closing with unread input loses the response.
        let mut ignored = [0; UNREAD_MAX];
        let _nothing_yet = rustix::io::read(&stream, &mut ignored);
        rustix::io::write(&stream, &self.0)?;
        rustix::net::shutdown(&stream, rustix::net::Shutdown::Write)
    }
}

async fn wait_for_request(caller: &AcceptedStream, limit: Duration) {
    let readable = async {
        match caller {
            AcceptedStream::Unix(stream, _) => stream.readable().await,
            AcceptedStream::Tcp(stream, ..) => stream.readable().await,
        }
    };
    // A client that sends nothing is answered all the same.
    drop(tokio::time::timeout(limit, readable).await);
}

/// A descriptor that is held open only to be closed when the process has no other left: then a connection can still be
/// accepted, refused and closed, instead of waiting in the kernel's queue for nobody.
#[derive(Debug)]
pub(super) struct SpareDescriptor(Option<File>);

impl SpareDescriptor {
    pub(super) fn new() -> Self {
        Self(File::open("/dev/null").ok())
    }

    /// Whether accepting failed because no descriptor was left.
    pub(super) fn is_needed(error: &io::Error) -> bool {
        let errors = [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error()));
        errors.contains(&error.raw_os_error())
    }

    /// Whether the process can open nothing at the moment.
    pub(super) fn none_left() -> bool {
        File::open("/dev/null").is_err_and(|error| Self::is_needed(&error))
    }

    /// Frees the descriptor. False if it could not be opened again since its last use.
    pub(super) fn release(&mut self) -> bool {
        self.0.take().is_some()
    }

    /// Opens the descriptor again, if it was used.
    pub(super) fn renew(&mut self) {
        if self.0.is_none() {
            *self = Self::new();
        }
    }
}
