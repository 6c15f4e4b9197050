//! Agents that are described by their name alone: `acp:CMD`, `pty:CMD`, `exec:CMD`, `a2a:URL` and `worker:URL`, or by a file
//! that their name says: `manifest:PATH`.

use std::path::Path;

use qd_protocol::manifest::{
    About, AskUser, Capabilities, Cost, Driver, FastPath, IdleRules, Manifest, Offer, ResumeBy, ResumeRules,
    Startup, TurnRules,
};

use crate::peer::{PeerAddress, PeerError, WORKER_TOKEN};
use crate::{FILE_MAX, read};

/// The variable whose value lets people in at a remote agent.
pub const REMOTE_TOKEN: &str = "A2A_TOKEN";

/// Why a name describes nobody.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NamedError {
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
    Peer(#[from] PeerError),
    /// The file that it names is no manifest.
    #[error("{0}")]
    File(String),
}

/// How a name begins that says in which file its agent is described.
const IN_FILE: &str = "manifest:";

/// Whether a name describes its agent.
pub fn is_described(name: &str) -> bool {
    split(name).is_some() || name.starts_with(IN_FILE)
}

/// The agent that a name describes to somebody who works in this directory.
pub fn described_in(name: &str, directory: &Path) -> Result<Manifest, NamedError> {
    let Some(path) = name.strip_prefix(IN_FILE) else { return described(name) };
    if path.trim().is_empty() {
        return Err(NamedError::Empty);
    }
    let read = read::file(&directory.join(path), FILE_MAX).and_then(|text| read::manifest(&text));
    let mut manifest = read.map_err(|error| NamedError::File(error.to_string()))?;
    name.clone_into(&mut manifest.agent.name);
    Ok(manifest)
}

/// The agent that a name describes. Nothing is known of it, so nothing is promised for it.
pub fn described(name: &str) -> Result<Manifest, NamedError> {
    let (driver, rest) = split(name).ok_or(NamedError::Plain)?;
    let about = |binary: String| About {
        name: name.to_owned(),
        description: "As its name says.".to_owned(),
        binary,
        driver: Some(driver),
        ..About::default()
    };
    if rest.trim().is_empty() {
        return Err(NamedError::Empty);
    }
    if driver == Driver::A2a {
        let url = rest.trim();
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(NamedError::Address(url.to_owned()));
        }
        return Ok(Manifest {
            agent: about(String::new()),
            // What lets people in there is the caller's to give.
            startup: Startup { pass_env: vec![REMOTE_TOKEN.to_owned()], ..Startup::default() },
            fast_path: FastPath { a2a_serve_at: Some(Offer::At(url.to_owned())), ..FastPath::default() },
            capabilities: Capabilities {
                streaming_output: true,
                mid_turn_cancel: true,
                ask_user: AskUser { free_text: true, ..AskUser::default() },
                ..Capabilities::default()
            },
            ..Manifest::default()
        });
    }
    if driver == Driver::Worker {
        PeerAddress::parse(rest)?;
        return Ok(Manifest {
            agent: about(String::new()),
            startup: Startup { pass_env: vec![WORKER_TOKEN.to_owned()], ..Startup::default() },
            fast_path: FastPath {
                worker_serve_at: Some(Offer::At(rest.trim().to_owned())),
                ..FastPath::default()
            },
            capabilities: Capabilities {
                streaming_output: true,
                mid_turn_cancel: true,
                approvals: true,
                ask_user: AskUser { yes_no: true, ..AskUser::default() },
                ..Capabilities::default()
            },
            ..Manifest::default()
        });
    }
    let command = words(rest).ok_or(NamedError::Quote)?;
    let binary = command.first().cloned().ok_or(NamedError::Empty)?;
    let by = match driver {
        Driver::Exec => ResumeBy::Stateless,
        Driver::Pty => ResumeBy::Nothing,
        _ => ResumeBy::Driver,
    };
    Ok(Manifest {
        agent: about(binary),
        startup: Startup { command, ..Startup::default() },
        turn: TurnRules::default(),
        resume: ResumeRules { by, ..ResumeRules::default() },
        idle: IdleRules::default(),
        capabilities: Capabilities {
            streaming_output: true,
            mid_turn_cancel: true,
            approvals: driver == Driver::Acp,
            models: driver == Driver::Acp,
            ..Capabilities::default()
        },
        cost: Cost { tokens: driver == Driver::Acp, ..Cost::default() },
        ..Manifest::default()
    })
}

fn split(name: &str) -> Option<(Driver, &str)> {
    let (kind, rest) = name.split_once(':')?;
    let driver = match kind {
        "acp" => Driver::Acp,
        "pty" => Driver::Pty,
        "exec" => Driver::Exec,
        "a2a" => Driver::A2a,
        "worker" => Driver::Worker,
        _ => return None,
    };
    Some((driver, rest))
}

/// The words of a command as a shell would part them, of which only quotes and backslashes mean anything: there is no
/// shell, so nothing is expanded. `None` if a quote has no end.
pub fn words(line: &str) -> Option<Vec<String>> {
    parted(line, |_, _| false)
}

/// The same of a line that means no more to a shell than these words: `None` also if a shell would put something else in
/// their place, or do something besides.
pub fn plain_words(line: &str) -> Option<Vec<String>> {
    parted(line, |c, quoted| match c {
        '$' | '`' => true,
        ';' | '&' | '|' | '<' | '>' | '(' | ')' | '*' | '?' => !quoted,
        c => !quoted && c != ' ' && c.is_whitespace(),
    })
}

/// Parts a line into words; `None` if a quote has no end, or if `means` is true of a character that no backslash and no
/// single quote protects. It is told whether double quotes do.
fn parted(line: &str, means: impl Fn(char, bool) -> bool) -> Option<Vec<String>> {
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
        let parted = |line: &str| words(line).unwrap();
        assert_eq!(parted("  my-agent  --acp "), ["my-agent", "--acp"]);
        assert_eq!(
            parted(r#"a 'b c' "d \"e\" $F" g\ h '' x"y"z"#),
            ["a", "b c", "d \"e\" $F", "g h", "", "xyz"]
        );
        assert_eq!(words("a 'b"), None);
        assert_eq!(words("a \"b"), None);
        assert_eq!(words("a \\"), None);
    }

    #[test]
    fn words_of_which_a_shell_would_make_more_are_not_plain() {
        let plain = "bash -lc 'a; $b' \"c; d\" e\\;f \"\\$g\"";
        assert_eq!(plain_words(plain).unwrap(), ["bash", "-lc", "a; $b", "c; d", "e;f", "$g"]);
        assert_eq!(plain_words(plain), words(plain));
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
            assert_eq!(plain_words(more), None, "{more}");
        }
    }

    #[test]
    fn a_name_with_a_command_is_an_agent() {
        let agent = described("acp:node /x/agent.js --acp").unwrap();
        assert_eq!(
            (agent.driver(), agent.command()),
            (Driver::Acp, vec!["node".into(), "/x/agent.js".into(), "--acp".into()])
        );
        assert_eq!(described("pty:bash -i").unwrap().resume.by, ResumeBy::Nothing);
        let rests = |name: &str| described(name).unwrap().rests();
        assert!(rests("acp:x") && rests("exec:x") && !rests("pty:x"), "its memory is its process");
        assert_eq!(described("a2a:https://h:1/x").unwrap().address(), Some("https://h:1/x"));
        let remote = described("a2a:http://h").unwrap();
        assert!(
            remote.rests() && remote.capabilities.ask_user.any(),
            "its memory is elsewhere, and it may ask"
        );
        assert_eq!(remote.startup.pass_env, ["A2A_TOKEN"]);
        let worker = described("worker:ws://127.0.0.1:7778").unwrap();
        assert_eq!((worker.driver(), worker.address()), (Driver::Worker, Some("ws://127.0.0.1:7778")));
        assert!(worker.steers() && !worker.rests(), "its memory is its connection");
        assert_eq!(worker.startup.pass_env, ["WORKER_TOKEN"]);
        assert!(matches!(described("worker:http://127.0.0.1:1"), Err(NamedError::Peer(_))));
        assert_eq!(described("worker:"), Err(NamedError::Empty));
        assert_eq!(described("claude"), Err(NamedError::Plain));
        assert_eq!(described("acp: "), Err(NamedError::Empty));
        assert_eq!(described("exec:a 'b"), Err(NamedError::Quote));
        assert!(matches!(described("a2a:ftp://x"), Err(NamedError::Address(_))));
        assert!(!is_described("box:thing") && is_described("exec:") && is_described("manifest:x.toml"));
    }

    #[test]
    fn a_name_may_say_in_which_file_its_agent_is_described() {
        let project = tempfile::tempdir().unwrap();
        std::fs::create_dir(project.path().join("agents")).unwrap();
        let text = "[agent]\nname = \"mine\"\nbinary = \"cat\"\ndriver = \"exec\"\n";
        std::fs::write(project.path().join("agents/mine.toml"), text).unwrap();
        let found = described_in("manifest:agents/mine.toml", project.path()).unwrap();
        assert_eq!(
            (found.agent.name.as_str(), found.agent.binary.as_str()),
            ("manifest:agents/mine.toml", "cat")
        );
        std::fs::write(project.path().join("bad.toml"), "[agent]\nname = 3\n").unwrap();
        for name in ["manifest:bad.toml", "manifest:none.toml"] {
            assert!(matches!(described_in(name, project.path()), Err(NamedError::File(_))), "{name}");
        }
        assert_eq!(described_in("manifest: ", project.path()), Err(NamedError::Empty));
        assert_eq!(described_in("exec:cat", project.path()), described("exec:cat"));
    }
}
