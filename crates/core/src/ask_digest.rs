//! The digest of an ask's input, by which an answer says what its sender was shown. docs/policies.md defines it for
//! clients that compute it themselves.

use std::fmt::Write as _;

use qd_protocol::event::Ask;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// SHA-256, as 64 lowercase hexadecimal digits, of the canonical JSON of an ask's input.
pub fn input_sha256(input: &Value) -> String {
    let mut text = String::new();
    write_canonical(&mut text, input);
    hex::encode(Sha256::digest(text))
}

/// The ask with the digest of its input. An ask has none stored if an earlier release opened it or a policy decided it.
pub fn with_digest(ask: Ask) -> Ask {
    Ask { input_sha256: Some(stored_or_computed(&ask)), ..ask }
}

/// Whether an answer that was given to `shown` may answer `ask`. An answer without a digest may.
pub(crate) fn matches_shown(ask: &Ask, shown: Option<&str>) -> bool {
    shown.is_none_or(|shown| shown == stored_or_computed(ask))
}

/// The stored digest wins over a computed one, because it is the one that clients were shown.
fn stored_or_computed(ask: &Ask) -> String {
    ask.input_sha256.clone().unwrap_or_else(|| input_sha256(&ask.input))
}

/// JSON without whitespace and with the keys of every object sorted by their bytes. The order is not left to
/// `serde_json`, whose maps keep another order if any dependency enables its feature `preserve_order`.
fn write_canonical(out: &mut String, value: &Value) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                write_canonical(out, item);
            }
            out.push(']');
        }
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort_unstable();
            out.push('{');
            for (i, key) in keys.into_iter().enumerate() {
                let separator = if i > 0 { "," } else { "" };
                // Writing to a string cannot fail.
                let _ = write!(out, "{separator}{}:", Value::from(key.as_str()));
                write_canonical(out, &map[key.as_str()]);
            }
            out.push('}');
        }
        scalar => {
            let _ = write!(out, "{scalar}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn canonical(value: &Value) -> String {
        let mut text = String::new();
        write_canonical(&mut text, value);
        text
    }

    #[test]
    fn keys_are_sorted_and_nothing_is_added() {
        let value = json!({"b": [1, 2.5, null, true], "a": {"z": "ä\n\"", "Z": {}}, "": []});
        assert_eq!(canonical(&value), r#"{"":[],"a":{"Z":{},"z":"ä\n\""},"b":[1,2.5,null,true]}"#);
    }

    #[test]
    fn the_digest_is_what_other_programs_compute() {
        // printf '{"command":"make install"}' | sha256sum
        assert_eq!(
            input_sha256(&json!({"command": "make install"})),
            "d22fa347f9bb77e0753363cb7fb08a414b874dbae88ccb14db892cc77dba5846"
        );
        // printf null | sha256sum
        assert_eq!(
            input_sha256(&Value::Null),
            "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
        );
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        scalar.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(".{0,4}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn canonical_json_is_the_same_value_and_survives_being_stored(value in any_value()) {
            let text = canonical(&value);
            let again: Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&again, &value);
            prop_assert_eq!(canonical(&again), text);
        }

        #[test]
        fn two_values_have_the_same_canonical_json_only_if_they_are_equal(a in any_value(), b in any_value()) {
            prop_assert_eq!(canonical(&a) == canonical(&b), a == b);
        }
    }
}
