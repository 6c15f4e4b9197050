//! The flags of verbs about who may do what and who did it: `tokens` and `audit`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use qd_protocol::Millis;
use qd_protocol::api::TokenRole;

use crate::args::reports::hit_limit;
use crate::past_time::{parse_end, parse_since};

/// `qd tokens`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokensVerb {
    /// Create a token and print it; it is not shown again
    #[command(after_help = "Examples:
  qd tokens create phone --role approver --expires 30d
  qd tokens create ci --role operator --workspace .

Roles: a viewer reads, an approver also answers asks, an operator also prompts, cancels and closes, an admin may do \
everything. The client sends the token as `Authorization: Bearer TOKEN`; `qd` takes it from QD_TOKEN.")]
    Create(TokenCreateArgs),
    /// List tokens by id, name and role; the secrets are never shown again
    List,
    /// Revoke a token; whatever is open with it ends
    Revoke {
        /// Name of the token, its id, or the first characters of the id
        token: String,
    },
}

/// `qd tokens create`.
#[derive(Debug, Args)]
pub(crate) struct TokenCreateArgs {
    /// Name, which `qd audit` shows
    pub(crate) name: String,
    /// What the client may do
    #[arg(long, value_name = "ROLE", value_parser = token_role())]
    pub(crate) role: TokenRole,
    /// Allow only this workspace: its id or its directory
    #[arg(long, value_name = "WORKSPACE")]
    pub(crate) workspace: Option<String>,
    /// When the token becomes invalid: after 12h, 30d or 8w, or at a time such as 2026-12-31
    #[arg(long, value_name = "TIME", value_parser = parse_end)]
    pub(crate) expires: Option<Millis>,
}

/// `qd audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Only what was done from this time on: 24h, 7d, today, yesterday, 2026-11-01 or 2026-11-01T18:00
    #[arg(long, value_name = "TIME", value_parser = parse_since)]
    pub(crate) since: Option<Millis>,
    /// Only what was done in this session: its id or its title
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Show at most this many entries, up to 1000
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = hit_limit)]
    pub(crate) limit: usize,
    /// Continue with older entries, as the end of the last page says
    #[arg(long, value_name = "POSITION")]
    pub(crate) before: Option<String>,
}

/// Parses a role.
fn token_role() -> impl TypedValueParser<Value = TokenRole> {
    const ROLES: [TokenRole; 4] =
        [TokenRole::Admin, TokenRole::Operator, TokenRole::Approver, TokenRole::Viewer];
    PossibleValuesParser::new(ROLES.map(TokenRole::as_str)).map(|name| {
        let role = ROLES.into_iter().find(|role| role.as_str() == name);
        role.unwrap_or(TokenRole::Viewer)
    })
}
