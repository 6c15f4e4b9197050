//! Resolves what the user typed (an id, the start of one, or a title) to a session, run, fleet or ask. The daemon lists
//! the matches; this file decides what one, several or none of them mean for a verb.

use std::collections::{HashMap, HashSet};

use qd_protocol::api::{ReferenceKind, ReferenceMatch, Session, ShortIds};
use qd_protocol::limits::SHORT_IDS_MAX;
use qd_protocol::{RunId, SessionId};

use crate::client::{DaemonClient, percent_encode};
use crate::failure::{CliFailure, Result};
use crate::output::CliOutput;
use crate::render::session_cells::ShownIds;
use crate::render::visible_text::show_prose_line;
use crate::render::{session_cells, text};

/// What verbs accept that watch something. An id of a session or fleet is shortened so that all of them accept it.
pub(crate) const WATCHED_KINDS: [ReferenceKind; 3] =
    [ReferenceKind::Session, ReferenceKind::Run, ReferenceKind::Fleet];
/// A longer list shows whole ids, because shortening them would take longer than fetching them.
const SHORTENED_IDS_MAX: usize = 1000;

/// A whole session, or one of its runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionOrRun {
    Session(ResolvedSession),
    Run(ResolvedSession, RunId),
}

/// What a person can watch or wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WatchTarget {
    Session(ResolvedSession),
    Run(ResolvedSession, RunId),
    Fleet(ResolvedFleet),
}

/// A session and its workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolvedSession {
    pub(crate) workspace: String,
    pub(crate) id: SessionId,
}

impl ResolvedSession {
    /// `/v1/workspaces/W/sessions/S`.
    pub(crate) fn path(&self) -> String {
        format!("/v1/workspaces/{}/sessions/{}", self.workspace, self.id)
    }

    /// `/v1/workspaces/W/agent/sessions/S`.
    pub(crate) fn agent_path(&self) -> String {
        format!("/v1/workspaces/{}/agent/sessions/{}", self.workspace, self.id)
    }

    /// The path of the session's event stream.
    pub(crate) fn stream_path(&self) -> String {
        format!("/v1/workspaces/{}/events?session={}", self.workspace, self.id)
    }

    /// `/v1/workspaces/W/runs/R`.
    pub(crate) fn run_path(&self, run: &RunId) -> String {
        format!("/v1/workspaces/{}/runs/{run}", self.workspace)
    }
}

impl SessionOrRun {
    /// The session, or the session of the run.
    pub(crate) fn session(&self) -> &ResolvedSession {
        match self {
            Self::Session(session) | Self::Run(session, _) => session,
        }
    }

    pub(crate) fn run(&self) -> Option<&RunId> {
        match self {
            Self::Session(_) => None,
            Self::Run(_, run) => Some(run),
        }
    }
}

/// Resolves a session by id, id prefix or title.
pub(crate) async fn resolve_session(client: &DaemonClient, text: &str) -> Result<ResolvedSession> {
    session_of_match(&resolve_one(client, text, &[ReferenceKind::Session]).await?)
}

/// Resolves a session or a run.
pub(crate) async fn resolve_target(client: &DaemonClient, text: &str) -> Result<SessionOrRun> {
    let found = resolve_one(client, text, &[ReferenceKind::Session, ReferenceKind::Run]).await?;
    let session = session_of_match(&found)?;
    if found.kind == ReferenceKind::Session {
        return Ok(SessionOrRun::Session(session));
    }
    Ok(SessionOrRun::Run(session, RunId::parse(&found.id).map_err(anyhow::Error::from)?))
}

/// Resolves a session, a run or a fleet.
pub(crate) async fn resolve_watch_target(client: &DaemonClient, text: &str) -> Result<WatchTarget> {
    let found = resolve_one(client, text, &WATCHED_KINDS).await?;
    match found.kind {
        ReferenceKind::Fleet => Ok(WatchTarget::Fleet(fleet_of_match(found))),
        ReferenceKind::Run => {
            let run = RunId::parse(&found.id).map_err(anyhow::Error::from)?;
            Ok(WatchTarget::Run(session_of_match(&found)?, run))
        }
        _ => Ok(WatchTarget::Session(session_of_match(&found)?)),
    }
}

/// A fleet and its workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolvedFleet {
    pub(crate) workspace: String,
    pub(crate) id: String,
}

impl ResolvedFleet {
    /// `/v1/workspaces/W/fleets/F`.
    pub(crate) fn path(&self) -> String {
        format!("/v1/workspaces/{}/fleets/{}", self.workspace, self.id)
    }
}

/// Resolves a fleet by id or id prefix.
pub(crate) async fn resolve_fleet(client: &DaemonClient, text: &str) -> Result<ResolvedFleet> {
    Ok(fleet_of_match(resolve_one(client, text, &[ReferenceKind::Fleet]).await?))
}

fn fleet_of_match(found: ReferenceMatch) -> ResolvedFleet {
    ResolvedFleet { workspace: found.workspace_id.to_string(), id: found.id }
}

/// Resolves an ask by id or id prefix to its full id.
pub(crate) async fn resolve_ask(client: &DaemonClient, text: &str) -> Result<String> {
    Ok(resolve_one(client, text, &[ReferenceKind::Ask]).await?.id)
}

/// For each id, the shortest beginning that a verb taking these kinds accepts for it and for nothing else, at least four
/// characters long. Ids stay whole if the daemon cannot shorten them, as one of an earlier release.
async fn short_ids(
    client: &DaemonClient,
    kinds: &[ReferenceKind],
    ids: Vec<String>,
) -> Result<HashMap<String, String>> {
    let kinds: Vec<String> = kinds.iter().map(text::wire_name).collect();
    let mut short: HashMap<String, String> = ids.iter().map(|id| (id.clone(), id.clone())).collect();
    for some in ids.chunks(SHORT_IDS_MAX) {
        let list = percent_encode(&some.join(","));
        let path = format!("/v1/short-ids?kinds={}&ids={list}", kinds.join(","));
        match client.get::<ShortIds>(&path).await {
            Ok(found) => short.extend(found.ids),
            Err(CliFailure::Refused(_)) => break,
            Err(failure) => return Err(failure),
        }
    }
    Ok(short)
}

/// How a list shows the ids of what it lists: short at a terminal, where people read and type them, elsewhere whole.
pub(crate) async fn shown_ids(
    out: &CliOutput,
    client: &DaemonClient,
    kinds: &[ReferenceKind],
    ids: Vec<String>,
) -> Result<ShownIds> {
    if out.json || out.width().is_none() || ids.len() > SHORTENED_IDS_MAX {
        return Ok(ShownIds::default());
    }
    Ok(ShownIds::shortened(short_ids(client, kinds, ids).await?))
}

async fn resolve_one(client: &DaemonClient, text: &str, kinds: &[ReferenceKind]) -> Result<ReferenceMatch> {
    if text.trim().is_empty() {
        return Err(CliFailure::Usage("the id is empty".to_owned()));
    }
    let mut found: Vec<ReferenceMatch> =
        client.get(&format!("/v1/resolve?ref={}", percent_encode(text))).await?;
    let sessions = found.iter().filter(|found| found.kind == ReferenceKind::Session).count();
    if sessions > 1 && kinds.contains(&ReferenceKind::Session) {
        let open: Vec<Session> =
            client.list(&format!("/v1/sessions?open=true&ref={}", percent_encode(text))).await?;
        found = without_closed(found, &open.into_iter().map(|session| session.id.to_string()).collect());
    }
    let is_ambiguous = found.iter().filter(|found| kinds.contains(&found.kind)).count() > 1;
    let sessions = if is_ambiguous { describe_sessions(client, text).await } else { HashMap::new() };
    choose_match(text, found, kinds, &sessions)
}

/// Agent, state and title of the sessions that match a reference, by id. Empty if they cannot be read.
async fn describe_sessions(client: &DaemonClient, reference: &str) -> HashMap<String, String> {
    let path = format!("/v1/sessions?ref={}", percent_encode(reference));
    let describe = |session: Session| {
        let state = session_cells::describe_state(&session, 0, "waiting to start");
        let title = session_cells::shown_title(&session);
        (session.id.to_string(), format!("{}  {state}  {title}", session.agent))
    };
    client.list(&path).await.unwrap_or_default().into_iter().map(describe).collect()
}

/// Drops closed sessions if an open one matches too: a closed session keeps its title, but an open one wins.
fn without_closed(found: Vec<ReferenceMatch>, open: &HashSet<String>) -> Vec<ReferenceMatch> {
    match open.is_empty() {
        true => found,
        false => {
            let is_kept =
                |found: &ReferenceMatch| found.kind != ReferenceKind::Session || open.contains(&found.id);
            found.into_iter().filter(is_kept).collect()
        }
    }
}

/// Picks the only match of the right kind. Fails with a list if there are several, with what is known of each session.
fn choose_match(
    text: &str,
    found: Vec<ReferenceMatch>,
    kinds: &[ReferenceKind],
    sessions: &HashMap<String, String>,
) -> Result<ReferenceMatch> {
    let wrong_kind = found.iter().find(|found| !kinds.contains(&found.kind)).map(|found| noun(found.kind));
    let mut matches: Vec<ReferenceMatch> =
        found.into_iter().filter(|found| kinds.contains(&found.kind)).collect();
    match (matches.len(), wrong_kind) {
        (1, _) => Ok(matches.remove(0)),
        (0, Some(wrong_kind)) => Err(CliFailure::NotFound(format!(
            "{text} is {wrong_kind}, but this command needs {}",
            nouns(kinds)
        ))),
        (0, None) => {
            let list = if kinds == [ReferenceKind::Ask] { "qd asks" } else { "qd ps -a" };
            Err(CliFailure::NotFound(format!("nothing matches {text}; see `{list}`")))
        }
        _ => {
            let line = |found: &ReferenceMatch| match sessions.get(&found.id) {
                Some(about) => format!("\n    {}  {}", found.id, show_prose_line(about)),
                None => format!("\n    {}", found.id),
            };
            let list: String = matches.iter().map(line).collect();
            Err(CliFailure::Usage(format!("{text} is ambiguous; use more of the id:{list}")))
        }
    }
}

fn session_of_match(found: &ReferenceMatch) -> Result<ResolvedSession> {
    let workspace = found.workspace_id.to_string();
    match &found.session_id {
        Some(id) => Ok(ResolvedSession { workspace, id: id.clone() }),
        None => Err(CliFailure::NotFound(format!("{} belongs to no session", found.id))),
    }
}

fn noun(kind: ReferenceKind) -> &'static str {
    match kind {
        ReferenceKind::Workspace => "a workspace",
        ReferenceKind::Session => "a session",
        ReferenceKind::Run => "a run",
        ReferenceKind::Ask => "an ask",
        ReferenceKind::Fleet => "a fleet",
    }
}

fn nouns(kinds: &[ReferenceKind]) -> String {
    kinds.iter().map(|&kind| noun(kind)).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::CliExitCode;
    use qd_protocol::WorkspaceId;

    fn sample_match(kind: ReferenceKind, id: &str) -> ReferenceMatch {
        ReferenceMatch {
            kind,
            id: id.to_owned(),
            workspace_id: WorkspaceId::parse("ws_1").unwrap(),
            session_id: Some(SessionId::parse("ses_1").unwrap()),
        }
    }

    /// Nothing is known of any session.
    fn choose(text: &str, found: Vec<ReferenceMatch>, kinds: &[ReferenceKind]) -> Result<ReferenceMatch> {
        choose_match(text, found, kinds, &HashMap::new())
    }

    #[test]
    fn a_single_match_of_the_right_kind_is_chosen() {
        let both =
            vec![sample_match(ReferenceKind::Ask, "ask_1"), sample_match(ReferenceKind::Session, "ses_1")];
        assert_eq!(choose("x", both.clone(), &[ReferenceKind::Session]).unwrap().id, "ses_1");
        assert_eq!(choose("x", both, &[ReferenceKind::Ask]).unwrap().id, "ask_1");
    }

    #[test]
    fn several_matches_are_wrong_usage_and_are_listed() {
        let two = vec![
            sample_match(ReferenceKind::Session, "ses_1"),
            sample_match(ReferenceKind::Session, "ses_2"),
        ];
        let failure = choose("ses", two, &[ReferenceKind::Session]).unwrap_err();
        assert_eq!(failure.exit_code(), CliExitCode::Usage);
        assert!(failure.to_string().contains("ses_1\n    ses_2"), "{failure}");
    }

    #[test]
    fn the_sessions_of_an_ambiguous_title_are_described() {
        let two = vec![
            sample_match(ReferenceKind::Session, "ses_1"),
            sample_match(ReferenceKind::Session, "ses_2"),
        ];
        let sessions = HashMap::from([("ses_2".to_owned(), "claude  idle  parser".to_owned())]);
        let failure = choose_match("parser", two, &[ReferenceKind::Session], &sessions).unwrap_err();
        assert!(failure.to_string().ends_with("\n    ses_1\n    ses_2  claude  idle  parser"), "{failure}");
    }

    #[test]
    fn an_open_session_wins_over_a_closed_one() {
        let all = || {
            vec![sample_match(ReferenceKind::Session, "ses_1"), sample_match(ReferenceKind::Session, "ses_2")]
        };
        let open = HashSet::from(["ses_2".to_owned()]);
        let chosen = choose("par", without_closed(all(), &open), &[ReferenceKind::Session]).unwrap();
        assert_eq!(chosen.id, "ses_2");
        assert_eq!(without_closed(all(), &HashSet::new()), all(), "none is open");
    }

    #[test]
    fn no_match_is_not_found_and_another_kind_is_named() {
        let none = choose("x", Vec::new(), &[ReferenceKind::Session]).unwrap_err();
        assert_eq!(none.exit_code(), CliExitCode::NotFound);
        assert!(none.to_string().contains("`qd ps -a`"), "{none}");
        let ask = choose("x", Vec::new(), &[ReferenceKind::Ask]).unwrap_err();
        assert!(ask.to_string().contains("`qd asks`"), "{ask}");
        let run = choose("run_1", vec![sample_match(ReferenceKind::Run, "run_1")], &[ReferenceKind::Session])
            .unwrap_err();
        assert_eq!(run.exit_code(), CliExitCode::NotFound);
        assert_eq!(run.to_string(), "run_1 is a run, but this command needs a session");
    }
}
