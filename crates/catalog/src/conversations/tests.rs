//! Conversations of each agent, in the form in which the tested versions write them, and damaged or misplaced files.

use std::fs::{create_dir_all, write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::{Duration, SystemTime};

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::Catalog;

/// A home directory with a project.
struct FakeHome {
    dir: TempDir,
    variables: Vec<(&'static str, String)>,
}

impl FakeHome {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        create_dir_all(dir.path().join("project")).unwrap();
        let home = dir.path().to_str().unwrap().to_owned();
        Self { dir, variables: vec![("HOME", home)] }
    }

    fn project(&self) -> PathBuf {
        self.dir.path().join("project").canonicalize().unwrap()
    }

    /// Writes a file with one JSON value per line; a text stands for itself.
    fn write_lines(&self, path: &str, lines: &[Value]) -> PathBuf {
        let path = self.dir.path().join(path);
        create_dir_all(path.parent().unwrap()).unwrap();
        let line = |line: &Value| line.as_str().map_or_else(|| line.to_string(), str::to_owned);
        let lines: Vec<String> = lines.iter().map(line).collect();
        write(&path, lines.join("\n") + "\n").unwrap();
        path
    }

    fn claude_lines(&self, prompt: &str) -> Vec<Value> {
        vec![
            json!({"type": "queue-operation", "operation": "enqueue", "sessionId": "x"}),
            json!({"type": "user", "isSidechain": false, "cwd": self.project(), "sessionId": "x",
                "message": {"role": "user", "content": [{"type": "text", "text": prompt}]}}),
            json!({"type": "assistant", "isSidechain": false, "cwd": "/elsewhere",
                "message": {"role": "assistant", "content": [{"type": "text", "text": "done"}]}}),
        ]
    }

    fn list_in(&self, agent: &str, directory: Option<&Path>) -> Vec<AgentConversation> {
        let manifest = Catalog::built_in().get(agent).unwrap();
        let variable = |name: &str| {
            let found = self.variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone())
        };
        list_conversations(&manifest, &variable, directory)
    }

    /// Id and title of the project's conversations.
    fn list(&self, agent: &str) -> Vec<(String, String)> {
        let found = self.list_in(agent, Some(&self.project()));
        found.into_iter().map(|one| (one.id, one.title.unwrap_or_default())).collect()
    }
}

fn pair(id: &str, title: &str) -> (String, String) {
    (id.to_owned(), title.to_owned())
}

fn set_age(path: &Path, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
}

#[test]
fn claudes_conversations_have_its_own_title_or_the_first_prompt_and_are_sorted_by_age() {
    let home = FakeHome::new();
    let old = home.write_lines(".claude/projects/-p/aaa.jsonl", &home.claude_lines("\n Fix it \nplease"));
    set_age(&old, 3600);
    let mut lines = home.claude_lines("hello");
    lines.insert(
        1,
        json!({"type": "user", "isSidechain": false, "cwd": home.project(),
        "message": {"role": "user", "content": "<command-name>/clear</command-name>"}}),
    );
    lines.push(json!({"type": "ai-title", "aiTitle": "Old title", "sessionId": "x"}));
    lines.push(json!({"type": "ai-title", "aiTitle": "Greeting", "sessionId": "x"}));
    let new = home.write_lines(".claude/projects/-p/bbb.jsonl", &lines);
    set_age(&new, 60);
    assert_eq!(home.list("claude"), [pair("bbb", "Greeting"), pair("aaa", "Fix it")]);
    let found = home.list_in("claude", None);
    assert_eq!(found[0].size, new.metadata().unwrap().len());
    assert!(found[0].changed_at > found[1].changed_at);
    assert_eq!((found[0].agent.as_str(), &found[0].directory), ("claude", &home.project()));
    lines.push(json!({"type": "custom-title", "customTitle": "Mine", "sessionId": "x"}));
    home.write_lines(".claude/projects/-p/bbb.jsonl", &lines);
    assert_eq!(home.list("claude")[0], pair("bbb", "Mine"));
}

#[test]
fn codexs_conversations_are_read_in_the_old_form_and_the_new() {
    let home = FakeHome::new();
    let meta = |id: &str| json!({"type": "session_meta", "payload": {"id": id, "cwd": home.project()}});
    let context = json!({"type": "response_item", "payload": {"type": "message", "role": "user",
        "content": [{"type": "input_text", "text": "# AGENTS.md instructions"}]}});
    let new = json!({"type": "event_msg", "payload": {"type": "item_completed", "item": {"type": "UserMessage",
        "content": [{"type": "text", "text": "Port the parser"}]}}});
    let old = json!({"type": "event_msg", "payload": {"type": "user_message", "message": "Rename it"}});
    let path = home
        .write_lines(".codex/sessions/2026/11/17/rollout-1-a1.jsonl", &[meta("a1"), context.clone(), new]);
    set_age(&path, 10);
    let path = home.write_lines(".codex/sessions/2025/01/02/rollout-2-a2.jsonl", &[meta("a2"), context, old]);
    set_age(&path, 1000);
    home.write_lines(".codex/sessions/2025/01/02/other.jsonl", &[meta("a3")]);
    assert_eq!(home.list("codex"), [pair("a1", "Port the parser"), pair("a2", "Rename it")]);
}

#[test]
fn conversations_of_gemini_copilot_and_qwen_are_read() {
    let home = FakeHome::new();
    let user = |text: &str| json!({"type": "user", "content": [{"text": text}]});
    let gemini = [json!({"sessionId": "g1", "kind": "main"}), user("<session_context>"), user("Say hello")];
    home.write_lines(".gemini/tmp/p/chats/session-2026-g1.jsonl", &gemini);
    home.write_lines(".gemini/tmp/p/.project_root", &[json!(home.project())]);
    home.write_lines(".gemini/tmp/q/chats/session-2026-g2.jsonl", &gemini);
    // Gemini leaves a file without a prompt at each start.
    home.write_lines(".gemini/tmp/p/chats/session-2026-g3.jsonl", &[json!({"sessionId": "g3"})]);
    assert_eq!(home.list("gemini"), [pair("g1", "Say hello")]);

    let start = json!({"type": "session.start", "data": {"context": {"cwd": home.project()}}});
    let message = json!({"type": "user.message", "data": {"content": "Review\nthis"}});
    home.write_lines(".copilot/session-state/c1/events.jsonl", &[start, message]);
    assert_eq!(home.list("copilot"), [pair("c1", "Review")]);

    let line = json!({"type": "user", "cwd": home.project(), "message": {"parts": [{"text": "Count"}]}});
    home.write_lines(".qwen/projects/-p/chats/q1.jsonl", &[line]);
    assert_eq!(home.list("qwen"), [pair("q1", "Count")]);
}

#[test]
fn a_variable_of_the_caller_moves_the_agents_folder() {
    let mut home = FakeHome::new();
    home.write_lines(".claude/projects/-p/usual.jsonl", &home.claude_lines("usual"));
    home.write_lines("moved/projects/-p/moved.jsonl", &home.claude_lines("moved"));
    let moved = home.dir.path().join("moved").to_str().unwrap().to_owned();
    home.variables.push(("CLAUDE_CONFIG_DIR", moved));
    assert_eq!(home.list("claude"), [pair("moved", "moved")]);
    home.variables[1].1.clear();
    assert_eq!(home.list("claude"), [pair("usual", "usual")], "an empty variable does not count");
    home.variables.clear();
    assert_eq!(home.list("claude"), []);
}

#[test]
fn only_the_directory_that_was_asked_for_is_listed_also_if_it_was_reached_by_a_link() {
    let home = FakeHome::new();
    let link = home.dir.path().join("link");
    symlink(home.project(), &link).unwrap();
    let at = |directory: &Path| json!({"type": "user", "isSidechain": false, "cwd": directory, "message": {"content": "hi"}});
    home.write_lines(".claude/projects/-p/linked.jsonl", &[at(&link)]);
    home.write_lines(".claude/projects/-p/other.jsonl", &[at(Path::new("/other"))]);
    home.write_lines(".claude/projects/-p/relative.jsonl", &[at(Path::new("project"))]);
    assert_eq!(home.list("claude"), [pair("linked", "hi")]);
    assert_eq!(home.list_in("claude", None).len(), 2, "a relative directory means nothing");
}

#[test]
fn files_that_are_not_conversations_are_left_out_and_links_are_not_followed() {
    let home = FakeHome::new();
    home.write_lines("outside.jsonl", &home.claude_lines("outside"));
    home.write_lines("outside/one.jsonl", &home.claude_lines("outside"));
    let folder = home.dir.path().join(".claude/projects");
    let good = home.write_lines(".claude/projects/-p/good.jsonl", &home.claude_lines("good"));
    symlink(home.dir.path().join("outside.jsonl"), folder.join("-p/link.jsonl")).unwrap();
    symlink(home.dir.path().join("outside"), folder.join("-linked")).unwrap();
    write(folder.join("-p/binary.jsonl"), [0xff, 0, b'\n', b'{', 0xfe]).unwrap();
    write(folder.join("-p/empty.jsonl"), "").unwrap();
    home.write_lines(".claude/projects/-p/deep.jsonl", &[json!("[".repeat(10_000))]);
    home.write_lines(".claude/projects/-p/types.jsonl", &[json!({"type": "user", "cwd": 1, "message": []})]);
    home.write_lines(".claude/projects/-p/--flag.jsonl", &home.claude_lines("an id like a flag"));
    let subagent =
        json!({"type": "user", "isSidechain": true, "cwd": home.project(), "message": {"content": "a"}});
    home.write_lines(".claude/projects/-p/agent-1.jsonl", &[subagent]);
    create_dir_all(folder.join("-p/folder.jsonl")).unwrap();
    let pipe = folder.join("-p/pipe.jsonl");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::from_raw_mode(0o600), 0)
        .unwrap();
    assert_eq!(home.list("claude"), [pair("good", "good")]);
    // For root every file is readable.
    std::fs::set_permissions(&good, PermissionsExt::from_mode(0o000)).unwrap();
    if File::open(&good).is_err() {
        assert_eq!(home.list("claude"), []);
    }
}

#[test]
fn of_a_huge_file_only_the_beginning_and_the_end_are_read() {
    let home = FakeHome::new();
    let filler = json!({"type": "progress", "text": "x".repeat(1 << 20)});
    let mut lines = home.claude_lines("the first prompt");
    lines.extend([filler.clone(), json!({"type": "ai-title", "aiTitle": "In the middle"}), filler.clone()]);
    home.write_lines(".claude/projects/-p/huge.jsonl", &lines);
    assert_eq!(home.list("claude"), [pair("huge", "the first prompt")]);
    lines.push(json!({"type": "ai-title", "aiTitle": "At the end"}));
    home.write_lines(".claude/projects/-p/huge.jsonl", &lines);
    assert_eq!(home.list("claude"), [pair("huge", "At the end")]);
    // If the directory comes too late, the conversation cannot be placed.
    lines.insert(0, filler);
    home.write_lines(".claude/projects/-p/huge.jsonl", &lines);
    assert_eq!(home.list("claude"), []);
}

#[test]
fn a_title_is_one_line_that_the_daemon_accepts() {
    assert_eq!(title_line("\n\t \n a\u{7}b\tc \nd").as_deref(), Some("abc"));
    assert_eq!(title_line(" \n"), None);
    let long = title_line(&"ä".repeat(TITLE_MAX)).unwrap();
    assert_eq!(long.len(), TITLE_MAX);
}

#[test]
fn only_the_newest_conversations_are_read_and_isolated_agents_have_none() {
    let home = FakeHome::new();
    for n in 0..CONVERSATIONS_MAX {
        home.write_lines(&format!(".claude/projects/-p/n{n}.jsonl"), &home.claude_lines("new"));
    }
    let oldest = home.write_lines(".claude/projects/-p/oldest.jsonl", &home.claude_lines("oldest"));
    set_age(&oldest, 100_000);
    let listed = home.list("claude");
    assert_eq!(listed.len(), CONVERSATIONS_MAX);
    assert!(!listed.contains(&pair("oldest", "oldest")));
    let mut isolated = Catalog::built_in().get("claude").unwrap();
    isolated.startup.isolated = true;
    assert!(!can_adopt(&isolated));
    for agent in ["echo", "script", "opencode", "claude-acp"] {
        assert!(!can_adopt(&Catalog::built_in().get(agent).unwrap()), "{agent}");
    }
}
