//! Mail on its way into a session's mailbox: what is wrong with it is said here, an id that is known gets its first
//! receipt again, and who it is from is decided by whoever calls, never by what the sender wrote. What becomes of a
//! message is the session's to decide.

use std::sync::Arc;

use qd_core::rows::{MailDoc, mail_receipt};
use qd_core::session::{Command, Put};
use qd_journal::MailRow;
use qd_protocol::event::MailSent;
use qd_protocol::limits::MAIL_TEXT_MAX;
use qd_protocol::mail::{Deliver, FROM_FILE, FROM_USER, Mail, MailKind, MailReceipt};
use qd_protocol::text::escaped_len;
use qd_protocol::{ApiError, Code, MailId, RunId, SessionId};
use sha2::{Digest, Sha256};

use crate::actor::{Answer, Done, IdempotencyKey};
use crate::daemon::{Daemon, SessionRef, read_failed};
use crate::invalid;
use crate::random;

/// The longest name that a sender may have for an exchange.
const CORRELATION_MAX: usize = 255;

/// Who a message is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Sender {
    /// A person, or a program in their name.
    User,
    /// Whoever can write into the home.
    File,
    /// A session, by its name in its fleet if it has one.
    Session { id: SessionId, name: Option<String> },
}

impl Sender {
    /// As the recipient is told. A session that is called like somebody else is told by its id.
    fn words(&self) -> String {
        match self {
            Self::User => FROM_USER.to_owned(),
            Self::File => FROM_FILE.to_owned(),
            Self::Session { id, name } => {
                let name = name.clone().filter(|name| ![FROM_USER, FROM_FILE].contains(&name.as_str()));
                name.unwrap_or_else(|| id.to_string())
            }
        }
    }

    fn session(&self) -> Option<SessionId> {
        match self {
            Self::Session { id, .. } => Some(id.clone()),
            Self::User | Self::File => None,
        }
    }
}

/// A message that somebody wants to send.
#[derive(Debug, Clone)]
pub(crate) struct Outgoing {
    pub(crate) from: Sender,
    /// Its id, if somebody may send it again under the same.
    pub(crate) id: Option<MailId>,
    pub(crate) kind: MailKind,
    pub(crate) text: String,
    pub(crate) in_reply_to: Option<MailId>,
    pub(crate) correlation_id: Option<String>,
    /// As the session's own settings say unless given.
    pub(crate) deliver: Option<Deliver>,
    /// The run that it is to become, where somebody waits for that.
    pub(crate) run: Option<RunId>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Posted {
    /// It is in the journal, with its answer under the key that came with it.
    Now(MailReceipt),
    /// It was before.
    Before(MailReceipt),
}

impl Daemon {
    /// Puts a message into a session's mailbox, once for its id.
    pub(crate) async fn post_mail(
        self: &Arc<Self>,
        session: &Arc<SessionRef>,
        mail: Outgoing,
        key: Option<IdempotencyKey>,
    ) -> Result<Posted, ApiError> {
        check(&mail)?;
        let fingerprint = fingerprint(&session.id, &mail);
        let id = mail.id.clone().unwrap_or_else(|| MailId::from_random(&random::bytes::<16>()));
        let mut _one_at_a_time = None;
        if mail.id.is_some() {
            _one_at_a_time = Some(self.keys.lock(format!("mail {id}")).await);
            if let Some(receipt) = self.known_mail(&id, &fingerprint).await? {
                return Ok(Posted::Before(receipt));
            }
        }
        let put = Put {
            id: id.clone(),
            from: mail.from.words(),
            from_session: mail.from.session(),
            kind: mail.kind,
            text: mail.text,
            in_reply_to: mail.in_reply_to,
            correlation_id: mail.correlation_id,
            deliver: mail.deliver,
            run: mail.run,
            fingerprint: fingerprint.clone(),
        };
        let Done { answer, .. } = self.command(session, Command::Put(put), key).await?;
        match answer {
            Answer::Mailed(receipt) => Ok(Posted::Now(receipt)),
            _ => match self.known_mail(&id, &fingerprint).await? {
                Some(receipt) => Ok(Posted::Before(receipt)),
                None => Err(ApiError::not_found("mail", &id)),
            },
        }
    }

    /// The first receipt of a message, if there is one under this id and it is the same.
    async fn known_mail(&self, id: &MailId, fingerprint: &str) -> Result<Option<MailReceipt>, ApiError> {
        let Some(row) = self.journal.mail(id).await.map_err(read_failed)? else { return Ok(None) };
        if row.session.is_none() || row.fingerprint != fingerprint {
            let message = format!("{id} is the id of another message; choose a new one");
            return Err(ApiError::new(Code::MailIdConflict, message));
        }
        Ok(Some(mail_receipt(&sent(&row)?, row.seq)))
    }
}

/// A message as clients see it.
pub(crate) fn view(row: &MailRow) -> Result<Mail, ApiError> {
    let doc: MailDoc = serde_json::from_slice(&row.doc).map_err(|error| unreadable(row, &error))?;
    Ok(doc.view(sent(row)?))
}

/// What was sent.
pub(crate) fn sent(row: &MailRow) -> Result<MailSent, ApiError> {
    let sent = row.sent.as_deref().unwrap_or_default();
    serde_json::from_slice(sent).map_err(|error| unreadable(row, &error))
}

fn unreadable(row: &MailRow, error: &serde_json::Error) -> ApiError {
    let message = format!("mail {} could not be read from the journal: {error}; see `qd doctor`", row.id);
    ApiError::new(Code::Internal, message)
}

fn check(mail: &Outgoing) -> Result<(), ApiError> {
    if mail.text.trim().is_empty() {
        return Err(invalid("`text` is empty; say something"));
    }
    if escaped_len(&mail.text) > MAIL_TEXT_MAX {
        let message = format!(
            "`text` is at most {MAIL_TEXT_MAX} bytes as JSON; put what is longer into a file and say where it is"
        );
        return Err(invalid(message));
    }
    let plain =
        |text: &String| (1..=CORRELATION_MAX).contains(&text.len()) && !text.contains(char::is_control);
    if mail.correlation_id.as_ref().is_some_and(|text| !plain(text)) {
        return Err(invalid(format!("`correlation_id` is 1 to {CORRELATION_MAX} bytes on one line")));
    }
    Ok(())
}

/// What tells a message apart from another under the same id.
fn fingerprint(session: &SessionId, mail: &Outgoing) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: Option<&str>| {
        // With its length, and a mark for what is not there, so that no two lists of parts can look the same.
        hash.update([u8::from(part.is_some())]);
        hash.update((part.unwrap_or_default().len() as u64).to_le_bytes());
        hash.update(part.unwrap_or_default());
    };
    add(Some(session.as_str()));
    add(Some(&mail.from.words()));
    add(Some(mail.kind.as_str()));
    add(Some(&mail.text));
    add(mail.in_reply_to.as_ref().map(MailId::as_str));
    add(mail.correlation_id.as_deref());
    add(mail.deliver.map(Deliver::as_str));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
