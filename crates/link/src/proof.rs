//! How two ends of a link show each other that they know the same secret, without saying it: an HMAC over fresh random
//! words of both. Nothing here reads or sends a frame.

use std::fmt::Write;

use hmac::{Hmac, KeyInit, Mac};
use qd_protocol::worker::Secret;
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// A random word that nobody has used before.
pub(crate) fn fresh_nonce() -> String {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("the kernel has randomness once it has booted");
    hex(&random)
}

/// What shows that the worker's side knows the secret.
pub(crate) fn worker_proof(secret: &Secret, daemons_nonce: &str, workers_nonce: &str) -> String {
    hmac_proof(secret, "worker", daemons_nonce, workers_nonce)
}

/// What shows that the daemon's side knows the secret.
pub(crate) fn daemon_proof(secret: &Secret, workers_nonce: &str, daemons_nonce: &str) -> String {
    hmac_proof(secret, "daemon", workers_nonce, daemons_nonce)
}

/// Whether a proof is the one that it has to be. Where there is no secret there is nothing to prove.
pub(crate) fn verify_proof(secret: &Secret, right: &str, given: &str) -> bool {
    secret.0.is_empty() || bool::from(right.as_bytes().ct_eq(given.as_bytes()))
}

/// The parts end in a newline each, so that no two choices of words make the same text.
fn hmac_proof(secret: &Secret, side: &str, theirs: &str, own: &str) -> String {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(secret.0.as_bytes()).expect("an HMAC takes a key of any length");
    for part in [side, theirs, own] {
        mac.update(part.as_bytes());
        mac.update(b"\n");
    }
    hex(&mac.finalize().into_bytes())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _written = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_side_its_words_and_its_secret_alone() {
        let (secret, other) = (Secret("s".to_owned()), Secret("t".to_owned()));
        let right = worker_proof(&secret, "d", "w");
        assert!(verify_proof(&secret, &right, &worker_proof(&secret, "d", "w")));
        for wrong in [
            daemon_proof(&secret, "d", "w"),
            worker_proof(&secret, "w", "d"),
            worker_proof(&secret, "dw", ""),
            worker_proof(&other, "d", "w"),
            String::new(),
        ] {
            assert!(!verify_proof(&secret, &right, &wrong), "{wrong}");
        }
    }

    #[test]
    fn without_a_secret_nothing_has_to_be_proven() {
        assert!(verify_proof(&Secret::default(), "right", "wrong"));
    }

    #[test]
    fn a_proof_is_what_any_other_language_makes_of_the_same_words() {
        // python3 -c 'import hmac; print(hmac.new(b"key", b"worker\nd\nw\n", "sha256").hexdigest())'
        let known = "bde412be4d6547306d4781b22bc8a6bc4fe9dbc423963044145542fd1561eebc";
        assert_eq!(worker_proof(&Secret("key".to_owned()), "d", "w"), known);
        assert_ne!(fresh_nonce(), fresh_nonce());
    }
}
