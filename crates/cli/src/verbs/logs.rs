//! `qd logs`: the conversation of a session, a run or a fleet as text, or its events as JSON lines.

use qd_protocol::{RunId, Seq};

use super::VerbContext;
use super::fleet_logs::log_fleet;
use super::transcript::{TranscriptLayout, TranscriptPrinter, is_of_run, read_page};
use crate::args::LogsArgs;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, WatchTarget};

/// Prints the events so far, and with `follow` new ones until the run has finished or the session is closed.
pub(crate) async fn logs(context: &VerbContext, flags: &LogsArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    let (session, run) = match &refs::resolve_watch_target(&client, &flags.id).await? {
        WatchTarget::Fleet(_) if flags.tail.is_some() => {
            return Err(CliFailure::Usage("--tail is for a session or a run, not for a fleet".to_owned()));
        }
        WatchTarget::Fleet(fleet) => {
            return log_fleet(context, &client, fleet, flags.follow, flags.since).await;
        }
        WatchTarget::Session(session) => (session.clone(), None),
        WatchTarget::Run(session, run) => (session.clone(), Some(run.clone())),
    };
    let (session, run) = (&session, run.as_ref());
    let mut transcript = TranscriptPrinter::new(&context.out, &client, TranscriptLayout::Whole);
    let mut tail = flags.tail.map(LastLines::new);
    let mut cursor = Seq(0);
    let mut ended = false;
    loop {
        let (mut events, next) = read_page(&client, session, cursor).await?;
        if events.is_empty() {
            break;
        }
        cursor = next;
        events.retain(|arrived| concerns(arrived, run));
        ended |= events.iter().any(|arrived| is_last_event(arrived, run));
        events.retain(|arrived| flags.since.is_none_or(|since| arrived.event.ts >= since));
        match &mut tail {
            None => transcript.show(events).await?,
            Some(tail) => {
                for arrived in events {
                    tail.push(&transcript.render_text(arrived).await?);
                }
            }
        }
    }
    if let Some(tail) = tail {
        // The renderer has made it visible, or left it exact.
        context.out.print_exact(tail.text())?;
    }
    if flags.follow && !ended {
        let mut stream = EventStream::after(&client, &session.stream_path(), cursor);
        while !ended {
            let EventStreamItem::Event(arrived) = stream.next().await? else { continue };
            if concerns(&arrived, run) {
                ended = is_last_event(&arrived, run);
                transcript.show([*arrived]).await?;
            }
        }
    }
    transcript.end_line()?;
    Ok(CliExitCode::Success)
}

/// The last lines of a text that arrives in pieces.
#[derive(Debug)]
struct LastLines {
    lines_max: usize,
    text: String,
}

impl LastLines {
    fn new(lines_max: usize) -> Self {
        Self { lines_max, text: String::new() }
    }

    fn push(&mut self, piece: &str) {
        self.text.push_str(piece);
        // The newline at the end belongs to the last line.
        let body = self.text.strip_suffix('\n').unwrap_or(&self.text);
        let cut = match self.lines_max {
            0 => Some(self.text.len()),
            lines => body.rmatch_indices('\n').nth(lines - 1).map(|(at, _)| at + 1),
        };
        self.text.drain(..cut.unwrap_or(0));
    }

    fn text(&self) -> &str {
        &self.text
    }
}

fn concerns(arrived: &ReceivedEvent, run: Option<&RunId>) -> bool {
    run.is_none_or(|run| is_of_run(&arrived.event, run))
}

/// Whether nothing that `qd logs` prints can follow this event.
fn is_last_event(arrived: &ReceivedEvent, run: Option<&RunId>) -> bool {
    match run {
        Some(run) => arrived.event.kind == "run.finished" && is_of_run(&arrived.event, run),
        None => arrived.event.kind == "session.closed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept_however_the_text_arrives() {
        let last = |lines_max, pieces: &[&str]| {
            let mut tail = LastLines::new(lines_max);
            pieces.iter().for_each(|piece| tail.push(piece));
            tail.text().to_owned()
        };
        assert_eq!(last(2, &["a\nb\nc\n"]), "b\nc\n");
        assert_eq!(last(2, &["a", "\n", "b\nc", "d"]), "b\ncd");
        assert_eq!(last(5, &["a\n", "b"]), "a\nb");
        assert_eq!(last(1, &["a\n", "\n"]), "\n");
        assert_eq!(last(0, &["a\n"]), "");
    }
}
