//! Paths and addresses as text: brought into order without asking the disk, and what kind of place they name. Links
//! are not followed here, since nothing is read; the workspace itself is not known, so an absolute path is nowhere
//! in particular.

/// Where a path leads, as far as its text tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// Below the directory that the agent works in.
    Inside,
    /// Absolute, and neither the system's nor a secret: it may well be the workspace.
    Absolute,
    /// Above the working directory, in the home, or wherever a variable says.
    Outside,
    /// The system's, or something that is run at the next login or commit.
    System,
    /// Keys, tokens, passwords.
    Secret,
}

/// The path without `.`, `..` and doubled slashes, so that `src/../../etc` does not pass for something in `src`.
pub(super) fn normalise(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut kept: Vec<&str> = Vec::new();
    for step in path.split('/') {
        match step {
            "" | "." => {}
            ".." => match kept.last() {
                // The home is not a step that can be taken back: nobody here knows what is above it.
                Some(&last) if last != ".." && !(kept.len() == 1 && !absolute && last.starts_with('~')) => {
                    kept.pop();
                }
                None if absolute => {}
                _ => kept.push(".."),
            },
            step => kept.push(step),
        }
    }
    finish(absolute, &kept)
}

/// A pattern for paths in the same order as the paths. Its `..` stay: a wildcard before one may be several steps.
pub(super) fn normalise_pattern(pattern: &str) -> String {
    let kept: Vec<&str> = pattern.split('/').filter(|step| !matches!(*step, "" | ".")).collect();
    finish(pattern.starts_with('/'), &kept)
}

fn finish(absolute: bool, steps: &[&str]) -> String {
    match (absolute, steps) {
        (true, steps) => format!("/{}", steps.join("/")),
        (false, []) => ".".to_owned(),
        (false, steps) => steps.join("/"),
    }
}

/// Whether a text is an address rather than a path.
pub(super) fn is_address(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+.-".contains(c))
    })
}

/// The address as a browser would ask for it, or nothing if it is written so that two readers could take it for two
/// different addresses.
pub(super) fn normalise_address(address: &str) -> Option<String> {
    if address.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
        return None;
    }
    let (scheme, rest) = address.split_once("://")?;
    let (place, tail) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    let (host, path) = place.split_at(place.find('/').unwrap_or(place.len()));
    if host.contains('@') {
        return None;
    }
    let path = path.replace("%2e", ".").replace("%2E", ".");
    let mut ordered = if path.is_empty() { String::new() } else { normalise(&path) };
    if path.len() > 1 && path.ends_with('/') && ordered.len() > 1 {
        ordered.push('/');
    }
    Some(format!("{}://{}{ordered}{tail}", scheme.to_ascii_lowercase(), host.to_ascii_lowercase()))
}

/// The host of an address, without user and port.
pub(super) fn host(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let place = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let place = place.rsplit_once('@').map_or(place, |(_, host)| host);
    if let Some(six) = place.strip_prefix('[') {
        return six.split(']').next().unwrap_or_default();
    }
    place.split(':').next().unwrap_or_default()
}

/// Where a path leads.
pub(super) fn place(path: &str) -> Place {
    let path = normalise(path);
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    let absolute = path.starts_with('/');
    if is_secret(&steps, absolute) {
        return Place::Secret;
    }
    if runs_later(&steps) {
        return Place::System;
    }
    let first = steps.first().copied().unwrap_or_default();
    if !absolute {
        return if first == ".." || first.starts_with('~') || path.contains('$') {
            Place::Outside
        } else {
            Place::Inside
        };
    }
    let second = steps.get(1).copied().unwrap_or_default();
    match first {
        "dev" if matches!(second, "null" | "zero" | "stdin" | "stdout" | "stderr" | "tty" | "fd") => {
            Place::Absolute
        }
        "var" if matches!(second, "tmp" | "folders") => Place::Absolute,
        "" => Place::System,
        first if SYSTEM.contains(&first) => Place::System,
        _ => Place::Absolute,
    }
}

/// Directories at the root that belong to the system.
const SYSTEM: &[&str] = &[
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr",
    "var", "System", "Library",
];

/// Directories and files that hold keys wherever they are.
const SECRETS: &[&str] = &[
    ".ssh",
    ".gnupg",
    ".aws",
    ".azure",
    ".kube",
    ".netrc",
    ".pgpass",
    ".pypirc",
    ".git-credentials",
    ".vault-token",
    ".password-store",
    ".env",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
];

fn is_secret(steps: &[&str], absolute: bool) -> bool {
    let example =
        |name: &str| ["example", "sample", "template", "dist"].iter().any(|end| name.ends_with(end));
    let named = steps.iter().any(|step| {
        SECRETS.contains(step) || (step.starts_with(".env.") && !example(step)) || step.ends_with(".pem")
    });
    let pair = |a: &str, b: &str| steps.windows(2).any(|two| two == [a, b]);
    let system = absolute
        && match (steps.first(), steps.last()) {
            (Some(&"etc"), Some(last)) => last.contains("shadow") || *last == "sudoers",
            (Some(&"proc"), Some(last)) => matches!(*last, "environ" | "mem"),
            _ => false,
        };
    named
        || system
        || pair(".config", "gh")
        || pair(".config", "gcloud")
        || pair(".docker", "config.json")
        || pair(".cargo", "credentials.toml")
        || pair("quarterdeck", "token")
}

/// What is written there is run later, by a login, a commit or a scheduler.
fn runs_later(steps: &[&str]) -> bool {
    const LOGIN: &[&str] = &[
        ".bashrc",
        ".bash_profile",
        ".bash_login",
        ".profile",
        ".zshrc",
        ".zprofile",
        ".zshenv",
        ".zlogin",
        ".gitconfig",
    ];
    steps.iter().any(|step| LOGIN.contains(step))
        || steps.windows(2).any(|two| {
            matches!(two, [".git", "hooks" | "config"] | [".config", "systemd" | "autostart" | "fish"])
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_brought_into_order_by_its_text_alone() {
        for (path, expected) in [
            ("src/lib.rs", "src/lib.rs"),
            ("./src//lib.rs", "src/lib.rs"),
            ("src/./a/../b", "src/b"),
            ("src/../../etc/passwd", "../etc/passwd"),
            ("../../x", "../../x"),
            ("/../../etc", "/etc"),
            ("/srv/../etc/", "/etc"),
            ("", "."),
            (".", "."),
            ("/", "/"),
            ("~/../etc", "~/../etc"),
            ("a/..", "."),
            ("...", "..."),
        ] {
            assert_eq!(normalise(path), expected, "{path:?}");
            assert_eq!(normalise(&normalise(path)), expected, "{path:?} twice");
        }
    }

    #[test]
    fn an_address_is_brought_into_order_or_refused() {
        for (address, expected) in [
            ("https://Example.com/docs/a", Some("https://example.com/docs/a")),
            ("HTTPS://example.com/docs/../admin", Some("https://example.com/admin")),
            ("https://example.com/docs/%2e%2E/admin/", Some("https://example.com/admin/")),
            ("https://example.com?q=/../x", Some("https://example.com?q=/../x")),
            ("https://example.com/", Some("https://example.com/")),
            ("https://docs.rs@evil.com/", None),
            ("https://docs.rs\\@evil.com/", None),
            ("https://docs.rs/ x", None),
            ("not an address", None),
        ] {
            assert_eq!(normalise_address(address).as_deref(), expected, "{address:?}");
        }
        assert_eq!(host("http://user@[::1]:80/x"), "::1");
        assert_eq!(host("localhost:8080/x"), "localhost");
    }

    #[test]
    fn a_place_is_told_by_the_path() {
        for (path, expected) in [
            ("src/lib.rs", Place::Inside),
            ("a/../b", Place::Inside),
            ("../b", Place::Outside),
            ("~/notes", Place::Outside),
            ("$HOME/notes", Place::Outside),
            ("/srv/app/src", Place::Absolute),
            ("/dev/null", Place::Absolute),
            ("/tmp/x", Place::Absolute),
            ("/tmp/../etc/hosts", Place::System),
            ("/", Place::System),
            ("~/.bashrc", Place::System),
            (".git/hooks/pre-commit", Place::System),
            ("~/.ssh/id_rsa", Place::Secret),
            ("/etc/shadow", Place::Secret),
            ("/proc/self/environ", Place::Secret),
            (".env", Place::Secret),
            ("app/.env.production", Place::Secret),
            (".env.example", Place::Inside),
        ] {
            assert_eq!(place(path), expected, "{path:?}");
        }
    }
}
