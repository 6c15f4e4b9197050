//! Times ahead as people read them, on the clock of the machine that they look at.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use qd_protocol::Millis;

/// A time in the local time zone: `15:00`, or `Nov 20 15:00` if it is on another day.
pub(crate) fn format_local_time(at: Millis) -> String {
    format_time(at, Millis::now(), &TimeZone::system())
}

fn format_time(at: Millis, now: Millis, zone: &TimeZone) -> String {
    let local = |time: Millis| {
        let time = i64::try_from(time.0).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
        time.unwrap_or(Timestamp::MAX).to_zoned(zone.clone())
    };
    let (at, now) = (local(at), local(now));
    let format = if at.date() == now.date() { "%H:%M" } else { "%b %-d %H:%M" };
    at.strftime(format).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_on_another_day_has_its_date() {
        let time = |text: &str| text.parse::<Millis>().unwrap();
        let now = time("2026-11-18T09:00:00Z");
        assert_eq!(format_time(time("2026-11-18T15:04:59Z"), now, &TimeZone::UTC), "15:04");
        assert_eq!(format_time(time("2026-11-20T05:00:00Z"), now, &TimeZone::UTC), "Nov 20 05:00");
        let east = TimeZone::fixed(jiff::tz::offset(9));
        assert_eq!(format_time(time("2026-11-18T15:04:59Z"), now, &east), "Nov 19 00:04");
    }
}
