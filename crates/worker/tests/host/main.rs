//! Promises of the worker process, shown with real processes: this suite stands where the daemon would, on the other
//! end of the worker's socket.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod claude;
mod executor;
mod harness;
mod running_worker;
mod terminal;
mod worker_ends;
