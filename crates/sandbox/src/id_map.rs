//! Which users and groups exist in a user namespace. Every user keeps its number, so that files look the same inside and
//! outside: root keeps all numbers that it has itself, an ordinary user the only one that it may map.

use std::fs;
use std::io;

use rustix::process::{getegid, geteuid};

/// The files of `/proc/PID` that define a user namespace's users and groups.
const MAPS: [&str; 2] = ["uid_map", "gid_map"];

/// Writes the maps of the user namespace that this process was made in. The caller must be in the namespace above it.
pub(crate) fn write_id_maps(pid: u32) -> io::Result<()> {
    if geteuid().is_root() {
        for map in MAPS {
            let own = fs::read_to_string(format!("/proc/self/{map}"))?;
            fs::write(format!("/proc/{pid}/{map}"), identity_map(&own))?;
        }
        return Ok(());
    }
    // Without rights, a group can be mapped only by one who gives up changing groups.
    fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    fs::write(format!("/proc/{pid}/uid_map"), format!("{user} {user} 1\n"))?;
    fs::write(format!("/proc/{pid}/gid_map"), format!("{group} {group} 1\n"))
}

/// A map that gives each number to itself, for all numbers of another map. A container's root does not have all.
fn identity_map(map: &str) -> String {
    let extents = map.lines().filter_map(|line| {
        let mut numbers = line.split_whitespace();
        let (first, count) = (numbers.next()?, numbers.nth(1)?);
        Some(format!("{first} {first} {count}\n"))
    });
    extents.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_that_root_has_maps_to_itself() {
        assert_eq!(identity_map("         0          0 4294967295\n"), "0 0 4294967295\n");
        let container = "         0     100000      65536\n     70000     200000          1\n";
        assert_eq!(identity_map(container), "0 0 65536\n70000 70000 1\n");
    }
}
