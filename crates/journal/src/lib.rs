//! The durable truth of Quarterdeck: events and rows on SQLite, one writer, cursors for readers.
