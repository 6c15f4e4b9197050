//! The real agents that the suites drive. They are installed once, at the versions pinned in
//! `tests/agents/package.json`, and run in a home of their own: they see nothing of the developer's setup, and their
//! only model is the scripted one. All settings that an agent needs for this are here and nowhere else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::FakeModel;

/// An agent's command line program, in a mode that speaks a protocol on stdin and stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RealAgent {
    /// Claude Code with its own stream of JSON lines.
    Claude,
    /// Codex with its app server.
    Codex,
    /// Claude Code behind the ACP adapter, which brings its own Claude.
    ClaudeAcp,
    /// Codex behind the ACP adapter.
    CodexAcp,
    /// Gemini CLI over ACP.
    Gemini,
    /// GitHub Copilot CLI over ACP.
    Copilot,
    /// OpenCode over ACP.
    Opencode,
    /// Qwen Code over ACP.
    Qwen,
}

impl RealAgent {
    pub const ALL: [Self; 8] = [
        Self::Claude,
        Self::Codex,
        Self::ClaudeAcp,
        Self::CodexAcp,
        Self::Gemini,
        Self::Copilot,
        Self::Opencode,
        Self::Qwen,
    ];

    /// The name of the program in a user's PATH.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::ClaudeAcp => "claude-agent-acp",
            Self::CodexAcp => "codex-acp",
            Self::Gemini => "gemini",
            Self::Copilot => "copilot",
            Self::Opencode => "opencode",
            Self::Qwen => "qwen",
        }
    }

    /// The arguments that make the program speak its protocol.
    pub fn args(self) -> &'static [&'static str] {
        match self {
            Self::Claude => &[
                "-p",
                "--input-format",
                "stream-json",
                "--output-format",
                "stream-json",
                "--verbose",
                "--permission-prompt-tool",
                "stdio",
            ],
            Self::Codex => &["app-server"],
            Self::ClaudeAcp | Self::CodexAcp => &[],
            // Without a named model, another model is asked which one to use.
            Self::Gemini => &["--acp", "-m", "gemini-2.5-pro"],
            Self::Copilot => &["--acp"],
            Self::Opencode => &["acp"],
            // In other modes another model decides whether a call is allowed, instead of the user.
            Self::Qwen => &["--acp", "--approval-mode", "default"],
        }
    }

    /// The script that node runs, for programs that are not executables of their own.
    fn node_script(self) -> Option<&'static str> {
        match self {
            Self::ClaudeAcp => Some("@agentclientprotocol/claude-agent-acp/dist/index.js"),
            Self::CodexAcp => Some("@agentclientprotocol/codex-acp/dist/index.js"),
            Self::Gemini => Some("@google/gemini-cli/bundle/gemini.js"),
            Self::Qwen => Some("@qwen-code/qwen-code/cli-entry.js"),
            Self::Claude | Self::Codex | Self::Copilot | Self::Opencode => None,
        }
    }
}

/// Where the agents are installed.
#[derive(Debug)]
pub struct InstalledAgents {
    root: PathBuf,
}

impl InstalledAgents {
    /// Installs the agents if necessary. `tests/agents/install` does the work and makes concurrent callers wait. If it
    /// fails, the test fails; it is not skipped.
    pub fn installed() -> &'static Self {
        static INSTALLED: OnceLock<InstalledAgents> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            let install = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/agents/install");
            let output = Command::new(&install).output();
            let output =
                output.unwrap_or_else(|error| panic!("{} does not start: {error}", install.display()));
            let stdout = String::from_utf8_lossy(&output.stdout);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "failed to install the agents: {}\n{stderr}{stdout}",
                output.status
            );
            Self { root: stdout.trim_end().into() }
        })
    }

    /// Everything that was installed is below this folder.
    pub fn folder(&self) -> &Path {
        &self.root
    }

    /// A directory for PATH with every program under its name, and the node that they need.
    pub fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// The program alone: its own executable, or node with the script. No shell and no shim in between.
    pub fn program(&self, cli: RealAgent) -> Vec<String> {
        let path = |path: PathBuf| path.to_str().expect("the cache's path is text").to_owned();
        match cli.node_script() {
            Some(script) => {
                vec![path(self.bin().join("node")), path(self.root.join("node_modules").join(script))]
            }
            None => vec![path(self.bin().join(cli.name()))],
        }
    }

    /// The program with the arguments for its protocol.
    pub fn argv(&self, cli: RealAgent) -> Vec<String> {
        self.program(cli).into_iter().chain(cli.args().iter().map(|&arg| arg.to_owned())).collect()
    }
}

/// The environment of an agent that can only reach `model`, and a `home` with the settings files that the agent reads
/// there. The home is created if it is missing. The environment is complete: an agent needs no other variables.
///
/// The proxy variables point to the model, so requests to other hosts show up in [`FakeModel::proxied_hosts`]. There
/// are none, except for two package lookups by OpenCode when it starts.
///
/// Agents that can ask the user a question: Claude (a control request), its adapter if the client declares
/// `elicitation`, Qwen (a permission request with `qwenInteractionKind`), and Codex only with `--enable
/// default_mode_request_user_input`. The others do not offer the tool.
pub fn isolated_environment(cli: RealAgent, home: &Path, model: &FakeModel) -> BTreeMap<String, String> {
    let (url, v1) = (model.url(), format!("{}/v1", model.url()));
    let text = |path: &Path| path.to_str().expect("the home's path is text").to_owned();
    // Some agents put sockets and scratch files there, wherever their home is.
    let tmp = home.join("tmp");
    std::fs::create_dir_all(&tmp).expect("the home can be made");
    let bin = text(&InstalledAgents::installed().bin());
    let path = std::env::var("PATH").map_or(bin.clone(), |path| format!("{bin}:{path}"));
    let mut env = BTreeMap::new();
    let mut set = |name: &str, value: &str| env.insert(name.to_owned(), value.to_owned());
    set("PATH", &path);
    set("HOME", &text(home));
    // The model's shell commands are written for this shell.
    set("SHELL", "/bin/bash");
    set("TMPDIR", &text(&tmp));
    set("XDG_CONFIG_HOME", &text(&home.join(".config")));
    set("XDG_DATA_HOME", &text(&home.join(".local/share")));
    set("XDG_STATE_HOME", &text(&home.join(".local/state")));
    set("XDG_CACHE_HOME", &text(&home.join(".cache")));
    for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
        set(proxy, &url);
    }
    set("NO_PROXY", "127.0.0.1,localhost");
    set("no_proxy", "127.0.0.1,localhost");
    match cli {
        RealAgent::Claude | RealAgent::ClaudeAcp => {
            set("ANTHROPIC_BASE_URL", &url);
            set("ANTHROPIC_API_KEY", "a-key-of-nobody");
            set("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
            set("DISABLE_AUTOUPDATER", "1");
            // Otherwise it asks the model after a turn what the user may type next.
            set("CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION", "false");
        }
        RealAgent::Codex | RealAgent::CodexAcp => {
            set("CODEX_API_KEY", "a-key-of-nobody");
            set("INITIAL_AGENT_MODE", "read-only");
            write_file(&home.join(".codex/config.toml"), &codex_config(&v1));
        }
        RealAgent::Gemini => {
            set("GEMINI_API_KEY", "a-key-of-nobody");
            set("GOOGLE_GEMINI_BASE_URL", &url);
            set("GEMINI_CLI_TRUST_WORKSPACE", "true");
            // One process instead of two.
            set("GEMINI_CLI_NO_RELAUNCH", "true");
            write_file(&home.join(".gemini/settings.json"), &gemini_settings().to_string());
        }
        RealAgent::Copilot => {
            set("COPILOT_OFFLINE", "true");
            set("COPILOT_PROVIDER_BASE_URL", &v1);
            set("COPILOT_PROVIDER_API_KEY", "a-key-of-nobody");
            set("COPILOT_MODEL", "a-key-of-nobody");
            set("COPILOT_AUTO_UPDATE", "false");
            // Otherwise it unpacks 240 MB into every new home.
            set("COPILOT_PKG_CACHE_HOME", &text(&InstalledAgents::installed().root.join("copilot-package")));
        }
        RealAgent::Opencode => {
            set("OPENCODE_DISABLE_AUTOUPDATE", "1");
            set("OPENCODE_DISABLE_MODELS_FETCH", "1");
            set("OPENCODE_DISABLE_LSP_DOWNLOAD", "1");
            write_file(&home.join(".config/opencode/opencode.json"), &opencode_config(&v1).to_string());
        }
        RealAgent::Qwen => {
            set("OPENAI_API_KEY", "a-key-of-nobody");
            set("OPENAI_BASE_URL", &v1);
            set("OPENAI_MODEL", "a-key-of-nobody");
            set("QWEN_CODE_NO_RELAUNCH", "true");
            write_file(&home.join(".qwen/settings.json"), &qwen_settings().to_string());
        }
    }
    env
}

/// With `on-request`, only commands that leave the sandbox need approval. Plugins and analytics are off because they
/// call other hosts. Codex must know the model, or it warns in every turn; and the model must be one without code
/// mode, or there is no shell tool.
fn codex_config(url: &str) -> String {
    format!(
        r#"model = "gpt-5.5"
model_provider = "scripted"
approval_policy = "on-request"
check_for_update_on_startup = false

[model_providers.scripted]
name = "scripted"
base_url = "{url}"
env_key = "CODEX_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
plugins = false
"#
    )
}

/// Session retention is off, because its cleanup at the start deletes sessions that it cannot read.
fn gemini_settings() -> Value {
    json!({
        "security": { "auth": { "selectedType": "gemini-api-key" } },
        "privacy": { "usageStatisticsEnabled": false },
        "telemetry": { "enabled": false },
        "general": { "enableAutoUpdate": false, "sessionRetention": { "enabled": false } },
    })
}

/// The question tool stays off: over ACP it would wait for ever.
fn opencode_config(url: &str) -> Value {
    let limit = json!({ "context": 100_000, "output": 8_000 });
    // Dollars per million tokens, so that it reports a cost.
    let cost = json!({ "input": 4.0, "output": 20.0 });
    let model = json!({ "name": "Scripted", "tool_call": true, "limit": limit, "cost": cost });
    json!({
        "provider": { "scripted": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Scripted",
            "options": { "baseURL": url, "apiKey": "scripted" },
            "models": { "scripted": model },
        } },
        "model": "scripted/scripted",
        "small_model": "scripted/scripted",
        "enabled_providers": ["scripted"],
        "permission": { "bash": "ask", "edit": "ask" },
        "autoupdate": false,
        "share": "disabled",
    })
}

fn qwen_settings() -> Value {
    json!({
        "security": { "auth": { "selectedType": "openai" } },
        "privacy": { "usageStatisticsEnabled": false },
        "telemetry": { "enabled": false },
        "general": { "enableAutoUpdate": false },
        // Otherwise it asks the model after a turn what the user may type next, and what to remember.
        "ui": { "enableFollowupSuggestions": false },
        "memory": { "enableManagedAutoMemory": false, "enableManagedAutoDream": false },
    })
}

fn write_file(path: &Path, content: &str) {
    let dir = path.parent().expect("a file is in a directory");
    std::fs::create_dir_all(dir).expect("the home can be written");
    std::fs::write(path, content).expect("the home can be written");
}
