use std::os::unix::fs::PermissionsExt;

use qd_protocol::limits::SEARCH_TEXT_MAX;
use qd_protocol::search::{SearchHit, SearchHitKind};
use qd_protocol::{MessageId, Millis, RunId, SessionId, TokenUsage, WorkspaceId};

use super::*;
use crate::event::WorkspaceKey;

struct DerivedFixture {
    home: tempfile::TempDir,
    store: DerivedStore,
}

impl DerivedFixture {
    fn new() -> Self {
        let home = tempfile::tempdir().unwrap();
        let store = DerivedStore::new(home.path());
        assert_eq!(store.open().unwrap(), Seq(0));
        Self { home, store }
    }

    fn with_sessions(count: i64) -> Self {
        let fixture = Self::new();
        let sessions: Vec<DerivedChange> = (1..=count).map(session).collect();
        fixture.store.apply(&sessions, Seq(0)).unwrap();
        fixture
    }

    #[track_caller]
    fn find(&self, words: &str) -> Vec<SearchHit> {
        self.find_with(words, &SearchFilter::default())
    }

    #[track_caller]
    fn find_with(&self, words: &str, filter: &SearchFilter) -> Vec<SearchHit> {
        let words = SearchWords::parse(words).unwrap();
        let (hits, _) = self.store.search(&words, filter, None, 1000).unwrap();
        hits.into_iter().map(|(_, hit)| hit).collect()
    }

    #[track_caller]
    fn seqs(&self, words: &str) -> Vec<u64> {
        self.find(words).iter().map(|hit| hit.seq.0).collect()
    }
}

fn session(key: i64) -> DerivedChange {
    DerivedChange::Session {
        key: SessionKey(key),
        id: SessionId::parse(&format!("ses_{key}")).unwrap(),
        workspace: Some(WorkspaceKey(1)),
        agent: if key % 2 == 1 { "echo" } else { "script" }.to_owned(),
        title: Some(format!("title {key}")),
        model: None,
    }
}

fn place(seq: u64, session: i64, kind: SearchHitKind) -> DerivedText {
    let (at, run) = (Millis(seq * 1000), Some(RunId::parse(&format!("run_{seq}")).unwrap()));
    DerivedText { seq: Seq(seq), session: SessionKey(session), kind, at, run }
}

fn prompt(seq: u64, session: i64, text: &str) -> DerivedChange {
    DerivedChange::Text { place: place(seq, session, SearchHitKind::Prompt), text: text.to_owned() }
}

fn usage(seq: u64, session: i64, run: &str, tokens: u64, cost_usd: f64) -> DerivedChange {
    DerivedChange::Usage {
        seq: Seq(seq),
        session: SessionKey(session),
        at: Millis(seq * 1000),
        run: Some(RunId::parse(run).unwrap()),
        usage: TokenUsage { input_tokens: tokens, output_tokens: 1, cost_usd },
    }
}

#[test]
fn texts_are_found_newest_first_with_their_session_and_a_marked_snippet() {
    let fixture = DerivedFixture::with_sessions(2);
    let workspace = DerivedChange::Workspace {
        key: WorkspaceKey(1),
        id: WorkspaceId::parse("ws_1").unwrap(),
        path: "/src".to_owned(),
    };
    let texts = [workspace, prompt(3, 1, "fix the Tests now"), prompt(5, 2, "the tests fail again")];
    fixture.store.apply(&texts, Seq(5)).unwrap();
    let hits = fixture.find("tests the");
    assert_eq!(hits.iter().map(|hit| hit.seq.0).collect::<Vec<_>>(), [5, 3]);
    let SearchHit { session_id, workspace_id, agent, title, kind, at, run_id, open, snippet, .. } = &hits[1];
    assert_eq!((session_id.as_str(), agent.as_str(), title.as_deref()), ("ses_1", "echo", Some("title 1")));
    assert_eq!(workspace_id.as_ref().unwrap().as_str(), "ws_1");
    assert_eq!((*kind, *at), (SearchHitKind::Prompt, Millis(3000)));
    assert_eq!((run_id.as_ref().unwrap().as_str(), open.as_str()), ("run_3", "qd logs run_3"));
    let parts: Vec<(&str, bool)> = snippet.iter().map(|part| (part.text.as_str(), part.is_match)).collect();
    assert_eq!(parts, [("fix ", false), ("the", true), (" ", false), ("Tests", true), (" now", false)]);
}

#[test]
fn words_prefixes_phrases_and_accents_are_matched() {
    let fixture = DerivedFixture::with_sessions(1);
    let texts = [
        prompt(1, 1, "run cargo nextest in src/main.rs"),
        prompt(2, 1, "the Café is in rs main"),
        prompt(3, 1, "parser_state"),
    ];
    fixture.store.apply(&texts, Seq(3)).unwrap();
    assert_eq!(fixture.seqs("src/main.rs"), [1], "a path is a phrase");
    assert_eq!(fixture.seqs("main rs"), [2, 1]);
    assert_eq!(fixture.seqs("\"main rs\""), [1]);
    assert_eq!(fixture.seqs("next*"), [1]);
    assert_eq!(fixture.seqs("next"), [] as [u64; 0]);
    assert_eq!(fixture.seqs("cafe"), [2]);
    assert_eq!(fixture.seqs("parser_state"), [3]);
    assert_eq!(fixture.seqs("\"parser sta\"*"), [3]);
}

#[test]
fn nothing_that_is_typed_is_an_error_of_the_database() {
    let fixture = DerivedFixture::with_sessions(1);
    fixture.store.apply(&[prompt(1, 1, "a b c or not and near")], Seq(1)).unwrap();
    for text in [
        "a AND",
        "NOT a",
        "a OR OR",
        "(a",
        "a)",
        "NEAR(a b)",
        "NEAR(",
        "text:a",
        "text : a",
        "-a",
        "^a",
        "a^",
        "{text}:a",
        "a + b",
        "a'; DROP TABLE entries; --",
        "\"a",
        "a\"\"b",
        "a*b*",
        "* a",
        "\"a\" *",
        "a\0b",
        "\u{2}a\u{3}",
        "a\\",
        "%a%",
        "_ a",
        "\u{301}a",
        "a\u{202e}",
        "🦀 a",
        "a:b:c",
        "a,b",
        "[a]",
        "a=1",
    ] {
        let words = SearchWords::parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        let found = fixture.store.search(&words, &SearchFilter::default(), None, 10);
        assert!(found.is_ok(), "{text:?}: {found:?}");
    }
}

#[test]
fn random_queries_are_no_errors_either() {
    const PIECES: [&str; 20] = [
        "a", "b", "\"", "\"\"", "*", " ", "AND", "OR", "NOT", "NEAR", "(", ")", ":", "^", "-", "+", "{", "}",
        "\0", "é",
    ];
    let fixture = DerivedFixture::with_sessions(1);
    fixture.store.apply(&[prompt(1, 1, "a b and or not near é")], Seq(1)).unwrap();
    // SplitMix64, so that every run tries the same queries.
    let mut state = 7_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    };
    let mut searched = 0;
    for _ in 0..3000 {
        let length = next() % 12;
        let text: String =
            (0..length).map(|_| PIECES[usize::try_from(next() % 20).unwrap_or_default()]).collect();
        let Ok(words) = SearchWords::parse(&text) else { continue };
        let found = fixture.store.search(&words, &SearchFilter::default(), None, 10);
        assert!(found.is_ok(), "{text:?}: {found:?}");
        searched += 1;
    }
    assert!(searched > 1000, "{searched}");
}

#[test]
fn pages_continue_exactly_while_texts_are_added() {
    let fixture = DerivedFixture::with_sessions(1);
    let texts: Vec<DerivedChange> = (1..=25).map(|seq| prompt(seq, 1, "needle")).collect();
    fixture.store.apply(&texts, Seq(25)).unwrap();
    let words = SearchWords::parse("needle").unwrap();
    let (mut seen, mut before, mut seq) = (Vec::new(), None, 25);
    loop {
        let (hits, _) = fixture.store.search(&words, &SearchFilter::default(), before, 4).unwrap();
        seen.extend(hits.iter().map(|(_, hit)| hit.seq.0));
        let Some((last, _)) = hits.last() else { break };
        before = SearchPosition::parse(&last.to_string());
        seq += 1;
        fixture.store.apply(&[prompt(seq, 1, "needle")], Seq(seq)).unwrap();
    }
    assert_eq!(seen, (1..=25).rev().collect::<Vec<_>>());
    assert_eq!(SearchPosition::parse("-1"), None);
    assert_eq!(SearchPosition::parse("x"), None);
}

#[test]
fn the_pieces_of_a_message_are_one_text_once_it_is_finished_also_across_a_restart() {
    let fixture = DerivedFixture::with_sessions(1);
    let message = MessageId::parse("msg_1").unwrap();
    let piece = |seq: u64, text: &str| DerivedChange::MessagePiece {
        seq: Seq(seq),
        session: SessionKey(1),
        message: message.clone(),
        text: text.to_owned(),
    };
    fixture.store.apply(&[piece(1, "hello wo"), piece(2, "rld an")], Seq(2)).unwrap();
    assert_eq!(fixture.seqs("hello"), [] as [u64; 0]);
    let store = DerivedStore::new(fixture.home.path());
    drop(fixture.store);
    assert_eq!(store.open().unwrap(), Seq(2));
    let fixture = DerivedFixture { home: fixture.home, store };
    let finished = DerivedChange::MessageFinished {
        place: place(4, 1, SearchHitKind::Answer),
        message: message.clone(),
    };
    fixture.store.apply(&[piece(3, "d more"), finished], Seq(4)).unwrap();
    assert_eq!(fixture.seqs("\"hello world and more\""), [4]);
}

#[test]
fn only_the_beginning_of_a_very_long_text_is_found() {
    let fixture = DerivedFixture::with_sessions(1);
    let text = format!("first {} last", "ä".repeat(SEARCH_TEXT_MAX));
    fixture.store.apply(&[prompt(1, 1, &text)], Seq(1)).unwrap();
    assert_eq!(fixture.seqs("first"), [1]);
    assert_eq!(fixture.seqs("last"), [] as [u64; 0]);
}

#[test]
fn filters_select_by_agent_and_time() {
    let fixture = DerivedFixture::with_sessions(2);
    let texts = [prompt(1, 1, "needle"), prompt(2, 2, "needle"), prompt(3, 1, "needle")];
    fixture.store.apply(&texts, Seq(3)).unwrap();
    let seqs = |filter: SearchFilter| -> Vec<u64> {
        fixture.find_with("needle", &filter).iter().map(|hit| hit.seq.0).collect()
    };
    assert_eq!(seqs(SearchFilter { agent: Some("echo".to_owned()), ..SearchFilter::default() }), [3, 1]);
    assert_eq!(seqs(SearchFilter { since: Some(Millis(2000)), ..SearchFilter::default() }), [3, 2]);
}

#[test]
fn what_purged_sessions_took_up_is_given_back_and_the_rest_is_still_found() {
    let fixture = DerivedFixture::with_sessions(2);
    let texts: Vec<DerivedChange> =
        (1..400).map(|seq| prompt(seq, 2, &format!("haystack {seq} {}", "x".repeat(4000)))).collect();
    fixture.store.apply(&texts, Seq(399)).unwrap();
    fixture.store.apply(&[prompt(400, 1, "needle")], Seq(400)).unwrap();
    let full = fixture.store.sizes().unwrap();
    assert!(full.files > 1_000_000, "{full:?}");
    fixture.store.remove_other_sessions(&[SessionKey(1)]).unwrap();
    let purged = fixture.store.sizes().unwrap();
    assert!(purged.unused > 1_000_000, "{purged:?}");
    fixture.store.shrink().unwrap();
    let shrunk = fixture.store.sizes().unwrap();
    assert!(shrunk.unused == 0 && shrunk.files < 300_000, "{shrunk:?}");
    assert_eq!(fixture.seqs("needle"), [400]);
    fixture.store.apply(&[prompt(401, 1, "another needle")], Seq(401)).unwrap();
    assert_eq!(fixture.seqs("needle").len(), 2, "it is written to as before");
    assert_eq!(fixture.store.open().unwrap(), Seq(401), "it is the same file with our version");
    let mode = fixture.home.path().join(DERIVED_FILE).metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_purged_session_leaves_nothing() {
    let fixture = DerivedFixture::with_sessions(3);
    let texts = [
        prompt(1, 1, "needle"),
        prompt(2, 2, "haystack"),
        usage(3, 2, "run_a", 7, 0.5),
        prompt(4, 3, "needle"),
    ];
    fixture.store.apply(&texts, Seq(4)).unwrap();
    let removed = fixture.store.remove_other_sessions(&[SessionKey(1), SessionKey(9)]).unwrap();
    assert_eq!(removed, 2);
    assert_eq!(fixture.seqs("needle"), [1]);
    assert_eq!(fixture.seqs("haystack"), [] as [u64; 0]);
    assert!(fixture.store.usage(None).unwrap().0.is_empty());
    drop(fixture.store);
    let db = Connection::open(fixture.home.path().join(DERIVED_FILE)).unwrap();
    db.execute_batch("INSERT INTO entry_words(entry_words, rank) VALUES ('integrity-check', 1)").unwrap();
    drop(db);
    let bytes = fs::read(fixture.home.path().join(DERIVED_FILE)).unwrap();
    let leaves = |word: &[u8]| bytes.windows(word.len()).any(|part| part == word);
    assert!(leaves(b"needle"), "the log is in the file");
    let db = Connection::open(fixture.home.path().join(DERIVED_FILE)).unwrap();
    let terms = "CREATE VIRTUAL TABLE temp.terms USING fts5vocab(main, entry_words, row)";
    db.execute_batch(terms).unwrap();
    let count = |term: &str| {
        let sql = "SELECT count(*) FROM temp.terms WHERE term = ?1";
        db.query_row(sql, [term], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!((count("needle"), count("haystack")), (1, 0));
}

#[test]
fn usage_comes_back_in_order_with_the_model_of_its_time() {
    let fixture = DerivedFixture::with_sessions(2);
    let model = |name: &str| DerivedChange::SessionSettings {
        key: SessionKey(1),
        title: None,
        model: Some(name.to_owned()),
    };
    let changes = [
        usage(1, 1, "run_a", 10, 0.0),
        model("large"),
        usage(2, 1, "run_a", 20, 0.5),
        usage(3, 1, "run_b", 30, 0.0),
        usage(4, 7, "run_c", 40, 0.0),
    ];
    fixture.store.apply(&changes, Seq(4)).unwrap();
    let (entries, seq) = fixture.store.usage(None).unwrap();
    assert_eq!(seq, Seq(4));
    let shown: Vec<(u64, Option<&str>, bool)> = entries
        .iter()
        .map(|entry| (entry.usage.input_tokens, entry.model.as_deref(), entry.lacks_cost))
        .collect();
    assert_eq!(shown, [(10, None, false), (20, Some("large"), false), (30, Some("large"), true)]);
    assert_eq!(fixture.store.usage(Some(Millis(2000))).unwrap().0.len(), 2);
}

#[test]
fn a_missing_damaged_or_foreign_file_is_created_anew_and_private() {
    for content in [None, Some(&b"no database"[..]), Some(b"")] {
        let fixture = DerivedFixture::with_sessions(1);
        fixture.store.apply(&[prompt(1, 1, "needle")], Seq(1)).unwrap();
        let DerivedFixture { home, store } = fixture;
        drop(store);
        remove_files(home.path()).unwrap();
        if let Some(content) = content {
            fs::write(home.path().join(DERIVED_FILE), content).unwrap();
        }
        let store = DerivedStore::new(home.path());
        assert_eq!(store.open().unwrap(), Seq(0), "{content:?}");
        let fixture = DerivedFixture { home, store };
        fixture.store.apply(&[session(1), prompt(1, 1, "needle")], Seq(1)).unwrap();
        assert_eq!(fixture.seqs("needle"), [1]);
        for file in DERIVED_FILES {
            let mode = fs::metadata(fixture.home.path().join(file)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
    }
}

#[test]
fn a_file_of_another_version_or_without_tables_is_created_anew() {
    for damage in ["PRAGMA user_version = 99", "PRAGMA application_id = 1", "DROP TABLE progress"] {
        let DerivedFixture { home, store } = DerivedFixture::with_sessions(1);
        store.apply(&[], Seq(9)).unwrap();
        drop(store);
        Connection::open(home.path().join(DERIVED_FILE)).unwrap().execute_batch(damage).unwrap();
        assert_eq!(DerivedStore::new(home.path()).open().unwrap(), Seq(0), "{damage}");
    }
}

#[test]
fn an_emptied_store_takes_the_same_changes_again() {
    let fixture = DerivedFixture::with_sessions(1);
    fixture.store.apply(&[prompt(1, 1, "needle")], Seq(1)).unwrap();
    let before = fixture.find("needle");
    let twice = fixture.store.apply(&[prompt(1, 1, "needle")], Seq(1)).unwrap_err();
    assert!(twice.needs_rebuild(), "an event that is applied twice does not go unnoticed: {twice}");
    fixture.store.clear().unwrap();
    assert!(fixture.find("needle").is_empty());
    fixture.store.apply(&[session(1), prompt(1, 1, "needle")], Seq(1)).unwrap();
    assert_eq!(fixture.find("needle"), before);
}

#[test]
fn a_store_that_is_not_open_says_so() {
    let home = tempfile::tempdir().unwrap();
    let store = DerivedStore::new(home.path());
    assert!(matches!(store.usage(None), Err(DerivedDataError::NotOpen)));
    assert!(matches!(store.apply(&[], Seq(1)), Err(DerivedDataError::NotOpen)));
}

fn audited(seq: u64, session: Option<i64>, workspace: Option<i64>) -> DerivedChange {
    DerivedChange::Audit {
        seq: Seq(seq),
        session: session.map(SessionKey),
        workspace: workspace.map(WorkspaceKey),
        at: Millis(seq * 1000),
        entry: format!("{{\"seq\":{seq}}}"),
    }
}

#[test]
fn what_was_done_is_listed_in_both_orders_by_session_workspace_and_time() {
    let fixture = DerivedFixture::with_sessions(2);
    let done = [
        audited(1, None, Some(1)),
        audited(2, Some(1), Some(1)),
        audited(3, Some(2), Some(1)),
        audited(4, None, None),
        audited(5, Some(1), Some(1)),
    ];
    fixture.store.apply(&done, Seq(5)).unwrap();
    let list = |filter: AuditFilter, limit| {
        let (documents, through) = fixture.store.audit(filter, limit).unwrap();
        assert_eq!(through, Seq(5));
        documents.iter().map(|(seq, _)| seq.0).collect::<Vec<_>>()
    };
    let all = AuditFilter::default();
    assert_eq!(list(all, 9), [1, 2, 3, 4, 5]);
    assert_eq!(list(AuditFilter { after: Some(Seq(2)), ..all }, 2), [3, 4]);
    assert_eq!(list(AuditFilter { newest_first: true, before: Some(Seq(4)), ..all }, 2), [3, 2]);
    assert_eq!(list(AuditFilter { session: Some(SessionKey(1)), ..all }, 9), [2, 5]);
    assert_eq!(
        list(AuditFilter { workspace: Some(WorkspaceKey(1)), newest_first: true, ..all }, 9),
        [5, 3, 2, 1]
    );
    assert_eq!(list(AuditFilter { since: Some(Millis(2500)), ..all }, 9), [3, 4, 5]);
    assert_eq!(list(AuditFilter { since: Some(Millis(9000)), ..all }, 9), [] as [u64; 0]);
    let (documents, _) = fixture.store.audit(all, 1).unwrap();
    assert_eq!(documents[0].1, b"{\"seq\":1}");
    fixture.store.remove_other_sessions(&[SessionKey(1)]).unwrap();
    assert_eq!(list(all, 9), [1, 2, 4, 5], "a purged session is gone from it");
}
