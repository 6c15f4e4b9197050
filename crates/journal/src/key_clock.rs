//! The clock by which idempotency keys expire. Setting the wall clock must not make a repeated request a new one, so the
//! clock goes on with the uptime of the machine, also across restarts of the daemon. After a reboot it is set to the wall
//! clock.

use qd_protocol::{MachineUptime, Millis};
use rusqlite::{Connection, OptionalExtension as _};

/// The key of the clock among the journal's own values.
const META_KEY: &str = "key_clock";

/// Reads the uptime of the machine; `None` if it cannot be read.
pub type UptimeReader = fn() -> Option<MachineUptime>;

/// A clock that setting the wall clock does not change.
#[derive(Debug)]
pub(crate) struct KeyClock {
    read_uptime: UptimeReader,
    /// What it showed when the journal was opened, and the uptime then.
    opened: Option<(Millis, MachineUptime)>,
}

impl KeyClock {
    /// Continues the clock that is stored in the journal.
    pub(crate) fn open(db: &Connection, read_uptime: UptimeReader) -> rusqlite::Result<Self> {
        let Some(uptime) = read_uptime() else { return Ok(Self { read_uptime, opened: None }) };
        let stored: Option<Vec<u8>> =
            db.query_row("SELECT value FROM meta WHERE key = ?1", [META_KEY], |row| row.get(0)).optional()?;
        let stored = stored.and_then(|value| serde_json::from_slice::<(u64, u32, i64)>(&value).ok());
        let now = match stored {
            Some((ms, boot, total_ms)) if boot == uptime.boot => advance(Millis(ms), total_ms, uptime),
            _ => Millis::now(),
        };
        let value = serde_json::to_vec(&(now.0, uptime.boot, uptime.total_ms)).unwrap_or_default();
        let stored = db.execute(
            "INSERT INTO meta(key, value) VALUES (?1, ?2) ON CONFLICT(key) DO UPDATE SET value = ?2",
            (META_KEY, value),
        );
        if let Err(error) = stored {
            // A daemon must be able to start on a full disk.
            tracing::warn!(%error, "the clock of idempotency keys could not be stored; the next start sets it again");
        }
        Ok(Self { read_uptime, opened: Some((now, uptime)) })
    }

    pub(crate) fn now(&self) -> Millis {
        match (self.opened, (self.read_uptime)()) {
            (Some((opened, then)), Some(uptime)) => advance(opened, then.total_ms, uptime),
            _ => Millis::now(),
        }
    }
}

/// The time at this uptime, if it was `ms` when the uptime was `total_ms`.
fn advance(ms: Millis, total_ms: i64, uptime: MachineUptime) -> Millis {
    Millis(ms.0.saturating_add_signed(uptime.total_ms.saturating_sub(total_ms).max(0)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

    use super::*;

    static BOOT: AtomicU32 = AtomicU32::new(1);
    static TOTAL_MS: AtomicI64 = AtomicI64::new(5_000);

    fn read_uptime() -> Option<MachineUptime> {
        let total_ms = TOTAL_MS.load(Ordering::Relaxed);
        Some(MachineUptime { boot: BOOT.load(Ordering::Relaxed), awake_ms: total_ms, total_ms })
    }

    #[test]
    fn it_goes_on_with_the_uptime_until_a_reboot_whatever_the_wall_clock_says() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch("CREATE TABLE meta(key TEXT PRIMARY KEY, value BLOB NOT NULL)").unwrap();
        let first = KeyClock::open(&db, read_uptime).unwrap();
        let began = first.now();
        assert!(began <= Millis::now());
        TOTAL_MS.store(9_000, Ordering::Relaxed);
        assert_eq!(first.now().0, began.0 + 4_000);
        // The next daemon finds a wall clock that was set far back.
        let ahead = serde_json::to_vec(&(began.0 + 1_000_000_000, 1, 9_000)).unwrap();
        db.execute("UPDATE meta SET value = ?1", [ahead]).unwrap();
        TOTAL_MS.store(10_000, Ordering::Relaxed);
        assert_eq!(KeyClock::open(&db, read_uptime).unwrap().now().0, began.0 + 1_000_001_000);
        BOOT.store(2, Ordering::Relaxed);
        TOTAL_MS.store(10, Ordering::Relaxed);
        let rebooted = KeyClock::open(&db, read_uptime).unwrap().now();
        assert!(rebooted.0 < began.0 + 1_000_000_000, "after a reboot the wall clock counts");
    }
}
