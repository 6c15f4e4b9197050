//! `qd logs`: the conversation of a session or a run as text, or its events as JSON lines.

use qd_protocol::{RunId, Seq};

use super::Context;
use super::transcript::{Shape, Transcript, is_of, page};
use crate::client::stream::{Arrived, EventStream, Next};
use crate::failure::{Exit, Result};
use crate::refs;

/// Prints what happened, and with `follow` what happens until there is an end.
pub(crate) async fn logs(context: &Context, id: &str, follow: bool) -> Result<Exit> {
    let client = context.client().await?;
    let target = refs::target(&client, id).await?;
    let (session, run) = (target.session(), target.run());
    let mut transcript = Transcript::new(&context.out, &client, Shape::Whole);
    let mut cursor = Seq(0);
    let mut ended = false;
    loop {
        let (mut events, next) = page(&client, session, cursor).await?;
        if events.is_empty() {
            break;
        }
        cursor = next;
        events.retain(|arrived| concerns(arrived, run));
        ended |= events.iter().any(|arrived| ends(arrived, run));
        transcript.show(events).await?;
    }
    if follow && !ended {
        let mut stream = EventStream::after(&client, &session.stream_path(), cursor);
        while !ended {
            let Next::Event(arrived) = stream.next().await? else { continue };
            if concerns(&arrived, run) {
                ended = ends(&arrived, run);
                transcript.show([*arrived]).await?;
            }
        }
    }
    transcript.end_line()?;
    Ok(Exit::Well)
}

fn concerns(arrived: &Arrived, run: Option<&RunId>) -> bool {
    run.is_none_or(|run| is_of(&arrived.event, run))
}

/// Whether nothing of interest can come after it.
fn ends(arrived: &Arrived, run: Option<&RunId>) -> bool {
    match run {
        Some(run) => arrived.event.kind == "run.finished" && is_of(&arrived.event, run),
        None => arrived.event.kind == "session.closed",
    }
}
