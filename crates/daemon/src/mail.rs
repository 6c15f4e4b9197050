//! Mail on its way into a session's mailbox: a message is validated, and a known id gets its first receipt again. The
//! caller determines the sender, never the message itself. The session decides what becomes of a message.

use std::sync::Arc;

use qd_core::rows::{MailDoc, mail_receipt};
use qd_core::session::{MailSubmission, SessionCommand};
use qd_journal::MailRow;
use qd_protocol::event::{EventActor, MailSent};
use qd_protocol::limits::MAIL_TEXT_MAX;
use qd_protocol::mail::{FROM_FILE, FROM_USER, Mail, MailDelivery, MailKind, MailReceipt};
use qd_protocol::text::escaped_len;
use qd_protocol::{ApiError, ErrorCode, MailId, RunId, SessionId};
use sha2::{Digest, Sha256};

use crate::actor::{ActorReply, CommandCompletion, IdempotencyKey};
use crate::daemon::{Daemon, SessionAddress, read_failed};
use crate::http::unreadable_row;
use crate::invalid_value;
use crate::random;

/// The longest `correlation_id`, in bytes.
const CORRELATION_MAX: usize = 255;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MailSender {
    /// A person, or a program that acts for one.
    User,
    /// A file in a mail folder: anything that can write to the home.
    File,
    /// A session, with its name in its fleet if it has one.
    Session { id: SessionId, name: Option<String> },
}

impl MailSender {
    /// The sender's name as the recipient sees it. A session named like a reserved sender is shown by its id.
    fn display_name(&self) -> String {
        match self {
            Self::User => FROM_USER.to_owned(),
            Self::File => FROM_FILE.to_owned(),
            Self::Session { id, name } => {
                let name = name.clone().filter(|name| ![FROM_USER, FROM_FILE].contains(&name.as_str()));
                name.unwrap_or_else(|| id.to_string())
            }
        }
    }

    fn session_id(&self) -> Option<SessionId> {
        match self {
            Self::Session { id, .. } => Some(id.clone()),
            Self::User | Self::File => None,
        }
    }
}

/// A message to be sent.
#[derive(Debug, Clone)]
pub(crate) struct OutgoingMail {
    pub(crate) from: MailSender,
    /// The message's id, if the sender may send it again under the same id.
    pub(crate) id: Option<MailId>,
    pub(crate) kind: MailKind,
    pub(crate) text: String,
    pub(crate) in_reply_to: Option<MailId>,
    pub(crate) correlation_id: Option<String>,
    /// By default, the session's settings apply.
    pub(crate) deliver: Option<MailDelivery>,
    /// The run that the message is to become, if the sender waits for that run.
    pub(crate) run: Option<RunId>,
}

/// The result of posting a message.
#[derive(Debug)]
pub(crate) enum PostMailOutcome {
    /// The message was journalled, with its receipt under the idempotency key if there is one.
    Accepted(MailReceipt),
    /// The message was already in the journal.
    AlreadyAccepted(MailReceipt),
}

impl Daemon {
    /// Puts a message into a session's mailbox, once per id.
    pub(crate) async fn post_mail(
        self: &Arc<Self>,
        session: &Arc<SessionAddress>,
        actor: &Arc<EventActor>,
        mail: OutgoingMail,
        key: Option<IdempotencyKey>,
    ) -> Result<PostMailOutcome, ApiError> {
        check_mail(&mail)?;
        let fingerprint = mail_fingerprint(&session.id, &mail);
        let id = mail.id.clone().unwrap_or_else(|| MailId::from_random(&random::bytes::<16>()));
        let mut _one_at_a_time = None;
        if mail.id.is_some() {
            _one_at_a_time = Some(self.key_locks.lock(format!("mail {id}")).await);
            if let Some(receipt) = self.find_mail_receipt(&id, &fingerprint).await? {
                return Ok(PostMailOutcome::AlreadyAccepted(receipt));
            }
        }
        let submission = MailSubmission {
            id: id.clone(),
            from: mail.from.display_name(),
            from_session: mail.from.session_id(),
            kind: mail.kind,
            text: mail.text,
            in_reply_to: mail.in_reply_to,
            correlation_id: mail.correlation_id,
            deliver: mail.deliver,
            run: mail.run,
            fingerprint: fingerprint.clone(),
        };
        let CommandCompletion { reply, .. } =
            self.send_command(session, actor, SessionCommand::AcceptMail(submission), key).await?;
        match reply {
            ActorReply::Mailed(receipt) => Ok(PostMailOutcome::Accepted(receipt)),
            _ => match self.find_mail_receipt(&id, &fingerprint).await? {
                Some(receipt) => Ok(PostMailOutcome::AlreadyAccepted(receipt)),
                None => Err(ApiError::not_found("mail", &id)),
            },
        }
    }

    /// The first receipt of this message, if its id is known. An error if the id belongs to another message.
    async fn find_mail_receipt(
        &self,
        id: &MailId,
        fingerprint: &str,
    ) -> Result<Option<MailReceipt>, ApiError> {
        let Some(row) = self.journal.mail(id).await.map_err(read_failed)? else { return Ok(None) };
        if row.session.is_none() || row.fingerprint != fingerprint {
            let message = format!("{id} is the id of another message; choose a new one");
            return Err(ApiError::new(ErrorCode::MailIdConflict, message));
        }
        Ok(Some(mail_receipt(&decode_sent_mail(&row)?, row.seq)))
    }
}

pub(crate) fn mail_view(row: &MailRow) -> Result<Mail, ApiError> {
    let doc: MailDoc = serde_json::from_slice(&row.doc).map_err(unreadable_row("mail", &row.id))?;
    Ok(doc.view(decode_sent_mail(row)?))
}

/// The message as it was sent.
pub(crate) fn decode_sent_mail(row: &MailRow) -> Result<MailSent, ApiError> {
    let sent = row.sent.as_deref().unwrap_or_default();
    serde_json::from_slice(sent).map_err(unreadable_row("mail", &row.id))
}

fn check_mail(mail: &OutgoingMail) -> Result<(), ApiError> {
    if mail.text.trim().is_empty() {
        return Err(invalid_value("`text` is empty"));
    }
    if escaped_len(&mail.text) > MAIL_TEXT_MAX {
        let message = format!(
            "`text` must be at most {MAIL_TEXT_MAX} bytes as JSON; put longer texts into a file and send its path"
        );
        return Err(invalid_value(message));
    }
    let is_valid =
        |text: &String| (1..=CORRELATION_MAX).contains(&text.len()) && !text.contains(char::is_control);
    if mail.correlation_id.as_ref().is_some_and(|text| !is_valid(text)) {
        return Err(invalid_value(format!(
            "`correlation_id` must be 1 to {CORRELATION_MAX} bytes on one line"
        )));
    }
    Ok(())
}

/// Distinguishes messages under the same id.
fn mail_fingerprint(session: &SessionId, mail: &OutgoingMail) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: Option<&str>| {
        // With the length, and a byte for absent parts, so that no two lists of parts have the same hash input.
        hash.update([u8::from(part.is_some())]);
        hash.update((part.unwrap_or_default().len() as u64).to_le_bytes());
        hash.update(part.unwrap_or_default());
    };
    add(Some(session.as_str()));
    add(Some(&mail.from.display_name()));
    add(Some(mail.kind.as_str()));
    add(Some(&mail.text));
    add(mail.in_reply_to.as_ref().map(MailId::as_str));
    add(mail.correlation_id.as_deref());
    add(mail.deliver.map(MailDelivery::as_str));
    hex::encode(hash.finalize())
}
