//! The locks of [`registry`](crate::registry), under a name that its shuttle test can give to others.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
