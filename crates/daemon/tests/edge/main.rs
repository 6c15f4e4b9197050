//! Tests of the edge over real sockets and with a router of a few routes: admission, limits and shutdown. Requests are
//! written byte by byte, because a client library would correct what must be wrong here.

#![expect(clippy::unwrap_used, reason = "what a test's own tools cannot do is a failure of the test")]

mod guard;
mod harness;
mod limits;
mod listeners;
mod shutdown;
