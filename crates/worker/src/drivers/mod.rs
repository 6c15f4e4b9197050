//! One room per way to reach an agent. A driver turns one prompt into what its agent says; when the turn is stopped
//! from outside, its future is dropped.

pub(crate) mod acp;
pub(crate) mod echo;
