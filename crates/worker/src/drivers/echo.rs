//! The `echo` agent: says its prompt again, word by word. It touches nothing but its turn.

use std::time::Duration;

use qd_link::Closed;
use qd_protocol::link::{Outcome, Stop};

use crate::turn::{End, Turn};

/// One turn: waits if the prompt says so, then echoes the rest of it. A cancel ends it wherever it is.
pub(crate) async fn turn(turn: &Turn<'_>, prompt: &str) -> Result<End, Closed> {
    tokio::select! {
        // The cancel first: one that is there when the last word is said has won.
        biased;
        () = turn.cancelled() => Ok(End::Stopped(Outcome::of(Stop::Cancelled))),
        end = echo(turn, prompt) => end,
    }
}

async fn echo(turn: &Turn<'_>, prompt: &str) -> Result<End, Closed> {
    let (wait, rest) = sleep_of(prompt).unwrap_or((Duration::ZERO, prompt));
    tokio::time::sleep(wait).await;
    for word in words(rest) {
        turn.say(word).await?;
    }
    Ok(End::Stopped(Outcome { text: Some(format!("echo: {rest}")), ..Outcome::of(Stop::EndTurn) }))
}

/// The words of a text, each with the white space behind it; what stands before the first word belongs to it.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let word = rest.find(|c: char| !c.is_whitespace()).unwrap_or(rest.len());
        let space = rest[word..].find(char::is_whitespace).map_or(rest.len(), |at| word + at);
        let next = rest[space..].find(|c: char| !c.is_whitespace()).map_or(rest.len(), |at| space + at);
        let (piece, left) = rest.split_at(next);
        rest = left;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Reads `__sleep_ms:N REST`. Anything that only looks like it is a prompt like any other.
fn sleep_of(prompt: &str) -> Option<(Duration, &str)> {
    let order = prompt.strip_prefix("__sleep_ms:")?;
    let (ms, rest) = order.split_once(char::is_whitespace).unwrap_or((order, ""));
    let ms = ms.bytes().all(|b| b.is_ascii_digit()).then(|| ms.parse().ok())??;
    Some((Duration::from_millis(ms), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_their_white_space_exactly() {
        for (text, expected) in [
            ("", vec![]),
            ("one", vec!["one"]),
            ("one two", vec!["one ", "two"]),
            ("  one \t\n two\u{a0}drei ", vec!["  one \t\n ", "two\u{a0}", "drei "]),
            (" \n", vec![" \n"]),
        ] {
            assert_eq!(words(text).collect::<Vec<_>>(), expected);
            assert_eq!(words(text).collect::<String>(), text);
        }
    }

    #[test]
    fn only_a_whole_number_of_milliseconds_is_a_wait() {
        assert_eq!(sleep_of("__sleep_ms:250 a b"), Some((Duration::from_millis(250), "a b")));
        assert_eq!(sleep_of("__sleep_ms:250  a"), Some((Duration::from_millis(250), " a")));
        assert_eq!(sleep_of("__sleep_ms:7"), Some((Duration::from_millis(7), "")));
        for plain in
            ["__sleep_ms:", "__sleep_ms: a", "__sleep_ms:-1 a", "__sleep_ms:+1 a", "__sleep_ms:1s a", "a"]
        {
            assert_eq!(sleep_of(plain), None, "{plain}");
        }
    }
}
