//! What the daemon and its clients must both know before they can speak to each other: where the home is, the secrets in
//! it, and the settings. This crate opens no socket, reads no journal and starts nothing.
//!
//! Modules, in reading order:
//! - `home`: the folder where a daemon stores everything, and its paths.
//! - `secrets`: the tokens, keys and variables in it.
//! - `private_files`: files and folders that only their owner can read.
//! - `config`: the settings, and where each comes from.
//! - `config_edit`: changes one of them. `credential_paths`: where keys and credentials usually are.
//! - `last_looks`: when the user last looked at each daemon.
//! - `listen_address`: the addresses that a daemon listens on.

mod config;
mod config_edit;
mod credential_paths;
mod home;
mod last_looks;
mod listen_address;
mod private_files;
mod secrets;
#[cfg(test)]
mod test_home;

pub use config::{ConfigEntry, ConfigError, ConfigSetting, DaemonConfig, SettingOrigin, user_config_file};
pub use credential_paths::CREDENTIAL_PATHS;
pub use home::DaemonHome;
pub use last_looks::LastLook;
pub use listen_address::{BadListenAddress, ListenAddress, UrlHost};
pub use private_files::{HomeError, open_private, replace_file};
pub use secrets::SecretToken;
