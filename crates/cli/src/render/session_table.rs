//! The table of `qd ps`, made of what the daemon lists.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use qd_protocol::api::Session;
use qd_protocol::event::Ask;
use qd_protocol::{Millis, SessionId, WorkspaceId};

use super::session_cells::{self, ShownIds, UnmergedWork};
use super::table::TextTable;
use super::text;

/// The place of the column that is coloured.
const STATE_COLUMN: usize = 1;
/// On a narrow terminal the state keeps this width, in which `waiting, 1 ask` is readable even if more follows.
const STATE_WIDTH_MIN: usize = 15;

/// What the table says besides the sessions themselves.
#[derive(Debug, Default)]
pub(crate) struct SessionListFacts {
    /// The paths of workspaces. One that is gone is shown by its id.
    pub(crate) paths: HashMap<WorkspaceId, String>,
    pub(crate) ids: ShownIds,
    /// How many open asks sessions have.
    pub(crate) open_asks: HashMap<SessionId, usize>,
    /// Why prompts of idle sessions wait.
    pub(crate) queue_reason: &'static str,
    pub(crate) unmerged_work: UnmergedWork,
    /// Whether there is a column about how agents are confined.
    pub(crate) with_sandbox: bool,
}

impl SessionListFacts {
    pub(crate) fn asks_of(&self, session: &Session) -> usize {
        self.open_asks.get(&session.id).copied().unwrap_or(0)
    }
}

/// How many of these asks each session has.
pub(crate) fn count_asks(asks: &[Ask]) -> HashMap<SessionId, usize> {
    let mut counts = HashMap::new();
    for session in asks.iter().filter_map(|ask| ask.session_id.as_ref()) {
        *counts.entry(session.clone()).or_default() += 1;
    }
    counts
}

/// The table. Sessions that need the user come first, then busy ones, each group with the latest activity first. The
/// workspace is only shown if there are several.
pub(crate) fn session_table(sessions: &mut [Session], facts: &SessionListFacts, now: Millis) -> TextTable {
    sessions.sort_by_key(|session| {
        (facts.asks_of(session) == 0, !session.busy, Reverse(session_cells::last_activity(session)))
    });
    let listed_workspaces: HashSet<&WorkspaceId> =
        sessions.iter().map(|session| &session.workspace_id).collect();
    let with_workspace = listed_workspaces.len() > 1;
    let mut titles = vec!["ID", "STATE", "LAST", "COST", "CHANGES", "AGENT", "TITLE"];
    titles.extend(facts.with_sandbox.then_some("SANDBOX"));
    titles.extend(with_workspace.then_some("WORKSPACE"));
    let mut table = TextTable::new(&titles);
    table.set_min_width(STATE_COLUMN, STATE_WIDTH_MIN);
    for session in sessions.iter() {
        let asks = facts.asks_of(session);
        let path =
            facts.paths.get(&session.workspace_id).map_or(session.workspace_id.as_str(), String::as_str);
        let cells = [
            facts.ids.shown(&session.id),
            session_cells::describe_state(session, asks, facts.queue_reason),
            text::format_age(session_cells::last_activity(session), now),
            text::format_dollars(session.usage.cost_usd),
            facts.unmerged_work.cell(session),
            session.agent.clone(),
            session_cells::shown_title(session),
        ];
        let sandbox = facts.with_sandbox.then(|| session_cells::describe_sandbox(session));
        table.add_row(cells.into_iter().chain(sandbox).chain(with_workspace.then(|| path.to_owned())));
        table.colour_cell(STATE_COLUMN, session_cells::state_colour(session, asks));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::session_cells::tests::{ended_session, waiting_session, worktree};
    use crate::render::style::TextStyle;
    use qd_protocol::api::{SessionSandbox, SessionStatus};
    use qd_protocol::event::FinishReason;
    use qd_protocol::sandbox::{NetworkSetting, SandboxLevel, SandboxSetting};

    const NOW: Millis = Millis(100 * 60 * 60 * 1000);
    const MINUTE: u64 = 60_000;

    fn minutes_ago(minutes: u64) -> u64 {
        NOW.0 - minutes * MINUTE
    }

    /// One session of every kind, with wide characters, a long agent name and a long title among them.
    fn every_kind() -> (Vec<Session>, SessionListFacts) {
        let asking = Session {
            title: Some("修复登录页面的测试并更新文档".to_owned()),
            updated_at: Millis(minutes_ago(3)),
            ..waiting_session("ses_4k2v9d0qxw1zr7ta")
        };
        let running = Session {
            state: SessionStatus::Running,
            agent: "acp:node /opt/agents/my-own-agent.js --fast".to_owned(),
            title: None,
            auto_title: Some("port the parser to the new grammar and keep every old test".to_owned()),
            queued: 0,
            worktree: Some("/w".to_owned()),
            updated_at: Millis(minutes_ago(1)),
            ..waiting_session("ses_9b1m3c5n7p2q4r6s")
        };
        let held = Session {
            state: SessionStatus::Idle,
            updated_at: Millis(minutes_ago(2)),
            ..waiting_session("ses_held000000000000")
        };
        let mut sessions = vec![
            Session {
                title: None,
                ..ended_session("ses_done000000000000", FinishReason::EndTurn, minutes_ago(90))
            },
            ended_session("ses_failed0000000000", FinishReason::Error, minutes_ago(5)),
            ended_session("ses_timeout000000000", FinishReason::Timeout, minutes_ago(1500)),
            ended_session("ses_cancelled0000000", FinishReason::Cancelled, minutes_ago(20)),
            held,
            running,
            asking,
        ];
        for session in &mut sessions {
            session.usage.cost_usd = 1.5;
        }
        let facts = SessionListFacts {
            open_asks: HashMap::from([(SessionId::parse("ses_4k2v9d0qxw1zr7ta").unwrap(), 1)]),
            queue_reason: "halted",
            unmerged_work: UnmergedWork::of(&[worktree("ses_9b1m3c5n7p2q4r6s", "dirty", Some(1204))]),
            ..SessionListFacts::default()
        };
        (sessions, facts)
    }

    #[test]
    fn sessions_are_listed_by_who_needs_the_user_and_fit_the_terminal() {
        let (mut sessions, facts) = every_kind();
        let table = session_table(&mut sessions, &facts, NOW);
        for width in [80, 140] {
            let shown = table.render(TextStyle::new(false), Some(width));
            assert!(shown.lines().all(|line| text::display_width(line) <= width), "{shown}");
            insta::assert_snapshot!(format!("ps_at_{width}_columns"), shown);
        }
        insta::assert_snapshot!("ps_in_colour", table.render(TextStyle::new(true), Some(140)));
    }

    #[test]
    fn a_verbose_list_shows_the_level_in_force_and_what_was_asked_for() {
        let sandbox =
            |asked, level, network| SessionSandbox { asked, level, network, ..SessionSandbox::default() };
        let session = |sandbox| Session { sandbox: Some(sandbox), ..waiting_session("ses_1") };
        let mut sessions = vec![
            session(sandbox(SandboxSetting::Auto, Some(SandboxLevel::Deck), NetworkSetting::On)),
            session(sandbox(SandboxSetting::Auto, Some(SandboxLevel::Off), NetworkSetting::On)),
            session(sandbox(SandboxSetting::Workspace, Some(SandboxLevel::Workspace), NetworkSetting::Off)),
            session(sandbox(SandboxSetting::Workspace, Some(SandboxLevel::Deck), NetworkSetting::On)),
            session(sandbox(SandboxSetting::Auto, None, NetworkSetting::On)),
        ];
        let facts = SessionListFacts { with_sandbox: true, ..SessionListFacts::default() };
        let shown = session_table(&mut sessions, &facts, NOW).render(TextStyle::new(false), None);
        assert!(shown.lines().next().unwrap().contains("SANDBOX"), "{shown}");
        for cell in ["deck", "off", "workspace, no network", "deck (workspace next)", "(auto)"] {
            assert!(shown.lines().any(|line| line.trim_end().ends_with(cell)), "{cell}: {shown}");
        }
    }

    #[test]
    fn the_workspace_is_shown_only_if_there_are_several() {
        let mut sessions = vec![waiting_session("ses_1"), waiting_session("ses_2")];
        sessions[1].workspace_id = WorkspaceId::parse("ws_gone").unwrap();
        let facts = SessionListFacts {
            paths: HashMap::from([(WorkspaceId::parse("ws_1").unwrap(), "/src/app".to_owned())]),
            ..SessionListFacts::default()
        };
        let shown = session_table(&mut sessions, &facts, NOW).render(TextStyle::new(false), None);
        assert!(shown.contains("WORKSPACE") && shown.contains("/src/app"), "{shown}");
        assert!(shown.contains("ws_gone"), "a workspace that is gone is shown by its id: {shown}");
        let shown = session_table(&mut sessions[..1], &facts, NOW).render(TextStyle::new(false), None);
        assert!(!shown.contains("WORKSPACE"), "{shown}");
    }
}
