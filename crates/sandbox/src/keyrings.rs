//! Keeps a process and all that it starts from the kernel's keyrings, which hold keys of the user for every process of the
//! same user id. No namespace separates them, so a filter refuses their system calls, as in a kernel that has none.

use std::io;

use crate::kernel::{self, FilterStep};

/// The tables of system calls that a program on this machine can use: the usual one, and that of 32-bit programs. Each is
/// named as in `linux/audit.h`, with its number of `add_key`. `request_key` and `keyctl` have the next two.
const TABLES: &[(u32, u32)] = match () {
    () if cfg!(target_arch = "x86_64") => &[(0xc000_003e, 248), (0x4000_0003, 286)],
    () if cfg!(target_arch = "aarch64") => &[(0xc000_00b7, 217), (0x4000_0028, 309)],
    () => &[],
};
const CALLS: u32 = 3;
/// Where the kernel has the number of a system call and the name of its table (`struct seccomp_data`).
const CALL_NUMBER_OFFSET: u32 = 0;
const TABLE_OFFSET: u32 = 4;
/// Programs of the x32 ABI set this bit in the numbers of the usual table.
const WITHOUT_X32_BIT: u32 = !0x4000_0000;
/// How many steps of a table's part follow the one that compares the table.
const REST_OF_TABLE: u8 = 6;

/// Refuses every use of the keyrings from now on. From now on, no program gains rights by being started.
pub(crate) fn refuse_keyrings() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    kernel::filter_system_calls(&filter())
}

fn filter() -> Vec<FilterStep> {
    let of_table = |&(table, first): &(u32, u32)| {
        [
            FilterStep::Load(TABLE_OFFSET),
            FilterStep::SkipUnlessEqual(table, REST_OF_TABLE),
            FilterStep::Load(CALL_NUMBER_OFFSET),
            FilterStep::And(WITHOUT_X32_BIT),
            FilterStep::SkipIfAtLeast(first + CALLS, 2),
            FilterStep::SkipUnlessAtLeast(first, 1),
            FilterStep::Refuse,
            FilterStep::Allow,
        ]
    };
    TABLES.iter().flat_map(of_table).chain([FilterStep::Allow]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_calls() {
        let calls = [libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl];
        if let Some((_, first)) = TABLES.first() {
            assert_eq!(calls, [0, 1, 2].map(|offset| i64::from(first + offset)));
        }
    }
}
