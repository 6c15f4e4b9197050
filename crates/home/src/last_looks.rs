//! When the user last looked at each daemon with `qd status`. Only clients read and write this; the daemon does not know
//! of it. Losing it loses nothing but that time.

use std::collections::BTreeMap;
use std::io::Read;

use qd_protocol::Millis;
use serde::{Deserialize, Serialize};

use crate::home::DaemonHome;
use crate::private_files::{HomeError, open_private, replace_file};

/// The most daemons whose last look is remembered. Those that were looked at longest ago are forgotten first.
const HOSTS_MAX: usize = 32;
/// The largest file that is read. A larger one was not written by us.
const FILE_MAX: u64 = 1 << 20;

/// When the user last looked at a daemon, and what was too recent to tell by that time alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastLook {
    pub looked_at: Millis,
    /// Ids of what had ended shortly before. An end is committed a moment after its time was taken, and the clock of
    /// another machine may differ, so around the look the time does not tell what was seen.
    #[serde(default)]
    pub seen: Vec<String>,
}

impl DaemonHome {
    /// The last look at the daemon with this address. A file that cannot be read or understood counts as no look.
    pub fn last_look(&self, host: &str) -> Option<LastLook> {
        self.read_last_looks().remove(host)
    }

    /// Remembers a look at the daemon with this address.
    pub fn record_last_look(&self, host: &str, look: LastLook) -> Result<(), HomeError> {
        self.prepare()?;
        let mut looks = self.read_last_looks();
        looks.insert(host.to_owned(), look);
        while looks.len() > HOSTS_MAX {
            let oldest = looks.iter().min_by_key(|(_, look)| look.looked_at).map(|(host, _)| host.clone());
            let Some(oldest) = oldest else { break };
            looks.remove(&oldest);
        }
        let content = serde_json::to_vec(&looks).unwrap_or_default();
        replace_file(&self.last_looks_file(), &content)
    }

    fn read_last_looks(&self) -> BTreeMap<String, LastLook> {
        let mut content = Vec::new();
        let read = open_private(&self.last_looks_file())
            .ok()
            .and_then(|file| file.take(FILE_MAX).read_to_end(&mut content).ok());
        read.and_then(|_| serde_json::from_slice(&content).ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::test_home::{mode, prepared_home};

    fn look(at: u64) -> LastLook {
        LastLook { looked_at: Millis(at), seen: vec!["run_1".to_owned()] }
    }

    #[test]
    fn each_daemon_has_its_own_last_look_in_a_private_file() {
        let (_folder, home) = prepared_home();
        assert_eq!(home.last_look("unix:/a"), None);
        home.record_last_look("unix:/a", look(1)).unwrap();
        home.record_last_look("https://b:1", look(2)).unwrap();
        home.record_last_look("unix:/a", look(3)).unwrap();
        assert_eq!(home.last_look("unix:/a"), Some(look(3)));
        assert_eq!(home.last_look("https://b:1"), Some(look(2)));
        assert_eq!(mode(home.last_looks_file()), 0o600);
    }

    #[test]
    fn a_damaged_file_counts_as_no_look_and_is_replaced() {
        let (_folder, home) = prepared_home();
        fs::write(home.last_looks_file(), "{\"unix:/a\": 7").unwrap();
        assert_eq!(home.last_look("unix:/a"), None);
        home.record_last_look("unix:/a", look(1)).unwrap();
        assert_eq!(home.last_look("unix:/a"), Some(look(1)));
    }

    #[test]
    fn daemons_that_were_looked_at_longest_ago_are_forgotten_first() {
        let (_folder, home) = prepared_home();
        for n in 0..=HOSTS_MAX as u64 {
            home.record_last_look(&format!("https://h{n}:1"), look(n)).unwrap();
        }
        assert_eq!(home.read_last_looks().len(), HOSTS_MAX);
        assert_eq!(home.last_look("https://h0:1"), None);
        assert!(home.last_look("https://h1:1").is_some());
    }
}
