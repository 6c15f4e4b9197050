//! Random numbers from a seed, so that a failing run can be repeated. Not for secrets. Nothing is printed here; the
//! test prints the seed.

/// A sequence of numbers that is determined by its seed.
#[derive(Debug, Clone)]
pub struct SeededRandom(u64);

impl SeededRandom {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed in `QD_SEED` if it is set, or else one from the clock.
    pub fn choose_seed() -> u64 {
        let given = std::env::var("QD_SEED").ok();
        given.map(|text| text.parse().expect("QD_SEED is a number")).unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            u64::from(now.subsec_nanos()) ^ now.as_secs()
        })
    }

    /// The next number, by SplitMix64, for which every seed is a good one.
    pub fn next_number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_number() % bound.max(1)
    }

    /// A random item.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let bound = u64::try_from(items.len()).expect("a slice is shorter than 2^64");
        &items[usize::try_from(self.below(bound)).expect("below a length")]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_numbers() {
        let (mut a, mut b) = (SeededRandom::new(7), SeededRandom::new(7));
        assert!((0..100).all(|_| a.next_number() == b.next_number()));
        assert!((0..100).all(|_| a.below(10) < 10));
    }
}
