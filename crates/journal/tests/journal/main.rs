//! The journal's promises, through its public face. Each room tests one of them against a journal in a temporary home;
//! `world` makes the events and rows that the others need.
#![expect(clippy::unwrap_used, reason = "what makes a test fail should show where it did")]

mod appends;
mod crash;
mod fixture;
mod lists;
mod replay;
mod storage;
mod subscriptions;
