//! Makes an agent ask before it acts, right before it is started: completes what its manifest says with what the user's
//! own settings of the agent allow, and refuses an agent that would act all the same.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use qd_catalog::policy_enforcement::{find_overriding_setting, read_settings, resolve_path};
use qd_protocol::event::RunError;
use qd_protocol::manifest::{AllowedBySettings, Manifest};
use qd_protocol::worker::AgentSpec;
use serde_json::{Value, json};

/// Stands for the settings in arguments, variables and `session_meta`.
const SETTINGS_PLACEHOLDER: &str = "{settings}";

/// The manifest with everything filled in that makes the agent ask, or why the agent must not be started.
pub(crate) fn enforce_policy(mut manifest: Manifest, spec: &AgentSpec) -> Result<Manifest, RunError> {
    if manifest.policy.file.is_some() {
        let message = "failed to write the file that makes the agent ask before it acts; check that the disk of \
                       Quarterdeck's home is not full and can be written";
        return Err(RunError::new("agent_failed_to_start", message));
    }
    if let Some(setting) = find_overriding_setting(&manifest, &spec.env) {
        let message = format!("the agent would act without asking because of {setting}; remove this setting");
        return Err(RunError::new("agent_overrides_policy", message));
    }
    let mut settings = Value::Object(std::mem::take(&mut manifest.policy.settings));
    if let Some(allowed) = &manifest.policy.allowed_by_settings {
        let rules = allowed_rules(allowed, &manifest, spec);
        append_rules(&mut settings, &allowed.ask, rules);
    }
    let text = settings.to_string();
    let fill_in = |argument: &mut String| *argument = argument.replace(SETTINGS_PLACEHOLDER, &text);
    manifest.policy.args.iter_mut().for_each(fill_in);
    manifest.policy.env.values_mut().for_each(fill_in);
    manifest.policy.session_meta.values_mut().for_each(|value| fill_in_settings(value, &settings));
    Ok(manifest)
}

/// What the user's own settings allow without asking.
fn allowed_rules(allowed: &AllowedBySettings, manifest: &Manifest, spec: &AgentSpec) -> BTreeSet<String> {
    let paths = allowed.files.iter().flat_map(|file| match resolve_path(file, manifest, &spec.env) {
        Some(path) if path.is_absolute() => vec![path],
        Some(path) => project_folders(&spec.cwd).iter().map(|folder| folder.join(&path)).collect(),
        None => Vec::new(),
    });
    let settings = paths.filter_map(|path| read_settings(&path));
    let rules = settings.filter_map(|settings| settings.pointer(&allowed.allow)?.as_array().cloned());
    rules.flatten().filter_map(|rule| rule.as_str().map(str::to_owned)).collect()
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

/// Appends rules to the list at this pointer, of which every part but the last is there.
fn append_rules(settings: &mut Value, pointer: &str, rules: BTreeSet<String>) {
    let Some((parent, key)) = pointer.rsplit_once('/') else { return };
    let Some(parent) = settings.pointer_mut(parent).and_then(Value::as_object_mut) else { return };
    let list = parent.entry(key).or_insert_with(|| json!([]));
    if let Some(list) = list.as_array_mut() {
        let rules: Vec<Value> =
            rules.into_iter().map(Value::from).filter(|rule| !list.contains(rule)).collect();
        list.extend(rules);
    }
}

/// Replaces each placeholder in the value with the settings.
fn fill_in_settings(value: &mut Value, settings: &Value) {
    match value {
        Value::String(text) if text == SETTINGS_PLACEHOLDER => *value = settings.clone(),
        Value::Array(items) => items.iter_mut().for_each(|item| fill_in_settings(item, settings)),
        Value::Object(fields) => fields.values_mut().for_each(|field| fill_in_settings(field, settings)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::{SessionId, WorkerId};

    use super::*;

    #[test]
    fn what_the_users_settings_allow_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, rules: Value| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, json!({ "permissions": { "allow": rules } }).to_string()).unwrap();
        };
        write("home/.demo/settings.json", json!(["Write", "Bash(npm *)"]));
        write("project/.demo/settings.json", json!(["Fetch", 7]));
        write("elsewhere/.demo/settings.json", json!(["Elsewhere"]));
        let worktree = folder.path().join("worktree/below");
        std::fs::create_dir_all(&worktree).unwrap();
        let git_folder = folder.path().join("project/.git/worktrees/w");
        std::fs::write(folder.path().join("worktree/.git"), format!("gitdir: {}\n", git_folder.display()))
            .unwrap();
        let mut spec =
            AgentSpec::new(SessionId::from_random(&[1]), WorkerId::from_random(&[1]), "x", &worktree);
        spec.env.insert("HOME".to_owned(), folder.path().join("home").display().to_string());

        let mut manifest = Manifest::default();
        manifest.policy.settings =
            json!({ "permissions": { "ask": ["Write"] } }).as_object().unwrap().clone();
        manifest.policy.allowed_by_settings = Some(AllowedBySettings {
            files: vec!["~/.demo/settings.json".to_owned(), ".demo/settings.json".to_owned()],
            allow: "/permissions/allow".to_owned(),
            ask: "/permissions/ask".to_owned(),
        });
        manifest.policy.args = vec!["--settings".to_owned(), "{settings}".to_owned()];
        manifest.policy.session_meta = json!({ "a": { "b": "{settings}" } }).as_object().unwrap().clone();
        let ready = enforce_policy(manifest.clone(), &spec).unwrap();
        let settings = json!({ "permissions": { "ask": ["Write", "Bash(npm *)", "Fetch"] } });
        assert_eq!(serde_json::from_str::<Value>(&ready.policy.args[1]).unwrap(), settings);
        assert_eq!(ready.policy.session_meta["a"]["b"], settings);

        manifest.policy.file = Some("not written".to_owned());
        assert_eq!(enforce_policy(manifest, &spec).unwrap_err().code, "agent_failed_to_start");
    }
}
