//! `qd workers`: lists the workers here and on other machines, and manages the tokens with which machines join.

use qd_protocol::Millis;
use qd_protocol::api::{CreatedWorkerToken, JoinedWorker, NewWorkerToken, Worker, WorkerToken};

use super::VerbContext;
use crate::args::{WorkerTokenArgs, WorkersVerb};
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::refs;
use crate::render::session_cells::ShownIds;
use crate::render::table::TextTable;
use crate::render::text;

const JOINED_PATH: &str = "/v1/workers/joined";

/// Lists running workers, and below them the joined machines.
pub(crate) async fn workers(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let workers: Vec<Worker> = client.list("/v1/workers").await?;
    if context.out.json {
        context.out.print_json(&workers)?;
        return Ok(CliExitCode::Success);
    }
    let joined: Vec<JoinedWorker> = client.list(JOINED_PATH).await?;
    if workers.is_empty() {
        context.out.print_note("no agents are running");
    } else {
        let ids = workers.iter().map(|worker| worker.session_id.to_string()).collect();
        let ids = refs::shown_ids(&context.out, &client, &refs::WATCHED_KINDS, ids).await?;
        print_table(context, &table(workers, &ids, Millis::now()))?;
    }
    if !joined.is_empty() {
        context.out.print_line("")?;
        print_table(context, &machines_table(joined, Millis::now()))?;
    }
    Ok(CliExitCode::Success)
}

async fn list_machines(context: &VerbContext, client: &DaemonClient) -> Result<CliExitCode> {
    let joined: Vec<JoinedWorker> = client.list(JOINED_PATH).await?;
    if context.out.json {
        context.out.print_json(&joined)?;
    } else if joined.is_empty() {
        context.out.print_note("no machine has joined; `qd workers token` prints the command for joining");
    } else {
        print_table(context, &machines_table(joined, Millis::now()))?;
    }
    Ok(CliExitCode::Success)
}

fn print_table(context: &VerbContext, table: &TextTable) -> Result<()> {
    Ok(context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?)
}

fn table(workers: Vec<Worker>, ids: &ShownIds, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["SESSION", "AGENT", "WHERE", "PID", "AGE", "PROCESSES", "WORKER"]);
    for worker in workers {
        let processes: Vec<String> =
            worker.processes.iter().map(|process| format!("{}({})", process.name, process.pid)).collect();
        table.add_row([
            ids.shown(&worker.session_id),
            worker.agent,
            worker.host.unwrap_or_else(|| "here".to_owned()),
            worker.pid.to_string(),
            text::format_age(worker.started_at, now),
            processes.join(" "),
            worker.id,
        ]);
    }
    table
}

fn machines_table(joined: Vec<JoinedWorker>, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["MACHINE", "LABELS", "AGENTS", "SESSIONS", "STATE", "AGE", "VERSION"]);
    for machine in joined {
        table.add_row([
            machine.name,
            machine.labels.join(","),
            machine.agents.join(","),
            machine.sessions.len().to_string(),
            if machine.connected { "connected" } else { "disconnected" }.to_owned(),
            text::format_age(machine.joined_at, now),
            machine.version,
        ]);
    }
    table
}

/// Lists machines; creates, lists and revokes the tokens with which they join.
pub(crate) async fn run_workers_verb(context: &VerbContext, verb: WorkersVerb) -> Result<CliExitCode> {
    let client = context.client().await?;
    match verb {
        WorkersVerb::Machines => list_machines(context, &client).await,
        WorkersVerb::Token(args) => make_token(context, &client, args).await,
        WorkersVerb::Tokens => list_tokens(context, &client).await,
        WorkersVerb::Revoke { id } => revoke_token(context, &client, &id).await,
    }
}

async fn make_token(
    context: &VerbContext,
    client: &DaemonClient,
    args: WorkerTokenArgs,
) -> Result<CliExitCode> {
    let WorkerTokenArgs { name, named, label: labels, agent: agents } = args;
    let new = NewWorkerToken { name: name.or(named), labels, agents };
    let made: CreatedWorkerToken = client.post("/v1/workers/tokens", &new).await?;
    if context.out.json {
        context.out.print_json(&made)?;
        return Ok(CliExitCode::Success);
    }
    let url = made.url.as_deref().unwrap_or("URL");
    let mut command = format!("qd worker join {url} --token {}", made.token);
    for label in made.labels.iter().flatten() {
        command.push_str(&format!(" --label {label}"));
    }
    for agent in made.agents.iter().flatten() {
        command.push_str(&format!(" --agent {agent}"));
    }
    if let Some(fingerprint) = &made.fingerprint {
        command.push_str(&format!(" --fingerprint {fingerprint}"));
    }
    context.out.print_line(&command)?;
    match made.url {
        None => context.out.print_note(
            "the daemon does not listen on a port yet; start it with `qd serve --listen HOST:PORT --tls self`",
        ),
        Some(url) if is_wildcard(&url) => {
            context.out.print_note("replace the host with a name or address of this machine");
        }
        Some(_) => {}
    }
    Ok(CliExitCode::Success)
}

/// Whether the host is a wildcard address, which other machines cannot connect to.
fn is_wildcard(url: &str) -> bool {
    ["://0.0.0.0:", "://[::]:"].iter().any(|host| url.contains(host))
}

async fn list_tokens(context: &VerbContext, client: &DaemonClient) -> Result<CliExitCode> {
    let tokens: Vec<WorkerToken> = client.list("/v1/workers/tokens").await?;
    if context.out.json {
        context.out.print_json(&tokens)?;
        return Ok(CliExitCode::Success);
    }
    print_table(context, &tokens_table(tokens, Millis::now()))?;
    Ok(CliExitCode::Success)
}

fn tokens_table(tokens: Vec<WorkerToken>, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["ID", "NAME", "LABELS", "AGENTS", "AGE", "LAST USED"]);
    let list = |allowed: Option<Vec<String>>| allowed.map_or_else(|| "any".to_owned(), |all| all.join(","));
    for token in tokens {
        let used = token.last_used_at.map_or_else(|| "never".to_owned(), |at| text::format_age(at, now));
        table.add_row([
            token.id.to_string(),
            token.name.unwrap_or_default(),
            list(token.labels),
            list(token.agents),
            text::format_age(token.created_at, now),
            used,
        ]);
    }
    table
}

async fn revoke_token(context: &VerbContext, client: &DaemonClient, id: &str) -> Result<CliExitCode> {
    let tokens: Vec<WorkerToken> = client.list("/v1/workers/tokens").await?;
    let token = find_token(&tokens, id)?;
    client.delete(&format!("/v1/workers/tokens/{}", token.id)).await?;
    match context.out.json {
        true => context.out.print_json(token)?,
        false => context.out.print_line(token.id.as_str())?,
    }
    Ok(CliExitCode::Success)
}

/// Finds the token with this id, id prefix or name.
fn find_token<'a>(tokens: &'a [WorkerToken], given: &str) -> Result<&'a WorkerToken> {
    if let Some(exact) = tokens.iter().find(|token| token.id.as_str() == given) {
        return Ok(exact);
    }
    let matches = |token: &&WorkerToken| {
        let id = token.id.as_str();
        let bare = id.trim_start_matches(qd_protocol::TokenId::PREFIX);
        id.starts_with(given) || bare.starts_with(given) || token.name.as_deref() == Some(given)
    };
    let found: Vec<&WorkerToken> = tokens.iter().filter(matches).collect();
    match found[..] {
        [token] => Ok(token),
        [] => Err(CliFailure::NotFound(format!("no worker token matches {given}; see `qd workers tokens`"))),
        _ => Err(CliFailure::Usage(format!("several worker tokens match {given}; use more of the id"))),
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::SessionId;
    use serde_json::{Value, json};

    use crate::render::view_snapshot::assert_view;
    use qd_protocol::TokenId;

    use super::*;

    fn token(id: &str, name: Option<&str>) -> WorkerToken {
        let id = TokenId::parse(id).unwrap();
        let name = name.map(str::to_owned);
        WorkerToken { id, name, created_at: Millis(0), last_used_at: None, labels: None, agents: None }
    }

    #[test]
    fn a_token_is_found_by_id_id_prefix_or_name() {
        let tokens = [token("tok_ab", Some("box")), token("tok_ac", None), token("tok_abc", Some("box2"))];
        for given in ["tok_ab", "box"] {
            assert_eq!(find_token(&tokens, given).unwrap().id.as_str(), "tok_ab", "{given}");
        }
        assert_eq!(find_token(&tokens, "ac").unwrap().id.as_str(), "tok_ac");
        assert_eq!(find_token(&tokens, "tok_a").unwrap_err().exit_code(), CliExitCode::Usage);
        assert_eq!(find_token(&tokens, "x").unwrap_err().exit_code(), CliExitCode::NotFound);
    }

    #[test]
    fn wildcard_addresses_are_recognized() {
        assert!(is_wildcard("https://0.0.0.0:1") && is_wildcard("https://[::]:1"));
        assert!(!is_wildcard("https://10.0.0.0:1"));
    }

    /// An hour after the epoch.
    const NOW: Millis = Millis(3_600_000);

    #[test]
    fn workers_machines_and_tokens_read_well() {
        let worker = |id: &str, host: Option<&str>, processes: Value| -> Worker {
            serde_json::from_value(json!({
                "id": id, "session_id": "ses_ar477mby3tane7hf", "pid": 4711, "started_at": Millis(1_200_000),
                "lease_expires_at": NOW, "agent": "claude", "host": host, "processes": processes,
            }))
            .unwrap()
        };
        let process = |name: &str, pid| json!({ "name": name, "pid": pid });
        let workers = [
            worker("wrk_5k1xq2m8fz0p7t3c", None, json!([process("claude", 4712), process("node", 4713)])),
            worker("wrk_h2c9v4n6b8m1q3w5", Some("ml-box.lan"), json!([])),
        ];
        assert_view("workers", |style, width| {
            table(workers.to_vec(), &ShownIds::default(), NOW).render(style, width)
        });

        let machine = |name: &str, connected| JoinedWorker {
            name: name.to_owned(),
            labels: vec!["gpu".to_owned(), "linux".to_owned()],
            agents: vec!["claude".to_owned(), "codex".to_owned(), "echo".to_owned(), "script".to_owned()],
            sessions: vec![SessionId::parse("ses_ar477mby3tane7hf").unwrap()],
            connected,
            joined_at: Millis(0),
            lease_expires_at: NOW,
            version: "1.2.0".to_owned(),
        };
        let machines = [machine("ml-box.lan", true), machine("laptop-of-ann", false)];
        assert_view("machines", |style, width| machines_table(machines.to_vec(), NOW).render(style, width));

        let used = WorkerToken {
            last_used_at: Some(Millis(3_000_000)),
            labels: Some(vec!["gpu".to_owned(), "big".to_owned()]),
            agents: Some(vec!["claude".to_owned()]),
            ..token("tok_ab12cd34ef56gh78", Some("gpu"))
        };
        let tokens = [used, token("tok_zz98yy76xx54ww32", None)];
        assert_view("worker_tokens", |style, width| tokens_table(tokens.to_vec(), NOW).render(style, width));
    }
}
