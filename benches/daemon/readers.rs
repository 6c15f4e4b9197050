//! Many readers of one stream in one process, as cheap as possible: bytes are counted or searched in place. They read
//! in the same way from either server.

use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::stamp::{now, stamps};

/// The maximum size of one read.
const BUFFER: usize = 64 << 10;

/// Opens this many streams and waits until each is attached.
pub(crate) async fn open(socket: &Path, path: &str, count: usize) -> Vec<Reader> {
    let mut readers = Vec::with_capacity(count);
    for _ in 0..count {
        readers.push(Reader::open(socket, path).await);
    }
    readers
}

/// Lets every reader count to `frames`.
pub(crate) fn count(readers: Vec<Reader>, frames: usize) -> Vec<JoinHandle<()>> {
    readers.into_iter().map(|reader| tokio::spawn(reader.count(frames))).collect()
}

/// Lets every reader record the ages of this many frames. Returns one list per reader.
pub(crate) fn ages(readers: Vec<Reader>, frames: usize) -> Vec<JoinHandle<Vec<Age>>> {
    readers.into_iter().map(|reader| tokio::spawn(reader.ages(frames))).collect()
}

/// When a frame was sent, and how long it took to arrive, in nanoseconds.
pub(crate) type Age = (u64, u64);

/// One open stream.
pub(crate) struct Reader {
    stream: UnixStream,
}

impl Reader {
    async fn open(socket: &Path, path: &str) -> Self {
        let mut stream = UnixStream::connect(socket).await.expect("the server takes connections");
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut received = Vec::new();
        while !received.windows(9).any(|window| window == b": ready\n\n") {
            let n = stream.read_buf(&mut received).await.expect("the server answers");
            assert!(n > 0, "{path} ended: {}", String::from_utf8_lossy(&received));
        }
        Self { stream }
    }

    /// Counts empty lines, which end a frame and appear nowhere else in the response.
    async fn count(mut self, frames: usize) {
        let (mut buffer, mut seen, mut last) = (vec![0; BUFFER], 0, 0);
        while seen < frames {
            let n = self.stream.read(&mut buffer).await.expect("the server writes");
            assert!(n > 0, "the stream ended after {seen} of {frames} frames");
            let bytes = &buffer[..n];
            seen += usize::from(last == b'\n' && bytes[0] == b'\n');
            seen += bytes.iter().zip(&bytes[1..]).filter(|&(a, b)| *a == b'\n' && *b == b'\n').count();
            last = bytes[n - 1];
        }
    }

    async fn ages(mut self, frames: usize) -> Vec<Age> {
        let (mut ages, mut received) = (Vec::with_capacity(frames), Vec::new());
        while ages.len() < frames {
            let n = self.stream.read_buf(&mut received).await.expect("the server writes");
            assert!(n > 0, "the stream ended after {} of {frames} frames", ages.len());
            let arrived = now();
            let Some(end) = received.windows(2).rposition(|window| window == b"\n\n") else { continue };
            let text = String::from_utf8_lossy(&received[..end]);
            ages.extend(stamps(&text).map(|sent| (sent, arrived.saturating_sub(sent))));
            received.drain(..end);
        }
        ages
    }
}
