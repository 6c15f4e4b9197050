//! Whether a process belongs to an agent, of whatever home. A process can take rights away from itself by what it looks
//! like, but never gain any.

use qd_sandbox::SANDBOX_COMMAND;

use crate::procfs;

/// The parts of our program that stand between a daemon and an agent.
const AGENT_HOSTS: [&str; 3] = ["__keeper", "__worker", SANDBOX_COMMAND];
/// The first process of the PID namespace that we are in.
const FIRST_PROCESS: u32 = 1;

/// Whether a process descends from an agent: it or one of its ancestors carries a mark, or is a worker, a keeper or the
/// first process of a sandbox. True as well if its ancestors cannot be told, and for all processes in our own sandbox:
/// the ancestors of some are outside.
pub fn descends_from_agent(pid: u32) -> bool {
    procfs::is_started_as(FIRST_PROCESS, SANDBOX_COMMAND)
        || procfs::ancestry(pid)
            .any(|ancestor| ancestor.is_none_or(|pid| procfs::mark_of(pid).is_some() || hosts_agents(pid)))
}

/// Whether a process is a worker, a keeper or the first process of a sandbox, or claims to be one.
pub fn hosts_agents(pid: u32) -> bool {
    AGENT_HOSTS.iter().any(|part| procfs::is_started_as(pid, part))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::MARK_VARIABLE;

    #[test]
    fn a_process_with_a_mark_and_everything_below_it_belongs_to_an_agent() {
        assert!(!descends_from_agent(std::process::id()));
        let mut marked = Command::new("sh")
            .args(["-c", "env -i sleep 600 & echo $!; wait"])
            .env(MARK_VARIABLE, "of-an-agent")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(marked.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let below: u32 = line.trim().parse().unwrap();
        assert!(descends_from_agent(marked.id()));
        assert!(descends_from_agent(below), "although its own environment is empty");
        let below = procfs::ProcessIdentity::find(below).unwrap();
        procfs::send_signal(&below, crate::Signal::KILL);
        marked.wait().unwrap();
    }

    #[test]
    fn a_process_that_does_not_exist_might_be_an_agents() {
        assert!(descends_from_agent(u32::MAX));
    }
}
