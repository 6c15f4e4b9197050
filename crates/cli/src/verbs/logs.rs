//! `qd logs`: the conversation of a session, a run or a fleet as text, or its events as JSON lines.

use qd_protocol::{RunId, Seq};

use super::VerbContext;
use super::fleet_logs::log_fleet;
use super::transcript::{TranscriptLayout, TranscriptPrinter, is_of_run, read_page};
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, Result};
use crate::refs::{self, WatchTarget};

/// Prints the events so far, and with `follow` new ones until the run has finished or the session is closed.
pub(crate) async fn logs(context: &VerbContext, id: &str, follow: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let (session, run) = match &refs::resolve_watch_target(&client, id).await? {
        WatchTarget::Fleet(fleet) => return log_fleet(context, &client, fleet, follow).await,
        WatchTarget::Session(session) => (session.clone(), None),
        WatchTarget::Run(session, run) => (session.clone(), Some(run.clone())),
    };
    let (session, run) = (&session, run.as_ref());
    let mut transcript = TranscriptPrinter::new(&context.out, &client, TranscriptLayout::Whole);
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
        transcript.show(events).await?;
    }
    if follow && !ended {
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
