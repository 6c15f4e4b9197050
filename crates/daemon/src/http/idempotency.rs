//! The same request under the same `Idempotency-Key` has its effect once. The first answer is written down in the
//! transaction of its effect, so a crash between the two is impossible; here it is found again.

use std::sync::Arc;

use qd_journal::{AppendRequest, IdempotencyRecord};
use qd_protocol::{ApiError, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::unreadable_row;
use crate::actor::{IdempotencyKey, encode_failed};
use crate::daemon::{Daemon, append_failed, read_failed};

/// Whether an answer is already written down under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseRecording {
    /// With its effect.
    WrittenWithEffect,
    /// There was no effect that the journal knows of, so it is written down alone.
    NotWritten,
}

/// Does a deed, or gives the answer that it had the first time. A refusal is not remembered: it had no effect.
pub(super) async fn run_once<T, F>(
    daemon: &Arc<Daemon>,
    key: Option<IdempotencyKey>,
    deed: impl FnOnce(Option<IdempotencyKey>) -> F,
) -> Result<T, ApiError>
where
    T: Serialize + DeserializeOwned,
    F: Future<Output = Result<(T, ResponseRecording), ApiError>>,
{
    let Some(key) = key else {
        return deed(None).await.map(|(answer, _)| answer);
    };
    let _one_at_a_time = daemon.key_locks.lock(format!("idem {}", key.key)).await;
    if let Some(first) = find_first_response(daemon, &key).await? {
        return Ok(first);
    }
    let (answer, kept) = deed(Some(key.clone())).await?;
    if kept == ResponseRecording::NotWritten {
        record_response(daemon, key, &answer).await?;
    }
    Ok(answer)
}

async fn find_first_response<T: DeserializeOwned>(
    daemon: &Daemon,
    key: &IdempotencyKey,
) -> Result<Option<T>, ApiError> {
    let Some((fingerprint, answer)) =
        daemon.journal.idempotent_response(&key.key).await.map_err(read_failed)?
    else {
        return Ok(None);
    };
    if fingerprint != key.fingerprint {
        let message = "this Idempotency-Key came with another request; choose a new one";
        return Err(ApiError::new(ErrorCode::IdempotencyConflict, message));
    }
    serde_json::from_slice(&answer).map(Some).map_err(unreadable_row("the answer under", &key.key))
}

async fn record_response<T: Serialize>(
    daemon: &Daemon,
    key: IdempotencyKey,
    answer: &T,
) -> Result<(), ApiError> {
    let IdempotencyKey { key, fingerprint } = key;
    let bytes = serde_json::to_vec(answer).map_err(encode_failed)?;
    let remember = IdempotencyRecord { key, fingerprint, make_response: Box::new(move |_| bytes.clone()) };
    let append = AppendRequest { idempotency: Some(remember), ..AppendRequest::default() };
    daemon.journal.append(append).await.map(drop).map_err(append_failed)
}
