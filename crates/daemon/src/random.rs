//! The daemon's one source of randomness. The machines have none: ids are made at the edge.

/// Bytes from the kernel.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has randomness once it has booted");
    bytes
}
