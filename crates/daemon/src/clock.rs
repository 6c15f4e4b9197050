//! Reads the clocks of this machine for events and for the limits and leases that are counted from them. Limits that
//! concern only this process use tokio's `Instant`, which is the same clock as the awake time here.
//!
//! Design: docs/design/deadlines-are-computed.md

use std::sync::LazyLock;
use std::time::Duration;

use qd_protocol::{ClockReading, MachineUptime, Millis};
use rustix::time::{ClockId, clock_gettime};

/// Where Linux names the current boot.
const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// The first 32 bits of the boot's name. `None` if they cannot be read: durations across a restart of the daemon are
/// then measured with the wall clock.
static BOOT: LazyLock<Option<u32>> = LazyLock::new(|| {
    let name = std::fs::read_to_string(BOOT_ID_FILE).inspect_err(
        |error| tracing::warn!(%error, "failed to read {BOOT_ID_FILE}: limits follow the wall clock"),
    );
    boot_number(&name.ok()?)
});

fn boot_number(name: &str) -> Option<u32> {
    u32::from_str_radix(name.get(..8)?, 16).ok()
}

/// Reads all clocks.
pub(crate) fn read_clocks() -> ClockReading {
    let uptime = BOOT.map(|boot| {
        let awake = to_duration(clock_gettime(ClockId::Monotonic));
        let suspended = to_duration(clock_gettime(ClockId::Boottime)).saturating_sub(awake);
        let awake_ms = to_millis(awake);
        MachineUptime { boot, awake_ms, total_ms: awake_ms + to_millis(suspended) }
    });
    ClockReading { wall: Millis::now(), uptime }
}

fn to_duration(time: rustix::time::Timespec) -> Duration {
    Duration::try_from(time).unwrap_or_default()
}

fn to_millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_named_and_its_clocks_do_not_go_back() {
        let (first, second) = (read_clocks(), read_clocks());
        let (Some(one), Some(two)) = (first.uptime, second.uptime) else { panic!("{first:?} {second:?}") };
        assert_eq!(one.boot, two.boot);
        assert!(one.awake_ms > 0 && one.awake_ms <= two.awake_ms && one.total_ms >= one.awake_ms);
    }

    #[test]
    fn a_boot_name_that_is_none_is_no_boot() {
        assert_eq!(boot_number("1a2b3c4d-0000-4000-8000-000000000000\n"), Some(0x1a2b_3c4d));
        assert_eq!((boot_number(""), boot_number("not a name")), (None, None));
    }
}
