//! Text for people, made from events, lists and asks. Everything here is a pure function or a small state machine over
//! strings; only `output.rs` prints.

pub(crate) mod ask;
pub(crate) mod ask_input;
pub(crate) mod asks_table;
pub(crate) mod audit;
pub(crate) mod conversation;
pub(crate) mod drawn_lines;
pub(crate) mod fleet_progress;
pub(crate) mod plan;
pub(crate) mod search;
pub(crate) mod session_cells;
pub(crate) mod session_table;
pub(crate) mod spinner;
pub(crate) mod status_report;
pub(crate) mod style;
pub(crate) mod table;
pub(crate) mod text;
pub(crate) mod tool;
pub(crate) mod usage;
#[cfg(test)]
pub(crate) mod view_snapshot;
pub(crate) mod visible_text;
