//! The order of lists, every filter, continuing after an id, trees of sessions, and resolving shortened ids.

use qd_journal::{
    AppendError, AppendRequest, AskFilter, JournalReadError, MailFilter, MailRow, RowChange, RunFilter,
    RunRow, SessionFilter, SessionKey, SessionRow, WorkspaceKey, WorkspaceRow,
};
use qd_protocol::api::ReferenceKind;
use qd_protocol::{MailId, Millis, Seq};

use crate::fixture::*;

fn keys(rows: &[SessionRow]) -> Vec<i64> {
    rows.iter().map(|row| row.key.0).collect()
}

#[tokio::test]
async fn sessions_are_listed_in_the_order_of_creation_by_every_filter() {
    let fixture = JournalFixture::new();
    let rows = vec![
        SessionRow { live: true, ..session_row(1) },
        SessionRow { closed_at: Some(Millis(7)), ..session_row(2) },
        SessionRow { workspace: WorkspaceKey(2), has_open_work: true, ..session_row(3) },
        SessionRow { parent: Some(SessionKey(1)), ..session_row(4) },
        SessionRow { parent: Some(SessionKey(1)), closed_at: Some(Millis(8)), live: true, ..session_row(5) },
    ];
    change(&fixture.journal, rows.iter().cloned().map(RowChange::Session).collect()).await.unwrap();
    let filter = SessionFilter::default;
    for (filter, expected) in [
        (filter(), vec![1, 2, 3, 4, 5]),
        (SessionFilter { workspace: Some(WorkspaceKey(1)), ..filter() }, vec![1, 2, 4, 5]),
        (SessionFilter { open_only: true, ..filter() }, vec![1, 3, 4]),
        (SessionFilter { workspace: Some(WorkspaceKey(2)), open_only: true, ..filter() }, vec![3]),
        (SessionFilter { live_only: true, ..filter() }, vec![1, 5]),
        (SessionFilter { live_only: true, open_only: true, ..filter() }, vec![1]),
        (SessionFilter { live_only: true, workspace: Some(WorkspaceKey(2)), ..filter() }, vec![]),
        (SessionFilter { open_work_only: true, ..filter() }, vec![3]),
        (SessionFilter { parent: Some(SessionKey(1)), ..filter() }, vec![4, 5]),
        (SessionFilter { parent: Some(SessionKey(1)), open_only: true, ..filter() }, vec![4]),
    ] {
        let found = fixture.journal.sessions(filter, None, 100).await.unwrap();
        assert_eq!(keys(&found), expected, "{filter:?}");
        let after = fixture.journal.sessions(filter, Some(&session_id(1)), 1).await.unwrap();
        let expected: Vec<_> = expected.into_iter().filter(|key| *key > 1).take(1).collect();
        assert_eq!(keys(&after), expected, "{filter:?} after the first");
    }
    let all = fixture.journal.sessions(filter(), None, 100).await.unwrap();
    assert_eq!(all, rows);
    let unknown = fixture.journal.sessions(filter(), Some(&session_id(99)), 1).await;
    assert_eq!(unknown, Err(JournalReadError::Cursor("ses_0099".to_owned())));
    assert_eq!(fixture.journal.session_by_key(SessionKey(3)).await.unwrap().as_ref(), Some(&rows[2]));
    let counts = fixture.journal.counts().await.unwrap();
    assert_eq!((counts.open_sessions, counts.live_sessions), (3, 2));
}

#[tokio::test]
async fn runs_are_listed_in_the_order_of_acceptance() {
    let fixture = JournalFixture::new();
    for (name, session, number) in [("z", 1, 1), ("m", 2, 1), ("a", 1, 2)] {
        let rows = vec![RowChange::Run(run_row(name, session))];
        let events = vec![event(&scope(session), number)];
        fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    let end = RunRow { finished: true, accepted_event: None, ..run_row("m", 2) };
    change(&fixture.journal, vec![RowChange::Run(end)]).await.unwrap();
    let filter = RunFilter::default;
    for (filter, expected) in [
        (filter(), vec!["run_z", "run_m", "run_a"]),
        (RunFilter { session: Some(SessionKey(1)), ..filter() }, vec!["run_z", "run_a"]),
        (RunFilter { workspace: Some(WorkspaceKey(1)), ..filter() }, vec!["run_z", "run_m", "run_a"]),
        (RunFilter { unfinished_only: true, ..filter() }, vec!["run_z", "run_a"]),
        (RunFilter { unfinished_only: true, session: Some(SessionKey(2)), ..filter() }, vec![]),
        (RunFilter { workspace: Some(WorkspaceKey(2)), ..filter() }, vec![]),
    ] {
        let found = fixture.journal.runs(filter, None, 100).await.unwrap();
        assert_eq!(found.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), expected, "{filter:?}");
    }
    let after = fixture.journal.runs(filter(), Some(&run_id("m")), 100).await.unwrap();
    assert_eq!(after.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["run_a"]);
    assert_eq!(fixture.journal.counts().await.unwrap().unfinished_runs, 2);
}

#[tokio::test]
async fn asks_are_listed_oldest_first_also_after_a_change() {
    let fixture = JournalFixture::new();
    let open = |name, session| RowChange::Ask(ask_row(name, session, true));
    let elsewhere = SessionRow { workspace: WorkspaceKey(2), ..session_row(2) };
    let sessions = [session_row(1), elsewhere].map(RowChange::Session);
    change(&fixture.journal, sessions.into()).await.unwrap();
    change(&fixture.journal, vec![open("z", 1), open("m", 2), open("a", 1)]).await.unwrap();
    change(&fixture.journal, vec![RowChange::Ask(ask_row("m", 2, false)), open("z", 1)]).await.unwrap();
    let filter = AskFilter::default;
    for (filter, expected) in [
        (filter(), vec!["ask_z", "ask_m", "ask_a"]),
        (AskFilter { pending_only: true, ..filter() }, vec!["ask_z", "ask_a"]),
        (AskFilter { session: Some(SessionKey(2)), ..filter() }, vec!["ask_m"]),
        (AskFilter { session: Some(SessionKey(2)), pending_only: true, ..filter() }, vec![]),
        (AskFilter { newest_first: true, ..filter() }, vec!["ask_a", "ask_m", "ask_z"]),
        (AskFilter { newest_first: true, session: Some(SessionKey(1)), ..filter() }, vec!["ask_a", "ask_z"]),
        (AskFilter { workspace: Some(WorkspaceKey(1)), ..filter() }, vec!["ask_z", "ask_a"]),
        (AskFilter { workspace: Some(WorkspaceKey(2)), newest_first: true, ..filter() }, vec!["ask_m"]),
        (AskFilter { workspace: Some(WorkspaceKey(3)), ..filter() }, vec![]),
    ] {
        let found = fixture.journal.asks(filter, None, 100).await.unwrap();
        assert_eq!(found.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), expected, "{filter:?}");
    }
    let after = fixture.journal.asks(filter(), Some(&ask_row("z", 1, true).id), 1).await.unwrap();
    assert_eq!(after, [ask_row("m", 2, false)]);
    let newest = AskFilter { newest_first: true, ..filter() };
    let before = fixture.journal.asks(newest, Some(&ask_row("m", 2, true).id), 9).await.unwrap();
    assert_eq!(before, [ask_row("z", 1, true)]);
    assert_eq!(fixture.journal.counts().await.unwrap().pending_asks, 2);
}

#[tokio::test]
async fn a_path_is_one_workspace_until_it_is_removed() {
    let fixture = JournalFixture::new();
    let first = workspace_row(1, "/a");
    change(&fixture.journal, vec![RowChange::Workspace(first.clone())]).await.unwrap();
    assert!(change(&fixture.journal, vec![RowChange::Workspace(workspace_row(2, "/a"))]).await.is_err());
    let removed = WorkspaceRow { removed: true, ..first.clone() };
    change(&fixture.journal, vec![RowChange::Workspace(removed.clone())]).await.unwrap();
    assert_eq!(fixture.journal.workspace_by_path("/a").await.unwrap(), None);
    assert_eq!(fixture.journal.workspace(&first.id).await.unwrap(), Some(removed));
    let second = workspace_row(2, "/a");
    change(&fixture.journal, vec![RowChange::Workspace(second.clone())]).await.unwrap();
    assert_eq!(fixture.journal.workspace_by_path("/a").await.unwrap(), Some(second.clone()));
    let third = workspace_row(3, "/b");
    change(&fixture.journal, vec![RowChange::Workspace(third.clone())]).await.unwrap();
    assert_eq!(fixture.journal.workspaces(None, 10).await.unwrap(), [second.clone(), third.clone()]);
    assert_eq!(fixture.journal.workspaces(Some(&second.id), 10).await.unwrap(), [third]);
    assert_eq!(fixture.journal.workspace_by_key(WorkspaceKey(2)).await.unwrap(), Some(second));
}

#[tokio::test]
async fn a_budget_counts_the_whole_tree_and_a_session_knows_its_line() {
    let fixture = JournalFixture::new();
    let with = |key, parent: Option<i64>, cost_usd| {
        RowChange::Session(SessionRow { parent: parent.map(SessionKey), cost_usd, ..session_row(key) })
    };
    let rows = vec![
        with(1, None, 1.0),
        with(2, Some(1), 0.5),
        with(3, Some(2), 0.25),
        with(4, Some(1), 0.125),
        with(5, None, 100.0),
    ];
    change(&fixture.journal, rows).await.unwrap();
    for (root, cost) in [(1, 1.875), (2, 0.75), (3, 0.25), (5, 100.0), (99, 0.0)] {
        assert_eq!(fixture.journal.tree_cost(SessionKey(root)).await.unwrap(), cost, "{root}");
    }
    assert_eq!(keys(&fixture.journal.lineage(SessionKey(3)).await.unwrap()), [3, 2, 1]);
    assert_eq!(keys(&fixture.journal.lineage(SessionKey(1)).await.unwrap()), [1]);
}

#[tokio::test]
async fn a_short_id_is_the_shortest_reference_that_means_nothing_else() {
    let fixture = JournalFixture::new();
    let names = ["aaaa1x", "aaaa2x", "bbbbbb", "cccccc"];
    let mut rows = vec![
        RowChange::Workspace(workspace_row(1, "/a")),
        RowChange::Session(SessionRow { title: Some("cccc".to_owned()), ..session_row(1) }),
        RowChange::Run(run_row("bbbbbb_too", 1)),
    ];
    rows.extend(names.map(|name| RowChange::Ask(ask_row(name, 1, true))));
    let events = vec![event(&scope(1), 1)];
    fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    let short = async |kinds: &[ReferenceKind]| {
        let ids: Vec<String> = names.iter().map(|name| format!("ask_{name}")).collect();
        let found = fixture.journal.short_ids(ids, kinds.to_vec()).await.unwrap();
        found.into_values().collect::<Vec<_>>()
    };
    let asks = short(&[ReferenceKind::Ask]).await;
    assert_eq!(asks, ["aaaa1", "aaaa2", "bbbb", "ccccc"], "`cccc` is a title");
    let both = short(&[ReferenceKind::Ask, ReferenceKind::Run]).await;
    assert_eq!(both, ["aaaa1", "aaaa2", "ask_bbbbbb", "ccccc"], "a run begins with all of `bbbbbb`");
}

#[tokio::test]
async fn a_reference_is_an_id_a_title_or_the_beginning_of_an_id() {
    let fixture = JournalFixture::new();
    let titled = |key, title: &str| {
        RowChange::Session(SessionRow { title: Some(title.to_owned()), ..session_row(key) })
    };
    let rows = vec![
        RowChange::Workspace(workspace_row(1, "/a")),
        RowChange::Workspace(WorkspaceRow { removed: true, ..workspace_row(2, "/b") }),
        titled(1, "fix the tests"),
        titled(2, "ses_0001"),
        titled(3, "fix the tests"),
        RowChange::Session(session_row(12)),
        RowChange::Run(run_row("77", 1)),
        RowChange::Ask(ask_row("88", 1, true)),
    ];
    fixture
        .journal
        .append(AppendRequest { events: vec![event(&scope(1), 1)], rows, ..AppendRequest::default() })
        .await
        .unwrap();
    let resolve = async |text: &str, limit: usize| {
        let found = fixture.journal.resolve(text, limit).await.unwrap();
        found.iter().map(|found| found.id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(resolve("ses_0001", 10).await, ["ses_0001", "ses_0002"], "an id before a title");
    assert_eq!(resolve("fix the tests", 10).await, ["ses_0003", "ses_0001"]);
    assert_eq!(resolve("ses_00", 10).await, ["ses_0001", "ses_0002", "ses_0003", "ses_0012"]);
    assert_eq!(resolve("ses_00", 2).await.len(), 2);
    assert_eq!(resolve("001", 10).await, ["ses_0012"]);
    assert_eq!(resolve("7", 10).await, ["run_77"]);
    assert_eq!(resolve("ask_8", 10).await, ["ask_88"]);
    assert_eq!(resolve("ws_", 10).await, ["ws_0001"], "a removed one is not meant");
    assert_eq!(resolve("0001", 10).await, ["ses_0001", "ws_0001"]);
    let short = async |id: &str, kinds: &[ReferenceKind]| {
        fixture.journal.short_ids(vec![id.to_owned()], kinds.to_vec()).await.unwrap()[id].clone()
    };
    assert_eq!(short("ses_0012", &[ReferenceKind::Session]).await, "ses_0012", "too short to be shortened");
    assert_eq!(short("ses_none_of_them", &[ReferenceKind::Session]).await, "ses_none_of_them");
    for nothing in ["", "nope", "fix", "ses_%", "\u{7f}", "0_1"] {
        assert!(resolve(nothing, 10).await.is_empty(), "{nothing}");
    }
    let ask = &fixture.journal.resolve("ask_88", 1).await.unwrap()[0];
    assert_eq!((ask.kind, ask.workspace_id.as_str()), (ReferenceKind::Ask, "ws_0001"));
    assert_eq!(ask.session_id, Some(session_id(1)));
    let workspace = &fixture.journal.resolve("ws_0001", 1).await.unwrap()[0];
    assert_eq!((workspace.kind, &workspace.session_id), (ReferenceKind::Workspace, &None));
}

#[tokio::test]
async fn meta_is_kept_changed_and_forgotten() {
    let fixture = JournalFixture::new();
    assert_eq!(fixture.journal.meta("halt").await.unwrap(), None);
    for value in [Some(b"one".to_vec()), Some(b"two".to_vec()), None] {
        change(&fixture.journal, vec![RowChange::Meta { key: "halt".into(), value: value.clone() }])
            .await
            .unwrap();
        assert_eq!(fixture.journal.meta("halt").await.unwrap(), value);
    }
}

#[tokio::test]
async fn a_file_that_nothing_names_is_loose_and_one_that_is_named_is_not() {
    let fixture = JournalFixture::new();
    let blobs = fixture.journal.blobs();
    let mut hashes = Vec::new();
    for text in ["in an event", "in a row", "in a closed session", "nowhere"] {
        hashes.push(blobs.put(text.as_bytes().to_vec()).await.unwrap().sha256);
    }
    let naming = |hash: &str| format!(r#"{{"blob":{{"sha256":"{hash}","size":3}}}}"#).into_bytes();
    let events = vec![
        qd_journal::NewEvent { data: naming(&hashes[0]), ..event(&scope(1), 1) },
        qd_journal::NewEvent { data: naming(&hashes[2]), ..event(&scope(2), 1) },
    ];
    let rows = vec![RowChange::Session(SessionRow { doc: naming(&hashes[1]), ..session_row(1) })];
    fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    let loose = async |before, without: &[SessionKey]| {
        let files = fixture.journal.unreferenced_blobs(before, without).await.unwrap();
        files.into_iter().map(|file| file.blob.sha256).collect::<std::collections::HashSet<_>>()
    };
    let late = Millis(u64::MAX);
    assert_eq!(loose(late, &[]).await, [hashes[3].clone()].into());
    assert_eq!(loose(late, &[SessionKey(2)]).await, [hashes[3].clone(), hashes[2].clone()].into());
    assert!(loose(Millis(0), &[]).await.is_empty(), "a young file may be referred to in a moment");
    let sizes = fixture.journal.sizes().await.unwrap();
    assert_eq!(sizes.blobs, 11 + 8 + 19 + 7);
    assert!(sizes.journal > 0 || sizes.log > 0);
}

fn mail_row(name: &str, session: i64, sent_event: Option<usize>) -> MailRow {
    MailRow {
        id: MailId::parse(name).unwrap(),
        session: Some(SessionKey(session)),
        sent_event,
        seq: Seq(0),
        open: true,
        fingerprint: "f".to_owned(),
        sent: sent_event.map(|_| b"words".to_vec()),
        doc: b"{}".to_vec(),
    }
}

#[tokio::test]
async fn mail_is_listed_in_the_order_of_arrival_and_an_id_is_taken_for_ever() {
    let fixture = JournalFixture::new();
    for (name, session, number) in [("z", 1, 1), ("m", 2, 1), ("a", 1, 2)] {
        let rows = vec![
            RowChange::Mail(mail_row(name, session, Some(0))),
            // A second change in the append that sends the message is an update, and need not repeat its content.
            RowChange::Mail(MailRow { open: name != "z", sent: None, ..mail_row(name, session, Some(0)) }),
        ];
        let events = vec![event(&scope(session), number)];
        fixture.journal.append(AppendRequest { events, rows, ..AppendRequest::default() }).await.unwrap();
    }
    let names = async |filter| {
        let rows = fixture.journal.list_mail(filter, None, 100).await.unwrap();
        rows.iter().map(|row| row.id.to_string()).collect::<Vec<_>>()
    };
    let all = MailFilter::default();
    assert_eq!(names(all).await, ["z", "m", "a"]);
    assert_eq!(names(MailFilter { open_only: true, ..all }).await, ["m", "a"]);
    assert_eq!(names(MailFilter { session: Some(SessionKey(1)), ..all }).await, ["z", "a"]);
    let first = MailId::parse("z").unwrap();
    assert_eq!(fixture.journal.mail(&first).await.unwrap().unwrap().sent.as_deref(), Some(&b"words"[..]));
    change(&fixture.journal, vec![RowChange::Purge { session: SessionKey(1) }]).await.unwrap();
    assert_eq!(names(all).await, ["m"]);
    let purged = fixture.journal.mail(&first).await.unwrap().unwrap();
    assert_eq!((purged.session, purged.sent, purged.fingerprint.as_str()), (None, None, "f"));
    let events = vec![event(&scope(3), 1)];
    let again = AppendRequest {
        events,
        rows: vec![RowChange::Mail(mail_row("z", 3, Some(0)))],
        ..AppendRequest::default()
    };
    assert!(matches!(fixture.journal.append(again).await, Err(AppendError::Violation(_))));
}
