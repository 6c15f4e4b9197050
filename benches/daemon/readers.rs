//! Many readers of one stream in one process, as cheap as a reader can be: bytes are counted or searched where they
//! lie. They read the same way from whichever server they are given.

use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::stamp::{now, stamps};

/// What one read takes at most.
const BUFFER: usize = 64 << 10;

/// Opens so many streams and waits until each is attached.
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

/// Lets every reader note how old each of so many frames is, in nanoseconds: one list for each reader.
pub(crate) fn ages(readers: Vec<Reader>, frames: usize) -> Vec<JoinHandle<Vec<Age>>> {
    readers.into_iter().map(|reader| tokio::spawn(reader.ages(frames))).collect()
}

/// When something was said, and how long it took to get here, in nanoseconds.
pub(crate) type Age = (u64, u64);

/// One stream.
pub(crate) struct Reader {
    stream: UnixStream,
}

impl Reader {
    async fn open(socket: &Path, path: &str) -> Self {
        let mut stream = UnixStream::connect(socket).await.expect("the server takes connections");
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        let mut seen = Vec::new();
        while !seen.windows(9).any(|nine| nine == b": ready\n\n") {
            let n = stream.read_buf(&mut seen).await.expect("the server answers");
            assert!(n > 0, "{path} ended: {}", String::from_utf8_lossy(&seen));
        }
        Self { stream }
    }

    /// Frames end with an empty line, and nothing else in the answer has one of this form.
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
        let (mut ages, mut seen) = (Vec::with_capacity(frames), Vec::new());
        while ages.len() < frames {
            let n = self.stream.read_buf(&mut seen).await.expect("the server writes");
            assert!(n > 0, "the stream ended after {} of {frames} frames", ages.len());
            let here = now();
            let Some(end) = seen.windows(2).rposition(|two| two == b"\n\n") else { continue };
            let text = String::from_utf8_lossy(&seen[..end]);
            ages.extend(stamps(&text).map(|said| (said, here.saturating_sub(said))));
            seen.drain(..end);
        }
        ages
    }
}
