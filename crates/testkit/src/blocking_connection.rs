//! One connection that is kept open, without a runtime: a request then costs the daemon's time and two system calls of
//! ours. For benchmarks; tests use [`TestClient`](crate::TestClient).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to the daemon's socket.
#[derive(Debug)]
pub struct BlockingConnection {
    stream: UnixStream,
    received: Vec<u8>,
}

impl BlockingConnection {
    pub fn open(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon takes connections");
        Self { stream, received: Vec::new() }
    }

    /// Sends a request and reads the whole response. Returns status and body.
    pub fn request(&mut self, method: &str, path: &str, body: &str) -> (u16, &[u8]) {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(request.as_bytes()).expect("the daemon reads requests");
        self.received.clear();
        loop {
            if let Some((status, body)) = parse_response(&self.received) {
                return (status, &self.received[body..]);
            }
            let mut piece = [0; 64 << 10];
            let n = self.stream.read(&mut piece).expect("the daemon answers");
            assert!(n > 0, "the daemon hung up in the middle of {method} {path}");
            self.received.extend_from_slice(&piece[..n]);
        }
    }

    /// Like [`BlockingConnection::request`], but fails unless the status is 2xx. Returns the body as JSON.
    pub fn request_ok(&mut self, method: &str, path: &str, body: &str) -> serde_json::Value {
        let (status, body_bytes) = self.request(method, path, body);
        let text = String::from_utf8_lossy(body_bytes);
        assert!((200..300).contains(&status), "{method} {path} gave {status}: {text}");
        serde_json::from_slice(body_bytes)
            .unwrap_or_else(|error| panic!("{method} {path}: {error} in {text}"))
    }
}

/// The status and the offset of the body, once the response is complete.
fn parse_response(received: &[u8]) -> Option<(u16, usize)> {
    let head_end = received.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&received[..head_end]).expect("a head is text").to_ascii_lowercase();
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("an answer has a status");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.and_then(|length| length.trim().parse().ok()).expect("an answer has a length");
    (received.len() >= head_end + length).then_some((status, head_end))
}
