//! `qd mail`: the messages of a session, or of all of them, and with `-f` what becomes of them from now on; and one more
//! message to a session.

use qd_protocol::event::EventBody;
use qd_protocol::mail::{Mail, MailDelivery, MailKind, MailReceipt, NewMail};
use qd_protocol::{MailId, Millis};

use super::{VerbContext, prompt};
use crate::args::MailVerb;
use crate::client::stream::{EventStream, EventStreamItem};
use crate::client::{DaemonClient, random_id};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, ResolvedSession};
use crate::render::table::TextTable;
use crate::render::text;

/// What a stream of mail is made of.
const MAIL_EVENT_KINDS: &str =
    "mail.sent,mail.delivered,mail.claimed,mail.acknowledged,mail.returned,mail.quarantined";
/// How much of a message a line shows.
const PREVIEW_CHARS: usize = 200;

/// Lists messages.
pub(crate) async fn mail(
    context: &VerbContext,
    session: Option<&str>,
    state: Option<&str>,
    follow: bool,
) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = match session {
        Some(session) => Some(refs::resolve_session(&client, session).await?),
        None => None,
    };
    if follow {
        return follow_mail(context, &client, session.as_ref()).await;
    }
    let path = session.as_ref().map_or_else(|| "/v1/mail".to_owned(), |one| format!("{}/mail", one.path()));
    let query = state.map_or(String::new(), |state| format!("?state={state}"));
    let mail: Vec<Mail> = client.list(&format!("{path}{query}")).await?;
    if context.out.json {
        context.out.print_json(&mail)?;
        return Ok(CliExitCode::Success);
    }
    let now = Millis::now();
    let mut table = TextTable::new(&["ID", "FROM", "TO", "KIND", "STATE", "AGE", "TEXT"]);
    for Mail { message, state, .. } in &mail {
        table.add_row([
            message.id.to_string(),
            message.from.clone(),
            message.to.to_string(),
            message.kind.as_str().to_owned(),
            state.as_str().to_owned(),
            text::format_age(message.sent_at, now),
            text::first_line(&message.text, PREVIEW_CHARS),
        ]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

/// Whatever becomes of mail from now on.
async fn follow_mail(
    context: &VerbContext,
    client: &DaemonClient,
    session: Option<&ResolvedSession>,
) -> Result<CliExitCode> {
    let path = match session {
        Some(session) => format!("{}&kinds={MAIL_EVENT_KINDS}", session.stream_path()),
        None => format!("/v1/events?kinds={MAIL_EVENT_KINDS}"),
    };
    let mut stream = EventStream::from_now(client, &path).await?;
    loop {
        match stream.next().await? {
            EventStreamItem::Gap => {
                context.out.print_note("the connection broke; what came meanwhile is not shown here")
            }
            EventStreamItem::Event(arrived) if context.out.json => context.out.print_line(&arrived.line)?,
            EventStreamItem::Event(arrived) => {
                let event = arrived.event;
                let data = serde_json::to_vec(&event.data).map_err(anyhow::Error::from)?;
                let body = EventBody::decode(&event.kind, &data).map_err(anyhow::Error::from)?;
                let of = event.session_id.map(|id| id.to_string()).unwrap_or_default();
                if let Some(line) = body.and_then(|body| describe_event(&body, &of)) {
                    context.out.print_line(&line)?;
                }
            }
        }
    }
}

/// What an event says, in a line.
fn describe_event(body: &EventBody, of: &str) -> Option<String> {
    let said = match body {
        EventBody::MailSent(sent) => {
            let mail = &sent.mail;
            let words = text::first_line(&mail.text, PREVIEW_CHARS);
            format!("{} {} from {} to {of}: {words}", mail.id, mail.kind.as_str(), mail.from)
        }
        EventBody::MailDelivered(delivered) => {
            format!("{} delivered to {of} as a {}", delivered.id, delivered.delivered_as.as_str())
        }
        EventBody::MailClaimed(claimed) => format!("{} claimed", claimed.id),
        EventBody::MailAcknowledged(acknowledged) => format!("{} acknowledged", acknowledged.id),
        EventBody::MailReturned(returned) => format!("{} came back: {}", returned.id, returned.reason),
        EventBody::MailQuarantined(gone) => format!("{} kept from everybody: {}", gone.id, gone.reason),
        _ => return None,
    };
    Some(text::strip_controls(&said))
}

/// Does what else there is to do.
pub(crate) async fn run_mail_verb(context: &VerbContext, verb: MailVerb) -> Result<CliExitCode> {
    let MailVerb::Send { id, text, steer, hold, kind, reply_to } = verb;
    let deliver = match (steer, hold) {
        (true, _) => Some(MailDelivery::Steer),
        (_, true) => Some(MailDelivery::Hold),
        _ => None,
    };
    let wrong =
        |_| CliFailure::Usage("--reply-to takes the id of a message, as `qd mail` shows it".to_owned());
    let in_reply_to = reply_to.map(|id| MailId::parse(&id).map_err(wrong)).transpose()?;
    let reply = if in_reply_to.is_some() { MailKind::Reply } else { MailKind::Task };
    let known = |word: &str| MailKind::ALL.iter().find(|(name, _)| *name == word).map(|(_, kind)| *kind);
    let new = NewMail {
        text: prompt::read_prompt(&text)?,
        // An id of our own, so that a request that is repeated after a broken connection is sent once.
        id: Some(MailId::parse(&random_id(MailId::PREFIX)?).map_err(anyhow::Error::from)?),
        kind: Some(kind.as_deref().and_then(known).unwrap_or(reply)),
        deliver,
        in_reply_to,
        correlation_id: None,
    };
    let client = context.client().await?;
    let session = refs::resolve_session(&client, &id).await?;
    let receipt: MailReceipt = client.post(&format!("{}/mail", session.path()), &new).await?;
    if context.out.json {
        context.out.print_json(&receipt)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_line(receipt.id.as_str())?;
    if receipt.deliver == MailDelivery::Prompt && steer {
        context.out.print_note("nothing runs that could be steered: it is a prompt");
    }
    Ok(CliExitCode::Success)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::event::MailReturned;

    #[test]
    fn what_somebody_wrote_cannot_move_the_cursor() {
        let id = MailId::parse("mail_1").unwrap();
        let body = EventBody::MailReturned(MailReturned { id, reason: "\x1b[2Jno".to_owned(), returns: 1 });
        assert_eq!(describe_event(&body, "ses_1").unwrap(), "mail_1 came back: [2Jno");
    }
}
