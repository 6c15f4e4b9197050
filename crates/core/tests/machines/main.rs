//! The session and fleet machines, seen from outside: promises one by one, every interleaving of small sessions, and
//! random paths through larger ones. All are one program, because each further program would be optimised and linked
//! again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agent_limits;
mod asks;
mod clocks;
mod fleet;
mod harness;
mod mail;
mod modes;
mod moved_runs;
mod predecessor_bugs;
mod properties;
mod question_calls;
mod quota;
mod session_rows;
mod simulation;
mod steers;
mod stored_documents;
mod suspended;
mod tool_permissions;
mod usage;
mod walk;
mod workers;
