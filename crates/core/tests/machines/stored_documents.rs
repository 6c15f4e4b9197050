//! Documents that earlier releases stored, read by this one: snapshots of machines and the rows of lists keep the names
//! of their fields, whatever the types are called today. The fixture is described in `tests/fixtures/make_home.py`.

use std::path::Path;

use qd_core::rows::{AskDoc, MailDoc, RunDoc, SessionDoc};
use qd_core::session::SessionState;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads every stored document of one column as `T`, and writes it again.
fn expect_unchanged<T: Serialize + DeserializeOwned>(table: &str, column: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/home-0.1.0/stored.jsonl");
    let mut count = 0;
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if line["table"] == table && line["column"] == column {
            let document: T = serde_json::from_value(line["value"].clone()).unwrap();
            assert_eq!(serde_json::to_value(document).unwrap(), line["value"], "{table}.{column}");
            count += 1;
        }
    }
    assert!(count > 0, "the fixture has no {table}.{column}");
}

#[test]
fn snapshots_of_sessions_keep_their_form() {
    expect_unchanged::<SessionState>("snapshots", "state");
}

#[test]
fn rows_of_lists_keep_their_form() {
    expect_unchanged::<SessionDoc>("sessions", "doc");
    expect_unchanged::<RunDoc>("runs", "doc");
    expect_unchanged::<AskDoc>("asks", "doc");
    expect_unchanged::<MailDoc>("mail", "doc");
}
