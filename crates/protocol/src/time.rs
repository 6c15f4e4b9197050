//! Time as milliseconds since the Unix epoch. The state machines never read a clock; their callers pass the time in.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Milliseconds since the Unix epoch. On the wire it is RFC 3339 in UTC, so that people can read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub u64);

impl Millis {
    /// The current wall-clock time. Only the async code around the state machines calls this.
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// This time plus `ms` milliseconds.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds since `earlier`; 0 if `earlier` is later.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl fmt::Display for Millis {
    /// Converts days to a date with Howard Hinnant's `civil_from_days`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, ms) = (self.0 / 86_400_000, self.0 % 86_400_000);
        let shifted = days + 719_468;
        let (era, doe) = (shifted / 146_097, shifted % 146_097);
        let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let mp = (5 * doy + 2) / 153;
        let day = doy - (153 * mp + 2) / 5 + 1;
        let month = if mp < 10 { mp + 3 } else { mp - 9 };
        let year = yoe + era * 400 + u64::from(month <= 2);
        let (h, m, s, ms) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60, ms % 1000);
        write!(f, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{ms:03}Z")
    }
}

impl std::str::FromStr for Millis {
    type Err = &'static str;

    /// Parses what [`Display`](fmt::Display) writes: UTC, with or without milliseconds.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const BAD: &str = "a time is written like 2026-01-31T23:59:59.000Z";
        let body = text.strip_suffix('Z').ok_or(BAD)?;
        let (date, clock) = body.split_once('T').ok_or(BAD)?;
        let mut date = date.splitn(3, '-').map(|part| part.parse::<u64>().map_err(|_| BAD));
        let mut next = || date.next().unwrap_or(Err(BAD));
        let (year, month, day) = (next()?, next()?, next()?);
        let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "000"));
        let mut clock = clock.splitn(3, ':').map(|part| part.parse::<u64>().map_err(|_| BAD));
        let mut next = || clock.next().unwrap_or(Err(BAD));
        let (h, m, s) = (next()?, next()?, next()?);
        let fraction = fraction.get(..3).unwrap_or("000").parse::<u64>().map_err(|_| BAD)?;
        if !(1970..=9999).contains(&year)
            || !(1..=12).contains(&month)
            || !(1..=31).contains(&day)
            || h > 23
            || m > 59
            || s > 60
        {
            return Err(BAD);
        }
        let y = if month <= 2 { year - 1 } else { year };
        let (era, yoe) = (y / 400, y % 400);
        let mp = (month + 9) % 12;
        let doy = (153 * mp + 2) / 5 + day - 1;
        let doe = yoe * 365 + yoe / 4 - yoe / 100 + doy;
        let days = (era * 146_097 + doe).saturating_sub(719_468);
        Ok(Self(days * 86_400_000 + h * 3_600_000 + m * 60_000 + s * 1000 + fraction))
    }
}

impl Serialize for Millis {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Millis {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl utoipa::PartialSchema for Millis {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        <String as utoipa::PartialSchema>::schema()
    }
}

impl utoipa::ToSchema for Millis {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_reads_back_as_it_was_written() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_794_774_645_123, "2026-11-15T20:30:45.123Z"),
        ] {
            assert_eq!(Millis(ms).to_string(), text);
            assert_eq!(text.parse(), Ok(Millis(ms)));
        }
        assert!("2026-13-01T00:00:00Z".parse::<Millis>().is_err());
        assert!("yesterday".parse::<Millis>().is_err());
    }
}
