//! The locks of [`registry`](crate::registry). Its shuttle test replaces this module with shuttle's locks.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
