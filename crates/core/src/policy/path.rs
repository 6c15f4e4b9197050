//! Paths and addresses as text: normalised without looking at the disk, and classified by location. Callers pass the
//! workspace if they know it; without it, the location of an absolute path is unclear. Links are not followed: a link
//! in the workspace that leads out of it counts as inside, and a path through a link that leads into it as outside.

use super::sensitive::{is_autorun_path, is_secret_path};

/// Where a path leads, as far as its text shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathLocation {
    /// The directory that the agent works in, or below it.
    Inside,
    /// The null device and similar devices, which store nothing.
    NullDevice,
    /// Perhaps inside: an absolute path while the workspace is not known, or a path that depends on a variable.
    Unclear,
    /// Above the working directory, in the home directory, or an absolute path outside the workspace.
    Outside,
    /// Part of the system, or a file that is run at the next login or commit.
    System,
    /// Keys, tokens, passwords.
    Secret,
}

/// The path without `.`, `..` and doubled slashes, so that `src/../../etc` does not pass for something in `src`.
pub(super) fn normalise(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut components: Vec<&str> = Vec::new();
    for step in path.split('/') {
        match step {
            "" | "." => {}
            ".." => match components.last() {
                // `..` does not cancel `~`: what is above the home directory is not known here.
                Some(&last)
                    if last != ".." && !(components.len() == 1 && !absolute && last.starts_with('~')) =>
                {
                    components.pop();
                }
                None if absolute => {}
                _ => components.push(".."),
            },
            step => components.push(step),
        }
    }
    join_steps(absolute, &components)
}

/// Normalises a pattern like the paths that it is matched against. A `..` in it stays: a wildcard before it may stand
/// for several components.
pub(super) fn normalise_pattern(pattern: &str) -> String {
    let components: Vec<&str> = pattern.split('/').filter(|step| !matches!(*step, "" | ".")).collect();
    join_steps(pattern.starts_with('/'), &components)
}

fn join_steps(absolute: bool, steps: &[&str]) -> String {
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

/// The address as a browser would request it. `None` if different parsers could read it as different addresses.
pub(super) fn normalise_address(address: &str) -> Option<String> {
    if address.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
        return None;
    }
    let (scheme, rest) = address.split_once("://")?;
    let (authority_and_path, tail) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    let (host, path) =
        authority_and_path.split_at(authority_and_path.find('/').unwrap_or(authority_and_path.len()));
    if host.contains('@') {
        return None;
    }
    let path = path.replace("%2e", ".").replace("%2E", ".");
    let mut normalised = if path.is_empty() { String::new() } else { normalise(&path) };
    if path.len() > 1 && path.ends_with('/') && normalised.len() > 1 {
        normalised.push('/');
    }
    Some(format!("{}://{}{normalised}{tail}", scheme.to_ascii_lowercase(), host.to_ascii_lowercase()))
}

/// The host of an address, without user and port.
pub(super) fn address_host(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    if let Some(ipv6) = authority.strip_prefix('[') {
        return ipv6.split(']').next().unwrap_or_default();
    }
    authority.split(':').next().unwrap_or_default()
}

/// Where a path leads. A path below the workspace is treated like the same path written relative to it.
pub(super) fn locate_path(path: &str, workspace: Option<&str>) -> PathLocation {
    let path = normalise(path);
    let path = relative_to_workspace(&path, workspace).unwrap_or(&path);
    let steps: Vec<&str> = path.split('/').filter(|step| !step.is_empty()).collect();
    let absolute = path.starts_with('/');
    if is_secret_path(&steps, absolute) {
        return PathLocation::Secret;
    }
    if is_autorun_path(&steps) {
        return PathLocation::System;
    }
    let first = steps.first().copied().unwrap_or_default();
    if !absolute {
        return match first {
            ".." | "$HOME" | "${HOME}" => PathLocation::Outside,
            first if first.starts_with('~') => PathLocation::Outside,
            _ if path.contains('$') => PathLocation::Unclear,
            _ => PathLocation::Inside,
        };
    }
    match steps.as_slice() {
        ["dev", "null" | "zero" | "stdin" | "stdout" | "stderr"] => PathLocation::NullDevice,
        [] => PathLocation::System,
        ["var", "tmp" | "folders", ..] if workspace.is_none() => PathLocation::Unclear,
        ["var", "tmp" | "folders", ..] => PathLocation::Outside,
        [first, ..] if SYSTEM_DIRECTORIES.contains(first) => PathLocation::System,
        _ if workspace.is_none() => PathLocation::Unclear,
        // The variable may hold the workspace's own path, or the beginning of it.
        _ if first.contains('$') => PathLocation::Unclear,
        _ => PathLocation::Outside,
    }
}

/// A normalised absolute path, relative to the workspace; `None` if it is not below it.
pub(super) fn relative_to_workspace<'p>(path: &'p str, workspace: Option<&str>) -> Option<&'p str> {
    let workspace = workspace?.trim_end_matches('/');
    // With `/` as the workspace nothing would be outside, which cannot be intended.
    if !workspace.starts_with('/') {
        return None;
    }
    match path.strip_prefix(workspace)? {
        "" => Some("."),
        rest => rest.strip_prefix('/'),
    }
}

const SYSTEM_DIRECTORIES: &[&str] = &[
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "usr",
    "var", "System", "Library",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_normalised_by_its_text_alone() {
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
    fn an_address_is_normalised_or_refused() {
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
        assert_eq!(address_host("http://user@[::1]:80/x"), "::1");
        assert_eq!(address_host("localhost:8080/x"), "localhost");
    }

    #[test]
    fn a_location_is_found_by_the_path() {
        for (path, expected) in [
            ("src/lib.rs", PathLocation::Inside),
            ("a/../b", PathLocation::Inside),
            ("../b", PathLocation::Outside),
            ("~/notes", PathLocation::Outside),
            ("$HOME/notes", PathLocation::Outside),
            ("$X/notes", PathLocation::Unclear),
            ("/srv/app/src", PathLocation::Unclear),
            ("/dev/null", PathLocation::NullDevice),
            ("/tmp/x", PathLocation::Unclear),
            ("/tmp/../etc/hosts", PathLocation::System),
            ("/", PathLocation::System),
            ("~/.bashrc", PathLocation::System),
            (".git/hooks/pre-commit", PathLocation::System),
            ("~/.ssh/id_rsa", PathLocation::Secret),
            ("/etc/shadow", PathLocation::Secret),
            ("/proc/self/environ", PathLocation::Secret),
            (".env", PathLocation::Secret),
            ("app/.env.production", PathLocation::Secret),
            (".env.example", PathLocation::Inside),
        ] {
            assert_eq!(locate_path(path, None), expected, "{path:?}");
        }
    }

    #[test]
    fn an_absolute_path_is_inside_or_outside_once_the_workspace_is_known() {
        for workspace in ["/srv/app", "/srv/app/"] {
            for (path, expected) in [
                ("/srv/app/src/lib.rs", PathLocation::Inside),
                ("/srv/app", PathLocation::Inside),
                ("/srv/app/./a/../b", PathLocation::Inside),
                ("/srv/app/../app/x", PathLocation::Inside),
                ("/srv/app/../other", PathLocation::Outside),
                ("/srv/apple/x", PathLocation::Outside),
                ("/srv", PathLocation::Outside),
                ("/home/ann/x", PathLocation::Outside),
                ("/tmp/x", PathLocation::Outside),
                ("/var/tmp/x", PathLocation::Outside),
                ("/dev/null", PathLocation::NullDevice),
                ("/etc/hosts", PathLocation::System),
                ("/srv/app/.env", PathLocation::Secret),
                ("/srv/app/.git/hooks/x", PathLocation::System),
                ("/srv/app/$X", PathLocation::Unclear),
                ("src/lib.rs", PathLocation::Inside),
                ("../app/x", PathLocation::Outside),
            ] {
                assert_eq!(locate_path(path, Some(workspace)), expected, "{path:?}");
            }
        }
        assert_eq!(locate_path("/root/app/x", Some("/root/app")), PathLocation::Inside);
        assert_eq!(locate_path("/etc/hosts", Some("/")), PathLocation::System);
        assert_eq!(locate_path("/srv/credentials/x", Some("/srv/credentials")), PathLocation::Inside);
    }
}
