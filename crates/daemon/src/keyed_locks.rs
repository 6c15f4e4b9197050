//! One at a time per key: two requests with the same `Idempotency-Key`, run id or path wait for each other, and
//! nobody else waits for them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Locks by name. A name that nobody holds costs nothing.
#[derive(Debug, Default)]
pub(crate) struct KeyedLocks {
    locks: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
}

/// While this lives, nobody else holds the key.
#[derive(Debug)]
pub(crate) struct KeyedLockGuard {
    key: String,
    locks: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
    guard: Option<tokio::sync::OwnedMutexGuard<()>>,
}

impl KeyedLocks {
    /// Waits until nobody else holds `key`.
    pub(crate) async fn lock(&self, key: String) -> KeyedLockGuard {
        let mutex = {
            let mut held = self.locks.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            Arc::clone(held.entry(key.clone()).or_default())
        };
        let guard = mutex.lock_owned().await;
        KeyedLockGuard { key, locks: Arc::clone(&self.locks), guard: Some(guard) }
    }
}

impl Drop for KeyedLockGuard {
    fn drop(&mut self) {
        let mut held = self.locks.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.guard = None;
        // Ours and the map's: nobody waits.
        if held.get(&self.key).is_some_and(|mutex| Arc::strong_count(mutex) == 1) {
            held.remove(&self.key);
        }
    }
}
