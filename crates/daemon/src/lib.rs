//! The daemon of Quarterdeck: session actors, supervision, HTTP and SSE.

pub mod config;
pub mod edge;
pub mod home;
