//! Agents, and how they are reached. Everything an agent says leaves through a link; nothing here touches the journal.
//!
//! Layout, in reading order:
//! - `in_process`: the [`InProcess`] launcher and the task that owns one agent, from ready to gone.
//! - `turn`: what a turn may say and hear, and the commands that wait for it.
//! - `drivers`: one file per way to reach an agent; `echo` so far.
//! - `script`: the scripted agent: its steps, and the interpreter that part 2 moves into a process of its own.

mod drivers;
mod in_process;
mod script;
mod turn;

pub use in_process::InProcess;
