//! Agents that are described by their name alone: `acp:CMD`, `pty:CMD`, `exec:CMD`, `a2a:URL` and `worker:URL`, or by a file
//! that their name says: `manifest:PATH`.

use std::path::Path;

use qd_protocol::manifest::{
    AgentCapabilities, AgentIdentity, CostReporting, DriverKind, DriverOffer, FastPath, IdleRules, Manifest,
    QuestionCapabilities, ResumeMethod, ResumeRules, StartupRules, TurnRules,
};

use crate::peer_address::{PeerAddress, PeerAddressError, WORKER_TOKEN};
use crate::{MANIFEST_FILE_MAX, manifest_reader};

/// The variable whose value lets people in at a remote agent.
pub const REMOTE_TOKEN: &str = "A2A_TOKEN";

/// Why a name describes nobody.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AgentNameError {
    /// It is a plain name.
    #[error("it begins with none of acp:, pty:, exec:, a2a:, worker: and manifest:")]
    Plain,
    /// Nothing stands behind the colon.
    #[error(
        "nothing stands behind the colon: say a command, as in `acp:my-agent --flag`, or the URL of an a2a \
         agent or of a worker"
    )]
    Empty,
    /// A quote has no end.
    #[error("a quote in the command has no end")]
    Quote,
    /// It is no address.
    #[error("`{0}` is no address: an a2a agent has one that begins with http:// or https://")]
    Address(String),
    /// It is no address of a worker.
    #[error(transparent)]
    Peer(#[from] PeerAddressError),
    /// The file that it names is no manifest.
    #[error("{0}")]
    File(String),
}

/// How a name begins that says in which file its agent is described.
const MANIFEST_PREFIX: &str = "manifest:";

/// Whether a name describes its agent.
pub fn is_self_describing(name: &str) -> bool {
    split_driver(name).is_some() || name.starts_with(MANIFEST_PREFIX)
}

/// The agent that a name describes to somebody who works in this directory.
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

/// The agent that a name describes. Nothing is known of it, so nothing is promised for it.
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
            // What lets people in there is the caller's to give.
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

/// The words of a command as a shell would part them, of which only quotes and backslashes mean anything: there is no
/// shell, so nothing is expanded. `None` if a quote has no end.
pub fn split_words(line: &str) -> Option<Vec<String>> {
    split_line(line, |_, _| false)
}

/// The same of a line that means no more to a shell than these words: `None` also if a shell would put something else in
/// their place, or do something besides.
pub fn split_plain_words(line: &str) -> Option<Vec<String>> {
    split_line(line, |c, quoted| match c {
        '$' | '`' => true,
        ';' | '&' | '|' | '<' | '>' | '(' | ')' | '*' | '?' => !quoted,
        c => !quoted && c != ' ' && c.is_whitespace(),
    })
}

/// Parts a line into words; `None` if a quote has no end, or if `means` is true of a character that no backslash and no
/// single quote protects. It is told whether double quotes do.
fn split_line(line: &str, means: impl Fn(char, bool) -> bool) -> Option<Vec<String>> {
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
                        c if means(c, true) => return None,
                        c => word.push(c),
                    }
                }
            }
            '\\' => word.get_or_insert_default().push(chars.next()?),
            c if means(c, false) => return None,
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
    fn a_command_is_parted_as_a_shell_would_and_nothing_in_it_is_expanded() {
        let parted = |line: &str| split_words(line).unwrap();
        assert_eq!(parted("  my-agent  --acp "), ["my-agent", "--acp"]);
        assert_eq!(
            parted(r#"a 'b c' "d \"e\" $F" g\ h '' x"y"z"#),
            ["a", "b c", "d \"e\" $F", "g h", "", "xyz"]
        );
        assert_eq!(split_words("a 'b"), None);
        assert_eq!(split_words("a \"b"), None);
        assert_eq!(split_words("a \\"), None);
    }

    #[test]
    fn words_of_which_a_shell_would_make_more_are_not_plain() {
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
        let rests = |name: &str| manifest_from_name(name).unwrap().can_rest();
        assert!(rests("acp:x") && rests("exec:x") && !rests("pty:x"), "its memory is its process");
        assert_eq!(manifest_from_name("a2a:https://h:1/x").unwrap().address(), Some("https://h:1/x"));
        let remote = manifest_from_name("a2a:http://h").unwrap();
        assert!(
            remote.can_rest() && remote.capabilities.ask_user.any(),
            "its memory is elsewhere, and it may ask"
        );
        assert_eq!(remote.startup.pass_env, ["A2A_TOKEN"]);
        let worker = manifest_from_name("worker:ws://127.0.0.1:7778").unwrap();
        assert_eq!((worker.driver(), worker.address()), (DriverKind::Worker, Some("ws://127.0.0.1:7778")));
        assert!(worker.can_steer() && !worker.can_rest(), "its memory is its connection");
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
    fn a_name_may_say_in_which_file_its_agent_is_described() {
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
