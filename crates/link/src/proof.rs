//! How the two ends of a link prove to each other that they know the same secret without sending it: an HMAC over a
//! fresh nonce from each side. Nothing here reads or sends a frame.
//!
//! Design: docs/design/how-a-worker-is-known.md

use hmac::{Hmac, KeyInit, Mac};
use qd_protocol::worker::Secret;
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// 128 random bits in hex.
pub(crate) fn fresh_nonce() -> String {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("the kernel has randomness once it has booted");
    hex::encode(random)
}

/// Proves that the worker knows the secret.
pub(crate) fn worker_proof(secret: &Secret, daemons_nonce: &str, workers_nonce: &str) -> String {
    hmac_proof(secret, "worker", daemons_nonce, workers_nonce)
}

/// Proves that the daemon knows the secret.
pub(crate) fn daemon_proof(secret: &Secret, workers_nonce: &str, daemons_nonce: &str) -> String {
    hmac_proof(secret, "daemon", workers_nonce, daemons_nonce)
}

/// Compares a proof in constant time. With an empty secret, every proof is accepted.
pub(crate) fn verify_proof(secret: &Secret, expected: &str, given: &str) -> bool {
    secret.0.is_empty() || bool::from(expected.as_bytes().ct_eq(given.as_bytes()))
}

/// Each part ends in a newline, so no two different inputs hash the same text.
fn hmac_proof(secret: &Secret, side: &str, peer_nonce: &str, own_nonce: &str) -> String {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(secret.0.as_bytes()).expect("an HMAC takes a key of any length");
    for part in [side, peer_nonce, own_nonce] {
        mac.update(part.as_bytes());
        mac.update(b"\n");
    }
    hex::encode(mac.finalize().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_side_its_words_and_its_secret_alone() {
        let (secret, other) = (Secret("s".to_owned()), Secret("t".to_owned()));
        let expected = worker_proof(&secret, "d", "w");
        assert!(verify_proof(&secret, &expected, &worker_proof(&secret, "d", "w")));
        for wrong in [
            daemon_proof(&secret, "d", "w"),
            worker_proof(&secret, "w", "d"),
            worker_proof(&secret, "dw", ""),
            worker_proof(&other, "d", "w"),
            String::new(),
        ] {
            assert!(!verify_proof(&secret, &expected, &wrong), "{wrong}");
        }
    }

    #[test]
    fn without_a_secret_nothing_has_to_be_proven() {
        assert!(verify_proof(&Secret::default(), "expected", "wrong"));
    }

    #[test]
    fn a_proof_is_what_any_other_language_makes_of_the_same_words() {
        // python3 -c 'import hmac; print(hmac.new(b"key", b"worker\nd\nw\n", "sha256").hexdigest())'
        let known = "bde412be4d6547306d4781b22bc8a6bc4fe9dbc423963044145542fd1561eebc";
        assert_eq!(worker_proof(&Secret("key".to_owned()), "d", "w"), known);
        assert_ne!(fresh_nonce(), fresh_nonce());
    }
}
