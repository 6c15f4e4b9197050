//! Who is working, since when. Shown on a terminal while nothing else comes; `output.rs` puts it there and takes it
//! away.

use std::time::Duration;

/// Between two pictures.
pub(crate) const TICK: Duration = Duration::from_millis(120);
/// Silence before the spinner appears, so that it does not flicker between words.
pub(crate) const SHOW_AFTER: Duration = Duration::from_millis(400);

const FRAMES: [char; 4] = ['|', '/', '-', '\\'];

/// One picture of it.
pub(crate) fn spinner_frame(tick: usize, who: &str, does: &str, since_ms: u64) -> String {
    format!("{} {who} {does} {}", FRAMES[tick % FRAMES.len()], super::text::format_duration(since_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spinner_says_who_does_what_since_when() {
        assert_eq!(spinner_frame(5, "echo", "works", 61_000), "/ echo works 1m");
    }
}
