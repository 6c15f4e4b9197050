//! The router, by itself: every rule of contract section 7 that it decides, and properties over random fleets, random
//! ends and crashes in between.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod crew;
mod mentions;
mod properties;
mod rules;
