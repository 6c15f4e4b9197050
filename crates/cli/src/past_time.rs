//! Times as people type them, most of them in the past: `7d`, `24h`, `yesterday`, `2026-11-01`. Days are those of the local time zone.

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use qd_protocol::Millis;

/// Parses the value of `--since`.
pub(crate) fn parse_since(text: &str) -> Result<Millis, String> {
    parse_past_time(text, Millis::now(), &TimeZone::system())
}

/// Parses a time in the future: a duration from now, or a time.
pub(crate) fn parse_end(text: &str) -> Result<Millis, String> {
    parse_end_at(text, Millis::now(), &TimeZone::system())
}

fn parse_end_at(text: &str, now: Millis, zone: &TimeZone) -> Result<Millis, String> {
    let end = match parse_duration(text.trim()) {
        Some(ms) => Some(Millis(now.0.saturating_add(ms))),
        None => parse_past_time(text, now, zone).ok(),
    };
    end.filter(|end| *end > now && timestamp(*end) < Timestamp::MAX).ok_or_else(|| {
        "use a duration such as 12h or 30d, or a date or time in the future such as 2026-12-31".to_owned()
    })
}

/// The local time zone as the daemon understands it: by its name, or by its offset now if it has no name.
pub(crate) fn local_zone() -> String {
    zone_name(&TimeZone::system(), Millis::now())
}

fn zone_name(zone: &TimeZone, now: Millis) -> String {
    match zone.iana_name() {
        // The system does not say where it is. Jiff then counts in UTC.
        _ if zone.is_unknown() => "UTC".to_owned(),
        Some(name) => name.to_owned(),
        None => {
            let seconds = zone.to_offset(timestamp(now)).seconds();
            let (sign, minutes) = (if seconds < 0 { '-' } else { '+' }, seconds.abs() / 60);
            format!("{sign}{:02}:{:02}", minutes / 60, minutes % 60)
        }
    }
}

fn parse_past_time(text: &str, now: Millis, zone: &TimeZone) -> Result<Millis, String> {
    let text = text.trim();
    if let Some(ms) = parse_duration(text) {
        return Ok(Millis(now.0.saturating_sub(ms)));
    }
    let today = zone.to_datetime(timestamp(now)).date();
    let day = match text {
        "today" => Some(today),
        "yesterday" => today.checked_sub(1.day()).ok(),
        // A longer text has a time too, which a `Date` would ignore.
        _ if text.len() == "2026-11-01".len() => text.parse::<Date>().ok(),
        _ => None,
    };
    let time = match day {
        Some(day) => day.to_zoned(zone.clone()).ok().map(|start| start.timestamp()),
        None => text.parse::<Timestamp>().ok().or_else(|| {
            let time = text.parse::<DateTime>().ok()?;
            time.to_zoned(zone.clone()).ok().map(|time| time.timestamp())
        }),
    };
    let ms = time.and_then(|time| u64::try_from(time.as_millisecond()).ok());
    ms.map(Millis).ok_or_else(|| {
        "use a duration such as 24h or 7d, `today`, `yesterday`, a date such as 2026-11-01, or a time such as \
         2026-11-01T18:00 or 2026-11-01T18:00:00Z"
            .to_owned()
    })
}

/// A number with a unit, in milliseconds.
fn parse_duration(text: &str) -> Option<u64> {
    let unit = text.chars().last()?;
    let seconds: u64 = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        'w' => 7 * 86_400,
        _ => return None,
    };
    let number = &text[..text.len() - 1];
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // A number too large for the type is before everything.
    Some(number.parse::<u64>().unwrap_or(u64::MAX).saturating_mul(seconds).saturating_mul(1000))
}

fn timestamp(time: Millis) -> Timestamp {
    let time = i64::try_from(time.0).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    time.unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Central European time with its summer time.
    const BERLIN: &str = "CET-1CEST,M3.5.0,M10.5.0/3";

    #[track_caller]
    fn parsed(text: &str) -> String {
        let now: Millis = "2026-11-17T00:30:00.000Z".parse().unwrap();
        parse_past_time(text, now, &TimeZone::posix(BERLIN).unwrap()).unwrap().to_string()
    }

    #[test]
    fn durations_count_back_from_now() {
        for (text, expected) in [
            ("90s", "2026-11-17T00:28:30.000Z"),
            ("30m", "2026-11-17T00:00:00.000Z"),
            ("24h", "2026-11-16T00:30:00.000Z"),
            ("7d", "2026-11-10T00:30:00.000Z"),
            ("2w", "2026-11-03T00:30:00.000Z"),
            ("99999999999999999999d", "1970-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }

    #[test]
    fn days_begin_at_midnight_in_the_local_zone() {
        for (text, expected) in [
            ("today", "2026-11-16T23:00:00.000Z"),
            ("yesterday", "2026-11-15T23:00:00.000Z"),
            ("2026-11-01", "2026-10-31T23:00:00.000Z"),
            ("2026-07-01", "2026-06-30T22:00:00.000Z"),
            ("2026-07-01T08:15", "2026-07-01T06:15:00.000Z"),
            ("2026-07-01T08:15:00Z", "2026-07-01T08:15:00.000Z"),
            ("2026-07-01T08:15:00-05:00", "2026-07-01T13:15:00.000Z"),
        ] {
            assert_eq!(parsed(text), expected, "{text}");
        }
    }

    #[test]
    fn anything_else_says_what_to_type() {
        let zone = TimeZone::UTC;
        for bad in ["", "d", "7", "7x", "-7d", "2026-13-01", "1969-01-01", "tomorrow?", "７d", "2026-11-1"] {
            let error = parse_past_time(bad, Millis(0), &zone).unwrap_err();
            assert!(error.contains("such as 24h"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_zone_without_a_name_is_sent_as_its_offset() {
        let summer: Millis = "2026-07-01T00:00:00.000Z".parse().unwrap();
        assert_eq!(zone_name(&TimeZone::posix(BERLIN).unwrap(), summer), "+02:00");
        assert_eq!(zone_name(&TimeZone::fixed(jiff::tz::offset(-4)), summer), "-04:00");
        assert_eq!(zone_name(&TimeZone::unknown(), summer), "UTC");
    }

    #[test]
    fn an_end_is_in_the_future() {
        let now = Millis(1_000_000_000_000);
        let end = |text: &str| parse_end_at(text, now, &TimeZone::UTC);
        assert_eq!(end("30d").unwrap(), Millis(now.0 + 30 * 86_400_000));
        assert_eq!(end("2026-12-31").unwrap(), Millis(1_798_675_200_000));
        for text in ["0s", "2001-01-01", "yesterday", "soon", "99999999999999999999d"] {
            assert!(end(text).is_err(), "{text}");
        }
    }
}
