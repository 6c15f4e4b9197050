//! The fleet machine: every rule of contract section 7 that it decides, properties over random fleets with random run
//! ends and crashes, and the fleet machine together with the session machines.

mod fleet_harness;
mod mentions;
mod properties;
mod rules;
mod with_sessions;
