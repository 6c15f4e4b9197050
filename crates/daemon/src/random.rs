//! The daemon's only source of randomness. The state machines have none; ids are made in the shell.

/// Random bytes from the kernel.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has randomness once it has booted");
    bytes
}
