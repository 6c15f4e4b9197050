//! Makes an agent ask before it acts, as its manifest says (`[policy]`), and finds settings of the agent that would let
//! it act all the same. What an ask is answered with is decided elsewhere.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use jsonc_parser::ParseOptions;
use qd_protocol::manifest::{Manifest, OverridingSetting};
use regex::Regex;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::conversation_files::resolve_root;

/// Stands for the path of the file in arguments and variables.
const FILE_PLACEHOLDER: &str = "{file}";
/// The longest settings file that is read, in bytes.
const SETTINGS_MAX: u64 = 1 << 20;
/// The most files that a `*` stands for.
const FILES_MAX: usize = 1000;
/// How much of a passage is shown, in characters.
const PASSAGE_SHOWN_MAX: usize = 120;

/// The manifest with the path of its policy file filled in. The file is written to `folder`, under a name that depends on
/// its content, and again if somebody has changed it meanwhile. If that fails, the manifest still has the file's text,
/// and the agent must not be started.
#[must_use]
pub fn with_policy_file(manifest: Manifest, folder: &Path) -> Manifest {
    let Some(text) = &manifest.policy.file else { return manifest };
    match write_policy_file(&manifest.agent.name, text, folder) {
        Ok(path) => with_path(manifest, &path),
        Err(_) => manifest,
    }
}

fn write_policy_file(agent: &str, text: &str, folder: &Path) -> io::Result<PathBuf> {
    let digest = hex::encode(&Sha256::digest(text)[..8]);
    let path = folder.join(format!("{agent}-{digest}"));
    if !std::fs::read(&path).is_ok_and(|written| written == text.as_bytes()) {
        std::fs::create_dir_all(folder)?;
        qd_files::replace_file(&path, text.as_bytes())?;
    }
    Ok(path)
}

/// The manifest with this path instead of the file's text.
fn with_path(mut manifest: Manifest, path: &Path) -> Manifest {
    let path = path.display().to_string();
    manifest.policy.file = None;
    let fill_in = |text: &mut String| *text = text.replace(FILE_PLACEHOLDER, &path);
    manifest.policy.args.iter_mut().for_each(fill_in);
    manifest.policy.env.values_mut().for_each(fill_in);
    manifest
}

/// The setting in force that lets the agent act without asking, as a person would look it up: the file, and the place
/// in it. `env` has the variables of the session; the agent inherits others from this process. `cwd` is where the agent
/// works.
pub fn find_overriding_setting(
    manifest: &Manifest,
    env: &BTreeMap<String, String>,
    cwd: &Path,
) -> Option<String> {
    manifest.policy.overridden_by.iter().find_map(|setting| {
        let paths = settings_paths(&setting.file, manifest, env, cwd);
        paths.iter().find_map(|path| setting_in_file(setting, path))
    })
}

/// The paths of an agent's settings file, in which `~` or a variable stands for a folder. There are none if that variable
/// is not set, and several if the path is relative or has a `*`.
pub fn settings_paths(
    file: &str,
    manifest: &Manifest,
    env: &BTreeMap<String, String>,
    cwd: &Path,
) -> Vec<PathBuf> {
    let given = |name: &str| env.get(name).or_else(|| manifest.startup.env.get(name)).cloned();
    match resolve_root(file, &|name| given(name).or_else(|| std::env::var(name).ok())) {
        Some(path) if path.is_absolute() => matching_paths(&path),
        Some(path) => {
            project_folders(cwd).iter().flat_map(|folder| matching_paths(&folder.join(&path))).collect()
        }
        None => Vec::new(),
    }
}

/// Whether one of the files at this path has a line that matches.
pub fn has_line(
    file: &str,
    pattern: &str,
    manifest: &Manifest,
    env: &BTreeMap<String, String>,
    cwd: &Path,
) -> bool {
    let paths = settings_paths(file, manifest, env, cwd);
    paths.iter().any(|path| find_line(path, pattern).is_some())
}

/// The first line of the file that matches.
fn find_line(path: &Path, pattern: &str) -> Option<String> {
    let text = crate::manifest_reader::read_file(path, SETTINGS_MAX).ok()?;
    // The pattern was validated when the manifest was read.
    let pattern = Regex::new(pattern).ok()?;
    text.lines().find(|line| pattern.is_match(line)).map(|line| line.trim().to_owned())
}

/// The first passage of the file that matches and is not harmless, on one line.
fn find_passage(path: &Path, pattern: &str, unless: Option<&String>) -> Option<String> {
    let text = crate::manifest_reader::read_file(path, SETTINGS_MAX).ok()?;
    // The patterns were validated when the manifest was read.
    let pattern = Regex::new(pattern).ok()?;
    let harmless = unless.and_then(|unless| Regex::new(unless).ok());
    let is_harmless = |passage: &str| harmless.as_ref().is_some_and(|harmless| harmless.is_match(passage));
    let mut passages = pattern.find_iter(&text).map(|found| found.as_str());
    let passage = passages.find(|passage| !is_harmless(passage))?;
    Some(passage.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(PASSAGE_SHOWN_MAX).collect())
}

/// The folders in which an agent may look for settings of the project: the working directory, those above it, and for a
/// worktree the repository that it belongs to.
fn project_folders(cwd: &Path) -> Vec<PathBuf> {
    let repository = cwd.ancestors().find_map(|folder| {
        let link = std::fs::read_to_string(folder.join(".git")).ok()?;
        let git_folder = folder.join(link.strip_prefix("gitdir:")?.trim());
        git_folder.ancestors().find(|path| path.ends_with(".git"))?.parent().map(Path::to_owned)
    });
    cwd.ancestors().map(Path::to_owned).chain(repository).collect()
}

/// The settings in a JSON file, which may have comments and trailing commas, because agents accept them. A file that
/// cannot be read or is not JSON has none: the agent cannot read it either.
pub fn read_settings(path: &Path) -> Option<Value> {
    let text = crate::manifest_reader::read_file(path, SETTINGS_MAX).ok()?;
    jsonc_parser::parse_to_serde_value(text.trim_start_matches('\u{feff}'), &ParseOptions::default()).ok()
}

/// Whether there is anything at this place of the settings.
pub fn has_setting(settings: &Value, pointer: &str) -> bool {
    settings.pointer(pointer).is_some_and(|value| !is_empty(value))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The paths that match, if a part has a `*`; else the path itself.
fn matching_paths(path: &Path) -> Vec<PathBuf> {
    let mut paths = vec![PathBuf::new()];
    for part in path.components() {
        let pattern = part.as_os_str().to_str().and_then(|part| part.split_once('*'));
        match pattern {
            None => paths.iter_mut().for_each(|path| path.push(part)),
            Some((start, end)) => {
                let found = paths.iter().flat_map(|folder| matching_entries(folder, start, end));
                paths = found.take(FILES_MAX).collect();
            }
        }
    }
    paths
}

/// What is in the folder under a name with this start and end.
fn matching_entries(folder: &Path, start: &str, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let matches = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(matches).take(FILES_MAX).collect();
    paths.sort();
    paths
}

/// The setting as people would name it, if the file has it.
fn setting_in_file(setting: &OverridingSetting, path: &Path) -> Option<String> {
    if let Some(pattern) = &setting.line {
        return find_line(path, pattern).map(|line| format!("`{line}` in {}", path.display()));
    }
    if let Some(pattern) = &setting.passage {
        let passage = find_passage(path, pattern, setting.unless.as_ref())?;
        return Some(format!("`{passage}` in {}", path.display()));
    }
    let Some(pointer) = &setting.at else { return path.exists().then(|| path.display().to_string()) };
    let settings = read_settings(path)?;
    let keys: Vec<&str> = pointer.trim_start_matches('/').split('/').collect();
    let (found, value) = find_value(&settings, &keys, &setting.except)?;
    let counts = if setting.values.is_empty() { !is_empty(value) } else { setting.values.contains(value) };
    counts.then(|| format!("`{}` in {}", found.join("."), path.display()))
}

/// The first value at these keys, in which `*` matches any key but the excepted ones and `one|other` either of two, with
/// the keys that led to it.
fn find_value<'a>(value: &'a Value, keys: &[&str], except: &[String]) -> Option<(Vec<String>, &'a Value)> {
    let Some((key, rest)) = keys.split_first() else { return Some((Vec::new(), value)) };
    let matches = |name: &String| match *key {
        "*" => !except.contains(name),
        keys => keys.split('|').any(|key| key == name),
    };
    let entries = value.as_object()?.iter().filter(|(name, _)| matches(name));
    entries.into_iter().find_map(|(name, value)| {
        let (mut below, found) = find_value(value, rest, except)?;
        below.insert(0, name.clone());
        Some((below, found))
    })
}

#[cfg(test)]
mod tests {
    use qd_protocol::manifest::PolicyEnforcement;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_file_is_written_anew_and_its_path_is_filled_in() {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::default();
        manifest.agent.name = "demo".to_owned();
        manifest.policy = PolicyEnforcement {
            args: vec!["--rules".to_owned(), "{file}".to_owned()],
            env: BTreeMap::from([("RULES".to_owned(), "at={file}".to_owned())]),
            file: Some("ask = true".to_owned()),
            ..PolicyEnforcement::default()
        };
        let ready = with_policy_file(manifest.clone(), folder.path());
        let path = &ready.policy.args[1];
        assert_eq!(std::fs::read_to_string(path).unwrap(), "ask = true");
        assert_eq!(ready.policy.env["RULES"], format!("at={path}"));
        std::fs::write(path, "ask = false").unwrap();
        assert_eq!(with_policy_file(manifest.clone(), folder.path()), ready);
        assert_eq!(std::fs::read_to_string(path).unwrap(), "ask = true");
        let is_no_folder = Path::new(path);
        assert_eq!(with_policy_file(manifest.clone(), is_no_folder), manifest, "the agent is not started");
    }

    #[test]
    fn a_setting_that_overrides_the_policy_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let find = |file: &str, at: Option<&str>, values: &[Value]| {
            let setting = OverridingSetting {
                file: file.to_owned(),
                at: at.map(str::to_owned),
                except: vec!["build".to_owned()],
                values: values.to_vec(),
                line: file.ends_with(".md").then(|| "^permission:".to_owned()),
                passage: file.ends_with(".rules").then(|| r"(?s)rule\(.*?\)".to_owned()),
                unless: Some("never".to_owned()),
            };
            let policy = PolicyEnforcement { overridden_by: vec![setting], ..PolicyEnforcement::default() };
            let manifest = Manifest { policy, ..Manifest::default() };
            let home = folder.path().display().to_string();
            let project = folder.path().join("project/below");
            find_overriding_setting(&manifest, &BTreeMap::from([("HOME".to_owned(), home)]), &project)
                .map(|found| found.replace(&folder.path().display().to_string(), "~"))
        };
        write(
            "a.json",
            r#"{"agent": {"build": {"permission": 1}, "mine": {"permission": "allow"}, "other": {}}, "only": true}"#,
        );
        let found = |text: &str| Some(text.to_owned());
        assert_eq!(find("~/a.json", None, &[]), found("~/a.json"));
        assert_eq!(find("~/b.json", None, &[]), None);
        assert_eq!(find("~/*.json", Some("/only"), &[json!(true)]), found("`only` in ~/a.json"));
        assert_eq!(find("~/*.json", Some("/only"), &[json!(false)]), None);
        let all = Some("/agent/*/permission");
        assert_eq!(find("$HOME/a.json", all, &[]), found("`agent.mine.permission` in ~/a.json"));
        assert_eq!(find("$OTHER/a.json", all, &[]), None);
        write("d.md", "name: d\npermission: allow\n");
        assert_eq!(find("~/*.md", None, &[]), found("`permission: allow` in ~/d.md"));
        write("d.md", "name: d\n");
        assert_eq!(find("~/*.md", None, &[]), None);
        write("c.json", "not json");
        assert_eq!(find("~/c.json", all, &[]), None);
        write("c.json", "// mine\n{\"hooks\": {\"Ask\": [1, /* two */],},}\n");
        assert_eq!(find("~/c.json", Some("/hooks/Ask"), &[]), found("`hooks.Ask` in ~/c.json"));
        write("c.json", &"[".repeat(500_000));
        assert_eq!(find("~/c.json", Some("/hooks/Ask"), &[]), None, "nesting is limited");
        write("c.json", r#"{"hooks": {"Ask": []}}"#);
        assert_eq!(find("~/c.json", Some("/hooks/Ask"), &[]), None, "an empty list sets nothing");
        let either = Some("/hooks/before|Before");
        write("c.json", r#"{"hooks": {"Before": [1]}}"#);
        assert_eq!(find("~/c.json", either, &[]), found("`hooks.Before` in ~/c.json"));
        assert_eq!(find("${OTHER:-~}/c.json", either, &[]), found("`hooks.Before` in ~/c.json"));
        assert_eq!(find("${HOME:-/none}/c.json", either, &[]), found("`hooks.Before` in ~/c.json"));
        write("c.json", r#"{"hooks": {"After": [1]}}"#);
        assert_eq!(find("~/c.json", either, &[]), None);
        write("f.rules", "rule(a,\n  never)\n");
        assert_eq!(find("~/*.rules", None, &[]), None, "every passage is harmless");
        write("f.rules", "rule(a,\n  never)\nrule(b,\n  always)\n");
        assert_eq!(find("~/*.rules", None, &[]), found("`rule(b, always)` in ~/f.rules"));
        std::fs::create_dir_all(folder.path().join("skills/one/deep")).unwrap();
        write("skills/one/deep/g.md", "permission: all\n");
        assert_eq!(
            find("~/sk*/*/deep/*.md", None, &[]),
            found("`permission: all` in ~/skills/one/deep/g.md")
        );
        assert_eq!(find("~/sk*/two/*/*.md", None, &[]), None);
        std::fs::create_dir(folder.path().join("project")).unwrap();
        write("project/e.json", r#"{"only": true}"#);
        assert_eq!(find("e.json", Some("/only"), &[]), found("`only` in ~/project/e.json"));
    }
}
