//! Nothing but a home for `tests` and `benches`, which put our worker before the client of the crate
//! `bamboo-subagent`, and our client before its worker. No other crate of the workspace may depend on that one.
