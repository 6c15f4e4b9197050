//! The locks of [`registry`](crate::registry). Its shuttle test replaces this module with shuttle's locks, which have
//! the interface of the standard library's; everything else locks with parking_lot.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
