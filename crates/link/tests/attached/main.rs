//! Promises of the link over a socket, seen from its two ends: a worker endpoint and a session, with a pipe in memory
//! between them that can be cut at any moment. The clock is paused and advances only while every task waits.

mod delivery;
mod handshake;
mod lifecycle;
mod observed_spool;
mod pipe_worker;
mod reaching;
mod setup;
mod spool;
