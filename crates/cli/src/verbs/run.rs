//! `qd run`: a prompt for an agent, in a new session or an old one. What is said before the run exists lives here;
//! watching it to its end is `follow.rs`.

use anyhow::Context as _;
use qd_daemon::config::DaemonConfig;
use qd_protocol::api::{Agent, NewSession, PromptReceipt, Session};
use serde_json::json;

use super::run_watcher::{RunWatcher, WatchedRun};
use super::{VerbContext, prompt, workspace};
use crate::args::RunArgs;
use crate::client::DaemonClient;
use crate::client::stream::EventStream;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;
use crate::refs::{self, ResolvedSession};

/// Agents that are always there, and so are never taken as the only one found.
const BUILT_IN: [&str; 2] = ["echo", "script"];

/// Runs one prompt.
pub(crate) async fn run(context: &VerbContext, flags: RunArgs) -> Result<CliExitCode> {
    if flags.detach && flags.timeout.is_some() && flags.session.is_some() {
        let why =
            "nobody would keep the time of a detached run in an old session; leave out --detach or --timeout";
        return Err(CliFailure::Usage(why.to_owned()));
    }
    let words = prompt::read_prompt(&flags.prompt)?;
    let client = context.client().await?;
    let (session, agent) = open_session(context, &client, &flags).await?;
    if flags.detach {
        let receipt = start_run(&client, &session, &flags, words).await?;
        return print_detached(&context.out, &session, &receipt);
    }
    // The stream first: whatever the run does from its first moment on is then on it.
    let stream = EventStream::from_now(&client, &session.stream_path()).await?;
    let receipt = start_run(&client, &session, &flags, words).await?;
    let watched = WatchedRun { session, receipt, agent, on_ask: flags.on_ask, timeout: flags.timeout };
    RunWatcher::new(&context.out, &client, watched).watch(stream).await
}

/// Gives the session its prompt. One that was made for a prompt that is refused is not left behind.
async fn start_run(
    client: &DaemonClient,
    session: &ResolvedSession,
    flags: &RunArgs,
    words: String,
) -> Result<PromptReceipt> {
    let accepted = prompt::post_prompt(client, session, words).await;
    if matches!(accepted, Err(CliFailure::Refused(_))) && flags.session.is_none() {
        client.delete(&format!("{}?purge=true", session.path())).await?;
    }
    accepted
}

/// The session that was named, or a new one, and the name of its agent.
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
    let name = match &flags.agent {
        Some(name) => name.clone(),
        None => {
            let config = DaemonConfig::load(&context.locator.home).context("the settings cannot be used")?;
            choose_agent(config.agent.value, &agents, &context.out)
        }
    };
    let new = NewSession {
        agent: name.clone(),
        title: flags.title.clone(),
        model: flags.model.clone(),
        policy,
        worktree: flags.worktree.then_some(true),
        // Attached, we keep the time ourselves; a run that is left alone is timed by the daemon.
        run_timeout_s: flags.timeout.filter(|_| flags.detach),
        env: workspace::passed_variables(&workspace, &agents, [name.as_str()]),
        ..NewSession::default()
    };
    let session: Session = client.post(&format!("/v1/workspaces/{}/sessions", workspace.id), &new).await?;
    Ok((ResolvedSession { workspace: workspace.id.to_string(), id: session.id }, name))
}

/// The configured agent, else the only one found, else `echo` with a note.
fn choose_agent(configured: Option<String>, agents: &[Agent], out: &CliOutput) -> String {
    if let Some(name) = configured {
        return name;
    }
    let mut found = agents.iter().filter(|agent| agent.available && !BUILT_IN.contains(&agent.name.as_str()));
    match (found.next(), found.next()) {
        (Some(only), None) => only.name.clone(),
        (Some(one), Some(other)) => {
            out.print_note(&format!(
                "several agents can start ({}, {}, …): using echo; choose with --agent or `agent` in config.toml",
                one.name, other.name
            ));
            "echo".to_owned()
        }
        (None, _) => {
            out.print_note("no agent is installed: using echo, which repeats your words; `qd agents` lists those that are known");
            "echo".to_owned()
        }
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
    fn the_agent_is_the_configured_one_else_the_only_one_found_else_echo() {
        let out = CliOutput::new(false);
        let built_in = [agent("echo", true), agent("script", true)];
        let one = [agent("echo", true), agent("claude", true), agent("codex", false)];
        let two = [agent("echo", true), agent("claude", true), agent("codex", true)];
        assert_eq!(choose_agent(Some("codex".to_owned()), &one, &out), "codex");
        assert_eq!(choose_agent(None, &one, &out), "claude");
        assert_eq!(choose_agent(None, &two, &out), "echo");
        assert_eq!(choose_agent(None, &built_in, &out), "echo");
    }
}
