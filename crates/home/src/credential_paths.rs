//! Where keys and credentials usually are. Agents that are confined to their workspace cannot read these paths.

/// What counts if the setting `credential_paths` is unset; `~` is the home directory. Paths that do not exist are skipped.
pub const CREDENTIAL_PATHS: [&str; 34] = [
    // Keys.
    "~/.ssh",
    "~/.gnupg",
    "~/.pki",
    "~/.age",
    "~/.config/age",
    "~/.config/sops",
    "~/.password-store",
    // Clouds and clusters.
    "~/.aws",
    "~/.azure",
    "~/.config/gcloud",
    "~/.config/doctl",
    "~/.config/hcloud",
    "~/.oci",
    "~/.kube",
    "~/.docker",
    "~/.config/containers",
    "~/.terraform.d",
    "~/.vault-token",
    // Registries, code hosts and databases.
    "~/.netrc",
    "~/.git-credentials",
    "~/.config/git/credentials",
    "~/.config/gh",
    "~/.config/glab-cli",
    "~/.npmrc",
    "~/.pypirc",
    "~/.cargo/credentials.toml",
    "~/.gem/credentials",
    "~/.pgpass",
    // Browsers and keyrings.
    "~/.mozilla",
    "~/.config/google-chrome",
    "~/.config/chromium",
    "~/.config/BraveSoftware",
    "~/.local/share/keyrings",
    "~/.local/share/kwalletd",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_lists_exactly_these_paths() {
        let page = include_str!("../../../docs/sandbox.md");
        let (_, section) = page.split_once("## What is hidden").unwrap();
        let table: Vec<&str> = section.lines().filter(|line| line.starts_with("| ")).collect();
        let words = table.iter().flat_map(|line| line.split('`'));
        let listed: Vec<&str> = words.filter(|word| word.starts_with("~/")).collect();
        assert_eq!(listed, CREDENTIAL_PATHS);
    }
}
