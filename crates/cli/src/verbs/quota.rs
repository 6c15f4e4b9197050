//! `qd quota`: the accounts whose quota is exhausted, and their release before it resets.

use qd_protocol::api::{AccountQuota, Session};
use qd_protocol::{AccountId, Millis};

use super::VerbContext;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::local_time::format_local_time;
use crate::refs;
use crate::render::table::TextTable;
use crate::render::text;

const PATH: &str = "/v1/quotas";

/// Lists the exhausted quotas.
pub(crate) async fn list_quotas(context: &VerbContext) -> Result<CliExitCode> {
    let quotas: Vec<AccountQuota> = context.client().await?.get(PATH).await?;
    if context.out.json {
        context.out.print_json(&quotas)?;
    } else {
        let table = quota_table(&quotas, Millis::now());
        context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    }
    Ok(CliExitCode::Success)
}

fn quota_table(quotas: &[AccountQuota], now: Millis) -> TextTable {
    let mut table = TextTable::new(&["AGENT", "RESETS", "IN", "ACCOUNT", "REPORTED BY"]);
    for quota in quotas {
        table.add_row([
            quota.agent.clone(),
            format_local_time(quota.until),
            text::format_duration(quota.until.since(now)),
            quota.account.to_string(),
            quota.session_id.to_string(),
        ]);
    }
    table
}

/// Releases an account, named by its id, by its agent or by one of its sessions.
pub(crate) async fn release_quota(context: &VerbContext, name: &str) -> Result<CliExitCode> {
    let client = context.client().await?;
    let account = find_account(&client, name).await?;
    let released: serde_json::Value = client.delete(&format!("{PATH}/{account}")).await?;
    if context.out.json {
        context.out.print_json(&released)?;
    } else {
        let agent = released["agent"].as_str().unwrap_or(name);
        context.out.print_line(&format!("released {agent}: its queued runs start again"))?;
    }
    Ok(CliExitCode::Success)
}

async fn find_account(client: &DaemonClient, name: &str) -> Result<AccountId> {
    let quotas: Vec<AccountQuota> = client.get(PATH).await?;
    let named: Vec<&AccountQuota> = quotas
        .iter()
        .filter(|quota| quota.agent == name || quota.account.as_str().starts_with(name))
        .collect();
    match named[..] {
        [quota] => Ok(quota.account.clone()),
        [] => {
            let session = refs::resolve_session(client, name).await.map_err(|failure| match failure {
                CliFailure::NotFound(_) => CliFailure::NotFound(format!(
                    "no exhausted quota belongs to `{name}`; `qd quota` lists the accounts"
                )),
                failure => failure,
            })?;
            let session: Session = client.get(&session.path()).await?;
            session
                .account
                .ok_or_else(|| CliFailure::NotFound(format!("session {} has no account", session.id)))
        }
        _ => {
            let accounts: Vec<&str> = named.iter().map(|quota| quota.account.as_str()).collect();
            let accounts = accounts.join(", ");
            Err(CliFailure::Usage(format!("`{name}` means several accounts; name one of {accounts}")))
        }
    }
}
