//! `qd trust`: whether the agents that a project brings may be started. Without a directory it lists those that may.

use std::path::Path;

use qd_protocol::api::{TrustRequest, Trusted};

use super::Context;
use crate::client::encode;
use crate::failure::{Exit, Failure, Result};
use crate::render::table::Table;

const PATH: &str = "/v1/trust";

/// Trusts, distrusts or lists.
pub(crate) async fn trust(context: &Context, dir: Option<&Path>, no: bool) -> Result<Exit> {
    let client = context.client().await?;
    let Some(dir) = dir else {
        return list(context, &client.get::<Vec<Trusted>>(PATH).await?);
    };
    if no {
        // A folder that is gone can be forgotten by its name.
        let path = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let query = format!("{PATH}?path={}", encode(&path.display().to_string()));
        let left = client.delete(&query).await?;
        match context.out.json {
            true => context.out.value(&left)?,
            false => context.out.line(&format!("{} is not trusted", path.display()))?,
        }
        return Ok(Exit::Well);
    }
    let path = dir
        .canonicalize()
        .map_err(|error| Failure::Usage(format!("{} cannot be trusted: {error}", dir.display())))?;
    let request = TrustRequest { path: path.display().to_string() };
    let trusted: Trusted = client.post(PATH, &request).await?;
    if context.out.json {
        context.out.value(&trusted)?;
    } else {
        context.out.line(&format!("{} is trusted as it is now:", trusted.path))?;
        for file in &trusted.files {
            context.out.line(&format!("    {file}"))?;
        }
        context.out.note("when one of them changes, none counts until this is said again");
    }
    Ok(Exit::Well)
}

fn list(context: &Context, projects: &[Trusted]) -> Result<Exit> {
    if context.out.json {
        context.out.value(&projects)?;
        return Ok(Exit::Well);
    }
    let mut table = Table::new(&["PROJECT", "STANDS"]);
    for project in projects {
        let stands = if project.unchanged { "trusted" } else { "changed since, so not trusted" };
        table.row([project.path.clone(), stands.to_owned()]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}
