//! A common directory of our own for each repository. Git finds in it the repository's objects and refs, as links, and a
//! configuration of ours: those settings of the repository that can run no program and open no connection. So git never
//! reads a configuration that an agent can write, and there is no moment between a check and its use.
//!
//! The directory is made from the repository's configuration, and again when that has changed.
//!
//! Design: docs/design/git-reads-no-configuration-of-agents.md

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{WorktreeError, WorktreeResult, io_error_at};
use crate::git::Git;
use crate::links::{create_directory, read_regular_file};
use crate::process::StopFlag;
use crate::repository::path_text;

/// What git finds in a common directory. Some of these need not exist.
const LINKS: [&str; 9] =
    ["objects", "refs", "packed-refs", "reftable", "logs", "info", "shallow", "worktrees", "lfs"];
/// The maximum size of a configuration file.
const CONFIG_MAX: u64 = 1 << 20;
/// The settings of a repository that its commands need. None of them names a program or an address to connect to, and
/// only these are copied.
const COPIED_SETTINGS: &[&str] = &[
    "core.repositoryformatversion",
    "core.filemode",
    "core.symlinks",
    "core.ignorecase",
    "core.precomposeunicode",
    "core.autocrlf",
    "core.eol",
    "core.safecrlf",
    "core.checkroundtripencoding",
    "core.trustctime",
    "core.checkstat",
    "core.logallrefupdates",
    "core.sharedrepository",
    "core.compression",
    "core.loosecompression",
    "core.bigfilethreshold",
    "core.excludesfile",
    "core.attributesfile",
    "core.sparsecheckout",
    "core.sparsecheckoutcone",
    "user.name",
    "user.email",
    "user.useconfigonly",
    "author.name",
    "author.email",
    "committer.name",
    "committer.email",
    "i18n.commitencoding",
    "extensions.objectformat",
    "extensions.compatobjectformat",
    "extensions.refstorage",
    "extensions.preciousobjects",
];
/// Extensions of the repository's format that change nothing for our commands. One that is neither here nor copied could
/// change what a command does, so such a repository is refused.
const IGNORED_EXTENSIONS: &[&str] = &[
    "extensions.worktreeconfig",
    "extensions.relativeworktrees",
    "extensions.partialclone",
    "extensions.noop",
    "extensions.noop-v1",
];
/// Settings that a checkout can have for itself.
const CHECKOUT_SETTINGS: &[&str] = &["core.sparsecheckout", "core.sparsecheckoutcone"];

/// A common directory of our own, which stands for that of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PrivateCommonDir {
    pub(crate) path: PathBuf,
    /// Whether the repository has no main checkout.
    pub(crate) is_bare: bool,
    /// The settings that count for the main checkout alone, as `NAME=VALUE`.
    pub(crate) main_checkout_settings: Vec<String>,
}

/// What we remember about the configuration that the directory was made from.
#[derive(Debug, Serialize, Deserialize)]
struct CopiedConfiguration {
    /// The digest of the repository's configuration files, and of what is copied from them.
    sha256: String,
    is_bare: bool,
    main_checkout_settings: Vec<String>,
}

type GitSettings = Vec<(String, String)>;

/// Creates the directories of a repository that git creates when it first needs them, which it cannot do through links.
pub(crate) fn create_missing_directories(common_dir: &Path) -> WorktreeResult<()> {
    ["logs", "worktrees"].iter().try_for_each(|name| create_directory(&common_dir.join(name)))
}

impl PrivateCommonDir {
    /// The directory for a repository, below `root`. It is created or brought up to date.
    pub(crate) fn of(common_dir: &Path, root: &Path, stop: &StopFlag) -> WorktreeResult<Self> {
        let path = root.join(hex::encode(Sha256::digest(path_text(common_dir)?)));
        let common_file = common_dir.join("config");
        let main_file = common_dir.join("config.worktree");
        let (common_text, main_text) = (read_configuration(&common_file)?, read_configuration(&main_file)?);
        // Another release may copy other settings.
        let digest = Sha256::new().chain_update(COPIED_SETTINGS.join("\n")).chain_update([0]);
        let digest = digest.chain_update(&common_text).chain_update([0]).chain_update(&main_text);
        let sha256 = hex::encode(digest.finalize());
        create_links(common_dir, &path)?;
        let copied = match read_copied(&path).filter(|copied| copied.sha256 == sha256) {
            Some(copied) => copied,
            None => {
                let common = parse_configuration(&common_text, &path, stop)?;
                let is_set = |settings: &GitSettings, key: &str| {
                    let value = settings.iter().rev().find(|(name, _)| name == key);
                    value.is_some_and(|(_, value)| is_true(value))
                };
                let main = match is_set(&common, "extensions.worktreeconfig") {
                    true => parse_configuration(&main_text, &path, stop)?,
                    false => Vec::new(),
                };
                let is_bare = is_set(&common, "core.bare") || is_set(&main, "core.bare");
                write_configuration(common_dir, &path, &common)?;
                let main = main.into_iter().filter(|(name, _)| CHECKOUT_SETTINGS.contains(&name.as_str()));
                let main_checkout_settings = main.map(|(name, value)| format!("{name}={value}")).collect();
                let copied = CopiedConfiguration { sha256, is_bare, main_checkout_settings };
                write_copied(&path, &copied)?;
                copied
            }
        };
        let CopiedConfiguration { is_bare, main_checkout_settings, .. } = copied;
        Ok(Self { path, is_bare, main_checkout_settings })
    }
}

fn copied_file(path: &Path) -> PathBuf {
    path.join("copied.json")
}

fn read_copied(path: &Path) -> Option<CopiedConfiguration> {
    serde_json::from_slice(&fs::read(copied_file(path)).ok()?).ok()
}

fn write_copied(path: &Path, copied: &CopiedConfiguration) -> WorktreeResult<()> {
    let file = copied_file(path);
    let text = serde_json::to_vec(copied).map_err(|error| io_error_at("write", &file)(error.into()))?;
    qd_files::replace_file(&file, &text).map_err(io_error_at("write", &file))
}

/// The text of a configuration file. A file that does not exist is empty.
fn read_configuration(file: &Path) -> WorktreeResult<Vec<u8>> {
    match read_regular_file(file, CONFIG_MAX) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        text => text.map_err(io_error_at("read", file)),
    }
}

/// The settings in a configuration, without those that it includes from elsewhere.
fn parse_configuration(text: &[u8], path: &Path, stop: &StopFlag) -> WorktreeResult<GitSettings> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    // Git parses a copy, so that the settings are those of the digest.
    let copy = tempfile::NamedTempFile::new_in(path).map_err(io_error_at("create a file in", path))?;
    fs::write(copy.path(), text).map_err(io_error_at("write", copy.path()))?;
    let args = ["config", "--file", path_text(copy.path())?, "--no-includes", "-z", "--list"];
    let list = Git::without_repository(stop).output(&args)?;
    let list = String::from_utf8_lossy(&list);
    let entries = list.split('\0').filter(|entry| !entry.is_empty());
    // A setting without a value is true.
    let setting =
        |entry: &str| entry.split_once('\n').map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(entries.map(|entry| setting(entry).unwrap_or((entry.to_owned(), "true".to_owned()))).collect())
}

fn create_links(common_dir: &Path, path: &Path) -> WorktreeResult<()> {
    create_directory(path)?;
    for name in LINKS {
        let link = path.join(name);
        match symlink(common_dir.join(name), &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(io_error_at("create", &link)(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Writes the configuration that git reads: the settings that are copied.
fn write_configuration(common_dir: &Path, path: &Path, settings: &[(String, String)]) -> WorktreeResult<()> {
    let mut text = String::new();
    for (name, value) in settings {
        let is_copied = COPIED_SETTINGS.contains(&name.as_str()) || is_remote_url(name);
        let is_extension = name.starts_with("extensions.");
        let is_known = !is_extension || is_copied || IGNORED_EXTENSIONS.contains(&name.as_str());
        // The value of an extension is one word. Anything more could name a place.
        let is_word = value.chars().all(|letter| letter.is_ascii_alphanumeric());
        if !is_known || (is_extension && is_copied && !is_word) {
            let extension = format!("{name}={value}");
            return Err(WorktreeError::UnknownExtension { repository: common_dir.to_owned(), extension });
        }
        if is_copied {
            text.push_str(&setting_lines(name, value));
        }
    }
    let file = path.join("config");
    qd_files::replace_file(&file, text.as_bytes()).map_err(io_error_at("write", &file))
}

/// A configuration file with these settings, which are given as `NAME=VALUE`.
pub(crate) fn configuration_text(settings: &[String]) -> String {
    let pairs = settings.iter().filter_map(|setting| setting.split_once('='));
    pairs.map(|(name, value)| setting_lines(name, value)).collect()
}

/// Whether this is the address of a remote. It is not connected to: users' own configuration can depend on it.
fn is_remote_url(name: &str) -> bool {
    name.strip_prefix("remote.")
        .and_then(|rest| rest.strip_suffix(".url"))
        .is_some_and(|name| !name.is_empty())
}

/// A setting as lines of a configuration file.
fn setting_lines(name: &str, value: &str) -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
    let (section, rest) = name.split_once('.').unwrap_or((name, ""));
    let value = quoted(value).replace('\n', "\\n");
    match rest.rsplit_once('.') {
        Some((subsection, key)) => format!("[{section} \"{}\"]\n\t{key} = \"{value}\"\n", quoted(subsection)),
        None => format!("[{section}]\n\t{rest} = \"{value}\"\n"),
    }
}

fn is_true(value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    matches!(value.as_str(), "true" | "yes" | "on") || value.parse::<i64>().is_ok_and(|number| number != 0)
}
