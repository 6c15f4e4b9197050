//! The machines of Quarterdeck, pure: they are told what happened and what time it is, and answer with events and
//! effects. Nothing here awaits, reads a clock or a seq, or draws a random number, so all of it can be proven by
//! running it.
//!
//! Layout, in reading order:
//! - [`session`]: one conversation: its queue, its active run, its asks. The heart of everything.
//! - [`fleet`]: several sessions: who is given what when somebody has ended.
//! - [`policy`]: what an agent may do without asking.
//! - [`rows`]: the documents that lists are made of, derived from state and events.
//! - [`messages`]: events folded into messages.

pub mod fleet;
pub mod messages;
pub mod policy;
pub mod rows;
pub mod session;
