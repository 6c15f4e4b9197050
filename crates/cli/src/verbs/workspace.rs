//! The directory that a verb works in, as the daemon knows it, and the variables that go with it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use qd_protocol::api::{Agent, NewWorkspace, Workspace};

use crate::client::DaemonClient;
use crate::failure::{CliFailure, Result};

/// The workspace of a directory; of the current one, if none is named.
pub(super) async fn open_workspace(client: &DaemonClient, dir: Option<&Path>) -> Result<Workspace> {
    let dir = dir.unwrap_or(Path::new("."));
    let path = dir.canonicalize().map_err(|error| {
        CliFailure::Usage(format!("{} is no directory to work in: {error}", dir.display()))
    })?;
    let path = path.into_os_string().into_string().map_err(|path| {
        CliFailure::Usage(format!("{} is not UTF-8, and JSON cannot carry it", path.display()))
    })?;
    client.post("/v1/workspaces", &NewWorkspace { path, name: None }).await
}

/// The variables that the manifests of these agents list, from our environment.
pub(super) fn passed_variables<'a>(
    workspace: &Workspace,
    agents: &[Agent],
    names: impl IntoIterator<Item = &'a str>,
) -> BTreeMap<String, String> {
    let mut listed: Vec<String> = Vec::new();
    for name in names {
        match agents.iter().find(|agent| agent.name == name) {
            Some(agent) => listed.extend(agent.env.iter().cloned()),
            // What only its name describes is in no list.
            None => {
                let described = qd_catalog::manifest_from_name_in(name, Path::new(&workspace.path));
                listed.extend(described.map(|manifest| manifest.startup.pass_env).unwrap_or_default());
            }
        }
    }
    qd_catalog::select_variables(&listed, utf8_variables(std::env::vars_os()))
}

/// The variables that JSON can carry.
fn utf8_variables(
    vars: impl Iterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (String, String)> {
    vars.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
