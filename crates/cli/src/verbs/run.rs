//! `qd run`: a prompt for an agent, in a new session or an old one. What is said before the run exists lives here;
//! watching it to its end is `follow.rs`.

use anyhow::Context as _;
use qd_daemon::config::Config;
use qd_protocol::api::{Agent, NewSession, Receipt, Session};
use serde_json::json;

use super::follow::{Follow, Watched};
use super::{Context, prompt, workspace};
use crate::args::Run;
use crate::client::Client;
use crate::client::stream::EventStream;
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;
use crate::refs::{self, SessionRef};

/// Agents that are always there, and so are never taken as the only one found.
const BUILT_IN: [&str; 2] = ["echo", "script"];

/// Runs one prompt.
pub(crate) async fn run(context: &Context, flags: Run) -> Result<Exit> {
    if flags.detach && flags.timeout.is_some() && flags.session.is_some() {
        let why =
            "nobody would keep the time of a detached run in an old session; leave out --detach or --timeout";
        return Err(Failure::Usage(why.to_owned()));
    }
    let words = prompt::words(&flags.prompt)?;
    let client = context.client().await?;
    let (session, agent) = session(context, &client, &flags).await?;
    if flags.detach {
        let receipt = begin(&client, &session, &flags, words).await?;
        return detached(&context.out, &session, &receipt);
    }
    // The stream first: whatever the run does from its first moment on is then on it.
    let stream = EventStream::from_now(&client, &session.stream_path()).await?;
    let receipt = begin(&client, &session, &flags, words).await?;
    let watched = Watched { session, receipt, agent, on_ask: flags.on_ask, timeout: flags.timeout };
    Follow::new(&context.out, &client, watched).watch(stream).await
}

/// Gives the session its prompt. One that was made for a prompt that is refused is not left behind.
async fn begin(client: &Client, session: &SessionRef, flags: &Run, words: String) -> Result<Receipt> {
    let accepted = prompt::post(client, session, words).await;
    if matches!(accepted, Err(Failure::Refused(_))) && flags.session.is_none() {
        client.delete(&format!("{}?purge=true", session.path())).await?;
    }
    accepted
}

/// The session that was named, or a new one, and the name of its agent.
async fn session(context: &Context, client: &Client, flags: &Run) -> Result<(SessionRef, String)> {
    if let Some(id) = &flags.session {
        let session = refs::session(client, id).await?;
        let agent = client.get::<Session>(&session.path()).await?.agent;
        return Ok((session, agent));
    }
    let policy = flags.policy.as_deref().map(prompt::policy).transpose()?;
    let workspace = workspace::of(client, flags.dir.as_deref()).await?;
    let agents: Vec<Agent> = client.list(&format!("/v1/agents?workspace={}", workspace.id)).await?;
    let name = match &flags.agent {
        Some(name) => name.clone(),
        None => {
            let config = Config::load(&context.whereabouts.home).context("the settings cannot be used")?;
            choose(config.agent.value, &agents, &context.out)
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
        env: workspace::variables(&workspace, &agents, [name.as_str()]),
        ..NewSession::default()
    };
    let session: Session = client.post(&format!("/v1/workspaces/{}/sessions", workspace.id), &new).await?;
    Ok((SessionRef { workspace: workspace.id.to_string(), id: session.id }, name))
}

/// The configured agent, else the only one found, else `echo` with a note.
fn choose(configured: Option<String>, agents: &[Agent], out: &Output) -> String {
    if let Some(name) = configured {
        return name;
    }
    let mut found = agents.iter().filter(|agent| agent.available && !BUILT_IN.contains(&agent.name.as_str()));
    match (found.next(), found.next()) {
        (Some(only), None) => only.name.clone(),
        (Some(one), Some(other)) => {
            out.note(&format!(
                "several agents can start ({}, {}, …): using echo; choose with --agent or `agent` in config.toml",
                one.name, other.name
            ));
            "echo".to_owned()
        }
        (None, _) => {
            out.note("no agent is installed: using echo, which repeats your words; `qd agents` lists those that are known");
            "echo".to_owned()
        }
    }
}

fn detached(out: &Output, session: &SessionRef, receipt: &Receipt) -> Result<Exit> {
    let id = &session.id;
    if out.json {
        out.value(&json!({
            "session_id": id, "workspace_id": session.workspace, "run_id": receipt.run_id,
            "state": receipt.state, "position": receipt.position, "seq": receipt.seq,
        }))?;
    } else {
        out.line(id.as_str())?;
        out.note(&format!("    qd attach {id}\n    qd logs -f {id}\n    qd cancel {id}"));
    }
    Ok(Exit::Well)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(name: &str, available: bool) -> Agent {
        Agent { name: name.to_owned(), available, ..Agent::default() }
    }

    #[test]
    fn the_agent_is_the_configured_one_else_the_only_one_found_else_echo() {
        let out = Output::new(false);
        let built_in = [agent("echo", true), agent("script", true)];
        let one = [agent("echo", true), agent("claude", true), agent("codex", false)];
        let two = [agent("echo", true), agent("claude", true), agent("codex", true)];
        assert_eq!(choose(Some("codex".to_owned()), &one, &out), "codex");
        assert_eq!(choose(None, &one, &out), "claude");
        assert_eq!(choose(None, &two, &out), "echo");
        assert_eq!(choose(None, &built_in, &out), "echo");
    }
}
