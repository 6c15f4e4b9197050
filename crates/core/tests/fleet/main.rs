//! The router: every rule of contract section 7 that it decides, properties over random fleets, random ends and crashes
//! in between, and the same together with the machine of its sessions.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet_harness;
mod mentions;
mod properties;
mod rules;
#[path = "../simulation/mod.rs"]
mod simulation;
mod with_sessions;
