//! What a person means by an id, a beginning of one, or a title. The daemon knows what exists; here is decided what
//! one answer, several or none mean for a verb.

use std::collections::HashSet;

use qd_protocol::api::{Match, MatchKind, Session};
use qd_protocol::{RunId, SessionId};

use crate::client::{Client, encode};
use crate::failure::{Failure, Result};

/// A conversation or one prompt of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// All of it.
    Session(SessionRef),
    /// One run.
    Run(SessionRef, RunId),
}

/// A session and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionRef {
    /// The workspace.
    pub(crate) workspace: String,
    /// The session.
    pub(crate) id: SessionId,
}

impl SessionRef {
    /// `/v1/workspaces/W/sessions/S`.
    pub(crate) fn path(&self) -> String {
        format!("/v1/workspaces/{}/sessions/{}", self.workspace, self.id)
    }

    /// `/v1/workspaces/W/agent/sessions/S`.
    pub(crate) fn agent_path(&self) -> String {
        format!("/v1/workspaces/{}/agent/sessions/{}", self.workspace, self.id)
    }

    /// The stream of its events.
    pub(crate) fn stream_path(&self) -> String {
        format!("/v1/workspaces/{}/events?session={}", self.workspace, self.id)
    }

    /// `/v1/workspaces/W/runs/R`.
    pub(crate) fn run_path(&self, run: &RunId) -> String {
        format!("/v1/workspaces/{}/runs/{run}", self.workspace)
    }
}

impl Target {
    /// The session, or the run's.
    pub(crate) fn session(&self) -> &SessionRef {
        match self {
            Self::Session(session) | Self::Run(session, _) => session,
        }
    }

    /// The run, if it is one.
    pub(crate) fn run(&self) -> Option<&RunId> {
        match self {
            Self::Session(_) => None,
            Self::Run(_, run) => Some(run),
        }
    }
}

/// A session, by id, beginning or title.
pub(crate) async fn session(client: &Client, text: &str) -> Result<SessionRef> {
    located(&one(client, text, &[MatchKind::Session]).await?)
}

/// A session or a run.
pub(crate) async fn target(client: &Client, text: &str) -> Result<Target> {
    let found = one(client, text, &[MatchKind::Session, MatchKind::Run]).await?;
    let session = located(&found)?;
    if found.kind == MatchKind::Session {
        return Ok(Target::Session(session));
    }
    Ok(Target::Run(session, RunId::parse(&found.id).map_err(anyhow::Error::from)?))
}

/// A fleet and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FleetRef {
    /// The workspace.
    pub(crate) workspace: String,
    /// The fleet.
    pub(crate) id: String,
}

impl FleetRef {
    /// `/v1/workspaces/W/fleets/F`.
    pub(crate) fn path(&self) -> String {
        format!("/v1/workspaces/{}/fleets/{}", self.workspace, self.id)
    }
}

/// A fleet, by id or beginning of one.
pub(crate) async fn fleet(client: &Client, text: &str) -> Result<FleetRef> {
    let found = one(client, text, &[MatchKind::Fleet]).await?;
    Ok(FleetRef { workspace: found.workspace_id.to_string(), id: found.id })
}

/// An ask, by its whole id.
pub(crate) async fn ask(client: &Client, text: &str) -> Result<String> {
    Ok(one(client, text, &[MatchKind::Ask]).await?.id)
}

async fn one(client: &Client, text: &str, kinds: &[MatchKind]) -> Result<Match> {
    if text.trim().is_empty() {
        return Err(Failure::Usage("an empty id means nothing".to_owned()));
    }
    let mut found: Vec<Match> = client.get(&format!("/v1/resolve?ref={}", encode(text))).await?;
    let sessions = found.iter().filter(|one| one.kind == MatchKind::Session).count();
    if sessions > 1 && kinds.contains(&MatchKind::Session) {
        let open: Vec<Session> = client.list(&format!("/v1/sessions?open=true&ref={}", encode(text))).await?;
        found = without_closed(found, &open.into_iter().map(|session| session.id.to_string()).collect());
    }
    choose(text, found, kinds)
}

/// A session that is closed keeps its title, but gives way to one that is open.
fn without_closed(found: Vec<Match>, open: &HashSet<String>) -> Vec<Match> {
    match open.is_empty() {
        true => found,
        false => {
            let stays = |one: &Match| one.kind != MatchKind::Session || open.contains(&one.id);
            found.into_iter().filter(stays).collect()
        }
    }
}

/// The one that is meant, among those that it may mean.
fn choose(text: &str, found: Vec<Match>, kinds: &[MatchKind]) -> Result<Match> {
    let other = found.iter().find(|one| !kinds.contains(&one.kind)).map(|one| noun(one.kind));
    let mut fitting: Vec<Match> = found.into_iter().filter(|one| kinds.contains(&one.kind)).collect();
    match (fitting.len(), other) {
        (1, _) => Ok(fitting.remove(0)),
        (0, Some(other)) => {
            Err(Failure::NotFound(format!("{text} is {other}, and {} is needed here", nouns(kinds))))
        }
        (0, None) => {
            let list = if kinds == [MatchKind::Ask] { "qd asks" } else { "qd ps -a" };
            Err(Failure::NotFound(format!("nothing is called {text}; `{list}` lists what there is")))
        }
        _ => {
            let list: String = fitting.iter().map(|one| format!("\n    {}", one.id)).collect();
            Err(Failure::Usage(format!("{text} may mean several; say more of the id:{list}")))
        }
    }
}

fn located(found: &Match) -> Result<SessionRef> {
    let workspace = found.workspace_id.to_string();
    match &found.session_id {
        Some(id) => Ok(SessionRef { workspace, id: id.clone() }),
        None => Err(Failure::NotFound(format!("{} belongs to no session", found.id))),
    }
}

fn noun(kind: MatchKind) -> &'static str {
    match kind {
        MatchKind::Workspace => "a workspace",
        MatchKind::Session => "a session",
        MatchKind::Run => "a run",
        MatchKind::Ask => "an ask",
        MatchKind::Fleet => "a fleet",
    }
}

fn nouns(kinds: &[MatchKind]) -> String {
    kinds.iter().map(|&kind| noun(kind)).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;
    use qd_protocol::WorkspaceId;

    fn found(kind: MatchKind, id: &str) -> Match {
        Match {
            kind,
            id: id.to_owned(),
            workspace_id: WorkspaceId::parse("ws_1").unwrap(),
            session_id: Some(SessionId::parse("ses_1").unwrap()),
        }
    }

    #[test]
    fn one_match_of_the_right_kind_is_meant() {
        let both = vec![found(MatchKind::Ask, "ask_1"), found(MatchKind::Session, "ses_1")];
        assert_eq!(choose("x", both.clone(), &[MatchKind::Session]).unwrap().id, "ses_1");
        assert_eq!(choose("x", both, &[MatchKind::Ask]).unwrap().id, "ask_1");
    }

    #[test]
    fn several_matches_are_wrong_usage_and_are_listed() {
        let two = vec![found(MatchKind::Session, "ses_1"), found(MatchKind::Session, "ses_2")];
        let failure = choose("ses", two, &[MatchKind::Session]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        assert!(failure.to_string().contains("ses_1\n    ses_2"), "{failure}");
    }

    #[test]
    fn what_is_closed_gives_way_to_what_is_open() {
        let all = || vec![found(MatchKind::Session, "ses_1"), found(MatchKind::Session, "ses_2")];
        let open = HashSet::from(["ses_2".to_owned()]);
        let meant = choose("par", without_closed(all(), &open), &[MatchKind::Session]).unwrap();
        assert_eq!(meant.id, "ses_2");
        assert_eq!(without_closed(all(), &HashSet::new()), all(), "none is open");
    }

    #[test]
    fn no_match_is_not_found_and_another_kind_is_named() {
        let none = choose("x", Vec::new(), &[MatchKind::Session]).unwrap_err();
        assert_eq!(none.exit(), Exit::NotFound);
        assert!(none.to_string().contains("`qd ps -a`"), "{none}");
        let ask = choose("x", Vec::new(), &[MatchKind::Ask]).unwrap_err();
        assert!(ask.to_string().contains("`qd asks`"), "{ask}");
        let run = choose("run_1", vec![found(MatchKind::Run, "run_1")], &[MatchKind::Session]).unwrap_err();
        assert_eq!(run.exit(), Exit::NotFound);
        assert_eq!(run.to_string(), "run_1 is a run, and a session is needed here");
    }
}
