//! The flags of `qd status`.

use std::str::FromStr;

use clap::Args;
use qd_protocol::Millis;

/// `qd status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Show what finished since then instead of since your last look: a time ago (90s, 30m, 8h, 2d) or a time in UTC
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<SinceTime>,
}

/// A time in the past, as given on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SinceTime {
    /// So many milliseconds ago.
    Ago(u64),
    At(Millis),
}

impl SinceTime {
    pub(crate) fn resolve(self, now: Millis) -> Millis {
        match self {
            Self::Ago(ms) => Millis(now.0.saturating_sub(ms)),
            Self::At(time) => time,
        }
    }
}

impl FromStr for SinceTime {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORMS: &str =
            "expected a time ago like 90s, 30m, 8h or 2d, or a time like 2026-01-31T23:59:59Z";
        if let Ok(time) = text.parse() {
            return Ok(Self::At(time));
        }
        let unit = text.chars().last().ok_or(FORMS)?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 60 * 60,
            'd' => 24 * 60 * 60,
            _ => return Err(FORMS),
        };
        let count: u64 = text[..text.len() - unit.len_utf8()].parse().map_err(|_| FORMS)?;
        count.checked_mul(seconds * 1000).map(Self::Ago).ok_or(FORMS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_given_as_ago_or_in_utc() {
        let now = Millis(10 * 60 * 60 * 1000);
        let resolve = |text: &str| text.parse::<SinceTime>().map(|since| since.resolve(now).0);
        assert_eq!(resolve("90s"), Ok(now.0 - 90_000));
        assert_eq!(resolve("8h"), Ok(2 * 60 * 60 * 1000));
        assert_eq!(resolve("2d"), Ok(0), "before the epoch is at the epoch");
        assert_eq!(resolve("1970-01-01T00:00:07Z"), Ok(7000));
        for bad in
            ["", "8", "h", "-1h", "8 h", "1ä", "yesterday", "99999999999999999999d", "18446744073709551615d"]
        {
            assert!(resolve(bad).is_err(), "{bad}");
        }
    }
}
