//! Random cases that can be repeated: `QD_SEED=N` chooses the seed, and the tests print it.

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// A runner for this many cases, and its seed.
pub(crate) fn runner(cases: u32) -> (u64, TestRunner) {
    let chosen = std::env::var("QD_SEED").ok().and_then(|text| text.parse().ok());
    let seed: u64 =
        chosen.unwrap_or_else(|| std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0));
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    (seed, TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)))
}
