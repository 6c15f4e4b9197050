//! One lock per key: two requests with the same `Idempotency-Key`, run id or path wait for each other, and for no
//! other request.
//!
//! Design: docs/design/keyed-locks.md

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Locks by name. A name that is not locked takes no memory.
#[derive(Debug, Default)]
pub(crate) struct KeyedLocks {
    locks: Arc<Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>>,
}

/// While this exists, nobody else holds the key.
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
            let mut locks = self.locks.lock();
            Arc::clone(locks.entry(key.clone()).or_default())
        };
        let guard = mutex.lock_owned().await;
        KeyedLockGuard { key, locks: Arc::clone(&self.locks), guard: Some(guard) }
    }
}

impl Drop for KeyedLockGuard {
    fn drop(&mut self) {
        let mut locks = self.locks.lock();
        self.guard = None;
        // Only the map refers to the lock now, so nobody waits for it.
        if locks.get(&self.key).is_some_and(|mutex| Arc::strong_count(mutex) == 1) {
            locks.remove(&self.key);
        }
    }
}
