//! `qd ps`: lists sessions, those that need the user first. Sessions and workspaces are fetched in parallel; asks, the
//! halt and unmerged work only if a listed session makes them matter.

use std::collections::BTreeSet;

use qd_protocol::Millis;
use qd_protocol::api::{HaltStatus, Session, SessionStatus, Workspace};

use super::VerbContext;
use super::answer::PENDING_PATH;
use super::unmerged_work::fetch_unmerged_work;
use crate::args::SessionCondition;
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::session_table::{SessionListFacts, count_asks, session_table};
use crate::render::{session_cells, text};

/// A session that is not busy leaves the default view after this time without activity.
const RECENT_MS: u64 = 24 * 60 * 60 * 1000;

/// What `qd ps` shows of the sessions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionListView {
    /// Every session, not only open ones with recent activity.
    pub(crate) all: bool,
    /// Only the ids.
    pub(crate) quiet: bool,
    /// Also how agents are confined.
    pub(crate) verbose: bool,
}

pub(crate) async fn ps(
    context: &VerbContext,
    view: SessionListView,
    filters: &[SessionCondition],
) -> Result<CliExitCode> {
    let SessionListView { all, quiet, verbose } = view;
    let client = context.client().await?;
    let path = if all { "/v1/sessions" } else { "/v1/sessions?open=true" };
    let (sessions, workspaces) = tokio::join!(client.list(path), client.list("/v1/workspaces"));
    let (mut sessions, workspaces): (Vec<Session>, Vec<Workspace>) = (sessions?, workspaces?);
    let now = Millis::now();
    sessions.retain(|session| filters.iter().all(|filter| passes(session, filter)));
    let matching = sessions.len();
    sessions.retain(|session| all || is_current(session, now));
    let left_out = matching - sessions.len();
    if quiet {
        let ids: Vec<&str> = sessions.iter().map(|session| session.id.as_str()).collect();
        match context.out.json {
            true => context.out.print_json(&ids)?,
            false => ids.iter().try_for_each(|id| context.out.print_line(id))?,
        }
        return Ok(CliExitCode::Success);
    }
    if context.out.json {
        context.out.print_json(&sessions)?;
        return Ok(CliExitCode::Success);
    }
    let facts = fetch_facts(context, &client, &sessions, &workspaces).await?;
    let facts = SessionListFacts { with_sandbox: verbose, ..facts };
    let table = session_table(&mut sessions, &facts, now);
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    if verbose {
        explain_unconfined(&sessions).iter().for_each(|note| context.out.print_note(note));
    }
    if left_out > 0 {
        context.out.print_note(&describe_left_out(left_out));
    }
    Ok(CliExitCode::Success)
}

fn passes(session: &Session, filter: &SessionCondition) -> bool {
    match filter {
        SessionCondition::State(state) => {
            text::wire_name(&session.state) == *state || has_ended_as(session, state)
        }
        SessionCondition::Agent(agent) => session.agent == *agent,
        SessionCondition::Title(part) => {
            let title = session.title.as_ref().or(session.auto_title.as_ref());
            title.is_some_and(|title| title.to_lowercase().contains(part))
        }
    }
}

/// Whether a session is at rest after a run that ended so.
fn has_ended_as(session: &Session, outcome: &str) -> bool {
    let last =
        session.last_run.as_ref().filter(|_| session.state == SessionStatus::Idle && session.queued == 0);
    last.is_some_and(|last| session_cells::outcome_word(last.finish_reason) == outcome)
}

/// Whether the default view shows a session: it is busy, or something happened recently.
fn is_current(session: &Session, now: Millis) -> bool {
    session.busy || now.since(session_cells::last_activity(session)) < RECENT_MS
}

fn describe_left_out(count: usize) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} session{plural} without activity for a day not shown; `qd ps -a` shows all")
}

/// Why agents are not confined, once for each agent and reason.
fn explain_unconfined(sessions: &[Session]) -> BTreeSet<String> {
    let reason = |session: &Session| {
        let why = session.sandbox.as_ref()?.why.as_ref()?;
        Some(format!("{} is not confined: {why}", session.agent))
    };
    sessions.iter().filter_map(reason).collect()
}

async fn fetch_facts(
    context: &VerbContext,
    client: &DaemonClient,
    sessions: &[Session],
    workspaces: &[Workspace],
) -> Result<SessionListFacts> {
    let mut facts = SessionListFacts { queue_reason: "no free slot", ..SessionListFacts::default() };
    facts.paths = workspaces.iter().map(|workspace| (workspace.id.clone(), workspace.path.clone())).collect();
    if sessions.iter().any(|session| session.state == SessionStatus::Waiting) {
        facts.open_asks = count_asks(&client.list(PENDING_PATH).await?);
    }
    if sessions.iter().any(session_cells::is_waiting_to_start)
        && client.get::<HaltStatus>("/v1/halt").await?.halted
    {
        facts.queue_reason = "halted";
    }
    let ids = sessions.iter().map(|session| session.id.to_string()).collect();
    facts.ids = refs::shown_ids(&context.out, client, &refs::WATCHED_KINDS, ids).await?;
    facts.unmerged_work = fetch_unmerged_work(client, sessions).await;
    Ok(facts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::session_cells::tests::{ended_session, waiting_session};
    use qd_protocol::event::FinishReason;

    const NOW: Millis = Millis(100 * 60 * 60 * 1000);

    fn minutes_ago(minutes: u64) -> u64 {
        NOW.0 - minutes * 60_000
    }

    #[test]
    fn finished_sessions_leave_the_default_view_after_a_day() {
        let ended = |minutes| ended_session("ses_1", FinishReason::EndTurn, minutes_ago(minutes));
        assert!(is_current(&ended(24 * 60 - 1), NOW));
        assert!(!is_current(&ended(24 * 60), NOW));
        assert!(is_current(&waiting_session("ses_1"), NOW), "a busy session stays, however old");
        assert_eq!(
            describe_left_out(1),
            "1 session without activity for a day not shown; `qd ps -a` shows all"
        );
    }

    #[test]
    fn filters_compare_state_agent_and_part_of_the_title() {
        let passes = |filter| passes(&waiting_session("ses_1"), &filter);
        assert!(passes(SessionCondition::State("waiting".to_owned())));
        assert!(!passes(SessionCondition::State("idle".to_owned())));
        assert!(passes(SessionCondition::Agent("echo".to_owned())));
        assert!(!passes(SessionCondition::Agent("ech".to_owned())));
        assert!(passes(SessionCondition::Title("night".to_owned())));
        assert!(!passes(SessionCondition::Title("day".to_owned())));
    }

    #[test]
    fn a_filter_takes_the_words_of_the_state_column() {
        let failed = ended_session("ses_1", FinishReason::Timeout, NOW.0);
        for (state, passed) in [("timed out", true), ("idle", true), ("done", false), ("failed", false)] {
            assert_eq!(super::passes(&failed, &SessionCondition::State(state.to_owned())), passed, "{state}");
        }
        assert!(!super::passes(&waiting_session("ses_1"), &SessionCondition::State("done".to_owned())));
    }
}
