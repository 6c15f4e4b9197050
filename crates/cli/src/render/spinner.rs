//! The spinner: which agent is doing what, and for how long. It is shown on a terminal while no output arrives;
//! `output.rs` draws and clears it.

use std::time::Duration;

/// Between two frames.
pub(crate) const TICK: Duration = Duration::from_millis(120);
/// Silence before the spinner appears, so it does not flicker between two pieces of text.
pub(crate) const SHOW_AFTER: Duration = Duration::from_millis(400);

const FRAMES: [char; 4] = ['|', '/', '-', '\\'];

/// The text of one frame, such as `/ claude works 12s`.
pub(crate) fn spinner_frame(tick: usize, agent: &str, activity: &str, since_ms: u64) -> String {
    format!("{} {agent} {activity} {}", FRAMES[tick % FRAMES.len()], super::text::format_duration(since_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spinner_shows_agent_activity_and_duration() {
        assert_eq!(spinner_frame(5, "echo", "works", 61_000), "/ echo works 1m");
    }
}
