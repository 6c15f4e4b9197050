//! Chooses which of an agent's environment variables hold secrets. Addresses, models and switches are variables too, and
//! a text in which these were replaced could not be understood any more.

use std::collections::BTreeMap;

use qd_catalog::matches_variable;
use qd_protocol::worker::{AgentSpec, SESSION_TOKEN_VAR, TOKEN_FILE_PREFIX};

/// The ends of words that say that a variable is a secret: `OPENAI_API_KEY`, `GITHUB_TOKEN`, `MYAPIKEY`. Not `TOKENS`,
/// because that is a number of them.
const SECRET_WORD_ENDS: &[&str] =
    &["KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE"];
/// Words that say it only as a whole: `DB_PASS`, but not `BYPASS`.
const SECRET_WORDS: &[&str] = &["PASS", "PWD", "PAT"];
/// Variables that have such a word in their name and are no secrets.
const ORDINARY_VARIABLES: &[&str] = &["PWD", "OLDPWD"];

/// The secrets of an agent's specification: the token of its session, and of its variables those whose name says so,
/// those that the agent's manifest lists, and the password in any address.
pub(super) fn secrets_of(spec: &AgentSpec) -> BTreeMap<String, String> {
    let listed = spec.manifest.as_ref().map_or(&[][..], |manifest| &manifest.startup.secret_env);
    let is_secret =
        |name: &str| is_secret_name(name) || listed.iter().any(|pattern| matches_variable(pattern, name));
    let token = spec.mcp.as_ref().map(|mcp| (SESSION_TOKEN_VAR.to_owned(), mcp.token.0.clone()));
    let is_path = |name: &str, value: &str| name == SESSION_TOKEN_VAR && value.starts_with(TOKEN_FILE_PREFIX);
    let variables = spec.env.iter().filter(|(name, value)| !is_path(name, value));
    let secrets = variables.filter_map(|(name, value)| {
        let secret = if is_secret(name) { Some(value.as_str()) } else { password_in_address(value) };
        Some((name.clone(), secret?.to_owned()))
    });
    token.into_iter().chain(secrets).collect()
}

fn is_secret_name(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    !ORDINARY_VARIABLES.contains(&name.as_str())
        && name.split(|character: char| !character.is_ascii_alphanumeric()).any(|word| {
            SECRET_WORDS.contains(&word) || SECRET_WORD_ENDS.iter().any(|end| word.ends_with(end))
        })
}

/// The password in `scheme://user:password@host`.
fn password_in_address(value: &str) -> Option<&str> {
    let (_, rest) = value.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let (user, _) = authority.rsplit_once('@')?;
    let (_, password) = user.split_once(':')?;
    Some(password)
}

#[cfg(test)]
mod tests {
    use qd_protocol::ids::{SessionId, WorkerId};
    use qd_protocol::manifest::Manifest;
    use qd_protocol::worker::{McpAccess, Secret};

    use super::*;

    fn spec(variables: &[(&str, &str)]) -> AgentSpec {
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[7; 8]), WorkerId::from_random(&[8; 8]), "demo", "/");
        spec.env = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        spec
    }

    #[test]
    fn a_name_says_whether_a_variable_is_a_secret() {
        for name in [
            "ANTHROPIC_API_KEY",
            "ANTHROPIC_AUTH_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "client_secret",
            "DB_PASSWORD",
            "DB_PASS",
            "GITHUB_PAT",
            "MYAPIKEY",
            "QD_SESSION_TOKEN",
            "SSH_PASSPHRASE",
        ] {
            assert!(is_secret_name(name), "{name}");
        }
        for name in [
            "ANTHROPIC_BASE_URL",
            "ANTHROPIC_MODEL",
            "BYPASS",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS",
            "COPILOT_HOME",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "KEYBOARD",
            "PATH",
            "PWD",
            "SECRETARY",
        ] {
            assert!(!is_secret_name(name), "{name}");
        }
    }

    #[test]
    fn an_ordinary_value_stays_readable_and_the_password_of_an_address_does_not() {
        let secrets = secrets_of(&spec(&[
            ("ANTHROPIC_MODEL", "claude-opus"),
            ("ANTHROPIC_BASE_URL", "http://127.0.0.1:8080/v1"),
            ("HTTPS_PROXY", "http://me:hunter2@proxy:3128/"),
            ("MODEL_KEY", "sk-123456"),
        ]));
        let expected = [("HTTPS_PROXY", "hunter2"), ("MODEL_KEY", "sk-123456")];
        assert_eq!(secrets, spec(&expected).env);
    }

    #[test]
    fn the_token_of_the_session_is_a_secret_and_the_path_of_its_file_is_not() {
        let mut spec = spec(&[(SESSION_TOKEN_VAR, "file:/q/tools/s/token")]);
        assert!(secrets_of(&spec).is_empty());
        let token = Secret("ses_1.0123456789".to_owned());
        spec.mcp = Some(Box::new(McpAccess { host: "unix:/s".to_owned(), token_file: "/t".into(), token }));
        assert_eq!(secrets_of(&spec)[SESSION_TOKEN_VAR], "ses_1.0123456789");
    }

    #[test]
    fn a_manifest_adds_variables() {
        let mut spec = spec(&[("ANTHROPIC_CUSTOM_HEADERS", "x-api: 123456"), ("OTHER", "123456")]);
        let mut manifest = Manifest::default();
        manifest.startup.secret_env = vec!["ANTHROPIC_CUSTOM_*".to_owned()];
        spec.manifest = Some(Box::new(manifest));
        assert_eq!(secrets_of(&spec).into_keys().collect::<Vec<_>>(), ["ANTHROPIC_CUSTOM_HEADERS"]);
    }
}
