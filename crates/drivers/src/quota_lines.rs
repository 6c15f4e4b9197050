//! Finds in the text of an agent's error that the quota of its account is exhausted, and when it resets. Agents say so in
//! their own words, so the patterns are in their manifests; what the patterns take from a line is understood here.

use jiff::civil::{Date, Time};
use jiff::fmt::strtime::BrokenDownTime;
use jiff::tz::TimeZone;
use jiff::{Span, SpanRelativeTo, Timestamp, ToSpan as _, Zoned};
use qd_protocol::Millis;
use regex::{Captures, Regex};

/// The forms in which agents write a time, once commas and the word `at` are left out.
const TIME_FORMATS: &[&str] =
    &["%b %d %Y %I:%M%p", "%b %d %Y %I%p", "%b %d %I:%M%p", "%b %d %I%p", "%I:%M%p", "%I%p", "%H:%M"];
/// A time of day that has just passed is not that of tomorrow: the agent repeats what it said before.
const JUST_PASSED_HOURS: i64 = 1;
/// Seconds since the epoch are below this number for the next centuries, and milliseconds above it.
const EPOCH_SECONDS_MAX: i64 = 100_000_000_000;

/// A line of an error that says that the quota is exhausted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QuotaLine {
    /// When the quota resets, if the line says so in a way that is understood.
    pub(crate) resets_at: Option<Millis>,
}

/// The first line of the message that a pattern matches. One that names the reset counts more than one that does not.
pub(crate) fn find_quota_line(patterns: &[String], message: &str) -> Option<QuotaLine> {
    find_quota_line_at(patterns, message, &Zoned::now())
}

fn find_quota_line_at(patterns: &[String], message: &str, now: &Zoned) -> Option<QuotaLine> {
    // The manifest's patterns were validated when it was read.
    let patterns: Vec<Regex> = patterns.iter().filter_map(|pattern| Regex::new(pattern).ok()).collect();
    let lines = message.lines().flat_map(|line| patterns.iter().filter_map(|pattern| pattern.captures(line)));
    let found = lines.map(|line| QuotaLine { resets_at: named_reset(&line, now).and_then(to_millis) });
    found.reduce(|first, next| if first.resets_at.is_some() { first } else { next })
}

fn named_reset(line: &Captures<'_>, now: &Zoned) -> Option<Timestamp> {
    let group = |name: &str| line.name(name).map(|text| text.as_str().trim());
    if let Some(epoch) = group("epoch") {
        let number: i64 = epoch.parse().ok()?;
        return match number < EPOCH_SECONDS_MAX {
            true => Timestamp::from_second(number).ok(),
            false => Timestamp::from_millisecond(number).ok(),
        };
    }
    if let Some(duration) = group("in") {
        return parse_duration(duration).and_then(|span| after(now, span));
    }
    parse_time(group("at")?, group("zone"), now)
}

/// A duration in the forms `12h3m4s`, `3 days 4 hours` or, in seconds, `30`.
fn parse_duration(text: &str) -> Option<Span> {
    text.parse().ok().or_else(|| format!("{text}s").parse().ok())
}

fn after(now: &Zoned, span: Span) -> Option<Timestamp> {
    let duration = span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()?;
    now.timestamp().checked_add(duration).ok()
}

/// A time of day or a date with one, in the zone that the agent names or in that of this machine. Without a date it is
/// the next such time, without a year the next such day.
fn parse_time(text: &str, zone: Option<&str>, now: &Zoned) -> Option<Timestamp> {
    if let Ok(time) = text.parse() {
        return Some(time);
    }
    let zone = match zone {
        Some(name) => TimeZone::get(name).ok()?,
        None => now.time_zone().clone(),
    };
    let now = now.with_time_zone(zone.clone());
    let text = normalize_time(text);
    let parsed = TIME_FORMATS.iter().find_map(|format| BrokenDownTime::parse(format, &text).ok())?;
    let time = parsed.to_time().ok()?;
    let at = |date: Date, time: Time| date.to_datetime(time).to_zoned(zone.clone()).ok();
    let found = match (parsed.year(), parsed.month(), parsed.day()) {
        (Some(year), Some(month), Some(day)) => at(Date::new(year, month, day).ok()?, time)?,
        (None, Some(month), Some(day)) => {
            let in_year = |year: i16| at(Date::new(year, month, day).ok()?, time);
            let is_ahead = |at: &Zoned| at.date() >= now.date();
            in_year(now.year()).filter(is_ahead).or_else(|| in_year(now.year() + 1))?
        }
        _ => {
            let earliest = now.checked_sub(JUST_PASSED_HOURS.hours()).ok()?;
            let today = at(now.date(), time).filter(|today| *today >= earliest);
            today.or_else(|| at(now.date().tomorrow().ok()?, time))?
        }
    };
    // Such a time has no seconds, because the agent has cut them off.
    found.timestamp().checked_add(1.minute()).ok()
}

/// `Nov 20th, 2026 at 3:04 p.m.` becomes `Nov 20 2026 3:04pm`.
fn normalize_time(text: &str) -> String {
    let is_ordinal = |word: &str| {
        let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        !digits.is_empty() && matches!(&word[digits.len()..], "st" | "nd" | "rd" | "th")
    };
    let words = text.split([' ', ',', '\u{202f}', '\u{a0}']).filter(|word| !word.is_empty() && *word != "at");
    let mut normal = String::new();
    for word in words {
        let meridiem = word.to_ascii_lowercase().replace('.', "");
        if matches!(meridiem.as_str(), "am" | "pm") {
            normal.push_str(&meridiem);
            continue;
        }
        let word = if is_ordinal(word) { &word[..word.len() - 2] } else { word };
        normal.push_str(if normal.is_empty() { "" } else { " " });
        normal.push_str(word);
    }
    normal
}

fn to_millis(time: Timestamp) -> Option<Millis> {
    u64::try_from(time.as_millisecond()).ok().map(Millis)
}

#[cfg(test)]
mod tests {
    use qd_catalog::Catalog;

    use super::*;

    const NOW: &str = "2026-11-18T14:20:00+01:00[Europe/Berlin]";

    /// The reset that a message of an agent names, by the patterns of its manifest.
    fn reset(agent: &str, message: &str) -> Option<Option<String>> {
        let manifest = Catalog::built_in().get(agent).expect("a built-in agent");
        let line = find_quota_line_at(&manifest.parse.quota_lines, message, &NOW.parse().expect("a time"))?;
        Some(line.resets_at.map(|at| at.to_string()))
    }

    fn at(time: &str) -> Option<Option<String>> {
        Some(Some(format!("2026-11-{time}.000Z")))
    }

    #[test]
    fn the_words_of_each_agent_are_understood() {
        for agent in ["claude", "claude-acp"] {
            let limit = "You've hit your session limit · resets 3pm (Europe/Berlin)";
            assert_eq!(reset(agent, limit), at("18T14:01:00"));
            assert_eq!(
                reset(agent, "You've hit your weekly limit · resets Nov 20, 5:30am (America/New_York)"),
                at("20T10:31:00")
            );
            assert_eq!(reset(agent, "Claude AI usage limit reached|1795014000"), at("18T15:00:00"));
            assert_eq!(reset(agent, "API Error: 500 Internal server error"), None);
        }
        for agent in ["codex", "codex-acp"] {
            let limit = "You’ve hit your usage limit. Upgrade to Plus or try again at Nov 19, 2026 3:04 PM.";
            assert_eq!(reset(agent, limit), at("19T14:05:00"));
            assert_eq!(reset(agent, "You’ve hit your usage limit. Try again at 3:04 PM."), at("18T14:05:00"));
            assert_eq!(reset(agent, "You’ve hit your usage limit."), Some(None), "no reset is named");
        }
        let gemini = "Quota exceeded for quota metric 'Requests'.\nSuggested retry after 3600s.";
        assert_eq!(reset("gemini", gemini), at("18T14:20:00"));
        let gemini = "You have exhausted your capacity on this model. Your quota will reset after 12h3m4s.";
        assert_eq!(reset("gemini", gemini), at("19T01:23:04"));
        for agent in ["qwen", "opencode", "copilot"] {
            assert_eq!(
                reset(agent, "429 Rate limit reached for requests. Please try again in 7m12s."),
                at("18T13:27:12")
            );
            assert_eq!(reset(agent, "Error: rate limit exceeded, retry after 30 seconds"), at("18T13:20:30"));
            assert_eq!(reset(agent, "the model said: please try again in 7m12s"), None);
        }
        assert_eq!(
            reset("script", "quota exhausted, resets in 1.5s"),
            Some(Some("2026-11-18T13:20:01.500Z".to_owned()))
        );
        assert_eq!(reset("script", "quota exhausted"), Some(None));
    }

    #[test]
    fn a_time_of_day_is_the_next_one_unless_it_has_just_passed() {
        let at =
            |text: &str| parse_time(text, None, &NOW.parse().expect("a time")).map(|time| time.to_string());
        assert_eq!(at("2:30pm").as_deref(), Some("2026-11-18T13:31:00Z"));
        assert_eq!(at("14:19").as_deref(), Some("2026-11-18T13:20:00Z"), "it is not tomorrow's");
        assert_eq!(at("1pm").as_deref(), Some("2026-11-19T12:01:00Z"));
        assert_eq!(at("Jan 2nd at 9 a.m.").as_deref(), Some("2027-01-02T08:01:00Z"));
        assert_eq!(at("2026-11-18T15:00:00Z").as_deref(), Some("2026-11-18T15:00:00Z"));
        assert_eq!((at("soon"), at("25:00")), (None, None));
    }

    #[test]
    fn a_line_that_names_the_reset_counts_more_than_one_that_does_not() {
        let patterns = ["limit$".to_owned(), "reset in (?<in>.+)$".to_owned()];
        let found =
            find_quota_line_at(&patterns, "you hit a limit\nreset in 60", &NOW.parse().expect("a time"));
        assert_eq!(
            found.and_then(|line| line.resets_at).map(|at| at.to_string()).as_deref(),
            Some("2026-11-18T13:21:00.000Z")
        );
    }
}
