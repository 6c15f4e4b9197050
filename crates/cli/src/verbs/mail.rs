//! `qd mail`: the messages of a session, or of all of them, and with `-f` what becomes of them from now on; and one more
//! message to a session.

use qd_protocol::event::Body;
use qd_protocol::mail::{Deliver, Mail, MailKind, MailReceipt, NewMail};
use qd_protocol::{MailId, Millis};

use super::{Context, prompt};
use crate::args::MailVerb;
use crate::client::stream::{EventStream, Next};
use crate::client::{Client, random};
use crate::failure::{Exit, Failure, Result};
use crate::refs::{self, SessionRef};
use crate::render::table::Table;
use crate::render::text;

/// What a stream of mail is made of.
const KINDS: &str = "mail.sent,mail.delivered,mail.claimed,mail.acknowledged,mail.returned,mail.quarantined";
/// How much of a message a line shows.
const HEAD: usize = 200;

/// Lists messages.
pub(crate) async fn mail(
    context: &Context,
    session: Option<&str>,
    state: Option<&str>,
    follow: bool,
) -> Result<Exit> {
    let client = context.client().await?;
    let session = match session {
        Some(session) => Some(refs::session(&client, session).await?),
        None => None,
    };
    if follow {
        return go_on(context, &client, session.as_ref()).await;
    }
    let path = session.as_ref().map_or_else(|| "/v1/mail".to_owned(), |one| format!("{}/mail", one.path()));
    let query = state.map_or(String::new(), |state| format!("?state={state}"));
    let mail: Vec<Mail> = client.list(&format!("{path}{query}")).await?;
    if context.out.json {
        context.out.value(&mail)?;
        return Ok(Exit::Well);
    }
    let now = Millis::now();
    let mut table = Table::new(&["ID", "FROM", "TO", "KIND", "STATE", "AGE", "TEXT"]);
    for Mail { message, state, .. } in &mail {
        table.row([
            message.id.to_string(),
            message.from.clone(),
            message.to.to_string(),
            message.kind.as_str().to_owned(),
            state.as_str().to_owned(),
            text::age(message.sent_at, now),
            text::head(&message.text, HEAD),
        ]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}

/// Whatever becomes of mail from now on.
async fn go_on(context: &Context, client: &Client, session: Option<&SessionRef>) -> Result<Exit> {
    let path = match session {
        Some(session) => format!("{}&kinds={KINDS}", session.stream_path()),
        None => format!("/v1/events?kinds={KINDS}"),
    };
    let mut stream = EventStream::from_now(client, &path).await?;
    loop {
        match stream.next().await? {
            Next::Gap => context.out.note("the connection broke; what came meanwhile is not shown here"),
            Next::Event(arrived) if context.out.json => context.out.line(&arrived.line)?,
            Next::Event(arrived) => {
                let event = arrived.event;
                let data = serde_json::to_vec(&event.data).map_err(anyhow::Error::from)?;
                let body = Body::decode(&event.kind, &data).map_err(anyhow::Error::from)?;
                let of = event.session_id.map(|id| id.to_string()).unwrap_or_default();
                if let Some(line) = body.and_then(|body| line(&body, &of)) {
                    context.out.line(&line)?;
                }
            }
        }
    }
}

/// What an event says, in a line.
fn line(body: &Body, of: &str) -> Option<String> {
    let said = match body {
        Body::MailSent(sent) => {
            let mail = &sent.mail;
            let words = text::head(&mail.text, HEAD);
            format!("{} {} from {} to {of}: {words}", mail.id, mail.kind.as_str(), mail.from)
        }
        Body::MailDelivered(delivered) => {
            format!("{} delivered to {of} as a {}", delivered.id, delivered.delivered_as.as_str())
        }
        Body::MailClaimed(claimed) => format!("{} claimed", claimed.id),
        Body::MailAcknowledged(acknowledged) => format!("{} acknowledged", acknowledged.id),
        Body::MailReturned(returned) => format!("{} came back: {}", returned.id, returned.reason),
        Body::MailQuarantined(gone) => format!("{} kept from everybody: {}", gone.id, gone.reason),
        _ => return None,
    };
    Some(text::clean(&said))
}

/// Does what else there is to do.
pub(crate) async fn other(context: &Context, verb: MailVerb) -> Result<Exit> {
    let MailVerb::Send { id, text, steer, hold, kind, reply_to } = verb;
    let deliver = match (steer, hold) {
        (true, _) => Some(Deliver::Steer),
        (_, true) => Some(Deliver::Hold),
        _ => None,
    };
    let wrong = |_| Failure::Usage("--reply-to takes the id of a message, as `qd mail` shows it".to_owned());
    let in_reply_to = reply_to.map(|id| MailId::parse(&id).map_err(wrong)).transpose()?;
    let reply = if in_reply_to.is_some() { MailKind::Reply } else { MailKind::Task };
    let known = |word: &str| MailKind::ALL.iter().find(|(name, _)| *name == word).map(|(_, kind)| *kind);
    let new = NewMail {
        text: prompt::words(&text)?,
        // An id of our own, so that a request that is repeated after a broken connection is sent once.
        id: Some(MailId::parse(&random(MailId::PREFIX)?).map_err(anyhow::Error::from)?),
        kind: Some(kind.as_deref().and_then(known).unwrap_or(reply)),
        deliver,
        in_reply_to,
        correlation_id: None,
    };
    let client = context.client().await?;
    let session = refs::session(&client, &id).await?;
    let receipt: MailReceipt = client.post(&format!("{}/mail", session.path()), &new).await?;
    if context.out.json {
        context.out.value(&receipt)?;
        return Ok(Exit::Well);
    }
    context.out.line(receipt.id.as_str())?;
    if receipt.deliver == Deliver::Prompt && steer {
        context.out.note("nothing runs that could be steered: it is a prompt");
    }
    Ok(Exit::Well)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::event::MailReturned;

    #[test]
    fn what_somebody_wrote_cannot_move_the_cursor() {
        let id = MailId::parse("mail_1").unwrap();
        let body = Body::MailReturned(MailReturned { id, reason: "\x1b[2Jno".to_owned(), returns: 1 });
        assert_eq!(line(&body, "ses_1").unwrap(), "mail_1 came back: [2Jno");
    }
}
