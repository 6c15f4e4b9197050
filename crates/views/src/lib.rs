//! View models: what both screens show, computed from events and answers of the HTTP API.
//!
//! Everything here is pure: events in, rows and cells out. Nothing knows a terminal or a browser, reads a clock or does
//! I/O; the time of day and the width of the screen are arguments.
