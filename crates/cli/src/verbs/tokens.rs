//! `qd tokens`: creates, lists and revokes the tokens of clients over TCP.

use std::path::Path;

use qd_protocol::api::{ClientToken, CreatedClientToken, NewClientToken, ReferenceKind, ReferenceMatch};
use qd_protocol::{Millis, TokenId, WorkspaceId};

use super::VerbContext;
use super::workspace::open_workspace;
use crate::args::{TokenCreateArgs, TokensVerb};
use crate::client::{DaemonClient, percent_encode};
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::table::TextTable;
use crate::render::text;

const TOKENS_PATH: &str = "/v1/tokens";

pub(crate) async fn tokens(context: &VerbContext, verb: TokensVerb) -> Result<CliExitCode> {
    let client = context.client().await?;
    match verb {
        TokensVerb::Create(args) => create(context, &client, args).await,
        TokensVerb::List => list(context, &client).await,
        TokensVerb::Revoke { token } => revoke(context, &client, &token).await,
    }
}

async fn create(context: &VerbContext, client: &DaemonClient, args: TokenCreateArgs) -> Result<CliExitCode> {
    let TokenCreateArgs { name, role, workspace, expires } = args;
    let workspace_id = match workspace {
        Some(workspace) => Some(find_workspace(client, &workspace).await?),
        None => None,
    };
    let new = NewClientToken { name, role, workspace_id, expires_at: expires };
    let created: CreatedClientToken = client.post(TOKENS_PATH, &new).await?;
    match context.out.json {
        true => context.out.print_json(&created)?,
        false => context.out.print_line(&created.token)?,
    }
    Ok(CliExitCode::Success)
}

/// The workspace with this id or beginning of an id, or of this directory.
async fn find_workspace(client: &DaemonClient, given: &str) -> Result<WorkspaceId> {
    let path = format!("/v1/resolve?ref={}", percent_encode(given));
    let mut found: Vec<ReferenceMatch> = client.get(&path).await?;
    found.retain(|found| found.kind == ReferenceKind::Workspace);
    match &found[..] {
        [workspace] => Ok(workspace.workspace_id.clone()),
        [] if Path::new(given).is_dir() => Ok(open_workspace(client, Some(Path::new(given))).await?.id),
        [] => Err(CliFailure::NotFound(format!("no workspace matches {given}, and it is no directory"))),
        _ => Err(CliFailure::Usage(format!("several workspaces match {given}; use more of the id"))),
    }
}

async fn list(context: &VerbContext, client: &DaemonClient) -> Result<CliExitCode> {
    let tokens: Vec<ClientToken> = client.list(TOKENS_PATH).await?;
    if context.out.json {
        context.out.print_json(&tokens)?;
    } else if tokens.is_empty() {
        context.out.print_note("there are no tokens but the one in the home; `qd tokens create` makes one");
    } else {
        let table = tokens_table(tokens, Millis::now());
        context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    }
    Ok(CliExitCode::Success)
}

fn tokens_table(tokens: Vec<ClientToken>, now: Millis) -> TextTable {
    let mut table = TextTable::new(&["NAME", "ROLE", "WORKSPACE", "AGE", "EXPIRES IN", "LAST USED", "ID"]);
    for token in tokens {
        let expires = match token.expires_at {
            None => "never".to_owned(),
            Some(end) if end <= now => "expired".to_owned(),
            Some(end) => text::format_age(now, end),
        };
        table.add_row([
            token.name,
            token.role.as_str().to_owned(),
            token.workspace_id.map_or_else(|| "all".to_owned(), |workspace| workspace.to_string()),
            text::format_age(token.created_at, now),
            expires,
            token.last_used_at.map_or_else(|| "never".to_owned(), |at| text::format_age(at, now)),
            token.id.to_string(),
        ]);
    }
    table
}

async fn revoke(context: &VerbContext, client: &DaemonClient, given: &str) -> Result<CliExitCode> {
    let tokens: Vec<ClientToken> = client.list(TOKENS_PATH).await?;
    let token = find_token(&tokens, given)?;
    client.delete(&format!("{TOKENS_PATH}/{}", token.id)).await?;
    match context.out.json {
        true => context.out.print_json(token)?,
        false => context.out.print_line(&token.name)?,
    }
    Ok(CliExitCode::Success)
}

/// The token with this name, id, or beginning of an id.
fn find_token<'a>(tokens: &'a [ClientToken], given: &str) -> Result<&'a ClientToken> {
    if let Some(exact) = tokens.iter().find(|token| token.name == given || token.id.as_str() == given) {
        return Ok(exact);
    }
    let matches = |token: &&ClientToken| {
        let id = token.id.as_str();
        id.starts_with(given) || id.trim_start_matches(TokenId::PREFIX).starts_with(given)
    };
    let found: Vec<&ClientToken> = tokens.iter().filter(matches).collect();
    match found[..] {
        [token] => Ok(token),
        [] => Err(CliFailure::NotFound(format!("no token matches {given}; see `qd tokens list`"))),
        _ => Err(CliFailure::Usage(format!("several tokens match {given}; use more of the id"))),
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::api::TokenRole;

    use super::*;
    use crate::render::view_snapshot::assert_view;

    fn token(id: &str, name: &str) -> ClientToken {
        ClientToken {
            id: TokenId::parse(id).unwrap(),
            name: name.to_owned(),
            role: TokenRole::Approver,
            workspace_id: None,
            created_at: Millis(0),
            expires_at: None,
            last_used_at: None,
        }
    }

    #[test]
    fn a_token_is_found_by_its_name_its_id_or_the_beginning_of_its_id() {
        let tokens = [token("tok_ab", "phone"), token("tok_abc", "ci")];
        for (given, name) in [("phone", "phone"), ("tok_ab", "phone"), ("abc", "ci")] {
            assert_eq!(find_token(&tokens, given).unwrap().name, name, "{given}");
        }
        assert_eq!(find_token(&tokens, "ab").unwrap_err().exit_code(), CliExitCode::Usage);
        assert_eq!(find_token(&tokens, "x").unwrap_err().exit_code(), CliExitCode::NotFound);
    }

    #[test]
    fn tokens_read_well() {
        let now = Millis(3_600_000);
        let tokens = [
            token("tok_ab12cd34ef56gh78", "phone"),
            ClientToken {
                role: TokenRole::Operator,
                workspace_id: Some(WorkspaceId::parse("ws_8f2k1m5q7t9w3x6z").unwrap()),
                expires_at: Some(Millis(now.0 + 30 * 86_400_000)),
                last_used_at: Some(Millis(3_000_000)),
                ..token("tok_zz98yy76xx54ww32", "ci")
            },
            ClientToken { expires_at: Some(Millis(1)), ..token("tok_kk11ll22mm33nn44", "old") },
        ];
        assert_view("tokens", |style, width| tokens_table(tokens.to_vec(), now).render(style, width));
    }
}
