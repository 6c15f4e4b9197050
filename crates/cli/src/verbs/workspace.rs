//! The directory that a verb works in, as the daemon knows it, and the variables that go with it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use qd_protocol::api::{Agent, NewWorkspace, Workspace};

use crate::client::Client;
use crate::failure::{Failure, Result};

/// The workspace of a directory; of the current one, if none is named.
pub(super) async fn of(client: &Client, dir: Option<&Path>) -> Result<Workspace> {
    let dir = dir.unwrap_or(Path::new("."));
    let path = dir
        .canonicalize()
        .map_err(|error| Failure::Usage(format!("{} is no directory to work in: {error}", dir.display())))?;
    let path = path.into_os_string().into_string().map_err(|path| {
        Failure::Usage(format!("{} is not UTF-8, and JSON cannot carry it", path.display()))
    })?;
    client.post("/v1/workspaces", &NewWorkspace { path, name: None }).await
}

/// The variables that the manifests of these agents list, from our environment.
pub(super) fn variables<'a>(
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
                let described = qd_catalog::described_in(name, Path::new(&workspace.path));
                listed.extend(described.map(|manifest| manifest.startup.pass_env).unwrap_or_default());
            }
        }
    }
    qd_catalog::passed(&listed, texts(std::env::vars_os()))
}

/// The variables that JSON can carry.
fn texts(vars: impl Iterator<Item = (OsString, OsString)>) -> impl Iterator<Item = (String, String)> {
    vars.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}
