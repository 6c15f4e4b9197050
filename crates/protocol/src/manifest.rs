//! How an agent is found, started and understood: one TOML file each. Everything that is peculiar to an agent stands
//! here, so that drivers need to know none by name. CAP's fields keep their names and meaning; the others are ours.
//! Nothing here looks at a disk: which manifests count, and which agents are there, is the catalogue's business.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// An agent, described.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Who it is.
    pub agent: AgentIdentity,
    /// How its version is asked for.
    #[serde(default, skip_serializing_if = "is_default")]
    pub probe: VersionProbe,
    /// How it is started.
    #[serde(default, skip_serializing_if = "is_default")]
    pub startup: StartupRules,
    /// What better than a terminal it offers to be driven by.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fast_path: FastPath,
    /// How its turns are steered, judged and stopped.
    #[serde(default, skip_serializing_if = "is_default")]
    pub turn: TurnRules,
    /// How its conversation is gone on with.
    #[serde(default, skip_serializing_if = "is_default")]
    pub resume: ResumeRules,
    /// How an idle one is treated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idle: IdleRules,
    /// The terminal it is given, where it wants one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pty: TerminalRules,
    /// What its words look like, where it has only words.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parse: OutputPatterns,
    /// What it can do.
    #[serde(default, skip_serializing_if = "is_default")]
    pub capabilities: AgentCapabilities,
    /// What it tells of its cost.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cost: CostReporting,
}

/// Who an agent is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentIdentity {
    /// What `--agent` takes.
    pub name: String,
    /// For people, in one sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Its program: a name that is looked for on the `PATH`, or a path. Built-in agents have none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub binary: String,
    /// Other places where its program may be; `~` is the home directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<String>,
    /// How it is driven; by the best of its `fast_path` if that is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverKind>,
    /// The command that installs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub install: Option<String>,
    /// The version that it was last tried with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tested: Option<String>,
    /// CAP: a pattern that its version should match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version_match: Option<String>,
    /// CAP: the profiles that it follows. Of no meaning here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<String>,
}

/// How an agent is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// Part of this program: says its prompt again.
    Echo,
    /// The Agent Client Protocol on stdio.
    Acp,
    /// Claude Code's own lines of JSON and its control protocol.
    Claude,
    /// Codex's own server on stdio.
    Codex,
    /// A terminal, as a person would.
    Pty,
    /// A command for each prompt.
    Exec,
    /// A remote agent that speaks the Agent2Agent protocol.
    A2a,
    /// Somebody else's worker, by the plain frames.
    Worker,
}

impl DriverKind {
    /// Its name in manifests and lists.
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

    /// Whether a program of this machine is started for it.
    pub fn has_program(self) -> bool {
        !matches!(self, Self::Echo | Self::A2a | Self::Worker)
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How an agent's version is asked for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VersionProbe {
    /// The command; `BINARY --version` if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// A pattern whose first group, or else all of it, is the version; the first number with dots if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version_pattern: Option<String>,
}

/// How an agent is started.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartupRules {
    /// The program and its arguments; of `fast_path`, or else the program alone, if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The flag before the model. Agents that take one without a flag say so in `capabilities.models`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_arg: Option<String>,
    /// The flag before the system prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_prompt_arg: Option<String>,
    /// The flag before the working directory, for agents that do not take the one they are started in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd_arg: Option<String>,
    /// CAP: the variable that tells the agent the session's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id_env: Option<String>,
    /// Variables that it is always given.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Variables that `qd run` sends along from its caller's environment, where they are set; `*` at the end of a name
    /// stands for the rest of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pass_env: Vec<String>,
    /// Whether it is kept from the user's own login and settings.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub isolated: bool,
    /// The variables that then point into a folder of the daemon's, and where in there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub isolation: BTreeMap<String, String>,
    /// What it shows when it takes a prompt; only a terminal is looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_when: Option<ReadyPattern>,
    /// Seconds within which it must be ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_timeout_seconds: Option<u64>,
}

/// What an agent shows when it is ready.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadyPattern {
    /// A pattern that a line of its screen matches.
    pub pattern: String,
}

/// What an agent offers to be driven by. The first that is there is taken.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FastPath {
    /// Claude Code's lines of JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_json: Option<DriverOffer>,
    /// The Agent Client Protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acp_stdio: Option<DriverOffer>,
    /// The Agent2Agent protocol.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a2a_serve_at: Option<DriverOffer>,
    /// The plain frames of a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_serve_at: Option<DriverOffer>,
    /// CAP's own protocol, which nothing here speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc: Option<DriverOffer>,
}

/// One thing that an agent offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DriverOffer {
    /// Whether it does.
    Offered(bool),
    /// By this command.
    Command(Vec<String>),
    /// At this address.
    Address(String),
}

impl DriverOffer {
    /// Whether it is offered at all.
    pub fn is_offered(&self) -> bool {
        *self != Self::Offered(false)
    }
}

/// How turns are steered, judged and stopped.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TurnRules {
    /// The agent's own verb for a word on the way.
    #[serde(default, skip_serializing_if = "is_default")]
    pub steer: SteerMethod,
    /// What a turn that is to be stopped needs besides being asked to.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kill: KillRule,
    /// What it does when a tool is refused.
    #[serde(default, skip_serializing_if = "is_default")]
    pub refused: RefusalRule,
    /// How it asks people questions, where its protocol has more than one way.
    #[serde(default, skip_serializing_if = "is_default")]
    pub questions: QuestionMethod,
    /// What in its updates means that the turn failed, whatever it says of how that ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_when: Option<FailureMarker>,
    /// The mode in which it asks, if it does not begin in that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ask_mode: Option<String>,
    /// Names of its own helpers, which outlive a turn and are not counted among what the turn started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub helpers: Vec<String>,
    /// How a one-prompt command gets its prompt.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prompt: PromptTransport,
    /// What such a command writes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub output: ExecOutputFormat,
}

/// An agent's verb for a word in the middle of a turn.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SteerMethod {
    /// It has none.
    #[default]
    None,
    /// Its driver knows.
    Native,
    /// A request of this name.
    Request(String),
    /// Another prompt, which it takes as a steer; both are answered when the turn ends.
    Prompt,
    /// It asks for what there is by a request of this name.
    Pull(String),
}

/// What a turn that is to be stopped needs besides being asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KillRule {
    /// Nothing: it ends its tools as well. What it forgets, the keeper ends.
    #[default]
    Asked,
    /// Its tools go on; the keeper ends them at once.
    Tools,
}

/// What an agent does when a tool is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalRule {
    /// The model is told and goes on.
    #[default]
    GoesOn,
    /// The turn ends there, whatever it calls that.
    Stops,
}

/// How an agent asks people questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionMethod {
    /// As its protocol provides.
    #[default]
    Form,
    /// As permission for a tool whose arguments are the `questions`; the answers go beside the permission, by number.
    Permission,
}

/// A word in the `_meta` of an agent's updates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailureMarker {
    /// Where it stands, as a JSON pointer.
    pub meta: String,
    /// What it is then.
    pub is: String,
}

/// How a one-prompt command gets its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptTransport {
    /// On standard input, which is then closed.
    #[default]
    Stdin,
    /// In place of `{prompt}` among its arguments, or as the last of them.
    Argument,
}

/// What a one-prompt command writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecOutputFormat {
    /// Text.
    #[default]
    Text,
    /// One JSON value a line.
    Json,
}

/// How an agent's conversation is gone on with.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResumeRules {
    /// Whether it can be, and what stands in the way.
    #[serde(default, skip_serializing_if = "is_default")]
    pub by: ResumeMethod,
    /// Do not resume a conversation in the minute of the clock in which it was last used: the agent would lose it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub next_minute: bool,
    /// It repeats the past only after it has said that it is ready: its words count when that is over.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub late_replay: bool,
}

/// Whether a conversation can be gone on with by another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResumeMethod {
    /// As its driver finds out.
    #[default]
    Driver,
    /// It cannot: with its process its memory is gone.
    Nothing,
    /// There is nothing to remember: each prompt stands for itself.
    Stateless,
}

/// How an idle agent is treated.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdleRules {
    /// Seconds after which it is put to rest, if not those of the settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest_after_s: Option<u64>,
}

/// The terminal that an agent is given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TerminalRules {
    /// Its width.
    pub cols: u16,
    /// Its height.
    pub rows: u16,
    /// Whether prompts are pasted as one piece, so that line breaks in them do not send them off.
    pub bracketed_paste: bool,
    /// What ^C does.
    pub sigint_cancels_turn: SigintRule,
    /// Whether it takes what is typed while it works.
    pub queued_input_supported: bool,
    /// What sends a prompt off.
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

/// What ^C does to an agent at a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SigintRule {
    /// It ends the turn, and the agent is ready for the next.
    Graceful,
    /// It ends the agent.
    #[default]
    Hard,
    /// Nothing.
    None,
}

/// What an agent's words look like. Patterns are tried on single lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutputPatterns {
    /// The line in which it waits for a prompt.
    pub idle: Vec<String>,
    /// The line that is only there while it works.
    pub busy: Vec<String>,
    /// Where a tool call begins.
    pub tool_call_start: Vec<String>,
    /// Where it ends.
    pub tool_call_end: Vec<String>,
    /// Where a plan begins.
    pub plan_section: Vec<String>,
    /// Where a thought begins.
    pub thought_section: Vec<String>,
    /// A question that takes yes or no.
    pub ask_yes_no: Vec<String>,
    /// A question that takes one of several numbered answers.
    pub ask_options: Vec<String>,
    /// Words that mean that the turn failed, whatever the agent says of how it ended. Where tokens are told, only of a
    /// turn that used none: a model may say such words too.
    pub error_lines: Vec<String>,
    /// Words that are for people and no part of the answer.
    pub notice_lines: Vec<String>,
}

impl Default for OutputPatterns {
    fn default() -> Self {
        let none = Vec::new;
        Self {
            idle: vec![r"^>\s*$".to_owned(), r"^❯\s*$".to_owned()],
            busy: none(),
            tool_call_start: none(),
            tool_call_end: none(),
            plan_section: none(),
            thought_section: none(),
            ask_yes_no: none(),
            ask_options: none(),
            error_lines: none(),
            notice_lines: none(),
        }
    }
}

/// What an agent can do, as far as it is known before it is started.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentCapabilities {
    /// Whether its text comes while it is made.
    pub streaming_output: bool,
    /// CAP: whether it takes what is typed while it works.
    pub queued_input: bool,
    /// CAP: whether a turn can be cancelled.
    pub mid_turn_cancel: bool,
    /// CAP: whether one process can have several conversations.
    pub multi_session: bool,
    /// CAP: whether the output of tools comes while they run.
    pub streaming_tool_output: bool,
    /// CAP: what it takes.
    pub input_modalities: Vec<String>,
    /// CAP: what it gives.
    pub output_modalities: Vec<String>,
    /// What it can ask people.
    pub ask_user: QuestionCapabilities,
    /// Whether it asks before it uses tools.
    pub approvals: bool,
    /// Whether it can be told which model to use.
    pub models: bool,
    /// Whether it can be given a system prompt.
    pub system_prompts: bool,
    /// Whether it can be given servers of the Model Context Protocol when it is started.
    pub mcp: bool,
}

/// What an agent can ask people.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuestionCapabilities {
    /// Yes or no.
    pub yes_no: bool,
    /// One of several answers.
    pub options: bool,
    /// Anything.
    pub free_text: bool,
}

impl QuestionCapabilities {
    /// Whether it can ask anything at all.
    pub fn any(&self) -> bool {
        self.yes_no || self.options || self.free_text
    }
}

/// What an agent tells of its cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CostReporting {
    /// Whether it tells what it cost. If not, tokens are priced by the settings.
    pub metered: bool,
    /// In what.
    pub currency: String,
    /// Whether it tells how many tokens it used.
    pub tokens: bool,
    /// Of what it tells them.
    pub tokens_of: TokenScope,
}

/// What an agent's count of tokens is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenScope {
    /// The turn that has ended.
    #[default]
    Turn,
    /// The conversation so far.
    Session,
}

impl Default for CostReporting {
    fn default() -> Self {
        Self { metered: false, currency: "USD".to_owned(), tokens: false, tokens_of: TokenScope::Turn }
    }
}

/// What tokens cost, in dollars for a million.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenPrice {
    /// Of the prompt.
    pub input: f64,
    /// Of the answer.
    pub output: f64,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Manifest {
    /// How it is driven: as it says, else by the best that it offers, else by a terminal.
    pub fn driver(&self) -> DriverKind {
        let made = |offer: &Option<DriverOffer>| offer.as_ref().is_some_and(DriverOffer::is_offered);
        self.agent.driver.unwrap_or({
            if made(&self.fast_path.stream_json) {
                DriverKind::Claude
            } else if made(&self.fast_path.acp_stdio) {
                DriverKind::Acp
            } else if made(&self.fast_path.a2a_serve_at) {
                DriverKind::A2a
            } else if made(&self.fast_path.worker_serve_at) {
                DriverKind::Worker
            } else {
                DriverKind::Pty
            }
        })
    }

    /// The program and its arguments, before anything of a session is added; empty if it has none.
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

    /// Where it listens, for one that is elsewhere.
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

    /// Whether an idle one can be put to rest: another process goes on with its conversation, or there is none to go on
    /// with. The memory of a program in a terminal is its process, and that of somebody else's worker the connection.
    pub fn can_rest(&self) -> bool {
        match self.resume.by {
            ResumeMethod::Driver => !matches!(self.driver(), DriverKind::Pty | DriverKind::Worker),
            ResumeMethod::Nothing => false,
            ResumeMethod::Stateless => true,
        }
    }

    /// Whether a turn of it can be told something on its way; the frames of a worker have a word for that.
    pub fn can_steer(&self) -> bool {
        self.turn.steer != SteerMethod::None || self.driver() == DriverKind::Worker
    }
}
