//! The fleet machine: every rule of contract section 7 that it decides, properties over random fleets with random run
//! ends and crashes, and the fleet machine together with the session machines.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fleet_harness;
mod mentions;
mod properties;
mod rules;
#[path = "../simulation/mod.rs"]
mod simulation;
mod with_sessions;
