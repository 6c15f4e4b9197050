//! Tests of the journal's guarantees through its public API. Each module tests one area against a journal in a
//! temporary home; `fixture` creates the events and rows they need.
#![expect(clippy::unwrap_used, reason = "what makes a test fail should show where it did")]

mod appends;
mod check;
mod crash;
mod fixture;
mod lists;
mod merging;
mod replay;
mod storage;
mod subscriptions;
