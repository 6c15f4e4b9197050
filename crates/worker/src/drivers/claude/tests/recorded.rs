//! Exchanges with the real program, replayed.
