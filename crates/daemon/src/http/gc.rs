//! Garbage collection: what the home holds, what could be freed, and freeing it. Closed sessions are purged by their
//! own actors; blobs are removed only when nothing in the journal refers to them; old streamed text is merged; the files of the journal and of the derived data become smaller.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use futures_util::{StreamExt, stream};
use qd_core::session::SessionCommand;
use qd_journal::{AppendRequest, MergeSavings, RowChange, SessionKey};
use qd_protocol::api::{GcReport, GcRequest};
use qd_protocol::error::ErrorBody;
use qd_protocol::event::EventActor;
use qd_protocol::{ApiError, Millis};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::api_document::{BadBodyResponses, BadQueryResponse, GuardResponses, IdempotencyKeyHeader};
use super::caller::Caller;
use super::extract::{KeyedBody, Query};
use super::idempotency::{ResponseRecording, run_once};
use crate::daemon::{Daemon, append_failed, blob_failed, read_failed};
use crate::edge::{HttpError, Json, OptionalJson};

/// How many sessions are purged at once, so that they share their syncs.
const PURGES_AT_ONCE: usize = 16;
/// How many pages the journal frees at a time, so that its other batches are not held up.
const VACUUM_PAGES: u32 = 256;
/// A blob younger than this may belong to an event that is not written yet.
const YOUNG_BLOB_MS: u64 = 60_000;
const DAY_MS: u64 = 24 * 3600 * 1000;

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(preview_gc, collect_garbage))
}

/// Shows what the home holds, and what could be freed.
#[utoipa::path(get, path = "/v1/gc", operation_id = "gc_look", tag = "daemon", params(GcRequest), responses(
    (status = 200, description = "Sizes and counts; nothing was removed", body = GcReport), BadQueryResponse, GuardResponses,
))]
async fn preview_gc(
    State(daemon): State<Arc<Daemon>>,
    Query(request): Query<GcRequest>,
) -> Result<Json<GcReport>, HttpError> {
    let (gc, _) = survey_home(&daemon, request).await?;
    Ok(Json(gc))
}

/// Purges long-closed sessions, removes unreferenced blobs, merges old streamed text, and gives unused space of the
/// journal and of the search index back to the disk.
#[utoipa::path(post, path = "/v1/gc", operation_id = "gc", tag = "daemon", params(IdempotencyKeyHeader),
    request_body = Option<GcRequest>,
    responses(
        (status = 200, description = "Sizes and counts before, and what was freed", body = GcReport),
        (status = 409, description = "`idempotency_conflict`", body = ErrorBody),
        BadBodyResponses, GuardResponses,
    )
)]
async fn collect_garbage(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    KeyedBody(key, OptionalJson(request)): KeyedBody<OptionalJson<Option<GcRequest>>>,
) -> Result<Json<GcReport>, HttpError> {
    let request = request.unwrap_or(GcRequest { older_than_days: 30 });
    let collect = |_| async {
        let report = free_space(&daemon, &caller.actor, request).await?;
        Ok((report, ResponseRecording::NotWritten))
    };
    Ok(Json(run_once(&daemon, key, collect).await?))
}

/// Sizes and counts, and the sessions that could be purged.
async fn survey_home(daemon: &Daemon, request: GcRequest) -> Result<(GcReport, Vec<SessionKey>), ApiError> {
    let now = Millis::now();
    let before = Millis(now.0.saturating_sub(u64::from(request.older_than_days) * DAY_MS));
    let sizes = daemon.journal.sizes().await.map_err(read_failed)?;
    let closed = daemon.journal.closed_before(before, usize::MAX).await.map_err(read_failed)?;
    let loose = daemon
        .journal
        .unreferenced_blobs(loose_blob_cutoff(now), &closed.sessions)
        .await
        .map_err(read_failed)?;
    let mergeable = match daemon.merge_before() {
        Some(before) => daemon.journal.mergeable(before).await.map_err(read_failed)?,
        None => MergeSavings::default(),
    };
    let derived = daemon.derived_sizes().await;
    let gc = GcReport {
        journal_bytes: sizes.journal + sizes.log,
        blob_bytes: sizes.blobs,
        derived_bytes: derived.files,
        derived_unused_bytes: derived.unused,
        log_bytes: directory_bytes(daemon.home.log()).await,
        closed_sessions: closed.sessions.len() as u64,
        closed_events: closed.events,
        loose_blobs: loose.len() as u64,
        loose_blob_bytes: loose.iter().map(|file| file.blob.size).sum(),
        mergeable_events: mergeable.events,
        mergeable_bytes: mergeable.bytes,
        unused_bytes: sizes.free,
        done: false,
        freed_bytes: 0,
    };
    Ok((gc, closed.sessions))
}

fn loose_blob_cutoff(now: Millis) -> Millis {
    Millis(now.0.saturating_sub(YOUNG_BLOB_MS))
}

async fn free_space(
    daemon: &Arc<Daemon>,
    actor: &Arc<EventActor>,
    request: GcRequest,
) -> Result<GcReport, ApiError> {
    let (gc, closed) = survey_home(daemon, request).await?;
    let mut purged =
        stream::iter(closed).map(|key| purge_session(daemon, actor, key)).buffer_unordered(PURGES_AT_ONCE);
    while let Some(result) = purged.next().await {
        result?;
    }
    let mut freed = 0;
    for file in
        daemon.journal.unreferenced_blobs(loose_blob_cutoff(Millis::now()), &[]).await.map_err(read_failed)?
    {
        if daemon.journal.blobs().remove(&file.blob.sha256).await.map_err(blob_failed)? {
            freed += file.blob.size;
        }
    }
    // Merging needs some disk space first. On a full disk the rest is more important.
    if let Err(error) = daemon.merge_old_text(false).await {
        tracing::warn!(%error, "old streamed text could not be merged");
    }
    let before = daemon.journal.sizes().await.map_err(read_failed)?.free;
    while daemon.journal.vacuum(VACUUM_PAGES).await.map_err(append_failed)? >= u64::from(VACUUM_PAGES) {}
    let after = daemon.journal.sizes().await.map_err(read_failed)?.free;
    freed += before.saturating_sub(after);
    freed += daemon.shrink_derived().await;
    Ok(GcReport { done: true, freed_bytes: freed, ..gc })
}

/// Purges a closed session through its actor; if its workspace was removed, no actor can be woken, so it is done here.
async fn purge_session(
    daemon: &Arc<Daemon>,
    actor: &Arc<EventActor>,
    key: SessionKey,
) -> Result<(), ApiError> {
    let Some(row) = daemon.journal.session_by_key(key).await.map_err(read_failed)? else { return Ok(()) };
    if let Ok(session) = daemon.session_address(&row) {
        let command = SessionCommand::Close { purge: true };
        return daemon.send_command(&session, actor, command, None).await.map(drop);
    }
    let append = AppendRequest { rows: vec![RowChange::Purge { session: key }], ..AppendRequest::default() };
    daemon.journal.append(append).await.map_err(append_failed)?;
    crate::maildir::remove_folders(&daemon.home, &row.id);
    if let Err(error) = daemon.home.remove_session_secrets(&row.id) {
        tracing::warn!(session = %row.id, %error, "could not remove the variables of a purged session");
    }
    Ok(())
}

/// The size of the files in a directory. Unreadable files count as 0.
async fn directory_bytes(directory: PathBuf) -> u64 {
    let Ok(mut entries) = tokio::fs::read_dir(directory).await else { return 0 };
    let mut bytes = 0;
    while let Ok(Some(entry)) = entries.next_entry().await {
        bytes += entry.metadata().await.map_or(0, |metadata| metadata.len());
    }
    bytes
}
