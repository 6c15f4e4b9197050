//! One file per verb or small family of them. A verb calls the daemon through `client.rs`, prints through `output.rs`
//! and gives back an exit code; verbs do not call each other.

mod agents;
mod answer;
mod asks;
mod attach;
mod cancel;
mod completions;
mod config;
mod crew;
mod diff;
mod doctor;
mod down;
mod fleets;
mod follow;
mod gc;
mod halt;
mod join;
mod logs;
mod mail;
mod mcp;
mod merge;
mod policy;
mod prompt;
mod ps;
mod raw;
mod rm;
mod run;
mod send;
mod stop;
mod transcript;
mod tree;
mod trust;
mod typed;
mod up;
mod wait;
pub(crate) mod worker;
mod workers;
mod workspace;
mod worktrees;

use crate::args::{Verb, WorkerVerb, WorktreesVerb};
use crate::client::Client;
use crate::daemon::Whereabouts;
use crate::failure::{Exit, Failure, Result};
use crate::output::Output;

/// What every verb is given.
#[derive(Debug)]
pub(crate) struct Context {
    /// Where it prints.
    pub(crate) out: Output,
    /// Which daemon it talks to.
    pub(crate) whereabouts: Whereabouts,
}

impl Context {
    /// A client of the daemon, which is started if none answers.
    pub(crate) async fn client(&self) -> Result<Client> {
        self.whereabouts.reach(&self.out).await
    }
}

/// Does what the command line says.
pub(crate) async fn perform(context: &Context, verb: Verb) -> Result<Exit> {
    match verb {
        Verb::Run(flags) => run::run(context, flags).await,
        Verb::Ps { all, fleet: None, tree: false } => ps::ps(context, all).await,
        Verb::Ps { all, fleet: None, tree: true } => tree::tree(context, all).await,
        Verb::Ps { fleet: Some(fleet), .. } => fleets::ps(context, &fleet).await,
        Verb::Up(flags) => up::up(context, flags).await,
        Verb::Down { ids } => down::down(context, &ids).await,
        Verb::Attach { id, raw: false } => attach::attach(context, &id).await,
        Verb::Attach { id, raw: true } => raw::attach(context, &id).await,
        Verb::Send { id, text, steer } => send::send(context, &id, &text, steer).await,
        Verb::Logs { follow, id } => logs::logs(context, &id, follow).await,
        Verb::Wait { ids, timeout } => wait::wait(context, &ids, timeout).await,
        Verb::Cancel { ids } => cancel::cancel(context, &ids).await,
        Verb::Rm { ids, purge } => rm::rm(context, &ids, purge).await,
        Verb::Diff { id, stat } => diff::diff(context, &id, stat).await,
        Verb::Merge { id, into, squash } => merge::merge(context, &id, into, squash).await,
        Verb::Worktrees { verb: None } => worktrees::list(context).await,
        Verb::Worktrees { verb: Some(WorktreesVerb::Rm { ids, force }) } => {
            worktrees::rm(context, &ids, force).await
        }
        Verb::Worktrees { verb: Some(WorktreesVerb::Gc) } => worktrees::gc(context).await,
        Verb::Asks { follow } => asks::asks(context, follow).await,
        Verb::Mail { verb: Some(verb), .. } => mail::other(context, verb).await,
        Verb::Mail { session, state, follow, verb: None } => {
            mail::mail(context, session.as_deref(), state.as_deref(), follow).await
        }
        Verb::Allow { ask, always } => answer::allow(context, &ask, always).await,
        Verb::Deny { ask, reason } => answer::deny(context, &ask, &reason.join(" ")).await,
        Verb::Answer { ask, value } => answer::answer(context, &ask, value).await,
        Verb::Policy { verb } => policy::policy(context, verb).await,
        Verb::Halt { cancel, reason } => halt::halt(context, cancel, &reason.join(" ")).await,
        Verb::Unhalt => halt::unhalt(context).await,
        Verb::Trust { dir, no } => trust::trust(context, dir.as_deref(), no).await,
        Verb::Agents => agents::agents(context).await,
        Verb::Workers { verb: None } => workers::workers(context).await,
        Verb::Workers { verb: Some(verb) } => workers::joining(context, verb).await,
        Verb::Worker { verb: Some(WorkerVerb::Join(flags)), .. } => join::join(context, flags).await,
        Verb::Worker { serve: Some(flags), verb: None } => worker::worker(context, flags).await,
        Verb::Worker { serve: None, verb: None } => {
            Err(Failure::Usage("say --listen ADDR and --agent A, or `qd worker join URL`".to_owned()))
        }
        Verb::Stop { workers } => stop::stop(context, workers).await,
        Verb::Config => config::config(context),
        Verb::Gc { older_than, yes } => gc::gc(context, older_than, yes).await,
        Verb::Doctor { rebuild } => doctor::doctor(context, rebuild).await,
        Verb::Mcp { dir } => mcp::mcp(context, dir.as_deref()).await,
        Verb::Completions { shell } => completions::completions(context, shell),
        Verb::Serve(flags) => crate::serve::serve(context, flags),
    }
}
