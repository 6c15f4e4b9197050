//! One room per way to reach an agent. A driver turns one prompt into what its agent says; when the turn is stopped
//! from outside, its future is dropped. What is peculiar to an agent stands in its manifest; no driver knows one by name.
//!
//! - `process`: an agent's process, below the keeper; `lines`: its two streams.

pub(crate) mod acp;
pub(crate) mod echo;
mod lines;
mod process;
pub(crate) mod pty;
