//! `qd run`: sends a prompt to an agent, in a new session or an existing one. This file starts the run;
//! `run_watcher.rs` watches it.

use anyhow::Context as _;
use qd_home::DaemonConfig;
use qd_protocol::api::{Agent, NewAttachment, NewSession, PromptReceipt, Session};
use serde_json::json;

use super::run_watcher::{RunWatcher, WatchedRun};
use super::{VerbContext, prompt, workspace};
use crate::args::RunArgs;
use crate::client::DaemonClient;
use crate::client::stream::EventStream;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::refs::{self, ResolvedSession};

/// Agents that are always available. They do not count when `qd run` looks for the only installed agent.
const BUILT_IN: [&str; 2] = ["echo", "script"];

pub(crate) async fn run(context: &VerbContext, flags: RunArgs) -> Result<CliExitCode> {
    if flags.detach && flags.timeout.is_some() && flags.session.is_some() {
        let message =
            "--timeout has no effect on a detached run in an existing session; omit --detach or --timeout";
        return Err(CliFailure::Usage(message.to_owned()));
    }
    let text = prompt::read_prompt(&flags.prompt)?;
    let files = prompt::read_attachments(&flags.file)?;
    let client = context.client().await?;
    let (session, agent) = open_session(context, &client, &flags).await?;
    if flags.detach {
        let receipt = start_run(&client, &session, &flags, text, files).await?;
        return print_detached(&context.out, &session, &receipt);
    }
    // Open the stream before the run starts, so no event is missed.
    let stream = EventStream::from_now(&client, &session.stream_path()).await?;
    let receipt = start_run(&client, &session, &flags, text, files).await?;
    let watched = WatchedRun { session, receipt, agent, on_ask: flags.on_ask, timeout: flags.timeout };
    RunWatcher::new(&context.out, &client, watched).watch(stream).await
}

/// Sends the prompt. If it is refused, a session created for it is purged.
async fn start_run(
    client: &DaemonClient,
    session: &ResolvedSession,
    flags: &RunArgs,
    text: String,
    files: Vec<NewAttachment>,
) -> Result<PromptReceipt> {
    let receipt = prompt::post_prompt(client, session, text, files).await;
    if matches!(receipt, Err(CliFailure::Refused(_))) && flags.session.is_none() {
        client.delete(&format!("{}?purge=true", session.path())).await?;
    }
    receipt
}

/// The session of `--session`, or a new one, and the name of its agent.
async fn open_session(
    context: &VerbContext,
    client: &DaemonClient,
    flags: &RunArgs,
) -> Result<(ResolvedSession, String)> {
    if let Some(id) = &flags.session {
        let session = refs::resolve_session(client, id).await?;
        let agent = client.get::<Session>(&session.path()).await?.agent;
        return Ok((session, agent));
    }
    let policy = flags.policy.as_deref().map(prompt::read_policy).transpose()?;
    let workspace = workspace::open_workspace(client, flags.dir.as_deref()).await?;
    let agents: Vec<Agent> = client.list(&format!("/v1/agents?workspace={}", workspace.id)).await?;
    let own_program = |name: &str| workspace::own_program(client, &workspace, &agents, name);
    let name = match &flags.agent {
        Some(name) => name.clone(),
        None => {
            let config = DaemonConfig::load(&context.locator.home).context("the settings are not valid")?;
            let is_installed = |agent: &Agent| agent.available || own_program(&agent.name).is_some();
            choose_agent(config.agent.value, &agents, is_installed, &context.out)?
        }
    };
    let mut env = workspace::passed_variables(&workspace, &agents, [name.as_str()]);
    env.extend(workspace::given_variables(&flags.env)?);
    let new = NewSession {
        program: own_program(&name),
        agent: name.clone(),
        title: flags.title.clone(),
        model: flags.model.clone(),
        mode: flags.mode.clone(),
        policy,
        worktree: flags.worktree.then_some(true),
        // While attached, the watcher enforces --timeout; for a detached run the daemon does.
        run_timeout_s: flags.timeout.filter(|_| flags.detach),
        budget_usd: flags.budget,
        max_turns: flags.max_turns,
        system_prompt: flags.system_prompt.clone(),
        sandbox: flags.sandbox,
        network: flags.network,
        env,
        ..NewSession::default()
    };
    let created = client.post(&format!("/v1/workspaces/{}/sessions", workspace.id), &new).await;
    let session: Session = created.map_err(|failure| workspace::with_own_path(client, failure))?;
    Ok((ResolvedSession { workspace: workspace.id.to_string(), id: session.id }, name))
}

/// The configured agent, else the only one installed. Nobody chooses among several for the user; if there is none,
/// `echo` shows how a run looks.
fn choose_agent(
    configured: Option<String>,
    agents: &[Agent],
    is_installed: impl Fn(&Agent) -> bool,
    out: &CliOutput,
) -> Result<String> {
    if let Some(name) = configured {
        return Ok(name);
    }
    let is_found = |agent: &&Agent| is_installed(agent) && !BUILT_IN.contains(&agent.name.as_str());
    let found: Vec<&str> = agents.iter().filter(is_found).map(|agent| agent.name.as_str()).collect();
    match found[..] {
        [] => {
            out.print_note(
                "no agent is installed, so echo is used, which repeats your prompt; see `qd agents` for others",
            );
            Ok("echo".to_owned())
        }
        [only] => Ok(only.to_owned()),
        [first, ..] => Err(CliFailure::Usage(format!(
            "several agents are installed: {}\n    choose one for this run:  qd run --agent {first} …\n    or for all runs:          \
             qd config set agent {first}",
            found.join(", ")
        ))),
    }
}

fn print_detached(
    out: &CliOutput,
    session: &ResolvedSession,
    receipt: &PromptReceipt,
) -> Result<CliExitCode> {
    let id = &session.id;
    if out.json {
        out.print_json(&json!({
            "session_id": id, "workspace_id": session.workspace, "run_id": receipt.run_id,
            "state": receipt.state, "position": receipt.position, "seq": receipt.seq,
        }))?;
    } else {
        out.print_line(id.as_str())?;
        out.print_note(&format!("    qd attach {id}\n    qd logs -f {id}\n    qd cancel {id}"));
    }
    Ok(CliExitCode::Success)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(name: &str, available: bool) -> Agent {
        Agent { name: name.to_owned(), available, ..Agent::default() }
    }

    #[test]
    fn the_agent_is_the_configured_one_else_the_only_one_found_and_echo_only_where_there_is_none() {
        let out = CliOutput::new(false);
        let choose_agent = |configured, agents: &[Agent], out| {
            choose_agent(configured, agents, |agent| agent.available, out)
        };
        let built_in = [agent("echo", true), agent("script", true)];
        let one = [agent("echo", true), agent("claude", true), agent("codex", false)];
        let two = [agent("echo", true), agent("claude", true), agent("codex", true)];
        assert_eq!(choose_agent(Some("codex".to_owned()), &two, &out).unwrap(), "codex");
        assert_eq!(choose_agent(None, &one, &out).unwrap(), "claude");
        assert_eq!(choose_agent(None, &built_in, &out).unwrap(), "echo");
        let refused = choose_agent(None, &two, &out).unwrap_err();
        assert_eq!(refused.exit_code(), CliExitCode::Usage);
        assert!(refused.to_string().contains("claude, codex"), "{refused}");
        assert!(refused.to_string().contains("qd config set agent claude"), "{refused}");
    }
}
