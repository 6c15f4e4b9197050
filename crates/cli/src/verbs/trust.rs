//! `qd trust`: whether the agents that a project brings may be started. Without a directory it lists those that may.

use std::path::Path;

use qd_protocol::api::{TrustRequest, TrustedProject};

use super::VerbContext;
use crate::client::percent_encode;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;

const PATH: &str = "/v1/trust";

/// Trusts, distrusts or lists.
pub(crate) async fn trust(context: &VerbContext, dir: Option<&Path>, no: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let Some(dir) = dir else {
        return list(context, &client.get::<Vec<TrustedProject>>(PATH).await?);
    };
    if no {
        // A folder that is gone can be forgotten by its name.
        let path = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let query = format!("{PATH}?path={}", percent_encode(&path.display().to_string()));
        let left = client.delete(&query).await?;
        match context.out.json {
            true => context.out.print_json(&left)?,
            false => context.out.print_line(&format!("{} is not trusted", path.display()))?,
        }
        return Ok(CliExitCode::Success);
    }
    let path = dir
        .canonicalize()
        .map_err(|error| CliFailure::Usage(format!("{} cannot be trusted: {error}", dir.display())))?;
    let request = TrustRequest { path: path.display().to_string() };
    let trusted: TrustedProject = client.post(PATH, &request).await?;
    if context.out.json {
        context.out.print_json(&trusted)?;
    } else {
        context.out.print_line(&format!("{} is trusted as it is now:", trusted.path))?;
        for file in &trusted.files {
            context.out.print_line(&format!("    {file}"))?;
        }
        context.out.print_note("when one of them changes, none counts until this is said again");
    }
    Ok(CliExitCode::Success)
}

fn list(context: &VerbContext, projects: &[TrustedProject]) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&projects)?;
        return Ok(CliExitCode::Success);
    }
    let mut table = TextTable::new(&["PROJECT", "STANDS"]);
    for project in projects {
        let stands = if project.unchanged { "trusted" } else { "changed since, so not trusted" };
        table.add_row([project.path.clone(), stands.to_owned()]);
    }
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}
