//! Time: [`Millis`] since the Unix epoch, which people see, and a [`ClockReading`] of all clocks of a machine, which
//! limits and leases are counted with. The state machines never read a clock; their callers pass the time in.
//!
//! Design: docs/design/deadlines-are-computed.md

use std::fmt;

use jiff::Timestamp;
use jiff::fmt::StdFmtWrite;
use jiff::fmt::temporal::DateTimePrinter;
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
    /// A time after the year 9999 is written as the last one before it, so that everything written can be read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));
        let time = i64::try_from(self.0).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
        let time = time.unwrap_or(Timestamp::MAX);
        PRINTER.print_timestamp(&time, StdFmtWrite(f)).map_err(|_| fmt::Error)
    }
}

impl std::str::FromStr for Millis {
    type Err = &'static str;

    /// Parses what [`Display`](fmt::Display) writes: UTC, with or without milliseconds. The other forms of ISO 8601 are
    /// refused.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const BAD: &str = "a time is written like 2026-01-31T23:59:59.000Z";
        if text.as_bytes().get(10) != Some(&b'T') || !text.ends_with('Z') {
            return Err(BAD);
        }
        let time: Timestamp = text.parse().map_err(|_| BAD)?;
        u64::try_from(time.as_millisecond()).map(Self).map_err(|_| BAD)
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

/// What the clocks of a machine showed at one moment. People see the wall clock; durations are measured with the
/// uptime, which nobody can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClockReading {
    pub wall: Millis,
    /// Absent in readings of earlier releases, in events whose time decides nothing, and where the machine does not
    /// name its boots. Durations are then measured with the wall clock.
    pub uptime: Option<MachineUptime>,
}

/// How long a machine has been up. Only readings of the same boot can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineUptime {
    /// Tells one boot from another.
    pub boot: u32,
    /// Milliseconds on the clock that stands still while the machine is suspended. Negative for a moment before this
    /// boot; see [`ClockReading::carried_over_reboot`].
    pub awake_ms: i64,
    /// Milliseconds on the clock that counts suspended time too.
    pub total_ms: i64,
}

impl ClockReading {
    /// Milliseconds that count towards a limit: those in which the machine was awake.
    ///
    /// If the machine was rebooted in between, the result is the time since the boot. That is too little rather than
    /// too much, and it grows, so a limit is never reached early and is always reached.
    pub fn elapsed_since(self, earlier: Self) -> u64 {
        match (self.uptime, earlier.uptime) {
            (Some(now), Some(then)) if now.boot == then.boot => {
                non_negative(now.awake_ms.saturating_sub(then.awake_ms))
            }
            (Some(now), Some(_)) => non_negative(now.awake_ms),
            _ => self.wall.since(earlier.wall),
        }
    }

    /// Milliseconds that count towards a lease: suspended time too. A lease ends for everybody at the same time,
    /// whether or not this machine was awake.
    ///
    /// If the machine was rebooted in between, only the wall clock knows how long it was off. The result is at least
    /// the time since the boot, so a lease always ends.
    pub fn lease_time_since(self, earlier: Self) -> u64 {
        let by_wall_clock = self.wall.since(earlier.wall);
        match (self.uptime, earlier.uptime) {
            (Some(now), Some(then)) if now.boot == then.boot => {
                non_negative(now.total_ms.saturating_sub(then.total_ms))
            }
            (Some(now), Some(_)) => non_negative(now.total_ms).max(by_wall_clock),
            _ => by_wall_clock,
        }
    }

    /// The same moment by the clocks of the boot of `now`, so that later durations need neither an earlier boot nor
    /// the wall clock. `last` is the last moment that is known of the earlier boot. The time between it and this boot
    /// does not count towards limits: the machine was off for most of it.
    #[must_use]
    pub fn carried_over_reboot(self, last: Option<MachineUptime>, now: Self) -> Self {
        let Some(uptime) = now.uptime else { return self };
        let before_boot = match (self.uptime, last) {
            (Some(then), Some(last)) if then.boot == last.boot && last.boot != uptime.boot => {
                non_negative(last.awake_ms.saturating_sub(then.awake_ms))
            }
            _ => 0,
        };
        let passed = now.elapsed_since(self).saturating_add(before_boot);
        let awake_ms = uptime.awake_ms.saturating_sub(to_signed(passed));
        let total_ms = uptime.total_ms.saturating_sub(to_signed(now.lease_time_since(self)));
        Self { uptime: Some(MachineUptime { boot: uptime.boot, awake_ms, total_ms }), ..self }
    }

    /// The reading `ms` milliseconds later, if the machine stays awake and nobody sets its clock.
    #[must_use]
    pub fn plus(self, ms: u64) -> Self {
        let later = |uptime: MachineUptime| MachineUptime {
            awake_ms: uptime.awake_ms.saturating_add(to_signed(ms)),
            total_ms: uptime.total_ms.saturating_add(to_signed(ms)),
            ..uptime
        };
        Self { wall: self.wall.plus(ms), uptime: self.uptime.map(later) }
    }
}

fn non_negative(ms: i64) -> u64 {
    u64::try_from(ms).unwrap_or(0)
}

fn to_signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

/// A reading of the wall clock alone.
impl From<Millis> for ClockReading {
    fn from(wall: Millis) -> Self {
        Self { wall, uptime: None }
    }
}

impl fmt::Display for MachineUptime {
    /// The boot and the two clocks, of which the second is left out while both are the same: until the machine is
    /// first suspended.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x} {}", self.boot, self.awake_ms)?;
        if self.total_ms == self.awake_ms { Ok(()) } else { write!(f, " {}", self.total_ms) }
    }
}

impl std::str::FromStr for MachineUptime {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const BAD: &str = "an uptime is written like `1a2b3c4d 123456`";
        let (boot, clocks) = text.split_once(' ').ok_or(BAD)?;
        let (awake, total) = clocks.split_once(' ').unwrap_or((clocks, clocks));
        Ok(Self {
            boot: u32::from_str_radix(boot, 16).map_err(|_| BAD)?,
            awake_ms: awake.parse().map_err(|_| BAD)?,
            total_ms: total.parse().map_err(|_| BAD)?,
        })
    }
}

impl Serialize for MachineUptime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MachineUptime {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for ClockReading {
    /// Without an uptime it is written like a [`Millis`], as earlier releases wrote it.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.uptime {
            Some(uptime) => serializer.collect_str(&format_args!("{} {uptime}", self.wall)),
            None => self.wall.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for ClockReading {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let (wall, uptime) = match text.split_once(' ') {
            Some((wall, uptime)) => (wall, Some(uptime.parse().map_err(serde::de::Error::custom)?)),
            None => (&*text, None),
        };
        Ok(Self { wall: wall.parse().map_err(serde::de::Error::custom)?, uptime })
    }
}

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
        assert_eq!("2026-11-15T20:30:45Z".parse(), Ok(Millis(1_794_774_645_000)));
        let last = Millis(u64::MAX).to_string();
        assert_eq!(last.parse::<Millis>().unwrap().to_string(), last);
    }

    #[test]
    fn a_time_that_does_not_exist_or_is_written_otherwise_is_refused() {
        for text in [
            "2026-02-31T00:00:00.000Z",
            "2025-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "1969-12-31T23:59:59.999Z",
            "2026-01-31T23:59:59+01:00",
            "2026-01-31 23:59:59Z",
            "2026-01-31",
            "yesterday",
        ] {
            assert!(text.parse::<Millis>().is_err(), "{text}");
        }
    }

    fn reading(wall: u64, boot: u32, awake_ms: i64, total_ms: i64) -> ClockReading {
        ClockReading { wall: Millis(wall), uptime: Some(MachineUptime { boot, awake_ms, total_ms }) }
    }

    #[test]
    fn a_reading_reads_back_as_it_was_written_and_so_does_one_of_an_earlier_release() {
        let times = [
            (Millis(951_782_400_000).into(), r#""2000-02-29T00:00:00.000Z""#),
            (reading(0, 0x1a2b, 7, 7), r#""1970-01-01T00:00:00.000Z 00001a2b 7""#),
            (reading(0, u32::MAX, -7, 9), r#""1970-01-01T00:00:00.000Z ffffffff -7 9""#),
        ];
        for (reading, text) in times {
            assert_eq!(serde_json::to_string(&reading).unwrap(), text);
            assert_eq!(serde_json::from_str::<ClockReading>(text).unwrap(), reading);
        }
        assert!(serde_json::from_str::<ClockReading>(r#""1970-01-01T00:00:00.000Z 1a2b""#).is_err());
    }

    #[test]
    fn a_set_clock_changes_no_duration_and_suspended_time_counts_only_for_leases() {
        let start = reading(10_000_000, 1, 500, 500);
        for wall in [0, 10_000_000, u64::MAX] {
            let now = reading(wall, 1, 1500, 4500);
            assert_eq!((now.elapsed_since(start), now.lease_time_since(start)), (1000, 4000));
        }
    }

    #[test]
    fn readings_without_an_uptime_are_compared_by_the_wall_clock() {
        let (earlier, later) = (ClockReading::from(Millis(1000)), reading(3500, 1, 7, 7));
        assert_eq!((later.elapsed_since(earlier), earlier.elapsed_since(later)), (2500, 0));
        assert_eq!(later.lease_time_since(earlier), 2500);
    }

    #[test]
    fn after_a_reboot_no_clock_that_was_set_ends_a_limit_early_or_keeps_it_from_ending() {
        let start = reading(10_000_000, 1, 500_000, 500_000);
        for wall in [0, 10_000_000, 20_000_000] {
            let now = reading(wall, 2, 30_000, 40_000);
            assert_eq!(now.elapsed_since(start), 30_000);
            assert_eq!(now.lease_time_since(start), 40_000.max(wall.saturating_sub(10_000_000)));
        }
    }

    #[test]
    fn a_carried_reading_keeps_what_had_passed_before_the_reboot() {
        let (start, wait) = (reading(1000, 1, 500_000, 500_000), reading(9000, 1, 508_000, 508_000));
        let last = reading(21_000, 1, 520_000, 520_000).uptime;
        let now = reading(7, 2, 3000, 3000);
        let (start, wait) = (start.carried_over_reboot(last, now), wait.carried_over_reboot(last, now));
        assert_eq!(start.wall, Millis(1000), "people see the same time");
        assert_eq!(wait.elapsed_since(start), 8000);
        assert_eq!(now.elapsed_since(start), 20_000 + 3000);
        assert_eq!(now.plus(5).elapsed_since(start), 23_005);
    }

    #[test]
    fn a_carried_reading_of_an_earlier_release_counts_by_the_wall_clock_once_and_never_again() {
        let now = reading(61_000, 2, 3000, 3000);
        let start = ClockReading::from(Millis(1000)).carried_over_reboot(None, now);
        assert_eq!(now.elapsed_since(start), 60_000);
        assert_eq!(reading(0, 2, 4000, 4000).elapsed_since(start), 61_000);
    }
}
