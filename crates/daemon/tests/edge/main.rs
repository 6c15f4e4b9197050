//! The promises of the edge, over real sockets and with a router of a few routes: who gets in, how much a client may
//! take, and how it all ends. Requests are written byte by byte, because a client library would put right what must be
//! wrong here.

#![expect(clippy::unwrap_used, reason = "what a test's own tools cannot do is a failure of the test")]

mod guard;
mod harness;
mod limits;
mod listeners;
mod shutdown;
