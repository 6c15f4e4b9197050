//! A parser for server-sent events, for the daemon's streams and for agents that use them. It does no I/O: it takes
//! bytes in pieces of any size and returns frames.

/// A stream may begin with a byte order mark, which is ignored.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// One frame of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SseFrame {
    Message {
        /// The `id` field, with which a client resumes the stream.
        id: Option<String>,
        /// The `data` lines, joined by newlines.
        data: String,
    },
    /// A comment, without its leading space.
    Comment(String),
}

/// A frame is longer than the reader allows. The end of the frame is then unknown, so the stream cannot be read any
/// further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event on the stream is longer than {max} bytes")]
pub struct SseFrameTooLong {
    /// The maximum length in bytes.
    pub max: usize,
}

/// Parses frames from a stream of bytes.
#[derive(Debug)]
pub struct SseParser {
    /// Maximum length of a frame in bytes.
    max: usize,
    /// Whether the first line has ended. Only the first line can have a byte order mark.
    begun: bool,
    /// The incomplete line.
    line: Vec<u8>,
    /// Whether the last byte was a carriage return. A newline that follows belongs to it.
    after_return: bool,
    id: Option<String>,
    data: Option<String>,
}

impl SseParser {
    /// A parser for frames of at most `max` bytes.
    pub fn new(max: usize) -> Self {
        Self { max, begun: false, line: Vec::new(), after_return: false, id: None, data: None }
    }

    /// Takes some bytes and returns the frames that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<SseFrame>, SseFrameTooLong> {
        let mut frames = Vec::new();
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let more = &rest[..end.unwrap_or(rest.len())];
            if self.line.len() + more.len() + self.data.as_ref().map_or(0, String::len) > self.max {
                return Err(SseFrameTooLong { max: self.max });
            }
            self.line.extend_from_slice(more);
            let Some(end) = end else { break };
            self.after_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.line);
            frames.extend(self.end_of_line(&line));
        }
        Ok(frames)
    }

    fn end_of_line(&mut self, line: &[u8]) -> Option<SseFrame> {
        let first = !std::mem::replace(&mut self.begun, true);
        let line = if first { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) } else { line };
        let line = String::from_utf8_lossy(line);
        if line.is_empty() {
            let id = self.id.take();
            return self.data.take().map(|data| SseFrame::Message { id, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => return Some(SseFrame::Comment(value.to_owned())),
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            // The event kind is in the data too. Fields of later versions are ignored.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": ready\n\nid: 7\nevent: text.delta\ndata: {\"text\":\"ä\"}\n\n:\r\nid:8\r\ndata:a\r\ndata: b\r\n\r\nretry: 5\nid: 9\n\ndata\n\n";

    fn expected_frames() -> Vec<SseFrame> {
        vec![
            SseFrame::Comment("ready".to_owned()),
            SseFrame::Message { id: Some("7".to_owned()), data: "{\"text\":\"ä\"}".to_owned() },
            SseFrame::Comment(String::new()),
            SseFrame::Message { id: Some("8".to_owned()), data: "a\nb".to_owned() },
            SseFrame::Message { id: None, data: String::new() },
        ]
    }

    fn parser() -> SseParser {
        SseParser::new(STREAM.len())
    }

    #[test]
    fn frames_are_the_same_wherever_the_bytes_are_cut() {
        let bytes = STREAM.as_bytes();
        assert_eq!(parser().feed(bytes).unwrap(), expected_frames());
        for cut in 0..=bytes.len() {
            for second in cut..=bytes.len() {
                let mut parser = parser();
                let mut frames = parser.feed(&bytes[..cut]).unwrap();
                frames.extend(parser.feed(&bytes[cut..second]).unwrap());
                frames.extend(parser.feed(&bytes[second..]).unwrap());
                assert_eq!(frames, expected_frames(), "cut at {cut} and {second}");
            }
        }
    }

    #[test]
    fn an_unfinished_frame_is_not_given() {
        let mut parser = parser();
        assert_eq!(parser.feed(b"id: 1\ndata: x\n").unwrap(), vec![]);
        assert_eq!(
            parser.feed(b"\n").unwrap(),
            vec![SseFrame::Message { id: Some("1".to_owned()), data: "x".to_owned() }]
        );
    }

    #[test]
    fn an_id_does_not_leak_into_the_next_frame() {
        let frames = parser().feed(b"id: 1\n\ndata: x\n\n").unwrap();
        assert_eq!(frames, vec![SseFrame::Message { id: None, data: "x".to_owned() }]);
    }

    #[test]
    fn a_frame_that_is_too_long_is_no_frame_however_it_is_cut() {
        let fits = b"data: 1234\n\ndata: 5678\n\n";
        assert_eq!(SseParser::new(10).feed(fits).unwrap().len(), 2, "each for itself");
        for stream in [&b"data: 12345\n\n"[..], b"data: 123\ndata: 456\n\n", b": 1234567890"] {
            assert_eq!(SseParser::new(10).feed(stream), Err(SseFrameTooLong { max: 10 }));
            let mut parser = SseParser::new(10);
            assert!(stream.iter().any(|byte| parser.feed(&[*byte]).is_err()));
        }
    }

    #[test]
    fn the_mark_that_a_stream_may_begin_with_means_nothing() {
        let frames = parser().feed("\u{feff}data: x\n\n".as_bytes()).unwrap();
        assert_eq!(frames, vec![SseFrame::Message { id: None, data: "x".to_owned() }]);
    }
}
