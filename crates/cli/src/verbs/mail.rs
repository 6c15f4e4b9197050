//! `qd mail`: lists messages to one session or to all, follows them live with `-f`, and sends one.

use qd_protocol::event::EventBody;
use qd_protocol::mail::{Mail, MailDelivery, MailKind, MailReceipt, NewMail};
use qd_protocol::{MailId, Millis};

use super::{VerbContext, prompt};
use crate::args::MailVerb;
use crate::client::stream::{EventStream, EventStreamItem};
use crate::client::{DaemonClient, random_id};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs::{self, ResolvedSession};
use crate::render::session_cells::ShownIds;
use crate::render::table::TextTable;
use crate::render::text;
use crate::render::visible_text::show_prose_line;

/// The events that `qd mail -f` follows.
const MAIL_EVENT_KINDS: &str =
    "mail.sent,mail.delivered,mail.claimed,mail.acknowledged,mail.returned,mail.quarantined";
/// How much of a message one line shows.
const PREVIEW_CHARS: usize = 200;

/// Lists or follows messages.
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
    let path =
        session.as_ref().map_or_else(|| "/v1/mail".to_owned(), |session| format!("{}/mail", session.path()));
    let query = state.map_or(String::new(), |state| format!("?state={state}"));
    let mail: Vec<Mail> = client.list(&format!("{path}{query}")).await?;
    if context.out.json {
        context.out.print_json(&mail)?;
        return Ok(CliExitCode::Success);
    }
    let sessions =
        mail.iter().flat_map(|mail| [Some(&mail.message.to), mail.message.from_session_id.as_ref()]);
    let sessions = sessions.flatten().map(ToString::to_string).collect();
    let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, sessions).await?;
    let table = table(&mail, &ids, Millis::now());
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn table(mail: &[Mail], ids: &ShownIds, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["ID", "FROM", "TO", "KIND", "STATE", "AGE", "TEXT"]);
    table.set_min_width(4, usize::MAX);
    for Mail { message, state, .. } in mail {
        table.add_row([
            message.id.to_string(),
            ids.shown(&message.from),
            ids.shown(&message.to),
            message.kind.as_str().to_owned(),
            state.as_str().to_owned(),
            text::format_age(message.sent_at, now),
            text::first_line(&message.text, PREVIEW_CHARS),
        ]);
    }
    table
}

/// Prints mail events from now on.
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
                context.out.print_note("the connection broke; messages sent in between are not shown")
            }
            EventStreamItem::Event(arrived) if context.out.json => {
                context.out.print_exact(&format!("{}\n", arrived.line))?
            }
            EventStreamItem::Event(arrived) => {
                let event = arrived.event;
                let data = serde_json::to_vec(&event.data).map_err(anyhow::Error::from)?;
                let body = EventBody::decode(&event.kind, &data).map_err(anyhow::Error::from)?;
                let session = event.session_id.map(|id| id.to_string()).unwrap_or_default();
                if let Some(line) = body.and_then(|body| describe_event(&body, &session)) {
                    context.out.print_line(&line)?;
                }
            }
        }
    }
}

/// A mail event on one line.
fn describe_event(body: &EventBody, session: &str) -> Option<String> {
    let line = match body {
        EventBody::MailSent(sent) => {
            let mail = &sent.mail;
            let preview = text::first_line(&mail.text, PREVIEW_CHARS);
            format!("{} {} from {} to {session}: {preview}", mail.id, mail.kind.as_str(), mail.from)
        }
        EventBody::MailDelivered(delivered) => {
            format!("{} delivered to {session} as a {}", delivered.id, delivered.delivered_as.as_str())
        }
        EventBody::MailClaimed(claimed) => format!("{} claimed", claimed.id),
        EventBody::MailAcknowledged(acknowledged) => format!("{} acknowledged", acknowledged.id),
        EventBody::MailReturned(returned) => format!("{} returned: {}", returned.id, returned.reason),
        EventBody::MailQuarantined(event) => format!("{} quarantined: {}", event.id, event.reason),
        _ => return None,
    };
    Some(show_prose_line(&line))
}

/// `qd mail send`.
pub(crate) async fn run_mail_verb(context: &VerbContext, verb: MailVerb) -> Result<CliExitCode> {
    let MailVerb::Send { id, text, steer, hold, kind, reply_to } = verb;
    let deliver = match (steer, hold) {
        (true, _) => Some(MailDelivery::Steer),
        (_, true) => Some(MailDelivery::Hold),
        _ => None,
    };
    let invalid_id =
        |_| CliFailure::Usage("--reply-to takes the id of a message, as `qd mail` shows it".to_owned());
    let in_reply_to = reply_to.map(|id| MailId::parse(&id).map_err(invalid_id)).transpose()?;
    let default_kind = if in_reply_to.is_some() { MailKind::Reply } else { MailKind::Task };
    let by_name = |given: &str| MailKind::ALL.iter().find(|(name, _)| *name == given).map(|(_, kind)| *kind);
    let new = NewMail {
        text: prompt::read_prompt(&text)?,
        // The client chooses the id, so a request repeated after a broken connection sends the message once.
        id: Some(MailId::parse(&random_id(MailId::PREFIX)?).map_err(anyhow::Error::from)?),
        kind: Some(kind.as_deref().and_then(by_name).unwrap_or(default_kind)),
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
        context.out.print_note("no running turn can be steered; the message was sent as a prompt");
    }
    Ok(CliExitCode::Success)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;
    use qd_protocol::event::MailReturned;

    #[test]
    fn a_message_cannot_move_the_cursor() {
        let id = MailId::parse("mail_1").unwrap();
        let body = EventBody::MailReturned(MailReturned { id, reason: "\x1b[2Jno".to_owned(), returns: 1 });
        assert_eq!(describe_event(&body, "ses_1").unwrap(), "mail_1 returned: ^[[2Jno");
    }

    #[test]
    fn messages_read_well() {
        let message = |id: &str, from: &str, state: &str, text: &str| -> Mail {
            serde_json::from_value(serde_json::json!({
                "id": id, "from": from, "to": "ses_ar477mby3tane7hf", "kind": "task", "text": text,
                "in_reply_to": null, "correlation_id": null, "sent_at": Millis(0), "deliver": "prompt",
                "state": state, "run_id": null, "delivered_as": null, "claim": null, "claim_expires_at": null,
                "returns": 0, "reason": null, "updated_at": Millis(0),
            }))
            .unwrap()
        };
        let mail = [
            message(
                "mail_7f2e9a01bc34de56",
                "user",
                "acknowledged",
                "Please look at the failing tests first.",
            ),
            message(
                "mail_0k2v7m4q8s1x5z9b",
                "ses_b07hx2k1m9d4vq8s",
                "waiting",
                "The parser is ready.\nDetails below.",
            ),
        ];
        let ids = ShownIds::from_pairs(&[("ses_ar477mby3tane7hf", "ar47"), ("ses_b07hx2k1m9d4vq8s", "b07h")]);
        assert_view("mail", |style, width| table(&mail, &ids, Millis(600_000)).render(style, width));
    }
}
