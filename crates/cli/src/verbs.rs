//! One file per verb or small family of verbs. A verb calls the daemon through `client.rs`, prints through `output.rs`
//! and returns an exit code. Verbs do not call each other.

mod adopt;
mod agents;
mod answer;
mod ask_feed;
mod asks;
mod asks_review;
mod attach;
mod attach_raw;
mod audit;
mod cancel;
mod completions;
mod config;
mod cost;
mod diff;
mod doctor;
mod down;
mod fleet_logs;
mod fleet_watcher;
mod fleets;
mod gc;
mod halt;
mod join;
mod logs;
mod mail;
mod man;
mod mcp;
mod merge;
mod open_asks;
mod policy;
mod prompt;
mod ps;
mod queue;
mod quota;
mod rm;
mod run;
mod run_watcher;
mod search;
mod send;
mod set;
mod status;
mod stdin_lines;
mod stop;
mod tokens;
mod transcript;
mod tree;
mod trust;
mod unmerged_work;
mod up;
mod wait;
pub(crate) mod worker;
mod workers;
mod workspace;
mod worktrees;

use qd_protocol::worktree::MergeRequest;

use crate::args::{CliVerb, QuotaVerb, TokensVerb, WorkerVerb, WorktreesVerb};
use crate::client::DaemonClient;
use crate::daemon::DaemonLocator;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::output::CliOutput;

/// What every verb is given.
#[derive(Debug)]
pub(crate) struct VerbContext {
    pub(crate) out: CliOutput,
    pub(crate) locator: DaemonLocator,
}

impl VerbContext {
    /// A client connected to the daemon. Starts a daemon if none answers.
    pub(crate) async fn client(&self) -> Result<DaemonClient> {
        self.locator.connect_or_start(&self.out).await
    }
}

/// Runs the verb that the command line names.
pub(crate) async fn run_verb(context: &VerbContext, verb: CliVerb) -> Result<CliExitCode> {
    match verb {
        CliVerb::Run(flags) => run::run(context, flags).await,
        CliVerb::Status(flags) => status::status(context, &flags).await,
        CliVerb::Adopt(flags) => adopt::adopt(context, &flags).await,
        CliVerb::Ps { all, fleet: None, tree: true, .. } => tree::tree(context, all).await,
        CliVerb::Ps { all, fleet: None, tree: false, quiet, verbose, filter } => {
            let view = ps::SessionListView { all, quiet, verbose };
            ps::ps(context, view, &filter).await
        }
        CliVerb::Ps { fleet: Some(fleet), .. } => fleets::list_fleets(context, &fleet).await,
        CliVerb::Up(flags) => up::up(context, flags).await,
        CliVerb::Down { ids } => down::down(context, &ids).await,
        CliVerb::Attach { id, raw: false } => attach::attach(context, &id).await,
        CliVerb::Attach { id, raw: true } => attach_raw::attach_raw(context, &id).await,
        CliVerb::Send(flags) => send::send(context, &flags).await,
        CliVerb::Set(flags) => set::set(context, &flags).await,
        CliVerb::Queue(flags) => queue::queue(context, &flags).await,
        CliVerb::Logs(flags) => logs::logs(context, &flags).await,
        CliVerb::Search(args) => search::search(context, args).await,
        CliVerb::Cost(args) => cost::cost(context, args).await,
        CliVerb::Wait(flags) => wait::wait(context, &flags).await,
        CliVerb::Cancel { ids } => cancel::cancel(context, &ids).await,
        CliVerb::Rm { ids, purge } => rm::rm(context, &ids, purge).await,
        CliVerb::Diff { id, stat } => diff::diff(context, &id, stat).await,
        CliVerb::Merge { id, into, squash, message } => {
            let request = MergeRequest { into, squash, message };
            merge::merge(context, &id, &request).await
        }
        CliVerb::Worktrees { verb: None } => worktrees::list(context).await,
        CliVerb::Worktrees { verb: Some(WorktreesVerb::Rm { ids, force }) } => {
            worktrees::rm(context, &ids, force).await
        }
        CliVerb::Worktrees { verb: Some(WorktreesVerb::Gc) } => worktrees::gc(context).await,
        CliVerb::Asks { ask: Some(ask), .. } => asks::show_ask(context, &ask).await,
        CliVerb::Asks { follow: true, .. } => asks::follow_asks(context).await,
        CliVerb::Asks { history: true, limit, .. } => asks::history(context, limit as usize).await,
        CliVerb::Asks { .. } => asks::asks(context).await,
        CliVerb::Mail { verb: Some(verb), .. } => mail::run_mail_verb(context, verb).await,
        CliVerb::Mail { session, state, follow, verb: None } => {
            mail::mail(context, session.as_deref(), state.as_deref(), follow).await
        }
        CliVerb::Allow { all: true, risk, always, .. } => {
            answer::allow_all(context, risk.map(Into::into), always).await
        }
        CliVerb::Allow { asks, always, .. } => answer::allow(context, &asks, always).await,
        CliVerb::Deny { ask, reason } => answer::deny(context, &ask, &reason.join(" ")).await,
        CliVerb::Answer { ask, value } => answer::answer(context, &ask, value).await,
        CliVerb::Policy { verb } => policy::policy(context, verb).await,
        CliVerb::Halt { cancel, reason } => halt::halt(context, cancel, &reason.join(" ")).await,
        CliVerb::Unhalt => halt::unhalt(context).await,
        CliVerb::Quota { verb: None } => quota::list_quotas(context).await,
        CliVerb::Quota { verb: Some(QuotaVerb::Release { name }) } => {
            quota::release_quota(context, &name).await
        }
        CliVerb::Trust { dir, no } => trust::trust(context, dir.as_deref(), no).await,
        CliVerb::Agents => agents::agents(context).await,
        CliVerb::Tokens { verb } => tokens::tokens(context, verb.unwrap_or(TokensVerb::List)).await,
        CliVerb::Audit(args) => audit::audit(context, args).await,
        CliVerb::Workers { verb: None } => workers::workers(context).await,
        CliVerb::Workers { verb: Some(verb) } => workers::run_workers_verb(context, verb).await,
        CliVerb::Worker { verb: Some(WorkerVerb::Join(flags)), .. } => join::join(context, flags).await,
        CliVerb::Worker { serve: Some(flags), verb: None } => worker::worker(context, flags).await,
        CliVerb::Worker { serve: None, verb: None } => Err(CliFailure::Usage(
            "use `qd worker --listen ADDR --agent AGENT` or `qd worker join URL`".to_owned(),
        )),
        CliVerb::Stop { workers } => stop::stop(context, workers).await,
        CliVerb::Config { verb } => config::run_config_verb(context, verb).await,
        CliVerb::Gc { older_than, yes } => gc::gc(context, older_than, yes).await,
        CliVerb::Doctor { rebuild } => doctor::doctor(context, rebuild).await,
        CliVerb::Mcp { dir } => mcp::mcp(context, dir.as_deref()).await,
        CliVerb::Completions { shell } => completions::completions(context, shell),
        CliVerb::Man { dir } => man::man(context, dir.as_deref()),
        CliVerb::Serve(flags) => crate::serve::serve(context, flags),
    }
}
