//! The hits of `qd search`: for each, its session, the text around the words, and the command that opens it.

use qd_protocol::Millis;
use qd_protocol::search::{SearchHit, SnippetPart};

use super::style::TextStyle;
use super::text::{display_width, format_age, truncate, truncate_start};
use super::visible_text::{show_hidden, show_prose_line};

/// Titles are truncated to this length, so that what follows them stays on the screen.
const TITLE_CHARS: usize = 40;
/// Before the lines of a hit after its first.
const INDENT: &str = "  ";
/// What a snippet keeps before its first match if it must be cut there, in parts of the width.
const LEAD_PART: usize = 3;

/// Renders hits, three lines each. Without colour, matches stand between « and ».
pub(crate) fn render_hits(hits: &[SearchHit], style: TextStyle, width: Option<usize>, now: Millis) -> String {
    hits.iter().map(|hit| render_hit(hit, style, width, now)).collect::<Vec<_>>().join("\n")
}

fn render_hit(hit: &SearchHit, style: TextStyle, width: Option<usize>, now: Millis) -> String {
    let title = hit.title.as_deref().map(show_prose_line).unwrap_or_default();
    let session = hit.session_id.as_str();
    let place = format!("{}  {} ago", hit.kind.as_str(), format_age(hit.at, now));
    let taken = session.chars().count() + place.chars().count() + 2 * INDENT.len();
    let room = width.map_or(TITLE_CHARS, |width| width.saturating_sub(taken).min(TITLE_CHARS));
    let mut head = style.bold(session);
    if !title.is_empty() && room > 0 {
        head.push_str(&format!("{INDENT}{}", truncate(&title, room)));
    }
    let snippet = render_snippet(&hit.snippet, style, width.map(|width| width.saturating_sub(INDENT.len())));
    let open = style.dim(&show_hidden(&hit.open));
    format!("{head}{INDENT}{}\n{INDENT}{snippet}\n{INDENT}{open}\n", style.dim(&place))
}

/// A snippet on one line. If it is too long for the width, the beginning is cut until the first match is on the screen,
/// and then the end.
fn render_snippet(parts: &[SnippetPart], style: TextStyle, width: Option<usize>) -> String {
    let mut parts: Vec<(String, bool)> =
        parts.iter().map(|part| (one_line(&part.text), part.is_match)).collect();
    if let Some(width) = width {
        let length: usize = parts.iter().map(|(text, is_match)| shown_width(text, *is_match, style)).sum();
        if length > width
            && let Some((lead, false)) = parts.first_mut()
        {
            *lead = truncate_start(lead, width / LEAD_PART);
        }
    }
    let mut room = width.unwrap_or(usize::MAX);
    let mut line = String::new();
    for (text, is_match) in parts {
        let marks = shown_width("", is_match, style);
        if room <= marks {
            break;
        }
        let text = truncate(&text, room - marks);
        room = room.saturating_sub(display_width(&text) + marks);
        match (is_match, style.has_colour()) {
            (true, true) => line.push_str(&style.yellow(&text)),
            (true, false) => line.push_str(&format!("«{text}»")),
            (false, _) => line.push_str(&text),
        }
    }
    line.trim_end().to_owned()
}

/// The columns that a part takes on the screen.
fn shown_width(text: &str, is_match: bool, style: TextStyle) -> usize {
    display_width(text) + if is_match && !style.has_colour() { 2 } else { 0 }
}

/// The text with its hidden characters shown, and all white space as single spaces.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_whitespace() {
            true if line.ends_with(' ') => {}
            true => line.push(' '),
            false => line.push(c),
        }
    }
    show_prose_line(&line)
}

#[cfg(test)]
mod tests {
    use qd_protocol::search::SearchHitKind;
    use qd_protocol::{RunId, Seq, SessionId};

    use super::*;

    fn hit(title: Option<&str>, kind: SearchHitKind, snippet: &[(&str, bool)]) -> SearchHit {
        SearchHit {
            session_id: SessionId::parse("ses_4kq8zt2m").unwrap(),
            workspace_id: None,
            agent: "claude".to_owned(),
            title: title.map(str::to_owned),
            kind,
            at: Millis(0),
            seq: Seq(7),
            run_id: Some(RunId::parse("run_7x").unwrap()),
            snippet: snippet
                .iter()
                .map(|(text, is_match)| SnippetPart { text: (*text).to_owned(), is_match: *is_match })
                .collect(),
            open: "qd logs run_7x".to_owned(),
        }
    }

    fn hits() -> Vec<SearchHit> {
        let long = "why does the connection pool of the payment service grow without any limit while the nightly \
                    job is running, and which of the many retries of the ";
        vec![
            hit(
                Some("nightly"),
                SearchHitKind::Prompt,
                &[("fix the ", false), ("parser", true), (" tests", false)],
            ),
            hit(
                Some("a title that is much longer than the forty characters which are shown"),
                SearchHitKind::Answer,
                &[(long, false), ("parser", true), (" is to blame for it?\n\nThe log says more.", false)],
            ),
            hit(None, SearchHitKind::Tool, &[("Bash\ncargo test -p ", false), ("parser", true)]),
            hit(
                Some("文書を直す"),
                SearchHitKind::Answer,
                &[
                    ("設計の入口にある説明を読んでから直す。それから全部の試験をもう一度実行する: ", false),
                    ("parser", true),
                    ("は速くなった。", false),
                ],
            ),
            hit(
                Some("esc\x1b[2J\ntitle"),
                SearchHitKind::Path,
                &[("src/", false), ("parser", true), (".rs\x1b[31m", false)],
            ),
        ]
    }

    #[test]
    fn hits_show_the_session_the_text_and_the_command() {
        let now = Millis(2 * 3_600_000);
        for (name, colour, width) in [
            ("hits_at_80_columns", false, Some(80)),
            ("hits_at_140_columns", false, Some(140)),
            ("hits_in_colour_at_80_columns", true, Some(80)),
            ("hits_in_colour_at_140_columns", true, Some(140)),
            ("hits_in_a_file", false, None),
        ] {
            let text = render_hits(&hits(), TextStyle::new(colour), width, now);
            insta::assert_snapshot!(name, text.replace('\x1b', "␛"));
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in 30..160 {
            let text = render_hits(&hits(), TextStyle::new(false), Some(width), Millis(0));
            for line in text.lines() {
                assert!(display_width(line) <= width, "{width}: {line}");
            }
            assert!(text.contains("«parser"), "the match is on the screen at {width}:\n{text}");
        }
    }
}
