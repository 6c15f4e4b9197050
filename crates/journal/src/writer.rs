//! The only thread that writes. It takes all appends that wait, makes them one transaction with one sync, shows the
//! events to readers, and only then answers. One caller's mistake is undone alone; a failure of the storage undoes
//! the batch and is told to everyone in it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use qd_protocol::limits::RESERVE_BYTES;
use qd_protocol::{Millis, Seq};
use rusqlite::{Connection, Statement, params};

use crate::checkpoint::Checkpointer;
use crate::error::AppendError;
use crate::event::PublishedEvent;
use crate::faults::{FaultInjector, WriterStep};
use crate::index::SessionIndex;
use crate::lists::idempotency_cutoff;
use crate::queue::{AppendJob, AppendReceipt, IdempotencyRecord, WriterQueue, WriterTask};
use crate::reserve::DiskReserve;
use crate::ring::EventHub;
use crate::rows::{RowChange, record_session_id, record_workspace_id, to_sql_int};
use crate::schema;
use crate::stats::JournalStats;

/// What the writer's thread owns.
pub(crate) struct JournalWriter {
    pub(crate) home: PathBuf,
    pub(crate) queue: Arc<WriterQueue>,
    pub(crate) hub: Arc<EventHub>,
    pub(crate) stats: Arc<JournalStats>,
    pub(crate) checkpoints: Arc<Checkpointer>,
    pub(crate) reserve: DiskReserve,
    pub(crate) faults: Option<Arc<FaultInjector>>,
    /// The last seq given out.
    pub(crate) last: Seq,
    pub(crate) index: SessionIndex,
    /// How many were waiting when the last sync returned.
    pub(crate) queued_at_commit: usize,
}

/// Why serving on one connection ended.
enum ServeEnd {
    /// The queue is closed and empty.
    QueueClosed,
    /// The storage failed: the connection may be in any state and is made anew.
    StorageFailed,
}

impl JournalWriter {
    /// Serves until the queue is closed and empty.
    pub(crate) fn run(mut self, db: Connection) {
        // However this thread ends, nobody may go on waiting for it.
        let _guard = AbandonOnDrop(self.queue.clone());
        let mut db = Some(db);
        loop {
            let served = match &db {
                Some(db) => self.serve(db).unwrap_or_else(|error| {
                    tracing::error!(%error, "the journal's writer could not prepare its statements");
                    self.refuse_batch(&error.into())
                }),
                None => match schema::open_writer(&self.home) {
                    Ok(opened) => {
                        db = Some(opened);
                        continue;
                    }
                    Err(error) => self.refuse_batch(&AppendError::Io(error.to_string())),
                },
            };
            match served {
                ServeEnd::QueueClosed => return,
                ServeEnd::StorageFailed => db = None,
            }
        }
    }

    /// Tells a batch that the storage is not there.
    fn refuse_batch(&mut self, error: &AppendError) -> ServeEnd {
        let mut batch = Vec::new();
        if !self.queue.take(&mut batch, 0) {
            return ServeEnd::QueueClosed;
        }
        for work in batch {
            match work {
                WriterTask::Append(job) => drop(job.answer.send(Err(error.clone()))),
                WriterTask::Vacuum { answer, .. } => drop(answer.send(Err(error.clone()))),
            }
        }
        ServeEnd::StorageFailed
    }

    fn serve(&mut self, db: &Connection) -> rusqlite::Result<ServeEnd> {
        let mut hand = WriterStatements::new(db)?;
        let mut batch = Vec::new();
        let mut jobs = Vec::new();
        let mut answered = 0;
        while self.queue.take(&mut batch, self.expected_batch_len(answered)) {
            answered = batch.len();
            if self.checkpoints.needs_writer() {
                self.checkpoints.finish_checkpoint(db);
            }
            for work in batch.drain(..) {
                match work {
                    WriterTask::Append(job) => jobs.push(job),
                    WriterTask::Vacuum { pages, answer } => {
                        let freed = vacuum(db, pages);
                        self.checkpoints.mark_dirty();
                        drop(answer.send(freed.map_err(AppendError::from)));
                    }
                }
            }
            if !jobs.is_empty() && !self.commit_batch(&mut hand, std::mem::take(&mut jobs)) {
                return Ok(ServeEnd::StorageFailed);
            }
            if self.index.is_due(self.last) {
                self.catch_up_index(db);
            }
        }
        // So that the next start has nothing to look at.
        if self.index.is_behind(self.last) {
            self.catch_up_index(db);
        }
        Ok(ServeEnd::QueueClosed)
    }

    /// How many callers are likely to share the next commit: those that were just answered, who tend to come back at
    /// once, and those that came while the last one was under way. A few may be late without everyone waiting.
    fn expected_batch_len(&self, answered: usize) -> usize {
        let likely = answered + self.queued_at_commit;
        likely - likely / 16
    }

    fn catch_up_index(&mut self, db: &Connection) {
        if let Err(error) = self.index.catch_up(db, self.last) {
            tracing::warn!(%error, "the index of sessions could not be caught up; it is tried again later");
        }
        // On the same occasion, as it must happen now and then and costs nothing if there is nothing to do.
        let oldest = idempotency_cutoff(Millis::now());
        let forgotten = db
            .prepare_cached("DELETE FROM remembered WHERE at < ?1")
            .and_then(|mut statement| statement.execute([oldest]));
        if let Err(error) = forgotten {
            tracing::warn!(%error, "old idempotency keys could not be forgotten; it is tried again later");
        }
    }

    /// Makes a batch. False if the storage failed in a way after which the connection is not to be trusted.
    fn commit_batch(&mut self, hand: &mut WriterStatements<'_>, mut jobs: Vec<AppendJob>) -> bool {
        if let Some(faults) = &self.faults {
            hand.inject_faults(faults, self.reserve.is_spent());
        }
        if self.reserve.is_spent() {
            let held = self.reserve.regain();
            self.stats.reserve_spent.store(usize::from(!held), Relaxed);
            if !held {
                // What is left of the reserve is for cancels and ends alone.
                jobs = refuse_jobs(jobs, &AppendError::Full, |job| job.may_use_reserve);
                if jobs.is_empty() {
                    return true;
                }
            }
        }
        let mut outcome = self.attempt_batch(hand, &mut jobs);
        if outcome == Err(AppendError::Full)
            && jobs.iter().any(|job| job.may_use_reserve)
            && self.reserve.spend()
        {
            tracing::warn!("the disk is full: the journal spends its reserve on what must still be written");
            self.stats.reserve_spent.store(1, Relaxed);
            jobs = refuse_jobs(jobs, &AppendError::Full, |job| job.may_use_reserve);
            if let Some(faults) = &self.faults {
                hand.inject_faults(faults, true);
            }
            outcome = self.attempt_batch(hand, &mut jobs);
        }
        self.queued_at_commit = self.queue.len();
        match outcome {
            Ok(batch) => {
                self.publish_batch(jobs, batch);
                true
            }
            Err(error) => {
                tracing::error!(%error, "a commit of the journal failed; nothing of it was acknowledged");
                self.stats.failed_commits.fetch_add(1, Relaxed);
                refuse_jobs(jobs, &error, |_| false);
                !matches!(error, AppendError::Io(_))
            }
        }
    }

    /// One transaction. Plainly first, as nearly all batches have nothing wrong with them; if one has, again with
    /// a savepoint for each append.
    fn attempt_batch(
        &mut self,
        hand: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
    ) -> Result<BatchResult, AppendError> {
        let begun = Instant::now();
        match self.run_transaction(hand, jobs, false) {
            Err(AppendError::Violation(_)) => self.run_transaction(hand, jobs, true),
            other => other,
        }
        .map(|batch| BatchResult { elapsed: begun.elapsed(), ..batch })
    }

    fn run_transaction(
        &mut self,
        hand: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
        apart: bool,
    ) -> Result<BatchResult, AppendError> {
        let written = self.write_appends(hand, jobs, apart);
        let committed = written.and_then(|batch| {
            if let Some(faults) = &self.faults {
                faults.before_commit(jobs.len());
                if faults.commit_fails() {
                    return Err(AppendError::Io("injected".to_owned()));
                }
            }
            hand.commit.execute([])?;
            Ok(batch)
        });
        if committed.is_err() {
            hand.roll_back();
            self.index.roll_back_to(0);
        }
        committed
    }

    fn write_appends(
        &mut self,
        hand: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
        apart: bool,
    ) -> Result<BatchResult, AppendError> {
        hand.begin.execute([])?;
        let mut batch = BatchResult { last: self.last, refused: Vec::new(), elapsed: Duration::ZERO };
        for (index, job) in jobs.iter_mut().enumerate() {
            if !apart {
                batch.last = hand.append(job, batch.last, &mut self.index)?;
                continue;
            }
            hand.db.prepare_cached("SAVEPOINT append")?.execute([])?;
            let mark = self.index.savepoint();
            match hand.append(job, batch.last, &mut self.index) {
                Ok(last) => batch.last = last,
                Err(error @ AppendError::Violation(_)) => {
                    hand.db.prepare_cached("ROLLBACK TO append")?.execute([])?;
                    self.index.roll_back_to(mark);
                    batch.refused.push((index, error));
                }
                Err(error) => return Err(error),
            }
            hand.db.prepare_cached("RELEASE append")?.execute([])?;
        }
        Ok(batch)
    }

    /// Shows what is committed and answers those who asked for it, in this order.
    fn publish_batch(&mut self, jobs: Vec<AppendJob>, batch: BatchResult) {
        self.checkpoints.mark_dirty();
        self.index.commit();
        if let Some(faults) = &self.faults {
            faults.after_commit();
        }
        let mut refused = batch.refused.into_iter().peekable();
        let mut answers = Vec::with_capacity(jobs.len());
        let mut shown = Vec::with_capacity(usize::try_from(batch.last.0 - self.last.0).unwrap_or(0));
        let mut purge = false;
        for (index, job) in jobs.into_iter().enumerate() {
            if let Some((_, error)) = refused.next_if(|(at, _)| *at == index) {
                self.stats.violations.fetch_add(1, Relaxed);
                answers.push((job.answer, Err(error)));
                continue;
            }
            let first = if job.events.is_empty() { self.last } else { Seq(self.last.0 + 1) };
            for draft in job.events {
                self.last.0 += 1;
                shown.push(Arc::<PublishedEvent>::new(draft.publish(self.last)));
            }
            for row in job.rows {
                if let RowChange::Purge { session } = row {
                    self.index.forget_session(session);
                    purge = true;
                }
            }
            answers.push((job.answer, Ok(AppendReceipt { first, last: self.last })));
        }
        self.stats.record_commit(shown.len() as u64, batch.elapsed);
        self.hub.publish(shown, purge);
        self.report_step(WriterStep::Published);
        for (caller, answer) in answers {
            // A caller that has gone away does not want to know.
            let _ = caller.send(answer);
        }
        self.report_step(WriterStep::Answered);
    }

    fn report_step(&self, step: WriterStep) {
        if let Some(faults) = &self.faults {
            faults.report_step(step);
        }
    }
}

/// What a transaction came to.
#[derive(Debug, PartialEq)]
struct BatchResult {
    /// The last seq it gave out.
    last: Seq,
    /// The appends that were undone, by their place in the batch.
    refused: Vec<(usize, AppendError)>,
    elapsed: Duration,
}

/// Answers the jobs that are not to be kept, and gives back those that are.
fn refuse_jobs(
    jobs: Vec<AppendJob>,
    error: &AppendError,
    keep: impl Fn(&AppendJob) -> bool,
) -> Vec<AppendJob> {
    let (kept, refused) = jobs.into_iter().partition(keep);
    let refused: Vec<AppendJob> = refused;
    for job in refused {
        let _ = job.answer.send(Err(error.clone()));
    }
    kept
}

/// Gives free pages back, and says how many were.
fn vacuum(db: &Connection, pages: u32) -> rusqlite::Result<u64> {
    let free = || db.query_row("PRAGMA freelist_count", [], |row| row.get::<_, i64>(0));
    let before = free()?;
    let mut statement = db.prepare(&format!("PRAGMA incremental_vacuum({pages})"))?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(u64::try_from(before - free()?).unwrap_or(0))
}

/// The statements that every batch needs, prepared once.
struct WriterStatements<'c> {
    db: &'c Connection,
    begin: Statement<'c>,
    commit: Statement<'c>,
    rollback: Statement<'c>,
    insert: Statement<'c>,
}

impl<'c> WriterStatements<'c> {
    fn new(db: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            db,
            begin: db.prepare("BEGIN IMMEDIATE")?,
            commit: db.prepare("COMMIT")?,
            rollback: db.prepare("ROLLBACK")?,
            insert: db.prepare(
                "INSERT INTO events(gid, session, number, workspace, ts, kind, run, up, data)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            )?,
        })
    }

    fn roll_back(&mut self) {
        // Some failures have rolled back already.
        if !self.db.is_autocommit()
            && let Err(error) = self.rollback.execute([])
        {
            tracing::error!(%error, "a failed transaction of the journal could not be rolled back");
        }
    }

    /// Writes one append after `last` and says which seq is the last then.
    fn append(
        &mut self,
        job: &mut AppendJob,
        last: Seq,
        index: &mut SessionIndex,
    ) -> Result<Seq, AppendError> {
        let mut seq = last;
        for draft in &job.events {
            seq.0 += 1;
            let scope = &draft.scope;
            let stream = scope.stream();
            if let (Some((key, _)), Some(number)) = (stream, draft.number) {
                index.claim_number(self.db, key, number)?;
            }
            let session = stream.map(|(key, _)| key.0);
            let workspace = scope.workspace.as_ref().map(|(key, _)| key.0);
            self.insert.execute(params![
                to_sql_int(seq.0),
                session,
                draft.number.map(|number| to_sql_int(number.0)),
                workspace,
                to_sql_int(draft.ts.0),
                draft.kind,
                draft.run.as_ref().map(|run| run.as_str()),
                draft.update_number.map(|up| to_sql_int(up.0)),
                draft.data(),
            ])?;
            // A session's first event and those of no session name whom they speak of; all others can be sure that
            // it has been done.
            if draft.number.is_none_or(|number| number.0 == 1) {
                if let Some((key, id)) = stream {
                    record_session_id(self.db, key, id)?;
                }
                if let Some((key, id)) = &scope.workspace {
                    record_workspace_id(self.db, *key, id)?;
                }
            }
        }
        let first = if job.events.is_empty() { last } else { Seq(last.0 + 1) };
        for row in &job.rows {
            row.apply(self.db, first, job.events.len(), seq)?;
        }
        if let Some(remember) = &mut job.idempotency {
            self.record_response(remember, first)?;
        }
        Ok(seq)
    }

    /// A key that is too old to be remembered is as good as none.
    fn record_response(&mut self, remember: &mut IdempotencyRecord, first: Seq) -> Result<(), AppendError> {
        let now = Millis::now();
        let written = self
            .db
            .prepare_cached(
                "INSERT INTO remembered(key, fingerprint, answer, at) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT(key) DO UPDATE SET fingerprint = ?2, answer = ?3, at = ?4 WHERE at < ?5",
            )?
            .execute(params![
                remember.key,
                remember.fingerprint,
                (remember.make_response)(first),
                to_sql_int(now.0),
                idempotency_cutoff(now),
            ])?;
        if written == 0 {
            return Err(AppendError::Violation("the idempotency key has been used".to_owned()));
        }
        Ok(())
    }

    /// Makes the connection behave as the faults say.
    fn inject_faults(&self, faults: &FaultInjector, reserve_spent: bool) {
        let page = 4096;
        let extra = if reserve_spent { u32::try_from(RESERVE_BYTES / page).unwrap_or(0) } else { 0 };
        let limit = match faults.page_limit.load(SeqCst) {
            0 => u32::MAX - 1,
            limit => limit + extra,
        };
        let read_only = u8::from(faults.read_only.load(SeqCst));
        let set = format!("PRAGMA max_page_count = {limit}; PRAGMA query_only = {read_only};");
        if let Err(error) = self.db.execute_batch(&set) {
            tracing::error!(%error, "a fault could not be injected");
        }
    }
}

/// Ends the queue with the thread that serves it.
struct AbandonOnDrop(Arc<WriterQueue>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.abandon();
    }
}
