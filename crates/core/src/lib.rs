//! Quarterdeck's pure state machines. They are given inputs and the current time, and return events and effects.
//! Nothing here awaits, reads a clock or a seq, or draws a random number, so tests can explore every transition.
//!
//! Layout, in reading order:
//! - [`session`]: one conversation with an agent: its queue, its active run, its asks. The most important machine.
//! - [`fleet`]: several sessions: which session gets which prompt when a run ends.
//! - [`policy`]: which tool calls an agent may make without approval.
//! - [`sandbox`]: which confinement an agent gets.
//! - [`ask_digest`]: the digest by which an answer names what its sender was shown.
//! - `event_actor`: who caused an event.
//! - [`quota`]: accounts, and their exhausted quotas.
//! - [`rows`]: the rows behind lists, derived from state and events.
//! - [`messages`]: folds events into messages.

pub mod ask_digest;
mod event_actor;
pub mod fleet;
pub mod messages;
pub mod policy;
pub mod quota;
pub mod rows;
pub mod sandbox;
pub mod session;
