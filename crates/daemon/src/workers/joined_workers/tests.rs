//! Which process is chosen, which messages are believed and for how long, without a connection: the tests read frames
//! from each process's outbox.

use qd_link::{WorkerConnector, WorkerEnding, WorkerUnreachable};
use qd_protocol::api::NewWorkerToken;
use qd_protocol::frame::v1::ProtocolVersions;
use qd_protocol::sandbox_spec::SandboxSupport;

use super::control::JoinedConnection;
use super::route::DialAttempt;
use super::*;
use crate::temporary_home::temporary_home;

const LEASE: Duration = Duration::from_secs(60);

struct JoinedWorkersFixture {
    _folder: tempfile::TempDir,
    joined: Arc<JoinedWorkers>,
    token: TokenId,
}

impl JoinedWorkersFixture {
    fn new() -> Self {
        let (folder, home) = temporary_home();
        let keys = WorkerKeys(home.worker_key().unwrap());
        let tokens = Arc::new(WorkerTokenStore::open(&home, keys.clone()).unwrap());
        let token = tokens.create(token_for(&["a", "b"]), None).unwrap().id;
        let joined = Arc::new(JoinedWorkers::new(home.workers(), keys, tokens, LEASE));
        Self { _folder: folder, joined, token }
    }

    /// Joins a process that offers `echo`.
    fn join(&self, host: &str, labels: &[&str], workers: Vec<SessionWorker>) -> JoinedConnection {
        let hello = hello(host, labels, workers);
        self.joined.admit_host(hello, self.token.clone()).unwrap_or_else(|refusal| panic!("{refusal:?}"))
    }

    /// Adds a worker placement for a session of `echo@label`.
    fn add_placement(&self, n: u8, label: &str) -> (SessionWorker, AgentSpec) {
        let session = SessionId::from_random(&[n; 4]);
        let worker = WorkerId::from_random(&[n; 4]);
        let remote_agent = RemoteAgentName { agent: "echo".to_owned(), label: label.to_owned() };
        let placement = WorkerPlacement::new(session.clone(), remote_agent, None);
        self.joined.lock().placements.insert(worker.clone(), placement);
        let spec = AgentSpec::new(session.clone(), worker.clone(), "echo", "/");
        (SessionWorker { session, worker }, spec)
    }

    fn host_of(&self, worker: &SessionWorker) -> Option<String> {
        self.joined.lock().placements.get(&worker.worker)?.host.clone()
    }

    fn refuse(&self, joined: &JoinedConnection, session_worker: &SessionWorker) {
        let SessionWorker { session, worker } = session_worker;
        let frame = serde_json::json!({
            "refused": { "session": session, "worker": worker, "code": "path_not_found", "message": "not here" }
        });
        self.joined.handle_frame(joined, &frame.to_string());
    }
}

fn hello(host: &str, labels: &[&str], workers: Vec<SessionWorker>) -> JoinHello {
    let agent = Agent { name: "echo".to_owned(), available: true, ..Agent::default() };
    JoinHello {
        versions: ProtocolVersions::SUPPORTED,
        software: "test".to_owned(),
        process_id: host.to_owned(),
        name: "box".to_owned(),
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        agents: vec![agent],
        workers,
        sandbox: SandboxSupport::default(),
    }
}

fn token_for(labels: &[&str]) -> NewWorkerToken {
    let labels = labels.iter().map(|&label| label.to_owned()).collect();
    NewWorkerToken { labels, ..NewWorkerToken::default() }
}

fn is_requested(attempt: &DialAttempt) -> bool {
    matches!(attempt, DialAttempt::Requested(..))
}

#[test]
fn an_agent_elsewhere_is_a_name_and_a_label() {
    let parse = |text| RemoteAgentName::parse(text).map(|RemoteAgentName { agent, label }| (agent, label));
    assert_eq!(parse("echo@gpu-1"), Some(("echo".to_owned(), "gpu-1".to_owned())));
    for text in ["echo", "@gpu", "echo@", "echo@a b", "echo@a/b"] {
        assert_eq!(parse(text), None, "{text}");
    }
}

#[tokio::test]
async fn a_session_goes_to_the_least_busy_of_those_that_fit_and_stays_there() {
    let fixture = JoinedWorkersFixture::new();
    let mut first = fixture.join("host-1", &["a", "b"], Vec::new());
    let second = fixture.join("host-2", &["a"], Vec::new());
    assert_eq!((first.name.as_str(), second.name.as_str()), ("box", "box-2"), "names are made unique");
    let began = Instant::now();
    let mut hosts = Vec::new();
    for n in 0..4 {
        let (worker, spec) = fixture.add_placement(n, "a");
        assert!(is_requested(&fixture.joined.request_dial(&worker, Some(&spec), began)));
        hosts.push(fixture.host_of(&worker).unwrap());
        let again = fixture.joined.request_dial(&worker, None, began);
        assert!(is_requested(&again) && fixture.host_of(&worker).as_ref() == hosts.last());
    }
    assert_eq!(hosts, ["host-1", "host-2", "host-1", "host-2"]);
    let (worker, spec) = fixture.add_placement(9, "b");
    assert!(is_requested(&fixture.joined.request_dial(&worker, Some(&spec), began)));
    assert_eq!(fixture.host_of(&worker).as_deref(), Some("host-1"));
    let Some(DaemonJoinFrame::Open { spec, secret }) = first.frames.recv().await else {
        panic!("it gets the request")
    };
    assert_eq!(spec.agent, "echo");
    assert_eq!(secret, fixture.joined.keys.secret(spec.worker.as_str()));
}

#[tokio::test]
async fn a_process_can_refuse_only_sessions_assigned_to_it() {
    let fixture = JoinedWorkersFixture::new();
    let (first, second) =
        (fixture.join("host-1", &["a"], Vec::new()), fixture.join("host-2", &["b"], Vec::new()));
    let (worker, spec) = fixture.add_placement(1, "a");
    assert!(is_requested(&fixture.joined.request_dial(&worker, Some(&spec), Instant::now())));
    fixture.refuse(&second, &worker);
    assert!(fixture.joined.failure_reason(&worker).is_none(), "the session was not assigned to it");
    assert!(
        fixture.joined.check_expected(&worker, &fixture.token).is_err(),
        "the route that asked was dropped"
    );
    let attempt = fixture.joined.request_dial(&worker, Some(&spec), Instant::now());
    assert!(is_requested(&attempt) && fixture.joined.check_expected(&worker, &fixture.token).is_ok());
    let other = fixture.joined.tokens.create(token_for(&["a", "b"]), None).unwrap().id;
    assert!(fixture.joined.check_expected(&worker, &other).is_err(), "another token was given nothing");
    fixture.refuse(&first, &worker);
    let reason = fixture.joined.failure_reason(&worker).unwrap();
    assert_eq!((reason.code.as_str(), reason.message.as_str()), ("path_not_found", "box: not here"));
    assert!(matches!(
        fixture.joined.request_dial(&worker, Some(&spec), Instant::now()),
        DialAttempt::Impossible
    ));
}

#[tokio::test(start_paused = true)]
async fn a_silent_process_is_waited_for_as_long_as_its_lease_and_no_longer() {
    let fixture = JoinedWorkersFixture::new();
    let joined = fixture.join("host-1", &["a"], Vec::new());
    let (worker, spec) = fixture.add_placement(1, "a");
    let began = Instant::now();
    assert!(is_requested(&fixture.joined.request_dial(&worker, Some(&spec), began)));
    tokio::time::advance(LEASE * 2).await;
    assert!(
        is_requested(&fixture.joined.request_dial(&worker, None, began)),
        "one that is connected is not silent"
    );
    fixture.joined.note_heard(&joined);
    fixture.joined.release_connection(&joined);
    tokio::time::advance(LEASE - Duration::from_secs(1)).await;
    assert!(matches!(fixture.joined.request_dial(&worker, None, began), DialAttempt::HostAway));
    let workers = vec![worker.clone()];
    let mut joined = fixture.join("host-1", &["a"], workers);
    assert!(joined.stale_sessions.is_empty(), "its session waits for it");
    assert!(is_requested(&fixture.joined.request_dial(&worker, None, began)));
    assert!(matches!(joined.frames.recv().await, Some(DaemonJoinFrame::Dial(_))));
    fixture.joined.release_connection(&joined);
    tokio::time::advance(LEASE).await;
    assert!(matches!(fixture.joined.request_dial(&worker, None, began), DialAttempt::Impossible));
    assert!(
        fixture.joined.failure_reason(&worker).is_none(),
        "it had dialled, so there is no reason to give"
    );
}

#[tokio::test(start_paused = true)]
async fn a_session_that_nobody_fits_waits_for_one_lease_and_is_told_why() {
    let fixture = JoinedWorkersFixture::new();
    let (worker, spec) = fixture.add_placement(1, "a");
    let began = Instant::now();
    let _unfit = fixture.join("host-1", &["b"], Vec::new());
    assert!(matches!(fixture.joined.request_dial(&worker, Some(&spec), began), DialAttempt::HostAway));
    tokio::time::advance(LEASE).await;
    assert!(matches!(fixture.joined.request_dial(&worker, Some(&spec), began), DialAttempt::Impossible));
    assert_eq!(fixture.joined.failure_reason(&worker).unwrap().code, "worker_away");
}

#[tokio::test(start_paused = true)]
async fn only_a_machine_that_is_there_and_does_not_dial_counts_as_out_of_reach() {
    let fixture = JoinedWorkersFixture::new();
    let mut joined = fixture.join("host-1", &["a"], Vec::new());
    let (worker, spec) = fixture.add_placement(1, "a");
    let mut connector =
        JoinedWorkerConnector::new(Arc::clone(&fixture.joined), worker.clone(), Some(Box::new(spec)));
    assert!(matches!(connector.dial().await, Err(WorkerUnreachable::RetryLater(_))));
    assert!(matches!(joined.frames.recv().await, Some(DaemonJoinFrame::Open { .. })));
    fixture.joined.release_connection(&joined);
    assert!(matches!(connector.dial().await, Err(WorkerUnreachable::MachineAway)));
    let mut joined = fixture.join("host-1", &["a"], vec![worker.clone()]);
    assert_eq!(connector.end_worker().await, WorkerEnding::Requested);
    assert_eq!(joined.frames.recv().await, Some(DaemonJoinFrame::Close(worker.clone())));
    assert!(matches!(connector.dial().await, Err(WorkerUnreachable::Dead)));
    assert!(fixture.joined.check_expected(&worker, &fixture.token).is_err(), "it may not dial any more");
}

#[tokio::test]
async fn what_nobody_wants_any_more_is_closed_now_or_when_its_process_comes_back() {
    let fixture = JoinedWorkersFixture::new();
    let mut joined = fixture.join("host-1", &["a"], Vec::new());
    let (worker, spec) = fixture.add_placement(1, "a");
    let _attempt = fixture.joined.request_dial(&worker, Some(&spec), Instant::now());
    assert!(matches!(joined.frames.recv().await, Some(DaemonJoinFrame::Open { .. })));
    fixture.joined.forget_strays(|other| *other != worker.worker);
    assert!(host_file(&fixture.joined.dir, &worker.worker).exists(), "one that is known is left alone");
    fixture.joined.forget(&worker.worker);
    assert_eq!(joined.frames.recv().await, Some(DaemonJoinFrame::Close(worker.clone())));
    fixture.joined.forget_strays(|_| true);
    let joined = fixture.join("host-1", &["a"], vec![worker.clone()]);
    assert_eq!(joined.stale_sessions, [worker]);
}

#[tokio::test]
async fn a_newer_connection_of_a_process_takes_the_place_of_the_older() {
    let fixture = JoinedWorkersFixture::new();
    let mut older = fixture.join("host-1", &["a"], Vec::new());
    let mut newer = fixture.join("host-1", &["a"], Vec::new());
    assert_eq!(newer.name, "box");
    assert_eq!(older.frames.recv().await, None, "the older one ends");
    fixture.joined.release_connection(&older);
    let (worker, spec) = fixture.add_placement(1, "a");
    assert!(
        is_requested(&fixture.joined.request_dial(&worker, Some(&spec), Instant::now())),
        "and takes nothing with it"
    );
    assert!(newer.frames.recv().await.is_some());
}

#[tokio::test]
async fn a_revoked_token_ends_its_connections_and_lets_nobody_back() {
    let fixture = JoinedWorkersFixture::new();
    let mut joined = fixture.join("host-1", &["a"], Vec::new());
    let (worker, spec) = fixture.add_placement(1, "a");
    let _attempt = fixture.joined.request_dial(&worker, Some(&spec), Instant::now());
    fixture.joined.tokens.revoke(&fixture.token).unwrap();
    fixture.joined.expel(&fixture.token);
    assert!(matches!(joined.frames.recv().await, Some(DaemonJoinFrame::Open { .. })));
    assert_eq!(joined.frames.recv().await, None);
    assert!(matches!(fixture.joined.request_dial(&worker, None, Instant::now()), DialAttempt::Impossible));
    let refused = fixture.joined.admit_host(hello("host-1", &["a"], Vec::new()), fixture.token.clone());
    assert_eq!(refused.err().map(|(code, _)| code), Some("unauthorized"));
}

#[test]
fn a_hello_that_makes_no_sense_is_refused_with_its_reason() {
    let fixture = JoinedWorkersFixture::new();
    let refused = |change: &dyn Fn(&mut JoinHello)| {
        let mut hello = hello("host-1", &["a"], Vec::new());
        change(&mut hello);
        fixture.joined.admit_host(hello, fixture.token.clone()).err().map(|(code, _)| code)
    };
    assert_eq!(
        refused(&|hello| hello.versions = ProtocolVersions { min: 99, max: 99 }),
        Some("unsupported_version")
    );
    assert_eq!(refused(&|hello| hello.process_id = "../x".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.name = "a\nb".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.labels.push("a b".to_owned())), Some("invalid_value"));
    assert_eq!(refused(&|_| {}), None);
    let other = fixture.joined.tokens.create(token_for(&["a", "b"]), None).unwrap().id;
    let taken = fixture.joined.admit_host(hello("host-1", &[], Vec::new()), other);
    assert_eq!(taken.err().map(|(code, _)| code), Some("host_taken"));
}

#[test]
fn a_process_joins_with_the_labels_and_agents_of_its_token_and_no_others() {
    let fixture = JoinedWorkersFixture::new();
    let create = |new| fixture.joined.tokens.create(new, None).unwrap().id;
    let lab = create(NewWorkerToken { name: Some("lab".to_owned()), ..NewWorkerToken::default() });
    let refusal = |token: &TokenId, labels: &[&str]| {
        let hello = hello("host-1", labels, Vec::new());
        fixture.joined.admit_host(hello, token.clone()).err().map(|(code, message)| {
            assert_eq!(code, "worker_not_allowed");
            message
        })
    };
    let message = refusal(&lab, &["lab", "prod"]).unwrap();
    assert!(message.contains("lab") && message.contains("prod"), "{message}");
    assert_eq!(refusal(&lab, &["lab"]), None);
    let codex = NewWorkerToken { agents: vec!["codex".to_owned()], ..token_for(&["a"]) };
    let message = refusal(&create(codex), &["a"]).unwrap();
    assert!(message.contains("codex") && message.contains("echo"), "{message}");
}
