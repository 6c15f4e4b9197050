//! Things that are being said while other things happen. A driver's loop holds one at a time and does not listen to its
//! agent meanwhile, which is how a slow journal slows the agent down.

use futures_util::future::BoxFuture;
use qd_link::{Closed, Voice};
use qd_protocol::RunId;
use qd_protocol::link::{Said, Up};

use crate::turn::Turn;

/// Something that is being said.
pub(crate) type Telling<'a> = BoxFuture<'a, Result<(), Closed>>;

/// Waits for something to be said; for ever if nothing is.
pub(crate) async fn said(telling: &mut Option<Telling<'_>>) -> Result<(), Closed> {
    match telling {
        Some(telling) => telling.await,
        None => std::future::pending().await,
    }
}

/// Says something of a turn.
pub(crate) async fn tell(turn: &Turn<'_>, said: Vec<Said>) -> Result<(), Closed> {
    tell_of(turn, turn.run.clone(), said).await
}

/// The same of any run, in this turn.
pub(crate) async fn tell_of(turn: &Turn<'_>, run: RunId, said: Vec<Said>) -> Result<(), Closed> {
    for what in said {
        turn.tell_of(run.clone(), what).await?;
    }
    Ok(())
}

/// Late words of the turn before, then notices.
pub(crate) async fn tell_first(
    turn: &Turn<'_>,
    late: Option<Telling<'static>>,
    notices: Vec<String>,
) -> Result<(), Closed> {
    if let Some(late) = late {
        late.await?;
    }
    tell(turn, notices.into_iter().map(|text| Said::Notice { text }).collect()).await
}

/// Says something of a turn that is over.
pub(crate) async fn say_late(voice: Voice, run: RunId, said: Vec<Said>) -> Result<(), Closed> {
    for what in said {
        voice.say(Up::Said { run: run.clone(), what }).await?;
    }
    Ok(())
}
