//! The workspace of the directory that a verb works in, and the environment variables to pass to its agents.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use qd_catalog::programs;
use qd_protocol::api::{Agent, NewWorkspace, Workspace};

use crate::client::DaemonClient;
use crate::client::host::DaemonHost;
use crate::failure::{CliFailure, Result};

/// The workspace of a directory, by default the current one. Creates it if needed.
pub(super) async fn open_workspace(client: &DaemonClient, dir: Option<&Path>) -> Result<Workspace> {
    let path = resolve_directory(dir)?
        .into_os_string()
        .into_string()
        .map_err(|path| CliFailure::Usage(format!("the path {} is not valid UTF-8", path.display())))?;
    client.post("/v1/workspaces", &NewWorkspace { path, name: None }).await
}

/// The directory with its links resolved, by default the current one.
pub(super) fn resolve_directory(dir: Option<&Path>) -> Result<PathBuf> {
    let dir = dir.unwrap_or(Path::new("."));
    dir.canonicalize()
        .map_err(|error| CliFailure::Usage(format!("cannot use the directory {}: {error}", dir.display())))
}

/// The variables that the manifests of these agents list, with their values in this process's environment.
pub(super) fn passed_variables<'a>(
    workspace: &Workspace,
    agents: &[Agent],
    names: impl IntoIterator<Item = &'a str>,
) -> BTreeMap<String, String> {
    let mut listed: Vec<String> = Vec::new();
    for name in names {
        match find_agent(agents, name) {
            Some(agent) => listed.extend(agent.env.iter().cloned()),
            // An agent that is described only by its name (such as an address) is not in the list.
            None => {
                let described = qd_catalog::manifest_from_name_in(name, Path::new(&workspace.path));
                listed.extend(described.map(|manifest| manifest.startup.pass_env).unwrap_or_default());
            }
        }
    }
    own_variables(&listed)
}

/// The variables of this process that match these patterns.
pub(super) fn own_variables(patterns: &[String]) -> BTreeMap<String, String> {
    qd_catalog::select_variables(patterns, utf8_variables(std::env::vars_os()))
}

/// The listed agent with this name. `NAME@LABEL` runs on another machine, but is the same agent as `NAME` here.
fn find_agent<'a>(agents: &'a [Agent], name: &str) -> Option<&'a Agent> {
    let by_name = |name: &str| agents.iter().find(|agent| agent.name == name);
    by_name(name).or_else(|| by_name(name.rsplit_once('@')?.0))
}

/// The program of an agent as this process finds it in its own `PATH`, if that is another one than the daemon's. Only for
/// a daemon on this machine.
pub(super) fn own_program(
    client: &DaemonClient,
    workspace: &Workspace,
    agents: &[Agent],
    name: &str,
) -> Option<String> {
    match agents.iter().find(|agent| agent.name == name) {
        Some(agent) => own_program_of(client, agent),
        None => {
            let described = qd_catalog::manifest_from_name_in(name, Path::new(&workspace.path)).ok()?;
            find_own_program(client, &programs::searched_name(&described)?)
        }
    }
}

/// The same for an agent that the daemon lists.
pub(super) fn own_program_of(client: &DaemonClient, agent: &Agent) -> Option<String> {
    let found = find_own_program(client, agent.command.as_deref()?)?;
    Some(found).filter(|found| agent.program.as_ref() != Some(found))
}

fn find_own_program(client: &DaemonClient, command: &str) -> Option<String> {
    if !matches!(client.host(), DaemonHost::Unix(_)) {
        return None;
    }
    let found = std::path::absolute(programs::find_on_path(command)?).ok()?;
    found.into_os_string().into_string().ok()
}

/// Adds to a refusal because of a missing agent that the `PATH` of this process was searched too.
pub(super) fn with_own_path(client: &DaemonClient, failure: CliFailure) -> CliFailure {
    match failure {
        CliFailure::Refused(mut refusal)
            if refusal.error.code == "agent_unavailable" && matches!(client.host(), DaemonHost::Unix(_)) =>
        {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let message = &refusal.error.message;
            refusal.error.message = format!("{message}\nyour own PATH was searched too: {}", path.display());
            CliFailure::Refused(refusal)
        }
        other => other,
    }
}

/// The variables of `--env`: `NAME=VALUE`, or `NAME` for the value that it has here.
pub(super) fn given_variables(given: &[String]) -> Result<Vec<(String, String)>> {
    let read = |text: &String| match text.split_once('=') {
        Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
        None => match std::env::var(text) {
            Ok(value) => Ok((text.clone(), value)),
            Err(_) => Err(CliFailure::Usage(format!(
                "--env {text}: the variable is not set here; use --env {text}=VALUE"
            ))),
        },
    };
    given.iter().map(read).collect()
}

/// Leaves out variables that are not valid UTF-8, which JSON cannot represent.
fn utf8_variables(
    vars: impl Iterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (String, String)> {
    vars.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
