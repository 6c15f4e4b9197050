//! Makes an agent ask before it acts, right before it is started: completes what its manifest says with what the user's
//! own settings of the agent allow, and refuses an agent that would act all the same.

use std::collections::BTreeSet;

use qd_catalog::policy_enforcement::{
    find_overriding_setting, has_line, has_setting, read_settings, settings_paths,
};
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
    if let Some(setting) = find_overriding_setting(&manifest, &spec.env, &spec.cwd) {
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

/// What the user's own settings allow without asking, and what some of them may allow by themselves.
fn allowed_rules(allowed: &AllowedBySettings, manifest: &Manifest, spec: &AgentSpec) -> BTreeSet<String> {
    let paths = allowed.files.iter().flat_map(|file| settings_paths(file, manifest, &spec.env, &spec.cwd));
    let mut rules = BTreeSet::new();
    for settings in paths.filter_map(|path| read_settings(&path)) {
        let listed = settings.pointer(&allowed.allow).and_then(Value::as_array).into_iter().flatten();
        rules.extend(listed.filter_map(|rule| rule.as_str().map(str::to_owned)));
        let is_there = |at: &String| has_setting(&settings, at);
        let more = allowed.asked_with.iter().filter(|more| more.at.as_ref().is_some_and(is_there));
        rules.extend(more.flat_map(|more| more.rules.iter().cloned()));
    }
    for more in &allowed.asked_with {
        let Some(line) = &more.line else { continue };
        if more.files.iter().any(|file| has_line(file, line, manifest, &spec.env, &spec.cwd)) {
            rules.extend(more.rules.iter().cloned());
        }
    }
    rules
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
    use qd_protocol::manifest::RulesWithSetting;
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
            asked_with: vec![
                RulesWithSetting {
                    at: Some("/hooks/Before".to_owned()),
                    rules: vec!["Bash".to_owned()],
                    ..RulesWithSetting::default()
                },
                RulesWithSetting {
                    files: vec!["~/.demo/skills/*/SKILL.md".to_owned()],
                    line: Some("^allowed-tools:".to_owned()),
                    rules: vec!["Script".to_owned()],
                    ..RulesWithSetting::default()
                },
            ],
        });
        manifest.policy.args = vec!["--settings".to_owned(), "{settings}".to_owned()];
        manifest.policy.session_meta = json!({ "a": { "b": "{settings}" } }).as_object().unwrap().clone();
        let ready = enforce_policy(manifest.clone(), &spec).unwrap();
        let settings = json!({ "permissions": { "ask": ["Write", "Bash(npm *)", "Fetch"] } });
        assert_eq!(serde_json::from_str::<Value>(&ready.policy.args[1]).unwrap(), settings);
        assert_eq!(ready.policy.session_meta["a"]["b"], settings);

        let hooked = json!({ "hooks": { "Before": [{}] } }).to_string();
        std::fs::write(folder.path().join("home/.demo/settings.json"), hooked).unwrap();
        let ready = enforce_policy(manifest.clone(), &spec).unwrap();
        let settings = json!({ "permissions": { "ask": ["Write", "Bash", "Fetch"] } });
        assert_eq!(ready.policy.session_meta["a"]["b"], settings, "a hook may allow it");

        let skill = folder.path().join("home/.demo/skills/one");
        std::fs::create_dir_all(&skill).unwrap();
        std::fs::write(skill.join("SKILL.md"), "name: one\nallowed-tools: Script\n").unwrap();
        let ready = enforce_policy(manifest.clone(), &spec).unwrap();
        let settings = json!({ "permissions": { "ask": ["Write", "Bash", "Fetch", "Script"] } });
        assert_eq!(ready.policy.session_meta["a"]["b"], settings, "a skill allows it");

        manifest.policy.file = Some("not written".to_owned());
        assert_eq!(enforce_policy(manifest, &spec).unwrap_err().code, "agent_failed_to_start");
    }
}
