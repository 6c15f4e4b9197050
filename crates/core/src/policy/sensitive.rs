//! Files that are sensitive wherever they are: keys, tokens and passwords, and files that a login, a commit or a
//! scheduler runs. They are recognised by name only; a copy under another name is not.

use super::glob;

/// Directories and files that hold keys wherever they are.
const SECRET_NAMES: &[&str] = &[
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".netrc",
    ".pgpass",
    ".my.cnf",
    ".pypirc",
    ".npmrc",
    ".htpasswd",
    ".dockercfg",
    ".s3cfg",
    ".boto",
    ".git-credentials",
    ".vault-token",
    ".password-store",
    ".env",
    ".envrc",
    ".mozilla",
    ".bash_history",
    ".zsh_history",
    ".python_history",
    ".psql_history",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
    "credentials",
    ".credentials",
    "credentials.json",
    ".credentials.json",
    "oauth_creds.json",
    "secrets.json",
    "secrets.toml",
    "secrets.yaml",
    "secrets.yml",
];

/// Pairs of path components that hold keys only in combination.
const SECRET_PAIRS: &[[&str; 2]] = &[
    [".config", "gh"],
    [".config", "gcloud"],
    [".config", "op"],
    [".config", "google-chrome"],
    [".config", "chromium"],
    [".docker", "config.json"],
    [".cargo", "credentials.toml"],
    [".codex", "auth.json"],
    ["share", "keyrings"],
    ["Library", "Keychains"],
    ["quarterdeck", "token"],
];

/// Suffixes of files that hold keys.
const SECRET_SUFFIXES: &[&str] = &[".pem", ".key", ".p12", ".pfx", ".jks", ".kdbx", ".ppk"];

/// Whether a path names keys, tokens or passwords.
pub(super) fn is_secret_path(steps: &[&str], absolute: bool) -> bool {
    let system = absolute
        && match (steps.first(), steps.last()) {
            (Some(&"etc"), Some(last)) => last.contains("shadow") || *last == "sudoers",
            (Some(&"proc"), Some(last)) => matches!(*last, "environ" | "mem"),
            _ => false,
        };
    system
        || steps.iter().any(|step| is_secret_name(step))
        || steps.windows(2).any(|components| SECRET_PAIRS.iter().any(|pair| components == pair))
}

fn is_secret_name(name: &str) -> bool {
    let is_example = || ["example", "sample", "template", "dist"].iter().any(|end| name.ends_with(end));
    if name.contains(['*', '?', '[']) {
        // `.e*` would read `.env` as well. A pattern that matches almost anything does not count.
        return name.starts_with(['.', 'i']) && name.len() > 1 && {
            let pattern = without_brackets(name);
            let hidden = |secret: &&&str| secret.starts_with('.') || secret.starts_with("id_");
            SECRET_NAMES.iter().filter(hidden).any(|secret| glob::matches(&pattern, secret))
        };
    }
    SECRET_NAMES.contains(&name)
        || (name.starts_with(".env.") && !is_example())
        || SECRET_SUFFIXES.iter().any(|end| name.ends_with(end) && name.len() > end.len())
}

/// Replaces a shell's `[ab]` with a `?`, which matches at least as much.
fn without_brackets(name: &str) -> String {
    let mut plain = String::new();
    let mut rest = name;
    while let Some((before, after)) = rest.split_once('[') {
        plain.push_str(before);
        plain.push('?');
        rest = after.split_once(']').map_or("", |(_, rest)| rest);
    }
    plain + rest
}

/// Whether a file at this path is run later by a login, a commit or a scheduler.
pub(super) fn is_autorun_path(steps: &[&str]) -> bool {
    const LOGIN: &[&str] = &[
        ".bashrc",
        ".bash_profile",
        ".bash_login",
        ".bash_logout",
        ".profile",
        ".zshrc",
        ".zprofile",
        ".zshenv",
        ".zlogin",
        ".gitconfig",
    ];
    steps.iter().any(|step| LOGIN.contains(step))
        || steps.windows(2).any(|components| {
            matches!(components, [".git", "hooks" | "config"] | [".config", "systemd" | "autostart" | "fish"])
        })
}

/// Whether a text expands a variable that is named like a secret: `$GITHUB_TOKEN`.
pub(super) fn expands_secret_variable(text: &str) -> bool {
    text.split('$').skip(1).any(|after| {
        let after = after.strip_prefix('{').unwrap_or(after);
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
        is_secret_variable(&after[..end])
    })
}

/// Whether a variable's name suggests that its value is a secret.
pub(super) fn is_secret_variable(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    let words: Vec<&str> = name.split('_').collect();
    let is_secret_word = |word: &&str| {
        matches!(*word, "TOKEN" | "SECRET" | "PASSWORD" | "PASSWD" | "APIKEY" | "CREDENTIALS" | "PAT")
    };
    words.iter().any(is_secret_word)
        || words.windows(2).any(|pair| matches!(pair, ["API" | "ACCESS" | "PRIVATE" | "SIGNING", "KEY"]))
}

/// Whether a host is a cloud metadata service, which hands out the machine's own keys.
pub(super) fn is_metadata_host(host: &str) -> bool {
    matches!(
        host.to_ascii_lowercase().as_str(),
        "169.254.169.254"
            | "169.254.170.2"
            | "metadata.google.internal"
            | "metadata"
            | "100.100.100.200"
            | "fd00:ec2::254"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_known_by_its_name_and_by_a_pattern_that_covers_it() {
        for name in [".env", ".env.production", "server.key", ".e*", ".en?", ".en[vw]", "id_*", ".*"] {
            assert!(is_secret_path(&[name], false), "{name}");
        }
        for name in [".env.example", "*", "*.rs", "src", ".key", "i*.rs", "environment", "[ab]"] {
            assert!(!is_secret_path(&[name], false), "{name}");
        }
    }

    #[test]
    fn a_variable_that_holds_a_secret_is_known_by_its_name() {
        for text in
            ["$GITHUB_TOKEN", "Bearer ${ANTHROPIC_API_KEY}", "x$DB_PASSWORD", "$aws_secret_access_key"]
        {
            assert!(expands_secret_variable(text), "{text}");
        }
        for text in ["$HOME", "$KEY", "TOKEN", "$TOKENS_MAX", "$", "${x}"] {
            assert!(!expands_secret_variable(text), "{text}");
        }
    }
}
