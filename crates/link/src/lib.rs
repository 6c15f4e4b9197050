//! The numbered link between a session and its agent: what is said goes up once and in order, what is commanded goes
//! down once, and a cancel overtakes. It knows no agent and no journal.
//!
//! Layout, in reading order:
//! - [`launch`](Launcher): what a session needs to know of its agent, and who starts one.
//! - `local`: a link inside one process, and the task behind it. Part 2 puts a socket beside it.
//! - `up`: merging, cutting, numbering and the window, without a transport.
//! - `down`: the order of commands and each of them once, without a transport.

mod down;
mod launch;
mod local;
mod up;

pub use launch::{AgentSpec, Launcher};
pub use local::{AgentEnd, Closed, Heard, SessionEnd, Voice, host, local};
pub use up::{ASK_ROOM, Numbered, WINDOW_BYTES};
