//! Server-sent events out of bytes, however they are cut. Pure: bytes in, frames out.

/// What a stream can say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// An event.
    Message {
        /// Where it stands, for a resumption.
        id: Option<String>,
        /// Its data, lines joined by newlines.
        data: String,
    },
    /// A comment, without the space that begins it.
    Comment(String),
}

/// Reads frames out of a stream of bytes.
#[derive(Debug, Default)]
pub(super) struct Parser {
    /// The unfinished line.
    line: Vec<u8>,
    /// Whether the last byte was a carriage return, whose newline may still come.
    after_return: bool,
    id: Option<String>,
    data: Option<String>,
}

impl Parser {
    /// Takes some bytes and gives every frame that they complete.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let Some(end) = rest.iter().position(|b| matches!(b, b'\n' | b'\r')) else {
                self.line.extend_from_slice(rest);
                break;
            };
            self.line.extend_from_slice(&rest[..end]);
            self.after_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            let line = std::mem::take(&mut self.line);
            frames.extend(self.end_of_line(&line));
        }
        frames
    }

    fn end_of_line(&mut self, line: &[u8]) -> Option<Frame> {
        let line = String::from_utf8_lossy(line);
        if line.is_empty() {
            let id = self.id.take();
            return self.data.take().map(|data| Frame::Message { id, data });
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => return Some(Frame::Comment(value.to_owned())),
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            // The kind stands in the data as well; anything else is for later versions.
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": ready\n\nid: 7\nevent: text.delta\ndata: {\"text\":\"ä\"}\n\n:\r\nid:8\r\ndata:a\r\ndata: b\r\n\r\nretry: 5\nid: 9\n\ndata\n\n";

    fn whole() -> Vec<Frame> {
        vec![
            Frame::Comment("ready".to_owned()),
            Frame::Message { id: Some("7".to_owned()), data: "{\"text\":\"ä\"}".to_owned() },
            Frame::Comment(String::new()),
            Frame::Message { id: Some("8".to_owned()), data: "a\nb".to_owned() },
            Frame::Message { id: None, data: String::new() },
        ]
    }

    #[test]
    fn frames_are_the_same_wherever_the_bytes_are_cut() {
        let bytes = STREAM.as_bytes();
        assert_eq!(Parser::default().feed(bytes), whole());
        for cut in 0..=bytes.len() {
            for second in cut..=bytes.len() {
                let mut parser = Parser::default();
                let mut frames = parser.feed(&bytes[..cut]);
                frames.extend(parser.feed(&bytes[cut..second]));
                frames.extend(parser.feed(&bytes[second..]));
                assert_eq!(frames, whole(), "cut at {cut} and {second}");
            }
        }
    }

    #[test]
    fn an_unfinished_frame_is_not_given() {
        let mut parser = Parser::default();
        assert_eq!(parser.feed(b"id: 1\ndata: x\n"), vec![]);
        assert_eq!(
            parser.feed(b"\n"),
            vec![Frame::Message { id: Some("1".to_owned()), data: "x".to_owned() }]
        );
    }

    #[test]
    fn an_id_does_not_leak_into_the_next_frame() {
        let frames = Parser::default().feed(b"id: 1\n\ndata: x\n\n");
        assert_eq!(frames, vec![Frame::Message { id: None, data: "x".to_owned() }]);
    }
}
