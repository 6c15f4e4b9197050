//! The only thread that writes. It takes all queued appends, commits them in one transaction with one sync, publishes
//! the events, and only then answers the callers. An invalid append is rolled back alone; a storage failure rolls back
//! the whole batch and is reported to every caller in it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use qd_protocol::Seq;
use qd_protocol::limits::RESERVE_BYTES;
use rusqlite::{Connection, Statement, params};

use crate::checkpoint::Checkpointer;
use crate::database_file::inspect_journal;
use crate::error::AppendError;
use crate::event::PublishedEvent;
use crate::faults::{FaultInjector, WriterStep};
use crate::index::SessionIndex;
use crate::key_clock::KeyClock;
use crate::lists::idempotency_cutoff;
use crate::merge::{self, MergePlan};
use crate::queue::{AppendJob, AppendReceipt, IdempotencyRecord, WriterQueue, WriterTask};
use crate::reserve::DiskReserve;
use crate::ring::EventHub;
use crate::rows::{RowChange, record_session_id, record_workspace_id, to_sql_int};
use crate::schema;
use crate::stats::JournalStats;

/// The state that the writer's thread owns.
pub(crate) struct JournalWriter {
    pub(crate) home: PathBuf,
    pub(crate) queue: Arc<WriterQueue>,
    pub(crate) hub: Arc<EventHub>,
    pub(crate) stats: Arc<JournalStats>,
    pub(crate) checkpoints: Arc<Checkpointer>,
    pub(crate) reserve: DiskReserve,
    pub(crate) faults: Option<Arc<FaultInjector>>,
    pub(crate) key_clock: Arc<KeyClock>,
    /// The last seq allocated.
    pub(crate) last: Seq,
    pub(crate) index: SessionIndex,
    /// The length of the queue when the last commit returned.
    pub(crate) queued_at_commit: usize,
}

/// Why [`JournalWriter::serve`] returned.
enum ServeEnd {
    /// The queue is closed and empty.
    QueueClosed,
    /// The storage failed. The connection may be in any state and is replaced.
    StorageFailed,
}

impl JournalWriter {
    /// Runs until the queue is closed and empty.
    pub(crate) fn run(mut self, db: Connection) {
        // However this thread ends, no caller may keep waiting for it.
        let _guard = AbandonOnDrop(self.queue.clone());
        let mut db = Some(db);
        loop {
            let end = match &db {
                Some(db) => self.serve(db).unwrap_or_else(|error| {
                    tracing::error!(%error, "the journal's writer could not prepare its SQL statements");
                    self.refuse_batch(&error.into())
                }),
                // Inspected again: SQLite would take a file that was emptied meanwhile for a new database.
                None => match inspect_journal(&self.home).and_then(|()| schema::open_writer(&self.home)) {
                    Ok(opened) => {
                        db = Some(opened);
                        continue;
                    }
                    Err(error) => self.refuse_batch(&AppendError::Io(error.to_string())),
                },
            };
            match end {
                ServeEnd::QueueClosed => return,
                ServeEnd::StorageFailed => db = None,
            }
        }
    }

    /// Answers the next batch with an error, because there is no usable connection.
    fn refuse_batch(&mut self, error: &AppendError) -> ServeEnd {
        let mut batch = Vec::new();
        if !self.queue.take(&mut batch, 0) {
            return ServeEnd::QueueClosed;
        }
        for task in batch {
            match task {
                WriterTask::Append(job) => drop(job.answer.send(Err(error.clone()))),
                WriterTask::Merge { reply, .. } => drop(reply.send(Err(error.clone()))),
                WriterTask::Vacuum { reply: answer, .. } => drop(answer.send(Err(error.clone()))),
            }
        }
        ServeEnd::StorageFailed
    }

    fn serve(&mut self, db: &Connection) -> rusqlite::Result<ServeEnd> {
        let mut statements = WriterStatements::new(db, Arc::clone(&self.key_clock))?;
        let mut batch = Vec::new();
        let mut jobs = Vec::new();
        let mut merges = Vec::new();
        let mut answered = 0;
        while self.queue.take(&mut batch, self.expected_batch_len(answered)) {
            answered = batch.len();
            if self.checkpoints.needs_writer() {
                self.checkpoints.finish_checkpoint(db);
            }
            for task in batch.drain(..) {
                match task {
                    WriterTask::Append(job) => jobs.push(job),
                    WriterTask::Merge { plan, reply } => merges.push((plan, reply)),
                    WriterTask::Vacuum { pages, reply: answer } => {
                        let freed = vacuum(db, pages);
                        self.checkpoints.mark_dirty();
                        drop(answer.send(freed.map_err(AppendError::from)));
                    }
                }
            }
            if !jobs.is_empty() && !self.commit_batch(&mut statements, std::mem::take(&mut jobs)) {
                return Ok(ServeEnd::StorageFailed);
            }
            // Appends come first, because somebody waits for them.
            for (plan, reply) in merges.drain(..) {
                let _ = reply.send(self.merge(db, &plan));
            }
            if self.index.is_due(self.last) {
                self.catch_up_index(db);
            }
        }
        // Catch up now, so that the next start has no unindexed events to scan.
        if self.index.is_behind(self.last) {
            self.catch_up_index(db);
        }
        Ok(ServeEnd::QueueClosed)
    }

    /// How many callers are likely to share the next commit: those just answered, because they tend to return at once,
    /// and those that queued during the last commit. One in sixteen may be late without making the others wait.
    fn expected_batch_len(&self, answered: usize) -> usize {
        let expected = answered + self.queued_at_commit;
        expected - expected / 16
    }

    /// Carries out a plan, unless disk space is short: merging frees pages in the file but needs some in the log first.
    fn merge(&self, db: &Connection, plan: &MergePlan) -> Result<bool, AppendError> {
        if self.reserve.is_spent() {
            return Err(AppendError::Full);
        }
        let merged = merge::carry_out(db, plan);
        self.checkpoints.mark_dirty();
        merged
    }

    fn catch_up_index(&mut self, db: &Connection) {
        if let Err(error) = self.index.catch_up(db, self.last) {
            tracing::warn!(%error, "the session index could not be updated; the journal will try again later");
        }
        // Expired idempotency keys are deleted here too: it must happen now and then, and is free if there are none.
        let cutoff = idempotency_cutoff(self.key_clock.now());
        let deleted = db
            .prepare_cached("DELETE FROM remembered WHERE at < ?1")
            .and_then(|mut statement| statement.execute([cutoff]));
        if let Err(error) = deleted {
            tracing::warn!(%error, "expired idempotency keys could not be deleted; the journal will try again later");
        }
    }

    /// Commits a batch and answers its callers. Returns false if the storage failed so that the connection cannot be
    /// trusted any more.
    fn commit_batch(&mut self, statements: &mut WriterStatements<'_>, mut jobs: Vec<AppendJob>) -> bool {
        if let Some(faults) = &self.faults {
            statements.inject_faults(faults, self.reserve.is_spent());
        }
        if self.reserve.is_spent() {
            let held = self.reserve.regain();
            self.stats.reserve_spent.store(usize::from(!held), Relaxed);
            if !held {
                // What is left of the reserve is only for cancels and run ends.
                jobs = refuse_jobs(jobs, &AppendError::Full, |job| job.may_use_reserve);
                if jobs.is_empty() {
                    return true;
                }
            }
        }
        let mut outcome = self.attempt_batch(statements, &mut jobs);
        if outcome == Err(AppendError::Full)
            && jobs.iter().any(|job| job.may_use_reserve)
            && self.reserve.spend()
        {
            tracing::warn!("the disk is full: the journal uses its reserve for cancels and run ends");
            self.stats.reserve_spent.store(1, Relaxed);
            jobs = refuse_jobs(jobs, &AppendError::Full, |job| job.may_use_reserve);
            if let Some(faults) = &self.faults {
                statements.inject_faults(faults, true);
            }
            outcome = self.attempt_batch(statements, &mut jobs);
        }
        self.queued_at_commit = self.queue.len();
        match outcome {
            Ok(batch) => {
                self.publish_batch(jobs, batch);
                true
            }
            Err(error) => {
                tracing::error!(%error, "a journal commit failed; none of its appends was acknowledged");
                self.stats.failed_commits.fetch_add(1, Relaxed);
                refuse_jobs(jobs, &error, |_| false);
                !matches!(error, AppendError::Io(_))
            }
        }
    }

    /// Commits one transaction. The first attempt uses no savepoints, because nearly every batch is valid. If an append
    /// contradicts the journal, the second attempt gives each append its own savepoint.
    fn attempt_batch(
        &mut self,
        statements: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
    ) -> Result<BatchResult, AppendError> {
        let started = Instant::now();
        match self.run_transaction(statements, jobs, false) {
            Err(AppendError::Violation(_)) => self.run_transaction(statements, jobs, true),
            result => result,
        }
        .map(|batch| BatchResult { elapsed: started.elapsed(), ..batch })
    }

    fn run_transaction(
        &mut self,
        statements: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
        use_savepoints: bool,
    ) -> Result<BatchResult, AppendError> {
        let written = self.write_appends(statements, jobs, use_savepoints);
        let committed = written.and_then(|batch| {
            if let Some(faults) = &self.faults {
                faults.before_commit(jobs.len());
                if faults.commit_fails() {
                    return Err(AppendError::Io("injected".to_owned()));
                }
            }
            statements.commit.execute([])?;
            Ok(batch)
        });
        if committed.is_err() {
            statements.roll_back();
            self.index.roll_back_to(0);
        }
        committed
    }

    fn write_appends(
        &mut self,
        statements: &mut WriterStatements<'_>,
        jobs: &mut [AppendJob],
        use_savepoints: bool,
    ) -> Result<BatchResult, AppendError> {
        statements.begin.execute([])?;
        let mut batch = BatchResult { last: self.last, refused: Vec::new(), elapsed: Duration::ZERO };
        for (index, job) in jobs.iter_mut().enumerate() {
            if !use_savepoints {
                batch.last = statements.append(job, batch.last, &mut self.index)?;
                continue;
            }
            statements.db.prepare_cached("SAVEPOINT append")?.execute([])?;
            let savepoint = self.index.savepoint();
            match statements.append(job, batch.last, &mut self.index) {
                Ok(last) => batch.last = last,
                Err(error @ AppendError::Violation(_)) => {
                    statements.db.prepare_cached("ROLLBACK TO append")?.execute([])?;
                    self.index.roll_back_to(savepoint);
                    batch.refused.push((index, error));
                }
                Err(error) => return Err(error),
            }
            statements.db.prepare_cached("RELEASE append")?.execute([])?;
        }
        Ok(batch)
    }

    /// Publishes the committed events, then answers the callers, in this order.
    fn publish_batch(&mut self, jobs: Vec<AppendJob>, batch: BatchResult) {
        self.checkpoints.mark_dirty();
        self.index.commit();
        if let Some(faults) = &self.faults {
            faults.after_commit();
        }
        let mut refused = batch.refused.into_iter().peekable();
        let mut replies = Vec::with_capacity(jobs.len());
        let mut published = Vec::with_capacity(usize::try_from(batch.last.0 - self.last.0).unwrap_or(0));
        let mut purge = false;
        for (index, job) in jobs.into_iter().enumerate() {
            if let Some((_, error)) = refused.next_if(|(at, _)| *at == index) {
                self.stats.violations.fetch_add(1, Relaxed);
                replies.push((job.answer, Err(error)));
                continue;
            }
            let first = if job.events.is_empty() { self.last } else { Seq(self.last.0 + 1) };
            for draft in job.events {
                self.last.0 += 1;
                published.push(Arc::<PublishedEvent>::new(draft.publish(self.last)));
            }
            for row in job.rows {
                if let RowChange::Purge { session } = row {
                    self.index.forget_session(session);
                    purge = true;
                }
            }
            replies.push((job.answer, Ok(AppendReceipt { first, last: self.last })));
        }
        self.stats.record_commit(published.len() as u64, batch.elapsed);
        self.hub.publish(published, purge);
        self.report_step(WriterStep::Published);
        for (caller, reply) in replies {
            // A caller that has gone away needs no answer.
            let _ = caller.send(reply);
        }
        self.report_step(WriterStep::Answered);
    }

    fn report_step(&self, step: WriterStep) {
        if let Some(faults) = &self.faults {
            faults.report_step(step);
        }
    }
}

/// The outcome of a transaction.
#[derive(Debug, PartialEq)]
struct BatchResult {
    /// The last seq it allocated.
    last: Seq,
    /// The appends that were rolled back, by their index in the batch.
    refused: Vec<(usize, AppendError)>,
    elapsed: Duration,
}

/// Answers the jobs that `keep` rejects with an error, and returns the others.
fn refuse_jobs(
    jobs: Vec<AppendJob>,
    error: &AppendError,
    keep: impl Fn(&AppendJob) -> bool,
) -> Vec<AppendJob> {
    let (accepted, refused) = jobs.into_iter().partition(keep);
    let refused: Vec<AppendJob> = refused;
    for job in refused {
        let _ = job.answer.send(Err(error.clone()));
    }
    accepted
}

/// Returns free pages to the file system and reports how many.
fn vacuum(db: &Connection, pages: u32) -> rusqlite::Result<u64> {
    let free = || db.query_row("PRAGMA freelist_count", [], |row| row.get::<_, i64>(0));
    let before = free()?;
    let mut statement = db.prepare(&format!("PRAGMA incremental_vacuum({pages})"))?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(u64::try_from(before - free()?).unwrap_or(0))
}

/// The statements that every batch needs, prepared once per connection.
struct WriterStatements<'c> {
    db: &'c Connection,
    begin: Statement<'c>,
    commit: Statement<'c>,
    rollback: Statement<'c>,
    insert: Statement<'c>,
    key_clock: Arc<KeyClock>,
}

impl<'c> WriterStatements<'c> {
    fn new(db: &'c Connection, key_clock: Arc<KeyClock>) -> rusqlite::Result<Self> {
        Ok(Self {
            db,
            key_clock,
            begin: db.prepare("BEGIN IMMEDIATE")?,
            commit: db.prepare("COMMIT")?,
            rollback: db.prepare("ROLLBACK")?,
            insert: db.prepare(
                "INSERT INTO events(gid, session, number, workspace, ts, kind, run, up, data, uptime)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            )?,
        })
    }

    fn roll_back(&mut self) {
        // After some failures SQLite has already rolled back.
        if !self.db.is_autocommit()
            && let Err(error) = self.rollback.execute([])
        {
            tracing::error!(%error, "a failed journal transaction could not be rolled back");
        }
    }

    /// Writes one append after the seq `last` and returns the new last seq.
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
                to_sql_int(draft.ts.wall.0),
                draft.kind,
                draft.run.as_ref().map(|run| run.as_str()),
                draft.update_number.map(|number| to_sql_int(number.0)),
                draft.data(),
                draft.ts.uptime.map(|uptime| uptime.to_string()),
            ])?;
            // The ids behind the keys are recorded with a session's first event, and with every event that has no
            // session. All later events of a session can rely on that.
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
        if let Some(record) = &mut job.idempotency {
            self.record_response(record, first)?;
        }
        Ok(seq)
    }

    /// Stores a response under its idempotency key. An expired key may be used again.
    fn record_response(&mut self, record: &mut IdempotencyRecord, first: Seq) -> Result<(), AppendError> {
        let now = self.key_clock.now();
        let written = self
            .db
            .prepare_cached(
                "INSERT INTO remembered(key, fingerprint, answer, at) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT(key) DO UPDATE SET fingerprint = ?2, answer = ?3, at = ?4 WHERE at < ?5",
            )?
            .execute(params![
                record.key,
                record.fingerprint,
                (record.make_response)(first),
                to_sql_int(now.0),
                idempotency_cutoff(now),
            ])?;
        if written == 0 {
            return Err(AppendError::Violation("the idempotency key is already in use".to_owned()));
        }
        Ok(())
    }

    /// Applies the injected faults to the connection.
    fn inject_faults(&self, faults: &FaultInjector, reserve_spent: bool) {
        let page_bytes = 4096;
        let extra = if reserve_spent { u32::try_from(RESERVE_BYTES / page_bytes).unwrap_or(0) } else { 0 };
        let limit = match faults.page_limit.load(SeqCst) {
            0 => u32::MAX - 1,
            limit => limit + extra,
        };
        let read_only = u8::from(faults.read_only.load(SeqCst));
        let set = format!("PRAGMA max_page_count = {limit}; PRAGMA query_only = {read_only};");
        if let Err(error) = self.db.execute_batch(&set) {
            tracing::error!(%error, "an injected fault could not be applied");
        }
    }
}

/// Abandons the queue when the writer's thread ends, however it ends.
struct AbandonOnDrop(Arc<WriterQueue>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        self.0.abandon();
    }
}
