//! Agents that are described by their name alone: `acp:CMD`, `pty:CMD`, `exec:CMD`, `a2a:URL` and `worker:URL`, or by
//! a file that the name gives: `manifest:PATH`.

use std::path::Path;

use qd_protocol::manifest::{
    AgentCapabilities, AgentIdentity, CostReporting, DriverKind, DriverOffer, FastPath, IdleRules, Manifest,
    QuestionCapabilities, ResumeMethod, ResumeRules, StartupRules, TurnRules,
};

use crate::peer_address::{PeerAddress, PeerAddressError, WORKER_TOKEN};
use crate::{MANIFEST_FILE_MAX, manifest_reader};

/// The variable that holds the token for a remote A2A agent.
pub const REMOTE_TOKEN: &str = "A2A_TOKEN";

/// Why a name describes no agent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentNameError {
    /// It has no known prefix.
    #[error("it does not begin with acp:, pty:, exec:, a2a:, worker: or manifest:")]
    Plain,
    #[error(
        "there is nothing after the colon: give a command, as in `acp:my-agent --flag`, or the URL of an a2a \
         agent or of a worker"
    )]
    Empty,
    #[error("a quote in the command is not closed")]
    Quote,
    /// The address of an A2A agent is not valid.
    #[error("`{0}` is not the address of an a2a agent: it must begin with http:// or https://")]
    Address(String),
    /// The address of a worker is not valid.
    #[error(transparent)]
    Peer(#[from] PeerAddressError),
    /// The file is not a valid manifest.
    #[error("{0}")]
    File(String),
}

/// The prefix of a name that gives the file with the agent's manifest.
const MANIFEST_PREFIX: &str = "manifest:";

/// Whether a name describes its agent.
pub fn is_self_describing(name: &str) -> bool {
    split_driver(name).is_some() || name.starts_with(MANIFEST_PREFIX)
}

/// The agent that a name describes. A relative `manifest:PATH` is resolved against this directory.
pub fn manifest_from_name_in(name: &str, directory: &Path) -> Result<Manifest, AgentNameError> {
    let Some(path) = name.strip_prefix(MANIFEST_PREFIX) else { return manifest_from_name(name) };
    if path.trim().is_empty() {
        return Err(AgentNameError::Empty);
    }
    let read = manifest_reader::read_file(&directory.join(path), MANIFEST_FILE_MAX)
        .and_then(|text| manifest_reader::parse_manifest(&text));
    let mut manifest = read.map_err(|error| AgentNameError::File(error.to_string()))?;
    name.clone_into(&mut manifest.agent.name);
    Ok(manifest)
}

/// The agent that a name describes. Nothing else is known about it, so only the basic capabilities are assumed.
pub fn manifest_from_name(name: &str) -> Result<Manifest, AgentNameError> {
    let (driver, rest) = split_driver(name).ok_or(AgentNameError::Plain)?;
    let about = |binary: String| AgentIdentity {
        name: name.to_owned(),
        description: "As its name says.".to_owned(),
        binary,
        driver: Some(driver),
        ..AgentIdentity::default()
    };
    if rest.trim().is_empty() {
        return Err(AgentNameError::Empty);
    }
    if driver == DriverKind::A2a {
        let url = rest.trim();
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(AgentNameError::Address(url.to_owned()));
        }
        return Ok(Manifest {
            agent: about(String::new()),
            // The caller may pass a token for the remote agent.
            startup: StartupRules { pass_env: vec![REMOTE_TOKEN.to_owned()], ..StartupRules::default() },
            fast_path: FastPath {
                a2a_serve_at: Some(DriverOffer::Address(url.to_owned())),
                ..FastPath::default()
            },
            capabilities: AgentCapabilities {
                streaming_output: true,
                mid_turn_cancel: true,
                ask_user: QuestionCapabilities { free_text: true, ..QuestionCapabilities::default() },
                ..AgentCapabilities::default()
            },
            ..Manifest::default()
        });
    }
    if driver == DriverKind::Worker {
        PeerAddress::parse(rest)?;
        return Ok(Manifest {
            agent: about(String::new()),
            startup: StartupRules { pass_env: vec![WORKER_TOKEN.to_owned()], ..StartupRules::default() },
            fast_path: FastPath {
                worker_serve_at: Some(DriverOffer::Address(rest.trim().to_owned())),
                ..FastPath::default()
            },
            capabilities: AgentCapabilities {
                streaming_output: true,
                mid_turn_cancel: true,
                approvals: true,
                ask_user: QuestionCapabilities { yes_no: true, ..QuestionCapabilities::default() },
                ..AgentCapabilities::default()
            },
            ..Manifest::default()
        });
    }
    let command = split_words(rest).ok_or(AgentNameError::Quote)?;
    let binary = command.first().cloned().ok_or(AgentNameError::Empty)?;
    let by = match driver {
        DriverKind::Exec => ResumeMethod::Stateless,
        DriverKind::Pty => ResumeMethod::Nothing,
        _ => ResumeMethod::Driver,
    };
    Ok(Manifest {
        agent: about(binary),
        startup: StartupRules { command, ..StartupRules::default() },
        turn: TurnRules::default(),
        resume: ResumeRules { by, ..ResumeRules::default() },
        idle: IdleRules::default(),
        capabilities: AgentCapabilities {
            streaming_output: true,
            mid_turn_cancel: true,
            approvals: driver == DriverKind::Acp,
            models: driver == DriverKind::Acp,
            ..AgentCapabilities::default()
        },
        cost: CostReporting { tokens: driver == DriverKind::Acp, ..CostReporting::default() },
        ..Manifest::default()
    })
}

fn split_driver(name: &str) -> Option<(DriverKind, &str)> {
    let (kind, rest) = name.split_once(':')?;
    let driver = match kind {
        "acp" => DriverKind::Acp,
        "pty" => DriverKind::Pty,
        "exec" => DriverKind::Exec,
        "a2a" => DriverKind::A2a,
        "worker" => DriverKind::Worker,
        _ => return None,
    };
    Some((driver, rest))
}

/// Splits a command into words as a shell would. Only quotes and backslashes have a meaning: no shell is involved, so
/// nothing is expanded. `None` if a quote is not closed.
pub fn split_words(line: &str) -> Option<Vec<String>> {
    split_line(line, |_, _| false)
}

/// Splits a line that has no other meaning to a shell than its words. `None` also if a shell would expand something,
/// or do more than run these words.
pub fn split_plain_words(line: &str) -> Option<Vec<String>> {
    split_line(line, |c, quoted| match c {
        '$' | '`' => true,
        ';' | '&' | '|' | '<' | '>' | '(' | ')' | '*' | '?' => !quoted,
        c => !quoted && c != ' ' && c.is_whitespace(),
    })
}

/// Splits a line into words. `None` if a quote is not closed, or if `is_special` is true for a character that is not
/// protected by a backslash or single quotes. Its second argument is whether the character is in double quotes.
fn split_line(line: &str, is_special: impl Fn(char, bool) -> bool) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next()? {
                        '"' => break,
                        '\\' => match chars.next()? {
                            c @ ('"' | '\\' | '$' | '`') => word.push(c),
                            c => word.extend(['\\', c]),
                        },
                        c if is_special(c, true) => return None,
                        c => word.push(c),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(chars.next()?),
            c if is_special(c, false) => return None,
            c if c.is_whitespace() => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_split_as_a_shell_would_and_nothing_is_expanded() {
        let split = |line: &str| split_words(line).unwrap();
        assert_eq!(split("  my-agent  --acp "), ["my-agent", "--acp"]);
        assert_eq!(
            split(r#"a 'b c' "d \"e\" $F" g\ h '' x"y"z"#),
            ["a", "b c", "d \"e\" $F", "g h", "", "xyz"]
        );
        assert_eq!(split_words("a 'b"), None);
        assert_eq!(split_words("a \"b"), None);
        assert_eq!(split_words("a \\"), None);
    }

    #[test]
    fn words_with_a_meaning_to_a_shell_are_not_plain() {
        let plain = "bash -lc 'a; $b' \"c; d\" e\\;f \"\\$g\"";
        assert_eq!(split_plain_words(plain).unwrap(), ["bash", "-lc", "a; $b", "c; d", "e;f", "$g"]);
        assert_eq!(split_plain_words(plain), split_words(plain));
        for more in [
            "a; b",
            "a | b",
            "a > b",
            "a $b",
            "a \"$b\"",
            "a `b`",
            "a \"`b`\"",
            "a *",
            "a\nb",
            "a\tb",
            "(a)",
            "a 'b",
        ] {
            assert_eq!(split_plain_words(more), None, "{more}");
        }
    }

    #[test]
    fn a_name_with_a_command_is_an_agent() {
        let agent = manifest_from_name("acp:node /x/agent.js --acp").unwrap();
        assert_eq!(
            (agent.driver(), agent.command()),
            (DriverKind::Acp, vec!["node".into(), "/x/agent.js".into(), "--acp".into()])
        );
        assert_eq!(manifest_from_name("pty:bash -i").unwrap().resume.by, ResumeMethod::Nothing);
        let rests = |name: &str| manifest_from_name(name).unwrap().can_stop_when_idle();
        assert!(rests("acp:x") && rests("exec:x") && !rests("pty:x"), "its memory is its process");
        assert_eq!(manifest_from_name("a2a:https://h:1/x").unwrap().address(), Some("https://h:1/x"));
        let remote = manifest_from_name("a2a:http://h").unwrap();
        assert!(
            remote.can_stop_when_idle() && remote.capabilities.ask_user.any(),
            "its memory is elsewhere, and it may ask"
        );
        assert_eq!(remote.startup.pass_env, ["A2A_TOKEN"]);
        let worker = manifest_from_name("worker:ws://127.0.0.1:7778").unwrap();
        assert_eq!((worker.driver(), worker.address()), (DriverKind::Worker, Some("ws://127.0.0.1:7778")));
        assert!(worker.can_steer() && !worker.can_stop_when_idle(), "its memory is its connection");
        assert_eq!(worker.startup.pass_env, ["WORKER_TOKEN"]);
        assert!(matches!(manifest_from_name("worker:http://127.0.0.1:1"), Err(AgentNameError::Peer(_))));
        assert_eq!(manifest_from_name("worker:"), Err(AgentNameError::Empty));
        assert_eq!(manifest_from_name("claude"), Err(AgentNameError::Plain));
        assert_eq!(manifest_from_name("acp: "), Err(AgentNameError::Empty));
        assert_eq!(manifest_from_name("exec:a 'b"), Err(AgentNameError::Quote));
        assert!(matches!(manifest_from_name("a2a:ftp://x"), Err(AgentNameError::Address(_))));
        assert!(
            !is_self_describing("box:thing")
                && is_self_describing("exec:")
                && is_self_describing("manifest:x.toml")
        );
    }

    #[test]
    fn a_name_may_give_the_file_that_describes_its_agent() {
        let project = tempfile::tempdir().unwrap();
        std::fs::create_dir(project.path().join("agents")).unwrap();
        let text = "[agent]\nname = \"mine\"\nbinary = \"cat\"\ndriver = \"exec\"\n";
        std::fs::write(project.path().join("agents/mine.toml"), text).unwrap();
        let found = manifest_from_name_in("manifest:agents/mine.toml", project.path()).unwrap();
        assert_eq!(
            (found.agent.name.as_str(), found.agent.binary.as_str()),
            ("manifest:agents/mine.toml", "cat")
        );
        std::fs::write(project.path().join("bad.toml"), "[agent]\nname = 3\n").unwrap();
        for name in ["manifest:bad.toml", "manifest:none.toml"] {
            assert!(
                matches!(manifest_from_name_in(name, project.path()), Err(AgentNameError::File(_))),
                "{name}"
            );
        }
        assert_eq!(manifest_from_name_in("manifest: ", project.path()), Err(AgentNameError::Empty));
        assert_eq!(manifest_from_name_in("exec:cat", project.path()), manifest_from_name("exec:cat"));
    }
}
