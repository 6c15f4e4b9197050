//! Promises of the worker process, tested with real processes. The tests take the daemon's part at the other end of the
//! worker's socket.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod claude;
mod confined;
mod executor;
mod harness;
mod running_worker;
mod terminal;
mod worker_ends;
