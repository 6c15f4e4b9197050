//! `qd trust`: trusts a project's agents and hooks at their current content, withdraws that trust, or lists the trusted
//! projects.

use std::path::Path;

use qd_protocol::api::{TrustRequest, TrustedProject};

use super::VerbContext;
use crate::client::percent_encode;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;

const PATH: &str = "/v1/trust";

pub(crate) async fn trust(context: &VerbContext, dir: Option<&Path>, no: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let Some(dir) = dir else {
        return list(context, &client.get::<Vec<TrustedProject>>(PATH).await?);
    };
    if no {
        // Trust in a deleted directory can still be withdrawn by its path.
        let path = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let query = format!("{PATH}?path={}", percent_encode(&path.display().to_string()));
        let response = client.delete(&query).await?;
        match context.out.json {
            true => context.out.print_json(&response)?,
            false => context.out.print_line(&format!("{} is no longer trusted", path.display()))?,
        }
        return Ok(CliExitCode::Success);
    }
    let path = dir
        .canonicalize()
        .map_err(|error| CliFailure::Usage(format!("cannot trust {}: {error}", dir.display())))?;
    let request = TrustRequest { path: path.display().to_string() };
    let trusted: TrustedProject = client.post(PATH, &request).await?;
    if context.out.json {
        context.out.print_json(&trusted)?;
    } else {
        context.out.print_line(&format!("{} is trusted at its current content:", trusted.path))?;
        for file in &trusted.files {
            context.out.print_line(&format!("    {file}"))?;
        }
        context.out.print_note("if one of these files changes, none is used until you run `qd trust` again");
    }
    Ok(CliExitCode::Success)
}

fn list(context: &VerbContext, projects: &[TrustedProject]) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&projects)?;
        return Ok(CliExitCode::Success);
    }
    context.out.print_data(&table(projects).render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn table(projects: &[TrustedProject]) -> TextTable {
    let mut table = TextTable::new(&["PROJECT", "STATE"]);
    for project in projects {
        let state = if project.unchanged { "trusted" } else { "changed, not trusted" };
        table.add_row([project.path.clone(), state.to_owned()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

    #[test]
    fn trusted_projects_read_well() {
        let project =
            |path: &str, unchanged| TrustedProject { path: path.to_owned(), unchanged, files: Vec::new() };
        let projects =
            [project("/home/ann/code/shop", true), project("/home/ann/code/a-much-longer-name", false)];
        assert_view("trusted_projects", |style, width| table(&projects).render(style, width));
    }
}
