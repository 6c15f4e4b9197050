//! The router, by itself: every rule of contract section 7 that it decides, and properties over random fleets, random
//! ends and crashes in between.

mod crew;
mod properties;
mod rules;
