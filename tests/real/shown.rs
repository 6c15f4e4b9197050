//! What the scenes show of each agent. Every scene records what it has shown right after it has checked it, and
//! `tests/agents/matrix` makes the table in `docs/agents.md` of what one run recorded. Nothing else knows what an agent
//! can do, so the table cannot claim what no scene has shown.

use std::io::Write;

use serde_json::json;

use super::{RealAgentTest, agent};

/// Names the file to which a run appends what its scenes have shown. Without it nothing is recorded.
const LOG_VARIABLE: &str = "QD_SCENE_LOG";

/// Defines the behaviours and how each is called in the table, in the order of its rows.
macro_rules! behaviours {
    ($($name:ident: $title:literal,)*) => {
        /// A behaviour that a scene shows of an agent.
        #[derive(Debug, Clone, Copy)]
        pub(super) enum Behaviour {
            $($name,)*
        }

        impl Behaviour {
            fn title(self) -> &'static str {
                match self {
                    $(Self::$name => $title,)*
                }
            }
        }
    };
}

behaviours! {
    Answers: "answers, remembers, and reports what that used",
    SlashPrompt: "a prompt that begins with a slash and is no command reaches the model",
    HidesKey: "what it says is shown with addresses, and without its key",
    Allowed: "asks before it runs a command, and shows the command",
    CreatesFiles: "creates files with its own tool, and asks first",
    OverwritesFiles: "overwrites files with its own tool, and asks first",
    UsesOurTools: "uses the tools of `qd mcp` under their common names, judged by the policy",
    StartsSessions: "starts and awaits another session, and asks a person by our tools",
    Denied: "is told why a tool was refused",
    Questions: "asks people questions of its own",
    PolicyHolds: "its own settings do not outvote the policy",
    Steered: "takes a steer while it works",
    CancelText: "a cancel stops it in the middle of text, and the model's stream ends",
    CancelTool: "a cancel stops its tool, and no process is left",
    CancelAsk: "a cancel withdraws its ask",
    CancelLate: "a cancel that meets the end of its turn does not reach the next one",
    CancelAtOnce: "a cancel right after the prompt is never missed",
    SurvivesDaemon: "goes on while the daemon is killed and restarted",
    Resumes: "resumes its conversation after its worker was killed",
    Adopted: "continues a conversation that its own program began",
    FailedCall: "a failed model call is an error, and the next prompt works",
    FailedAfterTool: "a model call that fails after a tool call is an error",
    Truncated: "an answer that reaches the limit of tokens is not `cancelled`, and the next prompt works",
    Silence: "the silence of a model that hangs, or that is tried again and again, is shown and ended",
    NotSignedIn: "without a key it says how to sign in",
    UnknownModel: "an unknown model is named in the error",
    Modes: "works in plan mode, also in another process, and asks again in its usual mode",
    OwnSwitch: "shows that it switched its mode by itself or by a command of its own",
    Plans: "its to-do list is the session's plan",
    Context: "shows how full its context is",
    Compacted: "shows that it compacted its conversation",
    Quota: "an exhausted quota parks the next run until the reset",
    CountsCalls: "counts the tokens of every model call of a turn",
    Budget: "is stopped at its budget, and goes on when it is raised",
    BilledOnce: "a conversation is billed once, also after a restart",
    AtWorkspace: "at `sandbox: workspace` it works, is cancelled, resumes, and writes nothing outside",
    OfOrdinaryUser: "at `sandbox: workspace` it does so too if an ordinary user runs the daemon",
}

impl RealAgentTest {
    /// Records that the agent has just shown this behaviour.
    pub(super) fn shows(&self, behaviour: Behaviour) {
        self.record(behaviour, None);
    }

    /// Records why the agent does not have this behaviour.
    pub(super) fn lacks(&self, behaviour: Behaviour, reason: &str) {
        self.record(behaviour, Some(reason));
    }

    fn record(&self, behaviour: Behaviour, lacks: Option<&str>) {
        let Some(path) = std::env::var_os(LOG_VARIABLE) else { return };
        let line = json!({
            "row": behaviour as usize, "behaviour": behaviour.title(), "agent": agent(self.cli), "lacks": lacks,
        });
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // One write per line: other tests append to the same file.
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).unwrap();
    }
}
