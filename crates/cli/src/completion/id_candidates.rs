//! The ids that a Tab offers, each with a title or text that tells a person what it is. They are read from the daemon;
//! nothing is changed.

use clap_complete::CompletionCandidate;
use qd_protocol::api::{AskRecord, QueueEntry, Session, Workspace};
use qd_protocol::event::{Ask, AskKind};
use qd_protocol::fleet::Fleet;

use super::DESCRIPTION_CHARS;
use super::shell_words::TypedWords;
use crate::client::DaemonClient;
use crate::failure::Result;
use crate::refs;
use crate::render::{ask, session_cells, text};

/// The most sessions that are offered.
const SESSIONS_READ: usize = 1000;
/// The flags of `qd queue` that have a value.
const QUEUE_FLAGS: [&str; 5] = ["--remove", "--move", "--to", "--home", "--host"];

/// The kind of id that an argument takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdCompletion {
    Session,
    SessionOrFleet,
    Fleet,
    /// A fleet that has not ended.
    RunningFleet,
    /// A run in the queue of the session that was typed before.
    QueuedRun,
    /// An open ask of either kind.
    Ask,
    PermissionRequest,
    Question,
}

/// An id, or a title that can be used in its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct IdCandidate {
    value: String,
    description: String,
}

impl IdCandidate {
    fn new(value: impl ToString, description: impl Into<String>) -> Self {
        Self { value: value.to_string(), description: description.into() }
    }

    pub(super) fn into_engine_candidate(self) -> CompletionCandidate {
        CompletionCandidate::new(self.value).help(Some(self.description.into()))
    }
}

/// The ids that an argument takes, the most likely first.
pub(super) async fn fetch_candidates(
    client: &DaemonClient,
    typed: &TypedWords,
    completion: IdCompletion,
) -> Result<Vec<IdCandidate>> {
    match completion {
        IdCompletion::Session => fetch_sessions(client, typed).await,
        IdCompletion::SessionOrFleet => {
            let mut found = fetch_sessions(client, typed).await?;
            found.extend(fetch_fleets(client, false).await?);
            Ok(found)
        }
        IdCompletion::Fleet => fetch_fleets(client, false).await,
        IdCompletion::RunningFleet => fetch_fleets(client, true).await,
        IdCompletion::QueuedRun => fetch_queued_runs(client, typed).await,
        IdCompletion::Ask => fetch_asks(client, None).await,
        IdCompletion::PermissionRequest => fetch_asks(client, Some(AskKind::Permission)).await,
        IdCompletion::Question => fetch_asks(client, Some(AskKind::Question)).await,
    }
}

async fn fetch_sessions(client: &DaemonClient, typed: &TypedWords) -> Result<Vec<IdCandidate>> {
    let path = format!("/v1/sessions?open=true&limit={SESSIONS_READ}");
    Ok(session_candidates(client.get(&path).await?, typed.current()))
}

/// Sessions by id, those with the latest activity first. To whoever has begun to type a title, titles are offered too.
fn session_candidates(mut sessions: Vec<Session>, typed: &str) -> Vec<IdCandidate> {
    sessions.sort_by_key(|session| std::cmp::Reverse(session_cells::last_activity(session)));
    let mut candidates: Vec<IdCandidate> = Vec::new();
    for session in &sessions {
        let state = session_cells::describe_state(session, 0, "waiting to start");
        let title = session_cells::shown_title(session);
        candidates.push(IdCandidate::new(&session.id, format!("{title} ({state})")));
        if let Some(title) =
            session.title.as_deref().filter(|title| !typed.is_empty() && is_plain_word(title))
        {
            candidates.push(IdCandidate::new(title, format!("{} ({state})", session.id)));
        }
    }
    candidates
}

/// Whether no shell needs quotes around this title.
fn is_plain_word(title: &str) -> bool {
    title.starts_with(|c: char| c.is_ascii_alphanumeric())
        && title.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

async fn fetch_fleets(client: &DaemonClient, running_only: bool) -> Result<Vec<IdCandidate>> {
    let mut fleets: Vec<Fleet> = Vec::new();
    for workspace in client.list::<Workspace>("/v1/workspaces").await? {
        fleets.extend(client.list::<Fleet>(&format!("/v1/workspaces/{}/fleets", workspace.id)).await?);
    }
    fleets.retain(|fleet| !(running_only && fleet.state.is_final()));
    fleets.sort_by_key(|fleet| std::cmp::Reverse(fleet.updated_at));
    let describe = |fleet: &Fleet| {
        let task = text::first_line(&fleet.task, DESCRIPTION_CHARS);
        IdCandidate::new(&fleet.id, format!("{task} ({})", text::wire_name(&fleet.state)))
    };
    Ok(fleets.iter().map(describe).collect())
}

async fn fetch_queued_runs(client: &DaemonClient, typed: &TypedWords) -> Result<Vec<IdCandidate>> {
    let Some(session) = typed.first_argument_of("queue", &QUEUE_FLAGS) else { return Ok(Vec::new()) };
    let session = refs::resolve_session(client, session).await?;
    let queue: Vec<QueueEntry> = client.list(&format!("{}/queue", session.agent_path())).await?;
    let describe = |entry: QueueEntry| {
        let prompt = text::first_line(&entry.prompt, DESCRIPTION_CHARS);
        IdCandidate::new(&entry.run_id, format!("{}: {prompt}", entry.position))
    };
    Ok(queue.into_iter().map(describe).collect())
}

async fn fetch_asks(client: &DaemonClient, kind: Option<AskKind>) -> Result<Vec<IdCandidate>> {
    let asks: Vec<AskRecord> = client.list("/v1/asks?state=pending").await?;
    let asks =
        asks.into_iter().map(|record| record.ask).filter(|ask| kind.is_none_or(|kind| ask.kind == kind));
    let describe = |ask: Ask| IdCandidate::new(&ask.id, ask::summarize(&ask).fit(Some(DESCRIPTION_CHARS)));
    Ok(asks.map(describe).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::session_cells::tests::{ended_session, waiting_session};
    use qd_protocol::event::FinishReason;

    #[test]
    fn sessions_are_offered_by_id_with_their_titles_the_latest_first() {
        let older = Session { title: None, ..ended_session("ses_1", FinishReason::Error, 5) };
        let older = Session { auto_title: Some("fix the\ttests".to_owned()), ..older };
        let newer = ended_session("ses_2", FinishReason::EndTurn, 9);
        let offered = session_candidates(vec![older, newer.clone()], "");
        let expected = [
            IdCandidate::new("ses_2", "nightly (done)"),
            IdCandidate::new("ses_1", "fix the\ttests (failed)"),
        ];
        assert_eq!(offered, expected);
        let typed = session_candidates(vec![newer], "ni");
        assert_eq!(typed[1], IdCandidate::new("nightly", "ses_2 (done)"));
    }

    #[test]
    fn a_title_that_a_shell_would_split_is_not_offered() {
        let session = Session { title: Some("the nightly build".to_owned()), ..waiting_session("ses_1") };
        assert_eq!(session_candidates(vec![session], "the").len(), 1);
        for word in ["a b", "$HOME", "-x", "a;b", "", "日"] {
            assert!(!is_plain_word(word), "{word}");
        }
    }
}
