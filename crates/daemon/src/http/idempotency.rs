//! A request repeated under the same `Idempotency-Key` has its effect once. The first response is written in the
//! transaction of its effect, so a crash cannot separate the two; here it is looked up.

use std::sync::Arc;

use qd_journal::AppendRequest;
use qd_protocol::{ApiError, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::unreadable_row;
use crate::actor::IdempotencyKey;
use crate::daemon::{Daemon, append_failed, read_failed};

/// Whether a response is already stored under its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseRecording {
    /// It was written in the transaction of its effect.
    WrittenWithEffect,
    /// There was no effect in the journal, so the response is written alone.
    NotWritten,
}

/// Runs an operation, or returns the response it had the first time. Errors are not stored: they had no effect.
pub(super) async fn run_once<T, F>(
    daemon: &Arc<Daemon>,
    key: Option<IdempotencyKey>,
    operation: impl FnOnce(Option<IdempotencyKey>) -> F,
) -> Result<T, ApiError>
where
    T: Serialize + DeserializeOwned,
    F: Future<Output = Result<(T, ResponseRecording), ApiError>>,
{
    let Some(key) = key else {
        return operation(None).await.map(|(response, _)| response);
    };
    let _one_at_a_time = daemon.key_locks.lock(format!("idem {}", key.key)).await;
    if let Some(first) = find_first_response(daemon, &key).await? {
        return Ok(first);
    }
    let (response, recording) = operation(Some(key.clone())).await?;
    if recording == ResponseRecording::NotWritten {
        record_response(daemon, key, &response).await?;
    }
    Ok(response)
}

async fn find_first_response<T: DeserializeOwned>(
    daemon: &Daemon,
    key: &IdempotencyKey,
) -> Result<Option<T>, ApiError> {
    let Some((fingerprint, response)) =
        daemon.journal.idempotent_response(&key.key).await.map_err(read_failed)?
    else {
        return Ok(None);
    };
    if fingerprint != key.fingerprint {
        let message = "this Idempotency-Key was used for another request; choose a new one";
        return Err(ApiError::new(ErrorCode::IdempotencyConflict, message));
    }
    serde_json::from_slice(&response).map(Some).map_err(unreadable_row("the response under", &key.key))
}

async fn record_response<T: Serialize>(
    daemon: &Daemon,
    key: IdempotencyKey,
    response: &T,
) -> Result<(), ApiError> {
    let append = AppendRequest { idempotency: Some(key.into_record(response)?), ..AppendRequest::default() };
    daemon.journal.append(append).await.map(drop).map_err(append_failed)
}
