//! Changes one setting in a home's `config.toml`, for `qd config set` and `unset`. Comments and the order of the file
//! stay. Nothing is written unless the file is valid afterwards.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use toml_edit::{DocumentMut, Item, Value};

use crate::config::{ConfigError, DaemonConfig, read_config_file};
use crate::home::DaemonHome;

impl DaemonConfig {
    /// Sets `key` in the home's settings file. `value` is TOML; a text that is no valid value of this key as TOML, like
    /// `claude`, is taken as a string. Returns the settings that now apply.
    pub fn set(home: &DaemonHome, key: &str, value: &str) -> Result<Self, ConfigError> {
        Self::check_key(key)?;
        let mut candidates: Vec<Value> = value.parse().into_iter().collect();
        candidates.push(Value::from(value));
        let mut refused = None;
        for candidate in candidates {
            match edit_config(home, key, |document| document.insert(key, Item::Value(candidate))) {
                Ok(config) => return Ok(config),
                Err(ConfigError::InvalidChange { message, .. }) => refused = refused.or(Some(message)),
                Err(error) => return Err(error),
            }
        }
        let message = refused.expect("a string is always a candidate");
        Err(ConfigError::InvalidChange { key: key.to_owned(), value: value.to_owned(), message })
    }

    /// Removes `key` from the home's settings file, so that the user's file or the default applies.
    pub fn unset(home: &DaemonHome, key: &str) -> Result<Self, ConfigError> {
        Self::check_key(key)?;
        edit_config(home, key, |document| document.remove(key))
    }
}

/// Applies `edit` to the home's settings file, and writes it if the result is valid.
fn edit_config(
    home: &DaemonHome,
    key: &str,
    edit: impl FnOnce(&mut DocumentMut) -> Option<Item>,
) -> Result<DaemonConfig, ConfigError> {
    // A file that cannot be used is reported as it is, not with the change in it.
    DaemonConfig::load(home)?;
    let path = resolve_link(&home.config_file());
    let text = read_config_file(&path)?.unwrap_or_default();
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| {
        let message = error.message().to_owned();
        ConfigError::Invalid { path: path.clone(), line: 1, message }
    })?;
    edit(&mut document);
    let text = document.to_string();
    let edited = document.get(key).map(ToString::to_string).unwrap_or_default();
    DaemonConfig::check_text(home, &path, &text).map_err(|error| match error {
        ConfigError::Invalid { message, .. } => {
            ConfigError::InvalidChange { key: key.to_owned(), value: edited.trim().to_owned(), message }
        }
        other => other,
    })?;
    let unwritable = |source: io::Error| ConfigError::Unwritable { path: path.clone(), source };
    qd_files::replace_file(&path, text.as_bytes()).map_err(unwritable)?;
    DaemonConfig::load(home)
}

/// The file that a link leads to: people keep their settings in a repository and link to them.
fn resolve_link(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct TestConfigHome {
        folder: tempfile::TempDir,
        home: DaemonHome,
    }

    fn home_with(text: &str) -> TestConfigHome {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        fs::write(home.config_file(), text).unwrap();
        TestConfigHome { folder, home }
    }

    impl TestConfigHome {
        fn text(&self) -> String {
            fs::read_to_string(self.home.config_file()).unwrap()
        }
    }

    #[test]
    fn a_setting_is_added_changed_and_removed_and_comments_stay() {
        let test = home_with("# mine\nidle_s = 60 # one minute\n");
        let config = DaemonConfig::set(&test.home, "agent", "claude").unwrap();
        assert_eq!(config.agent.value.as_deref(), Some("claude"));
        DaemonConfig::set(&test.home, "max_agents", "8").unwrap();
        DaemonConfig::set(&test.home, "listen", "[\"127.0.0.1:7777\"]").unwrap();
        assert_eq!(
            test.text(),
            "# mine\nidle_s = 60 # one minute\nagent = \"claude\"\nmax_agents = 8\nlisten = [\"127.0.0.1:7777\"]\n"
        );
        DaemonConfig::set(&test.home, "agent", "codex").unwrap();
        DaemonConfig::unset(&test.home, "listen").unwrap();
        DaemonConfig::unset(&test.home, "log").unwrap();
        assert_eq!(test.text(), "# mine\nidle_s = 60 # one minute\nagent = \"codex\"\nmax_agents = 8\n");
    }

    #[test]
    fn a_word_that_is_also_toml_is_a_string_where_the_key_wants_one() {
        let test = home_with("");
        assert_eq!(DaemonConfig::set(&test.home, "agent", "7").unwrap().agent.value.as_deref(), Some("7"));
        assert!(!DaemonConfig::set(&test.home, "mcp", "false").unwrap().mcp.value);
    }

    #[test]
    fn an_invalid_change_is_refused_and_the_file_stays() {
        let test = home_with("idle_s = 60\n");
        for (key, value, hint) in [
            (
                "idle_s",
                "soon",
                "`idle_s` cannot be `soon`: invalid type: string \"soon\", expected a whole number",
            ),
            ("max_agents", "0", "at least 1"),
            ("idel_s", "3", "did you mean `idle_s`?"),
        ] {
            let error = DaemonConfig::set(&test.home, key, value).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
        let error = DaemonConfig::unset(&test.home, "idel_s").unwrap_err().to_string();
        assert!(error.contains("did you mean `idle_s`?"), "{error}");
        assert_eq!(test.text(), "idle_s = 60\n");
    }

    #[test]
    fn a_file_that_is_a_link_stays_one() {
        let test = home_with("");
        let kept = test.folder.path().join("dotfiles.toml");
        fs::write(&kept, "log = \"debug\"\n").unwrap();
        fs::remove_file(test.home.config_file()).unwrap();
        std::os::unix::fs::symlink(&kept, test.home.config_file()).unwrap();
        DaemonConfig::set(&test.home, "agent", "claude").unwrap();
        assert!(test.home.config_file().is_symlink());
        assert_eq!(fs::read_to_string(&kept).unwrap(), "log = \"debug\"\nagent = \"claude\"\n");
    }
}
