//! `qd adopt`: lists the conversations that agents have on this machine's disk, and makes a session of one. The files are
//! read here, because they and the environment variables that say where they are belong to the caller. The daemon is
//! only told the agent's id of the conversation.

use std::path::Path;

use qd_catalog::Catalog;
use qd_catalog::conversations::{AgentConversation, can_adopt, list_conversations};
use qd_protocol::Millis;
use qd_protocol::api::{Agent, NewSession, Session};
use qd_protocol::manifest::Manifest;
use serde_json::{Value, json};

use super::{VerbContext, workspace};
use crate::args::AdoptArgs;
use crate::client::DaemonClient;
use crate::client::host::DaemonHost;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;
use crate::render::text;

/// The table shows at least this many characters of an id, and more if they are not enough to tell two ids apart.
const ID_CHARS_MIN: usize = 8;
/// How many conversations an ambiguous id is explained with.
const CANDIDATES_SHOWN: usize = 5;

/// Lists conversations, or with an id adopts one.
pub(crate) async fn adopt(context: &VerbContext, flags: &AdoptArgs) -> Result<CliExitCode> {
    let catalog = Catalog::with_user_folders(&context.locator.home.agent_folders());
    let manifests = adoptable_agents(&catalog, flags.agent.as_deref())?;
    let client = context.client().await?;
    if !matches!(client.host(), DaemonHost::Unix(_)) {
        let message = "conversations are files on the machine of the daemon, and --host or QD_HOST names one that may \
                       be elsewhere; run `qd adopt` there, without them";
        return Err(CliFailure::Usage(message.to_owned()));
    }
    let directory = workspace::resolve_directory(flags.dir.as_deref())?;
    let Some(id) = &flags.id else {
        let sessions: Vec<Session> = client.list("/v1/sessions?open=true").await?;
        let wanted = (!flags.all).then_some(directory.as_path());
        return print_list(context, &find_conversations(&manifests, wanted), &sessions, flags.all);
    };
    let mut found = with_prefix(find_conversations(&manifests, Some(&directory)), id);
    if found.is_empty() && flags.dir.is_none() {
        found = with_prefix(find_conversations(&manifests, None), id);
    }
    let conversation = choose_conversation(found, id)?;
    let session = create_session(&client, conversation).await?;
    if context.out.json {
        context.out.print_json(&session)?;
    } else {
        let id = &session.id;
        context.out.print_line(id.as_str())?;
        context.out.print_note(&format!("    qd run --session {id} PROMPT\n    qd attach {id}"));
    }
    Ok(CliExitCode::Success)
}

/// The agents whose conversations are looked for: all that can be adopted from, or the named one.
fn adoptable_agents(catalog: &Catalog, name: Option<&str>) -> Result<Vec<Manifest>> {
    if let Some(name) = name.filter(|name| name.contains('@')) {
        let message = format!(
            "{name} runs on another machine, whose files cannot be read from here; name an agent of this machine"
        );
        return Err(CliFailure::Usage(message));
    }
    let adoptable = catalog.entries().map(|entry| &entry.manifest).filter(|manifest| can_adopt(manifest));
    let adoptable: Vec<Manifest> = adoptable.cloned().collect();
    let Some(name) = name else { return Ok(adoptable) };
    match adoptable.iter().find(|manifest| manifest.agent.name == name) {
        Some(manifest) => Ok(vec![manifest.clone()]),
        None => {
            let known: Vec<&str> = adoptable.iter().map(|manifest| manifest.agent.name.as_str()).collect();
            let message = format!(
                "conversations of {name} cannot be adopted; agents whose conversations can be: {}",
                known.join(", ")
            );
            Err(CliFailure::Usage(message))
        }
    }
}

/// The conversations of all these agents, the one that changed last first.
fn find_conversations(manifests: &[Manifest], directory: Option<&Path>) -> Vec<AgentConversation> {
    let variable = |name: &str| std::env::var(name).ok();
    let of_agent = |manifest| list_conversations(manifest, &variable, directory);
    let mut found: Vec<AgentConversation> = manifests.iter().flat_map(of_agent).collect();
    found.sort_by_key(|conversation| std::cmp::Reverse(conversation.changed_at));
    found
}

fn with_prefix(mut found: Vec<AgentConversation>, prefix: &str) -> Vec<AgentConversation> {
    found.retain(|conversation| conversation.id.starts_with(prefix));
    match found.iter().position(|conversation| conversation.id == prefix) {
        Some(exact) => vec![found.swap_remove(exact)],
        None => found,
    }
}

fn choose_conversation(mut found: Vec<AgentConversation>, id: &str) -> Result<AgentConversation> {
    match found.len() {
        0 => Err(CliFailure::NotFound(format!(
            "no conversation has an id that begins with {id}; `qd adopt --all` lists the conversations"
        ))),
        1 => Ok(found.remove(0)),
        count => {
            let shown = found.iter().take(CANDIDATES_SHOWN);
            let shown: Vec<String> =
                shown.map(|conversation| format!("{} ({})", conversation.id, conversation.agent)).collect();
            let message = format!(
                "{count} conversations have an id that begins with {id}: {}; give more of it, or --agent",
                shown.join(", ")
            );
            Err(CliFailure::Usage(message))
        }
    }
}

fn session_of<'a>(sessions: &'a [Session], conversation: &AgentConversation) -> Option<&'a Session> {
    sessions.iter().find(|session| session.agent_session_id.as_deref() == Some(&conversation.id))
}

/// Creates a session that continues the conversation, in the directory in which it began.
async fn create_session(client: &DaemonClient, conversation: AgentConversation) -> Result<Session> {
    let AgentConversation { agent, id, directory, title, .. } = conversation;
    let workspace = workspace::open_workspace(client, Some(&directory)).await?;
    let agents: Vec<Agent> = client.list(&format!("/v1/agents?workspace={}", workspace.id)).await?;
    let new = NewSession {
        program: workspace::own_program(client, &workspace, &agents, &agent),
        env: workspace::passed_variables(&workspace, &agents, [agent.as_str()]),
        agent,
        title,
        agent_session_id: Some(id),
        ..NewSession::default()
    };
    client.post(&format!("/v1/workspaces/{}/sessions", workspace.id), &new).await
}

fn print_list(
    context: &VerbContext,
    found: &[AgentConversation],
    sessions: &[Session],
    all: bool,
) -> Result<CliExitCode> {
    let out = &context.out;
    if out.json {
        let values: Vec<Value> = found.iter().map(|one| conversation_json(one, sessions)).collect();
        out.print_json(&values)?;
        return Ok(CliExitCode::Success);
    }
    if found.is_empty() {
        out.print_note(match all {
            true => "no conversations were found",
            false => "no conversations were found for this directory; `qd adopt --all` lists those of all directories",
        });
        return Ok(CliExitCode::Success);
    }
    out.print_data(&table(found, sessions, all, Millis::now()).render(out.out_style(), out.width()))?;
    Ok(CliExitCode::Success)
}

fn conversation_json(conversation: &AgentConversation, sessions: &[Session]) -> Value {
    json!({
        "agent": conversation.agent, "id": conversation.id, "title": conversation.title,
        "directory": conversation.directory.to_string_lossy(), "changed_at": conversation.changed_at,
        "size": conversation.size, "session_id": session_of(sessions, conversation).map(|session| &session.id),
    })
}

fn table(found: &[AgentConversation], sessions: &[Session], all: bool, now: Millis) -> TextTable {
    let titles = ["AGENT", "TITLE", "AGE", "SIZE", "ID", "SESSION", "DIRECTORY"];
    let mut table = TextTable::new(if all { &titles } else { &titles[..6] });
    table.keep_ends(6);
    let id_chars = distinct_id_chars(found);
    for conversation in found {
        let session = session_of(sessions, conversation).map(|session| session.id.to_string());
        let cells = [
            conversation.agent.clone(),
            conversation.title.clone().unwrap_or_else(|| "-".to_owned()),
            text::format_age(conversation.changed_at, now),
            text::format_size(conversation.size),
            conversation.id.chars().take(id_chars).collect(),
            session.unwrap_or_else(|| "-".to_owned()),
        ];
        if all {
            let [agent, title, age, size, id, session] = cells;
            let directory = conversation.directory.display().to_string();
            table.add_row([agent, title, age, size, id, session, directory]);
        } else {
            table.add_row(cells);
        }
    }
    table
}

/// How many characters of the ids tell all of them apart.
fn distinct_id_chars(found: &[AgentConversation]) -> usize {
    let mut ids: Vec<&str> = found.iter().map(|conversation| conversation.id.as_str()).collect();
    ids.sort_unstable();
    let shared = |pair: &[&str]| pair[0].chars().zip(pair[1].chars()).take_while(|(a, b)| a == b).count() + 1;
    ids.windows(2).map(shared).max().unwrap_or(0).max(ID_CHARS_MIN)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::render::style::TextStyle;

    fn conversation(agent: &str, id: &str, age_s: u64, size: u64, title: Option<&str>) -> AgentConversation {
        AgentConversation {
            agent: agent.to_owned(),
            id: id.to_owned(),
            directory: PathBuf::from("/home/ann/shop"),
            title: title.map(str::to_owned),
            changed_at: Millis(1_000_000_000 - age_s * 1000),
            size,
        }
    }

    fn some_conversations() -> [AgentConversation; 4] {
        [
            conversation("claude", "fb006d6f-8341-4849-9701-4022c44400ca", 40, 112_640, Some("Login page")),
            conversation(
                "codex",
                "01a1eac8-4439-7442-8c1c-07db7049605d",
                7_200,
                48_200_000,
                Some("Port the parser to the new tokenizer and keep every public name as it is"),
            ),
            conversation("codex", "01a1eac8-9c01-7442-8c1c-07db7049605d", 90_000, 900, Some("修复测试")),
            conversation("gemini", "1f25c79f-cf92-4938-a65c-2fbd19ea5925", 900_000, 600_000, None),
        ]
    }

    fn session(agent_session_id: &str) -> Session {
        serde_json::from_value(json!({
            "id": "ses_ar477mby3tane7hf", "workspace_id": "ws_1", "agent": "claude", "title": null,
            "state": "idle", "busy": false, "parent": null, "model": null, "system_prompt": null,
            "policy": "ask", "queued": 0, "usage": {"input_tokens": 0, "output_tokens": 0, "cost_usd": 0.0},
            "agent_session_id": agent_session_id, "worktree": null, "budget_usd": null, "max_turns": null,
            "run_timeout_s": null, "cancel_grace_s": null, "restarts": null, "restart_window_s": null,
            "env": [], "closing": false, "created_at": "2026-09-01T10:00:00.000Z",
            "updated_at": "2026-09-01T10:00:00.000Z",
        }))
        .unwrap()
    }

    #[test]
    fn the_table_fits_the_terminal_and_names_the_session_that_has_a_conversation() {
        let sessions = [session("fb006d6f-8341-4849-9701-4022c44400ca")];
        let now = Millis(1_000_000_000);
        for width in [80, 140] {
            let shown = |all| {
                let table = table(&some_conversations(), &sessions, all, now);
                table.render(TextStyle::new(false), Some(width))
            };
            insta::assert_snapshot!(format!("conversations_{width}"), shown(false));
            insta::assert_snapshot!(format!("conversations_all_{width}"), shown(true));
        }
    }

    #[test]
    fn a_prefix_must_mean_one_conversation_and_a_whole_id_always_does() {
        let choose = |id| choose_conversation(with_prefix(some_conversations().to_vec(), id), id);
        assert_eq!(choose("fb").unwrap().agent, "claude");
        assert_eq!(choose("01a1eac8-9").unwrap().title.as_deref(), Some("修复测试"));
        assert_eq!(choose("zz").unwrap_err().exit_code(), CliExitCode::NotFound);
        let refused = choose("01a1eac8").unwrap_err();
        assert_eq!(refused.exit_code(), CliExitCode::Usage);
        assert!(refused.to_string().contains("01a1eac8-4439-7442-8c1c-07db7049605d (codex)"), "{refused}");
    }

    #[test]
    fn only_agents_of_this_machine_whose_conversations_are_known_can_be_named() {
        let catalog = Catalog::built_in();
        let refusal = |name| adoptable_agents(&catalog, Some(name)).unwrap_err().to_string();
        assert!(refusal("claude@gpu").contains("another machine"));
        assert!(
            refusal("opencode").contains("claude, codex, gemini, copilot, qwen"),
            "{}",
            refusal("opencode")
        );
        assert_eq!(adoptable_agents(&catalog, Some("codex")).unwrap().len(), 1);
    }
}
