//! This crate has no code of its own. Its `tests` and `benches` connect our worker to the client of the crate
//! `bamboo-subagent`, and our client to its worker. No other crate of the workspace may depend on `bamboo-subagent`.
