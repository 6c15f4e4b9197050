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

use crate::checkpoint::Checkpoints;
use crate::error::AppendError;
use crate::event::Published;
use crate::faults::{Faults, Step};
use crate::index::Index;
use crate::lists::oldest_remembered;
use crate::queue::{Appended, Job, Queue, Remember, Work};
use crate::reserve::Reserve;
use crate::ring::Board;
use crate::rows::{RowChange, int, name_session, name_workspace};
use crate::schema;
use crate::stats::Stats;

/// What the writer's thread owns.
pub(crate) struct Writer {
    pub(crate) home: PathBuf,
    pub(crate) queue: Arc<Queue>,
    pub(crate) board: Arc<Board>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) checkpoints: Arc<Checkpoints>,
    pub(crate) reserve: Reserve,
    pub(crate) faults: Option<Arc<Faults>>,
    /// The last seq given out.
    pub(crate) last: Seq,
    pub(crate) index: Index,
    /// How many were waiting when the last sync returned.
    pub(crate) others: usize,
}

/// Why serving on one connection ended.
enum Served {
    /// The queue is closed and empty.
    All,
    /// The storage failed: the connection may be in any state and is made anew.
    Until,
}

impl Writer {
    /// Serves until the queue is closed and empty.
    pub(crate) fn run(mut self, db: Connection) {
        // However this thread ends, nobody may go on waiting for it.
        let _guard = Abandon(self.queue.clone());
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
                Served::All => return,
                Served::Until => db = None,
            }
        }
    }

    /// Tells a batch that the storage is not there.
    fn refuse_batch(&mut self, error: &AppendError) -> Served {
        let mut batch = Vec::new();
        if !self.queue.take(&mut batch, 0) {
            return Served::All;
        }
        for work in batch {
            match work {
                Work::Append(job) => drop(job.answer.send(Err(error.clone()))),
                Work::Vacuum { answer, .. } => drop(answer.send(Err(error.clone()))),
            }
        }
        Served::Until
    }

    fn serve(&mut self, db: &Connection) -> rusqlite::Result<Served> {
        let mut hand = Hand::new(db)?;
        let mut batch = Vec::new();
        let mut jobs = Vec::new();
        let mut answered = 0;
        while self.queue.take(&mut batch, self.company(answered)) {
            answered = batch.len();
            if self.checkpoints.writer_is_asked() {
                self.checkpoints.finish(db);
            }
            for work in batch.drain(..) {
                match work {
                    Work::Append(job) => jobs.push(job),
                    Work::Vacuum { pages, answer } => {
                        let freed = vacuum(db, pages);
                        self.checkpoints.dirty();
                        drop(answer.send(freed.map_err(AppendError::from)));
                    }
                }
            }
            if !jobs.is_empty() && !self.commit(&mut hand, std::mem::take(&mut jobs)) {
                return Ok(Served::Until);
            }
            if self.index.is_due(self.last) {
                self.catch_up(db);
            }
        }
        // So that the next start has nothing to look at.
        if self.index.is_behind(self.last) {
            self.catch_up(db);
        }
        Ok(Served::All)
    }

    /// How many callers are likely to share the next commit: those that were just answered, who tend to come back at
    /// once, and those that came while the last one was under way. A few may be late without everyone waiting.
    fn company(&self, answered: usize) -> usize {
        let likely = answered + self.others;
        likely - likely / 16
    }

    fn catch_up(&mut self, db: &Connection) {
        if let Err(error) = self.index.catch_up(db, self.last) {
            tracing::warn!(%error, "the index of sessions could not be caught up; it is tried again later");
        }
        // On the same occasion, as it must happen now and then and costs nothing if there is nothing to do.
        let oldest = oldest_remembered(Millis::now());
        let forgotten = db
            .prepare_cached("DELETE FROM remembered WHERE at < ?1")
            .and_then(|mut statement| statement.execute([oldest]));
        if let Err(error) = forgotten {
            tracing::warn!(%error, "old idempotency keys could not be forgotten; it is tried again later");
        }
    }

    /// Makes a batch. False if the storage failed in a way after which the connection is not to be trusted.
    fn commit(&mut self, hand: &mut Hand<'_>, mut jobs: Vec<Job>) -> bool {
        if let Some(faults) = &self.faults {
            hand.inject(faults, self.reserve.is_spent());
        }
        if self.reserve.is_spent() {
            let held = self.reserve.regain();
            self.stats.reserve_spent.store(usize::from(!held), Relaxed);
            if !held {
                // What is left of the reserve is for cancels and ends alone.
                jobs = refuse(jobs, &AppendError::Full, |job| job.reserve);
                if jobs.is_empty() {
                    return true;
                }
            }
        }
        let mut outcome = self.attempt(hand, &mut jobs);
        if outcome == Err(AppendError::Full) && jobs.iter().any(|job| job.reserve) && self.reserve.spend() {
            tracing::warn!("the disk is full: the journal spends its reserve on what must still be written");
            self.stats.reserve_spent.store(1, Relaxed);
            jobs = refuse(jobs, &AppendError::Full, |job| job.reserve);
            if let Some(faults) = &self.faults {
                hand.inject(faults, true);
            }
            outcome = self.attempt(hand, &mut jobs);
        }
        self.others = self.queue.len();
        match outcome {
            Ok(batch) => {
                self.publish(jobs, batch);
                true
            }
            Err(error) => {
                tracing::error!(%error, "a commit of the journal failed; nothing of it was acknowledged");
                self.stats.failed_commits.fetch_add(1, Relaxed);
                refuse(jobs, &error, |_| false);
                !matches!(error, AppendError::Io(_))
            }
        }
    }

    /// One transaction. Plainly first, as nearly all batches have nothing wrong with them; if one has, again with
    /// a savepoint for each append.
    fn attempt(&mut self, hand: &mut Hand<'_>, jobs: &mut [Job]) -> Result<Batch, AppendError> {
        let begun = Instant::now();
        match self.transaction(hand, jobs, false) {
            Err(AppendError::Violation(_)) => self.transaction(hand, jobs, true),
            other => other,
        }
        .map(|batch| Batch { took: begun.elapsed(), ..batch })
    }

    fn transaction(
        &mut self,
        hand: &mut Hand<'_>,
        jobs: &mut [Job],
        apart: bool,
    ) -> Result<Batch, AppendError> {
        let written = self.write(hand, jobs, apart);
        let committed = written.and_then(|batch| {
            if let Some(faults) = &self.faults {
                faults.committing(jobs.len());
                if faults.commit_fails() {
                    return Err(AppendError::Io("injected".to_owned()));
                }
            }
            hand.commit.execute([])?;
            Ok(batch)
        });
        if committed.is_err() {
            hand.roll_back();
            self.index.undo(0);
        }
        committed
    }

    fn write(&mut self, hand: &mut Hand<'_>, jobs: &mut [Job], apart: bool) -> Result<Batch, AppendError> {
        hand.begin.execute([])?;
        let mut batch = Batch { last: self.last, refused: Vec::new(), took: Duration::ZERO };
        for (index, job) in jobs.iter_mut().enumerate() {
            if !apart {
                batch.last = hand.append(job, batch.last, &mut self.index)?;
                continue;
            }
            hand.db.prepare_cached("SAVEPOINT append")?.execute([])?;
            let mark = self.index.mark();
            match hand.append(job, batch.last, &mut self.index) {
                Ok(last) => batch.last = last,
                Err(error @ AppendError::Violation(_)) => {
                    hand.db.prepare_cached("ROLLBACK TO append")?.execute([])?;
                    self.index.undo(mark);
                    batch.refused.push((index, error));
                }
                Err(error) => return Err(error),
            }
            hand.db.prepare_cached("RELEASE append")?.execute([])?;
        }
        Ok(batch)
    }

    /// Shows what is committed and answers those who asked for it, in this order.
    fn publish(&mut self, jobs: Vec<Job>, batch: Batch) {
        self.checkpoints.dirty();
        self.index.keep();
        if let Some(faults) = &self.faults {
            faults.committed();
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
                shown.push(Arc::<Published>::new(draft.publish(self.last)));
            }
            for row in job.rows {
                if let RowChange::Purge { session } = row {
                    self.index.forget(session);
                    purge = true;
                }
            }
            answers.push((job.answer, Ok(Appended { first, last: self.last })));
        }
        self.stats.committed(shown.len() as u64, batch.took);
        self.board.publish(shown, purge);
        self.step(Step::Published);
        for (caller, answer) in answers {
            // A caller that has gone away does not want to know.
            let _ = caller.send(answer);
        }
        self.step(Step::Answered);
    }

    fn step(&self, step: Step) {
        if let Some(faults) = &self.faults {
            faults.step(step);
        }
    }
}

/// What a transaction came to.
#[derive(Debug, PartialEq)]
struct Batch {
    /// The last seq it gave out.
    last: Seq,
    /// The appends that were undone, by their place in the batch.
    refused: Vec<(usize, AppendError)>,
    took: Duration,
}

/// Answers the jobs that are not to be kept, and gives back those that are.
fn refuse(jobs: Vec<Job>, error: &AppendError, keep: impl Fn(&Job) -> bool) -> Vec<Job> {
    let (kept, refused) = jobs.into_iter().partition(keep);
    let refused: Vec<Job> = refused;
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
struct Hand<'c> {
    db: &'c Connection,
    begin: Statement<'c>,
    commit: Statement<'c>,
    rollback: Statement<'c>,
    insert: Statement<'c>,
}

impl<'c> Hand<'c> {
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
    fn append(&mut self, job: &mut Job, last: Seq, index: &mut Index) -> Result<Seq, AppendError> {
        let mut seq = last;
        for draft in &job.events {
            seq.0 += 1;
            let scope = &draft.scope;
            let stream = scope.stream();
            if let (Some((key, _)), Some(number)) = (stream, draft.number) {
                index.take(self.db, key, number)?;
            }
            let session = stream.map(|(key, _)| key.0);
            let workspace = scope.workspace.as_ref().map(|(key, _)| key.0);
            self.insert.execute(params![
                int(seq.0),
                session,
                draft.number.map(|number| int(number.0)),
                workspace,
                int(draft.ts.0),
                draft.kind,
                draft.run.as_ref().map(|run| run.as_str()),
                draft.up.map(|up| int(up.0)),
                draft.data(),
            ])?;
            // A session's first event and those of no session name whom they speak of; all others can be sure that
            // it has been done.
            if draft.number.is_none_or(|number| number.0 == 1) {
                if let Some((key, id)) = stream {
                    name_session(self.db, key, id)?;
                }
                if let Some((key, id)) = &scope.workspace {
                    name_workspace(self.db, *key, id)?;
                }
            }
        }
        let first = if job.events.is_empty() { last } else { Seq(last.0 + 1) };
        for row in &job.rows {
            row.apply(self.db, first, job.events.len(), seq)?;
        }
        if let Some(remember) = &mut job.remember {
            self.remember(remember, first)?;
        }
        Ok(seq)
    }

    /// A key that is too old to be remembered is as good as none.
    fn remember(&mut self, remember: &mut Remember, first: Seq) -> Result<(), AppendError> {
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
                (remember.answer)(first),
                int(now.0),
                oldest_remembered(now),
            ])?;
        if written == 0 {
            return Err(AppendError::Violation("the idempotency key has been used".to_owned()));
        }
        Ok(())
    }

    /// Makes the connection behave as the faults say.
    fn inject(&self, faults: &Faults, reserve_spent: bool) {
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
struct Abandon(Arc<Queue>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.abandon();
    }
}
