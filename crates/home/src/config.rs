//! `config.toml`, in the home and in the user's configuration directory. Every value knows where it came from, so
//! that `qd config` can show the effective settings and their origins. Only these two files are read here; the caller
//! applies command line flags on top.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use qd_protocol::limits::{
    AGENT_OUTPUT_MB_PER_MIN, AGENT_PROCESSES_MAX, ORPHAN_BUSY_S, ORPHAN_IDLE_S, REACH_TIMEOUT_S,
    REMOTE_LEASE_S, SILENCE_NOTICE_S,
};
use qd_protocol::manifest::TokenPrice;
use qd_protocol::model_host::ModelHostSetting;
use qd_protocol::policy::Policy;
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};
use serde::Serialize;
use serde::de::{DeserializeOwned, Error as _};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::home::{DaemonHome, user_directory};
use crate::listen_address::ListenAddress;

/// The default of `idle_s`.
const DEFAULT_IDLE_S: u64 = 300;
/// The default of `merge_after_s`.
const DEFAULT_MERGE_AFTER_S: u64 = 24 * 3600;
/// The default of `max_agents`.
const DEFAULT_MAX_AGENTS: usize = 256;
/// The default of `min_free_mb`.
const DEFAULT_MIN_FREE_MB: u64 = 256;
/// The largest `remote_lease_s`: a worker that is away for a day does not come back.
const REMOTE_LEASE_MAX_S: u64 = 24 * 3600;
/// The largest `reach_timeout_s`: a session waits for its worker all this time.
const REACH_TIMEOUT_MAX_S: u64 = 24 * 3600;
/// The largest `orphan_busy_s` and `orphan_idle_s`: work from a year ago is of no use to anybody.
const ORPHAN_MAX_S: u64 = 365 * 24 * 3600;
/// The largest `silence_notice_s` and `silence_timeout_s`: no model thinks for a day.
const SILENCE_MAX_S: u64 = 24 * 3600;
/// The largest settings file that is read; a larger file cannot be meant as one.
const CONFIG_FILE_MAX: u64 = 1 << 20;

/// The effective settings.
#[derive(Debug, Clone)]
pub struct DaemonConfig {
    /// The agent of `qd run` without `--agent`.
    pub agent: ConfigSetting<Option<String>>,
    /// The policy of sessions that do not set one.
    pub policy: ConfigSetting<Policy>,
    /// The addresses that `qd serve` without `--listen` listens on.
    pub listen: ConfigSetting<Vec<ListenAddress>>,
    /// Names that a `Host` header may have besides our own.
    pub allow_host: ConfigSetting<Vec<String>>,
    /// How many seconds an idle agent is kept before it is stopped.
    pub idle_s: ConfigSetting<u64>,
    /// How many agents may live at once; further sessions wait for a slot.
    pub max_agents: ConfigSetting<usize>,
    /// How many MiB of memory must be free before another agent starts; 0 turns the check off.
    pub min_free_mb: ConfigSetting<u64>,
    /// How many processes an agent and all that it starts may be; 0 means any number.
    pub max_processes: ConfigSetting<u64>,
    /// How many MiB of memory these may use together; 0 means any amount. Unset: four fifths of the machine's memory.
    pub max_memory_mb: ConfigSetting<Option<u64>>,
    /// How many MiB an agent may say in a minute; 0 means any amount.
    pub max_output_mb_per_min: ConfigSetting<u64>,
    /// How many seconds a silent joined worker is waited for before its sessions count as lost.
    pub remote_lease_s: ConfigSetting<u64>,
    /// How many seconds a worker that lives but does not answer is tried before it is ended.
    pub reach_timeout_s: ConfigSetting<u64>,
    /// How many seconds a worker without a daemon keeps an agent that is in a turn.
    pub orphan_busy_s: ConfigSetting<u64>,
    /// How many seconds a worker without a daemon keeps an agent that is idle.
    pub orphan_idle_s: ConfigSetting<u64>,
    /// After how many seconds without a word from an agent in a turn a notice says so; 0 means never.
    pub silence_notice_s: ConfigSetting<u64>,
    /// After how many seconds without a word from an agent its turn is ended as an error; 0 means never.
    pub silence_timeout_s: ConfigSetting<u64>,
    /// Token prices by model, for agents that report only how many tokens they used.
    pub prices: ConfigSetting<BTreeMap<String, TokenPrice>>,
    /// Whether agents get the tools of `qd mcp`, if they can take them.
    pub mcp: ConfigSetting<bool>,
    /// How strongly agents are confined, unless a session or a manifest says otherwise.
    pub sandbox: ConfigSetting<SandboxSetting>,
    /// Whether agents reach the network, unless a session or a manifest says otherwise.
    pub network: ConfigSetting<NetworkSetting>,
    /// Keys and credentials that agents cannot read at `workspace`; `~` is the home directory. Unset: the list in
    /// [`CREDENTIAL_PATHS`](crate::CREDENTIAL_PATHS).
    pub credential_paths: ConfigSetting<Option<Vec<String>>>,
    /// Hosts of models, which agents reach even if their network is off, beside those of their manifests.
    pub model_hosts: ConfigSetting<Vec<String>>,
    /// How many seconds old streamed text must be before it is merged; 0 means never.
    pub merge_after_s: ConfigSetting<u64>,
    /// What is logged: a level, or a filter of levels by module.
    pub log: ConfigSetting<String>,
}

/// A value and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigSetting<T> {
    pub value: T,
    pub origin: SettingOrigin,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    /// No file sets the value.
    Default,
    /// A line of a settings file sets it.
    File {
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
        }
    }
}

/// One line of the output of `qd config`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConfigEntry {
    pub key: &'static str,
    pub value: serde_json::Value,
    /// `default`, or file and line.
    pub origin: String,
}

/// A settings file that cannot be used. The daemon does not start with part of one.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file exists but cannot be read.
    #[error("could not read {path}: {source}")]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file is not TOML, or a value has the wrong type.
    #[error("{path}:{line}: {message}")]
    Invalid {
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        message: String,
    },
    /// The settings cannot have this value, so the file was not changed.
    #[error("`{key}` cannot be `{value}`: {message}")]
    InvalidChange {
        key: String,
        /// The value as given.
        value: String,
        message: String,
    },
    /// The changed file cannot be written.
    #[error("could not write {path}: {source}")]
    Unwritable { path: PathBuf, source: io::Error },
    /// The key does not exist; it is usually misspelled.
    #[error("there is no key `{key}`; did you mean `{nearest}`?")]
    NoSuchKey {
        /// The key as given.
        key: String,
        /// The most similar valid key.
        nearest: &'static str,
    },
    /// A file sets a key that does not exist.
    #[error("{path}:{line}: there is no key `{key}`; did you mean `{nearest}`?")]
    UnknownKey {
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The key as written.
        key: String,
        /// The most similar valid key.
        nearest: &'static str,
    },
}

const KEYS: [&str; 24] = [
    "agent",
    "policy",
    "listen",
    "allow_host",
    "idle_s",
    "max_agents",
    "min_free_mb",
    "max_processes",
    "max_memory_mb",
    "max_output_mb_per_min",
    "remote_lease_s",
    "reach_timeout_s",
    "orphan_busy_s",
    "orphan_idle_s",
    "silence_notice_s",
    "silence_timeout_s",
    "prices",
    "mcp",
    "sandbox",
    "network",
    "credential_paths",
    "model_hosts",
    "merge_after_s",
    "log",
];

impl DaemonConfig {
    /// The effective settings of this home: its own file over the user's file over the defaults. A missing file is
    /// not an error.
    pub fn load(home: &DaemonHome) -> Result<Self, ConfigError> {
        Self::load_from(home, user_config_file().as_deref())
    }

    /// Like [`Self::load`], with the path of the user's file given.
    pub fn load_from(home: &DaemonHome, user: Option<&Path>) -> Result<Self, ConfigError> {
        let mut config = Self::defaults(home);
        for path in user.into_iter().chain([home.config_file().as_path()]) {
            if let Some(text) = read_config_file(path)? {
                config.apply_file(path, &text)?;
            }
        }
        Ok(config)
    }

    /// Checks that a settings file with this text would be valid.
    pub(crate) fn check_text(home: &DaemonHome, path: &Path, text: &str) -> Result<(), ConfigError> {
        Self::defaults(home).apply_file(path, text)
    }

    /// Checks that there is such a key.
    pub(crate) fn check_key(key: &str) -> Result<(), ConfigError> {
        match KEYS.contains(&key) {
            true => Ok(()),
            false => Err(ConfigError::NoSuchKey { key: key.to_owned(), nearest: nearest_key(key) }),
        }
    }

    /// Every key with its value and origin, in the order of the documentation.
    pub fn entries(&self) -> Vec<ConfigEntry> {
        fn entry<T: Serialize>(key: &'static str, setting: &ConfigSetting<T>) -> ConfigEntry {
            let value = serde_json::to_value(&setting.value).expect("settings are plain data");
            ConfigEntry { key, value, origin: setting.origin.to_string() }
        }
        vec![
            entry("agent", &self.agent),
            entry("policy", &self.policy),
            entry("listen", &self.listen),
            entry("allow_host", &self.allow_host),
            entry("idle_s", &self.idle_s),
            entry("max_agents", &self.max_agents),
            entry("min_free_mb", &self.min_free_mb),
            entry("max_processes", &self.max_processes),
            entry("max_memory_mb", &self.max_memory_mb),
            entry("max_output_mb_per_min", &self.max_output_mb_per_min),
            entry("remote_lease_s", &self.remote_lease_s),
            entry("reach_timeout_s", &self.reach_timeout_s),
            entry("orphan_busy_s", &self.orphan_busy_s),
            entry("orphan_idle_s", &self.orphan_idle_s),
            entry("silence_notice_s", &self.silence_notice_s),
            entry("silence_timeout_s", &self.silence_timeout_s),
            entry("prices", &self.prices),
            entry("mcp", &self.mcp),
            entry("sandbox", &self.sandbox),
            entry("network", &self.network),
            entry("credential_paths", &self.credential_paths),
            entry("model_hosts", &self.model_hosts),
            entry("merge_after_s", &self.merge_after_s),
            entry("log", &self.log),
        ]
    }

    fn defaults(home: &DaemonHome) -> Self {
        fn default<T>(value: T) -> ConfigSetting<T> {
            ConfigSetting { value, origin: SettingOrigin::Default }
        }
        Self {
            agent: default(None),
            policy: default(Policy::default()),
            listen: default(vec![ListenAddress::Unix(home.socket())]),
            allow_host: default(Vec::new()),
            idle_s: default(DEFAULT_IDLE_S),
            max_agents: default(DEFAULT_MAX_AGENTS),
            min_free_mb: default(DEFAULT_MIN_FREE_MB),
            max_processes: default(AGENT_PROCESSES_MAX),
            max_memory_mb: default(None),
            max_output_mb_per_min: default(AGENT_OUTPUT_MB_PER_MIN),
            remote_lease_s: default(REMOTE_LEASE_S),
            reach_timeout_s: default(REACH_TIMEOUT_S),
            orphan_busy_s: default(ORPHAN_BUSY_S),
            orphan_idle_s: default(ORPHAN_IDLE_S),
            silence_notice_s: default(SILENCE_NOTICE_S),
            silence_timeout_s: default(0),
            prices: default(BTreeMap::new()),
            mcp: default(true),
            sandbox: default(SandboxSetting::default()),
            network: default(NetworkSetting::default()),
            credential_paths: default(None),
            model_hosts: default(Vec::new()),
            merge_after_s: default(DEFAULT_MERGE_AFTER_S),
            log: default("info".to_owned()),
        }
    }

    fn apply_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let table = DeTable::parse(text).map_err(|error| invalid_setting(path, text, &error, 0))?;
        for (key, value) in table.into_inner() {
            let start = key.span().start;
            let line = line_of(text, start);
            let origin = SettingOrigin::File { path: path.to_owned(), line };
            let failed = |error: toml::de::Error| invalid_setting(path, text, &error, start);
            match key.get_ref().as_ref() {
                "agent" => {
                    self.agent = ConfigSetting { value: Some(read_value(value).map_err(failed)?), origin }
                }
                "policy" => self.policy = ConfigSetting { value: read_value(value).map_err(failed)?, origin },
                "listen" => {
                    self.listen = ConfigSetting { value: read_addresses(value).map_err(failed)?, origin }
                }
                "allow_host" => {
                    self.allow_host = ConfigSetting { value: read_value(value).map_err(failed)?, origin }
                }
                "idle_s" => self.idle_s = ConfigSetting { value: read_value(value).map_err(failed)?, origin },
                "max_agents" => {
                    let value = read_value(value).map_err(failed)?;
                    if value == 0 {
                        return Err(failed(toml::de::Error::custom("`max_agents` must be at least 1")));
                    }
                    self.max_agents = ConfigSetting { value, origin };
                }
                "min_free_mb" => {
                    self.min_free_mb = ConfigSetting { value: read_value(value).map_err(failed)?, origin };
                }
                "max_processes" => {
                    self.max_processes = ConfigSetting { value: read_value(value).map_err(failed)?, origin };
                }
                "max_memory_mb" => {
                    let value = Some(read_value(value).map_err(failed)?);
                    self.max_memory_mb = ConfigSetting { value, origin };
                }
                "max_output_mb_per_min" => {
                    let value = read_value(value).map_err(failed)?;
                    self.max_output_mb_per_min = ConfigSetting { value, origin };
                }
                "remote_lease_s" => {
                    let value = read_seconds(value, REMOTE_LEASE_MAX_S).map_err(failed)?;
                    self.remote_lease_s = ConfigSetting { value, origin };
                }
                "reach_timeout_s" => {
                    let value = read_seconds(value, REACH_TIMEOUT_MAX_S).map_err(failed)?;
                    self.reach_timeout_s = ConfigSetting { value, origin };
                }
                "orphan_busy_s" => {
                    let value = read_seconds(value, ORPHAN_MAX_S).map_err(failed)?;
                    self.orphan_busy_s = ConfigSetting { value, origin };
                }
                "orphan_idle_s" => {
                    let value = read_seconds(value, ORPHAN_MAX_S).map_err(failed)?;
                    self.orphan_idle_s = ConfigSetting { value, origin };
                }
                "silence_notice_s" => {
                    let value = read_optional_seconds(value, SILENCE_MAX_S).map_err(failed)?;
                    self.silence_notice_s = ConfigSetting { value, origin };
                }
                "silence_timeout_s" => {
                    let value = read_optional_seconds(value, SILENCE_MAX_S).map_err(failed)?;
                    self.silence_timeout_s = ConfigSetting { value, origin };
                }
                "prices" => {
                    self.prices = ConfigSetting { value: read_prices(value).map_err(failed)?, origin }
                }
                "mcp" => self.mcp = ConfigSetting { value: read_value(value).map_err(failed)?, origin },
                "sandbox" => {
                    self.sandbox = ConfigSetting { value: read_value(value).map_err(failed)?, origin };
                }
                "network" => {
                    self.network = ConfigSetting { value: read_value(value).map_err(failed)?, origin };
                }
                "credential_paths" => {
                    let value = Some(read_paths(value).map_err(failed)?);
                    self.credential_paths = ConfigSetting { value, origin };
                }
                "model_hosts" => {
                    self.model_hosts = ConfigSetting { value: read_hosts(value).map_err(failed)?, origin };
                }
                "merge_after_s" => {
                    self.merge_after_s = ConfigSetting { value: read_value(value).map_err(failed)?, origin };
                }
                "log" => self.log = ConfigSetting { value: read_value(value).map_err(failed)?, origin },
                unknown => {
                    let (path, key) = (path.to_owned(), unknown.to_owned());
                    let nearest = nearest_key(unknown);
                    return Err(ConfigError::UnknownKey { path, line, key, nearest });
                }
            }
        }
        Ok(())
    }
}

fn read_seconds(value: Spanned<DeValue<'_>>, limit: u64) -> Result<u64, toml::de::Error> {
    let value = read_value(value)?;
    match (1..=limit).contains(&value) {
        true => Ok(value),
        false => Err(toml::de::Error::custom(format!("must be a number of seconds from 1 to {limit}"))),
    }
}

/// Like [`read_seconds`], where 0 turns something off.
fn read_optional_seconds(value: Spanned<DeValue<'_>>, limit: u64) -> Result<u64, toml::de::Error> {
    let value = read_value(value)?;
    match value <= limit {
        true => Ok(value),
        false => Err(toml::de::Error::custom(format!("must be a number of seconds from 0 to {limit}"))),
    }
}

fn read_prices(value: Spanned<DeValue<'_>>) -> Result<BTreeMap<String, TokenPrice>, toml::de::Error> {
    let prices: BTreeMap<String, TokenPrice> = read_value(value)?;
    let is_price = |amount: f64| amount.is_finite() && amount >= 0.0;
    match prices.iter().find(|(_, price)| !is_price(price.input) || !is_price(price.output)) {
        None => Ok(prices),
        Some((model, _)) => Err(toml::de::Error::custom(format!(
            "the price of {model} must be dollars per million tokens, 0 or more"
        ))),
    }
}

/// `quarterdeck/config.toml` in the user's configuration directory.
pub fn user_config_file() -> Option<PathBuf> {
    let configured = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let folder =
        configured.or_else(|| Some(user_directory(|name| std::env::var_os(name))?.join(".config")))?;
    Some(folder.join("quarterdeck/config.toml"))
}

pub(crate) fn read_config_file(path: &Path) -> Result<Option<String>, ConfigError> {
    let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
    let text = match fs::metadata(path) {
        Ok(metadata) if metadata.len() > CONFIG_FILE_MAX => Err(io::Error::from(io::ErrorKind::FileTooLarge)),
        Ok(_) => fs::read_to_string(path),
        Err(error) => Err(error),
    };
    match text {
        Ok(text) => Ok(Some(text)),
        // `NotADirectory`: some part of the path is a file, so there is no settings file either.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(unreadable(error)),
    }
}

fn read_value<T: DeserializeOwned>(value: Spanned<DeValue<'_>>) -> Result<T, toml::de::Error> {
    T::deserialize(toml::de::ValueDeserializer::from(value))
}

fn read_addresses(value: Spanned<DeValue<'_>>) -> Result<Vec<ListenAddress>, toml::de::Error> {
    let texts: Vec<String> = read_value(value)?;
    let addresses: Result<Vec<ListenAddress>, _> = texts.iter().map(|text| text.parse()).collect();
    match addresses {
        Ok(addresses) if addresses.is_empty() => {
            Err(toml::de::Error::custom("`listen` needs at least one address"))
        }
        other => other.map_err(toml::de::Error::custom),
    }
}

/// Paths that are absolute or below the home directory.
fn read_paths(value: Spanned<DeValue<'_>>) -> Result<Vec<String>, toml::de::Error> {
    let paths: Vec<String> = read_value(value)?;
    match paths.iter().find(|path| !path.starts_with('/') && !path.starts_with("~/")) {
        None => Ok(paths),
        Some(path) => Err(toml::de::Error::custom(format!("`{path}` must be absolute, or begin with `~/`"))),
    }
}

fn read_hosts(value: Spanned<DeValue<'_>>) -> Result<Vec<String>, toml::de::Error> {
    let hosts: Vec<String> = read_value(value)?;
    for host in &hosts {
        host.parse::<ModelHostSetting>().map_err(toml::de::Error::custom)?;
    }
    Ok(hosts)
}

fn invalid_setting(path: &Path, text: &str, error: &toml::de::Error, start: usize) -> ConfigError {
    let line = line_of(text, error.span().map_or(start, |span| span.start));
    let message = error.message().trim().replace('\n', "; ");
    // The parser names types of Rust.
    let message = ["u64", "usize"].iter().fold(message, |message, number| {
        message.replace(&format!("expected {number}"), "expected a whole number")
    });
    ConfigError::Invalid { path: path.to_owned(), line, message }
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|b| *b == b'\n').count()
}

fn nearest_key(unknown: &str) -> &'static str {
    // A key can be as long as the file; characters beyond the longest key make no difference to the result.
    let unknown: String = unknown.chars().take(64).collect();
    KEYS.into_iter().min_by_key(|key| strsim::osa_distance(&unknown, key)).expect("there are keys")
}

#[cfg(test)]
mod tests {
    use super::*;
    use qd_protocol::policy::PolicyVerdict;

    struct TestConfigFiles {
        _folder: tempfile::TempDir,
        home: DaemonHome,
        user: PathBuf,
    }

    impl TestConfigFiles {
        fn new(home_text: Option<&str>, user_text: Option<&str>) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let home = DaemonHome::resolve(Some(folder.path().join("home")));
            home.prepare().unwrap();
            let user = folder.path().join("user.toml");
            if let Some(text) = home_text {
                fs::write(home.config_file(), text).unwrap();
            }
            if let Some(text) = user_text {
                fs::write(&user, text).unwrap();
            }
            Self { _folder: folder, home, user }
        }

        fn load(&self) -> Result<DaemonConfig, ConfigError> {
            DaemonConfig::load_from(&self.home, Some(&self.user))
        }
    }

    #[test]
    fn without_any_file_the_defaults_count() {
        let files = TestConfigFiles::new(None, None);
        let config = files.load().unwrap();
        assert_eq!(config.listen.value, [ListenAddress::Unix(files.home.socket())]);
        assert_eq!(config.idle_s.value, DEFAULT_IDLE_S);
        assert_eq!(config.policy.value, Policy::Always(PolicyVerdict::Ask));
        assert!(config.entries().iter().all(|entry| entry.origin == "default"));
        assert_eq!(config.entries().iter().map(|entry| entry.key).collect::<Vec<_>>(), KEYS);
    }

    #[test]
    fn the_home_wins_over_the_user_and_each_value_knows_its_line() {
        let files = TestConfigFiles::new(
            Some("# mine\nagent = \"claude\"\nlisten = [\"127.0.0.1:0\", \"unix:/run/x\"]\n"),
            Some("agent = \"codex\"\nidle_s = 30\nlog = \"debug\"\nallow_host = [\"dev.example\"]\n"),
        );
        let config = files.load().unwrap();
        assert_eq!(config.agent.value.as_deref(), Some("claude"));
        assert_eq!(config.agent.origin.to_string(), format!("{}:2", files.home.config_file().display()));
        assert_eq!(
            config.idle_s,
            ConfigSetting { value: 30, origin: SettingOrigin::File { path: files.user, line: 2 } }
        );
        assert_eq!(config.listen.value.len(), 2);
        let shown = serde_json::to_value(config.entries()).unwrap();
        assert_eq!(shown[2]["value"], serde_json::json!(["127.0.0.1:0", "unix:/run/x"]));
        assert_eq!(shown[3]["value"], serde_json::json!(["dev.example"]));
    }

    #[test]
    fn a_policy_is_a_word_or_rules() {
        let files = TestConfigFiles::new(Some("policy = \"deny\""), None);
        assert_eq!(files.load().unwrap().policy.value, Policy::Always(PolicyVerdict::Deny));
        let rules = "[[policy]]\ntool = \"Bash\"\nmatch = \"git status*\"\ndecision = \"allow\"\n";
        let Policy::Rules(rules) = TestConfigFiles::new(Some(rules), None).load().unwrap().policy.value
        else {
            panic!()
        };
        assert_eq!(rules[0].pattern.as_deref(), Some("git status*"));
    }

    #[test]
    fn an_unknown_key_is_named_with_file_line_and_the_nearest_valid_one() {
        for (written, meant) in [("idel_s", "idle_s"), ("listn", "listen"), ("allowed-hosts", "allow_host")] {
            let files = TestConfigFiles::new(Some(&format!("\n\n{written} = 1\n")), None);
            let message = files.load().unwrap_err().to_string();
            let file = files.home.config_file();
            assert_eq!(
                message,
                format!("{}:3: there is no key `{written}`; did you mean `{meant}`?", file.display())
            );
        }
    }

    #[test]
    fn a_bad_value_is_named_with_file_and_line() {
        for (text, line, hint) in [
            ("log = 3", 1, "expected a string"),
            ("\nidle_s = -1", 2, "expected a whole number"),
            ("\nlisten = [\"nonsense\"]", 2, "nonsense"),
            ("listen = []", 1, "at least one"),
            ("agent = \"a\"\nagent = \"b\"", 2, "duplicate"),
            ("policy = \"perhaps\"", 1, "`ask`, `allow`, `deny`"),
            ("sandbox = \"high\"", 1, "`workspace`"),
            ("network = \"none\"", 1, "`off`"),
            ("credential_paths = [\"keys\"]", 1, "`keys` must be absolute"),
            ("model_hosts = [\"https://a.example\"]", 1, "`https://a.example` is no host"),
            ("a = = b", 1, ""),
        ] {
            let files = TestConfigFiles::new(Some(text), None);
            let error = files.load().unwrap_err();
            let ConfigError::Invalid { line: named, message, .. } = &error else { panic!("{error}") };
            assert_eq!(*named, line, "{error}");
            assert!(message.contains(hint), "{error}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_and_not_silence() {
        let files = TestConfigFiles::new(None, None);
        fs::create_dir(files.home.config_file()).unwrap();
        assert!(matches!(files.load(), Err(ConfigError::Unreadable { .. })));
    }
}
