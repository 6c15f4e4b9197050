//! The manifest of an agent: one TOML file that says how the agent is found, started and driven. Everything peculiar to
//! an agent is in its manifest, so drivers need not know any agent by name. Fields of the CAP manifest format keep
//! their names and meaning; the others are ours. This module does not touch the disk: `qd-catalog` finds and reads
//! manifests.

mod conversation_files;
mod modes;
mod policy_enforcement;
mod sandbox;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use conversation_files::{ConversationFiles, PromptLineRule};
pub use modes::AgentModes;
pub use policy_enforcement::{AllowedBySettings, OverridingSetting, PolicyEnforcement, RulesWithSetting};
pub use sandbox::SandboxRules;

/// Description of an agent.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub agent: AgentIdentity,
    #[serde(default, skip_serializing_if = "is_default")]
    pub probe: VersionProbe,
    #[serde(default, skip_serializing_if = "is_default")]
    pub startup: StartupRules,
    /// How the agent is made to ask for what the session's policy decides.
    #[serde(default, skip_serializing_if = "is_default")]
    pub policy: PolicyEnforcement,
    /// The modes of the agent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub modes: AgentModes,
    /// Ways to drive the agent that are better than a terminal.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fast_path: FastPath,
    /// How turns are steered, judged and stopped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub turn: TurnRules,
    /// How a conversation is resumed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub resume: ResumeRules,
    /// Where the agent keeps its conversations, for `qd adopt`. Only clients read this, so it is not sent to workers; one
    /// of an earlier release would not know it.
    #[serde(default, skip_serializing)]
    pub conversations: ConversationFiles,
    /// When an idle agent is stopped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idle: IdleRules,
    /// How strongly the agent is confined. Workers get it as part of their specification instead, because a worker of an
    /// earlier release would not know this section.
    #[serde(default, skip_serializing)]
    pub sandbox: SandboxRules,
    /// The terminal of an agent that is driven through one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pty: TerminalRules,
    /// Patterns in the output of an agent that only produces text.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parse: OutputPatterns,
    #[serde(default, skip_serializing_if = "is_default")]
    pub capabilities: AgentCapabilities,
    /// What the agent reports about its cost.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cost: CostReporting,
}

/// Name of an agent, and where its program is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentIdentity {
    /// Name that `--agent` takes.
    pub name: String,
    /// One sentence for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// The agent's program: a name to look up in `PATH`, or a path. Built-in agents have none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub binary: String,
    /// Other paths at which the program may be; `~` is the home directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<String>,
    /// How the agent is driven. Defaults to the best way in `fast_path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverKind>,
    /// Command that installs the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub install: Option<String>,
    /// What to do if the agent is not signed in, as a clause that follows a semicolon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sign_in: Option<String>,
    /// Version that Quarterdeck was last tested with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tested: Option<String>,
    /// CAP: pattern that the agent's version should match. It is checked to be a valid pattern, but not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version_match: Option<String>,
    /// CAP: profiles that the agent follows. Not used here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<String>,
}

/// How an agent is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// Built in, without a process: repeats its prompt.
    Echo,
    /// The Agent Client Protocol over stdio.
    Acp,
    /// Claude Code's own JSON lines and control protocol.
    Claude,
    /// Codex's own server over stdio.
    Codex,
    /// A terminal, with keys and a screen, as a person would use the agent.
    Pty,
    /// One command per prompt.
    Exec,
    /// A remote agent that speaks the Agent2Agent protocol.
    A2a,
    /// Somebody else's worker, driven with the plain frames.
    Worker,
}

impl DriverKind {
    /// Name in lists of agents. It is the name in manifests, except that `echo` is listed as `built-in`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Echo => "built-in",
            Self::Acp => "acp",
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Pty => "pty",
            Self::Exec => "exec",
            Self::A2a => "a2a",
            Self::Worker => "worker",
        }
    }

    /// Whether the driver sees what the agent does while it works. An agent that is seen only by its output may work
    /// for a long time without a word.
    pub fn reports_progress(self) -> bool {
        matches!(self, Self::Acp | Self::Claude | Self::Codex)
    }

    /// Whether the driver starts a program on this machine.
    pub fn has_program(self) -> bool {
        !matches!(self, Self::Echo | Self::A2a | Self::Worker)
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How to ask the agent's program for its version.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VersionProbe {
    /// Defaults to `BINARY --version`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Pattern for the version in the output: its first group, or the whole match if it has no group. Defaults to the
    /// first number with dots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version_pattern: Option<String>,
}

/// How an agent is started.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartupRules {
    /// The program and its arguments. A command in `fast_path` takes precedence; without either, the program is started
    /// without arguments.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Flag before the model. An agent that takes a model without a flag says so in `capabilities.models`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_arg: Option<String>,
    /// Flag before the system prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt_arg: Option<String>,
    /// Flag before the working directory, for agents that do not use the directory that they are started in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd_arg: Option<String>,
    /// CAP: environment variable that tells the agent the session's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id_env: Option<String>,
    /// Environment variables that the agent always gets. The session's own variables override them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Environment variables that `qd run` passes on from its caller's environment if they are set. A `*` at the end of
    /// a name matches the rest of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pass_env: Vec<String>,
    /// Environment variables that hold secrets, beside those whose name says so (`…KEY`, `…TOKEN`, `…SECRET`,
    /// `…PASSWORD`): if the agent prints such a value, it is replaced. A `*` at the end of a name matches the rest of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_env: Vec<String>,
    /// Environment variables that decide which login the agent uses. Sessions in which all of them have the same values
    /// share an account, and so its quota. A `*` at the end of a name matches the rest of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub login_env: Vec<String>,
    /// Whether the agent is kept away from the user's own login and settings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub isolated: bool,
    /// Environment variables that are set for an isolated agent. Each points to this path within a folder in the
    /// daemon's home.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub isolation: BTreeMap<String, String>,
    /// What the screen shows when the agent takes a prompt. Only used for agents in a terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_when: Option<ReadyPattern>,
    /// Seconds within which the agent must become ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_timeout_seconds: Option<u64>,
}

/// What an agent's screen shows when it is ready.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadyPattern {
    /// Pattern that a line of the screen must match.
    pub pattern: String,
}

/// Ways to drive the agent. The first one in this order that the agent offers is used.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FastPath {
    /// Claude Code's JSON lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_json: Option<DriverOffer>,
    /// The Agent Client Protocol over stdio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acp_stdio: Option<DriverOffer>,
    /// Address at which the agent serves the Agent2Agent protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a2a_serve_at: Option<DriverOffer>,
    /// Address at which a worker serves the plain frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_serve_at: Option<DriverOffer>,
    /// CAP's own protocol. Not supported here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc: Option<DriverOffer>,
}

/// How a manifest offers one way to drive the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DriverOffer {
    /// Whether it is offered at all. The command is in `startup`.
    Offered(bool),
    /// The command that starts it.
    Command(Vec<String>),
    /// The address at which it is served.
    Address(String),
}

impl DriverOffer {
    pub fn is_offered(&self) -> bool {
        *self != Self::Offered(false)
    }
}

/// How turns are steered, judged and stopped.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TurnRules {
    /// How the agent takes a steer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub steer: SteerMethod,
    /// Whether a cancelled turn leaves its tools running.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kill: KillRule,
    /// What the agent does after a tool was refused.
    #[serde(default, skip_serializing_if = "is_default")]
    pub refused: RefusalRule,
    /// How the agent asks people questions, if its protocol has more than one way.
    #[serde(default, skip_serializing_if = "is_default")]
    pub questions: QuestionMethod,
    /// Marker in the agent's updates that means that the turn failed, whatever stop reason the agent reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_when: Option<FailureMarker>,
    /// Whether every turn of the agent has text, a tool call or usage. A turn without any of them is then an error, except
    /// for a command of the agent's own that begins with a slash.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub always_answers: bool,
    /// The agent's own name of the mode in which it asks for permission, if it does not start in that mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask_mode: Option<String>,
    /// The agent reads files itself, and we do not offer to read them for it. For agents that cannot tell our response
    /// "there is no such file" from any other failure, and therefore could not create files. Only used for ACP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_files_itself: bool,
    /// How the agent is given our own MCP server. Only used for ACP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub mcp_transport: McpTransport,
    /// Which tools of MCP servers the agent uses without asking. The daemon then judges each call of its own tools by the
    /// session's policy, and asks a person if the policy says so.
    #[serde(default, skip_serializing_if = "is_default")]
    pub uses_mcp_unasked: UnaskedMcpTools,
    /// What the agent does with a prompt that begins with a slash.
    #[serde(default, skip_serializing_if = "is_default")]
    pub slash_commands: SlashCommandRules,
    /// Tools whose argument `todos` is the agent's whole to-do list, for agents that do not report it as a plan. Only used
    /// for ACP.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub todo_tools: Vec<String>,
    /// What ends the name of the tool at the beginning of the id of a call, for agents that show a title but no name.
    /// Only used for ACP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_in_call_id: Option<String>,
    /// The text with which the agent announces a call describes the call and is no output of the tool. Only used for ACP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub describes_calls: bool,
    /// Names of the agent's own helper processes. They outlive a turn and do not count as started by it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub helpers: Vec<String>,
    /// How a command that is run once per prompt gets its prompt.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prompt: PromptTransport,
    /// What a command that is run once per prompt writes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub output: ExecOutputFormat,
}

/// What an agent does with a prompt that begins with a slash.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SlashCommandRules {
    /// Whether the agent ignores a prompt that looks like a command which it does not have. Such a prompt is sent with a
    /// word before it.
    pub ignores_unknown: bool,
    /// Commands that the agent has and does not list.
    pub unlisted: Vec<String>,
}

/// How an agent takes a steer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SteerMethod {
    /// The agent cannot be steered.
    #[default]
    None,
    /// In the driver's own way.
    Native,
    /// As a request with this method name.
    Request(String),
    /// As another prompt, which the agent takes into the running turn. Both prompts are answered when the turn ends.
    Prompt,
    /// The agent fetches waiting steers with a request of this method name.
    Pull(String),
}

/// How an agent reaches an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum McpTransport {
    /// The agent starts the server and talks to it on stdio.
    #[default]
    Stdio,
    /// The agent refuses such servers. It gets one over HTTP, on a loopback port of its session.
    Http,
}

/// Which tools of MCP servers an agent uses without asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnaskedMcpTools {
    /// The agent asks before it uses any.
    #[default]
    None,
    /// Tools that their server calls read-only.
    ReadOnly,
    All,
}

/// Whether a cancelled turn leaves its tools running. This is for readers of the manifest: the keeper ends leftover
/// processes in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KillRule {
    /// The agent ends its tools when it is asked to stop.
    #[default]
    Asked,
    /// The agent's tools survive an interrupted turn.
    Tools,
}

/// What an agent does after a tool was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalRule {
    /// The model is told, and the turn continues.
    #[default]
    #[serde(rename = "goes_on")]
    Continues,
    /// The turn ends, whatever stop reason the agent reports.
    Stops,
}

/// How an agent asks people questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionMethod {
    /// In the way that its protocol provides.
    #[default]
    Form,
    /// As a permission request for a tool whose arguments are the `questions`. The answers are sent with the
    /// permission, by question number.
    Permission,
}

/// A value in the `_meta` of an agent's updates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureMarker {
    /// JSON pointer to the value.
    pub meta: String,
    /// The value that means failure.
    pub is: String,
}

/// How a command that is run once per prompt gets its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptTransport {
    /// On standard input, which is then closed.
    #[default]
    Stdin,
    /// In place of `{prompt}` among its arguments, or as the last argument.
    Argument,
}

/// What a command that is run once per prompt writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecOutputFormat {
    #[default]
    Text,
    /// One JSON value per line.
    Json,
}

/// How an agent's conversation is resumed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResumeRules {
    #[serde(default, skip_serializing_if = "is_default")]
    pub by: ResumeMethod,
    /// Do not resume a conversation within the clock minute in which it was last used, because the agent would lose it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub next_minute: bool,
    /// The agent replays the old conversation only after it has reported that it is ready. Its output counts from the
    /// end of the replay.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late_replay: bool,
}

/// Whether another process of the agent can resume a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeMethod {
    /// The driver finds out.
    #[default]
    Driver,
    /// No: the conversation is lost with the process.
    Nothing,
    /// There is nothing to resume: each prompt stands for itself.
    Stateless,
}

/// When an idle agent is stopped.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdleRules {
    /// Idle timeout in seconds, used unless the user's settings have `idle_s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest_after_s: Option<u64>,
}

/// The terminal of an agent that is driven through one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TerminalRules {
    pub cols: u16,
    pub rows: u16,
    /// Whether prompts are sent as bracketed paste, so that line breaks in them do not submit them.
    pub bracketed_paste: bool,
    pub sigint_cancels_turn: SigintRule,
    /// Whether the agent accepts input while it works.
    pub queued_input_supported: bool,
    /// Keys that submit a prompt.
    pub submit: String,
}

impl Default for TerminalRules {
    fn default() -> Self {
        Self {
            cols: 120,
            rows: 40,
            bracketed_paste: false,
            sigint_cancels_turn: SigintRule::Hard,
            queued_input_supported: false,
            submit: "\r".to_owned(),
        }
    }
}

/// What ^C does to an agent in a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SigintRule {
    /// It ends the turn, and the agent is ready for the next prompt.
    Graceful,
    /// It ends the agent.
    #[default]
    Hard,
    /// It has no effect.
    None,
}

/// Patterns in the output of an agent. Each is matched against single lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutputPatterns {
    /// The line in which the agent waits for a prompt.
    pub idle: Vec<String>,
    /// A line that is on the screen only while the agent works.
    pub busy: Vec<String>,
    /// Start of a tool call.
    pub tool_call_start: Vec<String>,
    /// End of a tool call.
    pub tool_call_end: Vec<String>,
    /// Start of a plan.
    pub plan_section: Vec<String>,
    /// Start of a thought.
    pub thought_section: Vec<String>,
    /// A yes-or-no question.
    pub ask_yes_no: Vec<String>,
    /// A question with several numbered answers.
    pub ask_options: Vec<String>,
    /// Lines that mean that the turn failed, whatever stop reason the agent reports. If the agent reports tokens, they
    /// count only in a turn that used none, because a model may write such a line too.
    pub error_lines: Vec<String>,
    /// Lines that are for people and not part of the answer.
    pub notice_lines: Vec<String>,
    /// Lines of an error that mean that the agent is not signed in, for agents whose protocol does not say so.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sign_in_lines: Vec<String>,
    /// Lines of an error that mean that the quota or rate limit of the account is exhausted, for agents whose protocol
    /// does not say so. Named groups take from the line when it resets: `epoch` (seconds since 1970), `in` (a duration
    /// such as `12h3m4s`), or `at` (a time such as `3pm` or `Nov 20, 3:04 PM`), with its `zone` if the line has one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub quota_lines: Vec<String>,
}

impl Default for OutputPatterns {
    fn default() -> Self {
        let empty = Vec::new;
        Self {
            idle: vec![r"^>\s*$".to_owned(), r"^❯\s*$".to_owned()],
            busy: empty(),
            tool_call_start: empty(),
            tool_call_end: empty(),
            plan_section: empty(),
            thought_section: empty(),
            ask_yes_no: empty(),
            ask_options: empty(),
            error_lines: empty(),
            notice_lines: empty(),
            sign_in_lines: empty(),
            quota_lines: empty(),
        }
    }
}

/// What an agent can do, as far as it is known before the agent starts. Fields marked with CAP are informational:
/// nothing here depends on them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentCapabilities {
    /// CAP: whether text arrives while it is being generated.
    pub streaming_output: bool,
    /// CAP: whether the agent accepts input while it works.
    pub queued_input: bool,
    /// CAP: whether a turn can be cancelled.
    pub mid_turn_cancel: bool,
    /// CAP: whether one process can hold several conversations.
    pub multi_session: bool,
    /// CAP: whether the output of tools arrives while they run.
    pub streaming_tool_output: bool,
    /// CAP: kinds of input, such as `text` and `image`.
    pub input_modalities: Vec<String>,
    /// CAP: kinds of output.
    pub output_modalities: Vec<String>,
    pub ask_user: QuestionCapabilities,
    /// Whether the agent asks for permission before it uses tools.
    pub approvals: bool,
    /// Whether the agent lets the session choose a model.
    pub models: bool,
    /// Whether the agent accepts a system prompt.
    pub system_prompts: bool,
    /// Whether the agent can be given MCP servers when it starts.
    pub mcp: bool,
}

/// Kinds of questions that an agent can ask people.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuestionCapabilities {
    pub yes_no: bool,
    /// Questions with several answers to choose from.
    pub options: bool,
    /// Questions that take any answer.
    pub free_text: bool,
}

impl QuestionCapabilities {
    pub fn any(&self) -> bool {
        self.yes_no || self.options || self.free_text
    }
}

/// What an agent reports about its cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CostReporting {
    /// Whether the agent reports its cost. If not, the daemon's `prices` setting gives the cost of its tokens.
    pub metered: bool,
    /// Currency of the reported cost.
    pub currency: String,
    /// Whether the agent reports how many tokens it used.
    pub tokens: bool,
    pub tokens_of: TokenScope,
}

/// What an agent's token counts cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenScope {
    /// The turn that has just ended.
    #[default]
    Turn,
    /// The whole conversation so far.
    Session,
    /// The last model call of the turn. The tokens of its other calls are known only if the agent reports every call, as
    /// it does with the `_meta` of its text; then those of the response are not counted again.
    Call,
}

impl Default for CostReporting {
    fn default() -> Self {
        Self { metered: false, currency: "USD".to_owned(), tokens: false, tokens_of: TokenScope::Turn }
    }
}

/// Price of tokens in US dollars per million.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenPrice {
    /// Price of input tokens.
    pub input: f64,
    /// Price of output tokens.
    pub output: f64,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Manifest {
    /// How the agent is driven: `agent.driver` if it is set, otherwise the first way that `fast_path` offers, otherwise
    /// a terminal.
    pub fn driver(&self) -> DriverKind {
        let is_offered = |offer: &Option<DriverOffer>| offer.as_ref().is_some_and(DriverOffer::is_offered);
        self.agent.driver.unwrap_or({
            if is_offered(&self.fast_path.stream_json) {
                DriverKind::Claude
            } else if is_offered(&self.fast_path.acp_stdio) {
                DriverKind::Acp
            } else if is_offered(&self.fast_path.a2a_serve_at) {
                DriverKind::A2a
            } else if is_offered(&self.fast_path.worker_serve_at) {
                DriverKind::Worker
            } else {
                DriverKind::Pty
            }
        })
    }

    /// The program and its arguments, without those that a session adds. Empty if the agent has no program.
    pub fn command(&self) -> Vec<String> {
        let offered = match self.driver() {
            DriverKind::Acp => self.fast_path.acp_stdio.as_ref(),
            DriverKind::Claude => self.fast_path.stream_json.as_ref(),
            _ => None,
        };
        match offered {
            Some(DriverOffer::Command(argv)) if !argv.is_empty() => argv.clone(),
            _ if !self.startup.command.is_empty() => self.startup.command.clone(),
            _ if self.agent.binary.is_empty() => Vec::new(),
            _ => vec![self.agent.binary.clone()],
        }
    }

    /// Address of a remote agent or worker.
    pub fn address(&self) -> Option<&str> {
        let offered = match self.driver() {
            DriverKind::Worker => &self.fast_path.worker_serve_at,
            _ => &self.fast_path.a2a_serve_at,
        };
        match offered {
            Some(DriverOffer::Address(url)) => Some(url),
            _ => None,
        }
    }

    /// Whether an idle agent may be stopped: a new process can resume its conversation, or there is none to resume. A
    /// program in a terminal keeps its memory in its process, and somebody else's worker may tie its memory to the
    /// connection.
    pub fn can_stop_when_idle(&self) -> bool {
        match self.resume.by {
            ResumeMethod::Driver => !matches!(self.driver(), DriverKind::Pty | DriverKind::Worker),
            ResumeMethod::Nothing => false,
            ResumeMethod::Stateless => true,
        }
    }

    /// Whether a new process of the agent can continue a conversation.
    pub fn can_resume(&self) -> bool {
        self.resume.by == ResumeMethod::Driver
            && !matches!(self.driver(), DriverKind::Exec | DriverKind::Pty | DriverKind::Worker)
    }

    /// Whether a running turn can be steered. The plain frames of a worker always allow it.
    pub fn can_steer(&self) -> bool {
        self.turn.steer != SteerMethod::None || self.driver() == DriverKind::Worker
    }
}
