//! Who is chosen, who is believed and for how long, without a connection: frames are read from the outbox of each.

use qd_protocol::frame::v1::ProtocolVersions;

use super::control::JoinedConnection;
use super::route::DialAttempt;
use super::*;
use crate::home::DaemonHome;

const LEASE: Duration = Duration::from_secs(60);

struct JoinedWorkersFixture {
    _folder: tempfile::TempDir,
    joined: Arc<JoinedWorkers>,
    token: TokenId,
}

impl JoinedWorkersFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = DaemonHome::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        let keys = WorkerKeys(home.worker_key().unwrap());
        let tokens = Arc::new(WorkerTokenStore::open(&home, keys.clone()).unwrap());
        let token = tokens.create(None).unwrap().id;
        let joined = Arc::new(JoinedWorkers::new(home.workers(), keys, tokens, LEASE));
        Self { _folder: folder, joined, token }
    }

    /// A process joins that offers `echo`.
    fn join(&self, host: &str, labels: &[&str], seats: Vec<SessionWorker>) -> JoinedConnection {
        let hello = hello(host, labels, seats);
        self.joined.admit_host(hello, self.token.clone()).unwrap_or_else(|unfit| panic!("{unfit:?}"))
    }

    /// A session of `echo@label` is to have a worker.
    fn add_placement(&self, n: u8, label: &str) -> (SessionWorker, AgentSpec) {
        let session = SessionId::from_random(&[n; 4]);
        let worker = WorkerId::from_random(&[n; 4]);
        let wanted = RemoteAgentName { agent: "echo".to_owned(), label: label.to_owned() };
        let placement = WorkerPlacement::new(session.clone(), wanted, None);
        self.joined.lock().placements.insert(worker.clone(), placement);
        let spec = AgentSpec::new(session.clone(), worker.clone(), "echo", "/");
        (SessionWorker { session, worker }, spec)
    }

    fn host_of(&self, seat: &SessionWorker) -> Option<String> {
        self.joined.lock().placements.get(&seat.worker)?.host.clone()
    }

    fn refuse(&self, guest: &JoinedConnection, seat: &SessionWorker) {
        let SessionWorker { session, worker } = seat;
        let frame = serde_json::json!({
            "refused": { "session": session, "worker": worker, "code": "path_not_found", "message": "not here" }
        });
        self.joined.handle_frame(guest, &frame.to_string());
    }
}

fn hello(host: &str, labels: &[&str], seats: Vec<SessionWorker>) -> JoinHello {
    let agent = Agent { name: "echo".to_owned(), available: true, ..Agent::default() };
    JoinHello {
        versions: ProtocolVersions::SUPPORTED,
        software: "test".to_owned(),
        host: host.to_owned(),
        name: "box".to_owned(),
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        agents: vec![agent],
        workers: seats,
    }
}

fn is_requested(way: &DialAttempt) -> bool {
    matches!(way, DialAttempt::Requested(..))
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
    let world = JoinedWorkersFixture::new();
    let mut one = world.join("host-1", &["a", "b"], Vec::new());
    let two = world.join("host-2", &["a"], Vec::new());
    assert_eq!((one.name.as_str(), two.name.as_str()), ("box", "box-2"), "they can be told apart");
    let began = Instant::now();
    let mut hosts = Vec::new();
    for n in 0..4 {
        let (seat, spec) = world.add_placement(n, "a");
        assert!(is_requested(&world.joined.request_dial(&seat, Some(&spec), began)));
        hosts.push(world.host_of(&seat).unwrap());
        let again = world.joined.request_dial(&seat, None, began);
        assert!(is_requested(&again) && world.host_of(&seat).as_ref() == hosts.last());
    }
    assert_eq!(hosts, ["host-1", "host-2", "host-1", "host-2"]);
    let (seat, spec) = world.add_placement(9, "b");
    assert!(is_requested(&world.joined.request_dial(&seat, Some(&spec), began)));
    assert_eq!(world.host_of(&seat).as_deref(), Some("host-1"));
    let Some(DaemonJoinFrame::Open { spec, secret }) = one.frames.recv().await else { panic!("it is told") };
    assert_eq!(spec.agent, "echo");
    assert_eq!(secret, world.joined.keys.secret(spec.worker.as_str()));
}

#[tokio::test]
async fn a_process_can_speak_only_of_what_it_was_given() {
    let world = JoinedWorkersFixture::new();
    let (one, two) = (world.join("host-1", &["a"], Vec::new()), world.join("host-2", &["b"], Vec::new()));
    let (seat, spec) = world.add_placement(1, "a");
    assert!(is_requested(&world.joined.request_dial(&seat, Some(&spec), Instant::now())));
    world.refuse(&two, &seat);
    assert!(world.joined.failure_reason(&seat).is_none(), "it is not its business");
    assert!(world.joined.check_expected(&seat, &world.token).is_err(), "who asked has gone away");
    let way = world.joined.request_dial(&seat, Some(&spec), Instant::now());
    assert!(is_requested(&way) && world.joined.check_expected(&seat, &world.token).is_ok());
    let other = world.joined.tokens.create(None).unwrap().id;
    assert!(world.joined.check_expected(&seat, &other).is_err(), "another token was given nothing");
    world.refuse(&one, &seat);
    let reason = world.joined.failure_reason(&seat).unwrap();
    assert_eq!((reason.code.as_str(), reason.message.as_str()), ("path_not_found", "box: not here"));
    assert!(matches!(world.joined.request_dial(&seat, Some(&spec), Instant::now()), DialAttempt::Impossible));
}

#[tokio::test(start_paused = true)]
async fn a_silent_process_is_waited_for_as_long_as_its_lease_and_no_longer() {
    let world = JoinedWorkersFixture::new();
    let guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.add_placement(1, "a");
    let began = Instant::now();
    assert!(is_requested(&world.joined.request_dial(&seat, Some(&spec), began)));
    tokio::time::advance(LEASE * 2).await;
    assert!(
        is_requested(&world.joined.request_dial(&seat, None, began)),
        "one that is connected is not silent"
    );
    world.joined.note_heard(&guest);
    world.joined.release_connection(&guest);
    tokio::time::advance(LEASE - Duration::from_secs(1)).await;
    assert!(matches!(world.joined.request_dial(&seat, None, began), DialAttempt::HostAway));
    let seats = vec![seat.clone()];
    let mut guest = world.join("host-1", &["a"], seats);
    assert!(guest.stale_sessions.is_empty(), "its session waits for it");
    assert!(is_requested(&world.joined.request_dial(&seat, None, began)));
    assert!(matches!(guest.frames.recv().await, Some(DaemonJoinFrame::Dial(_))));
    world.joined.release_connection(&guest);
    tokio::time::advance(LEASE).await;
    assert!(matches!(world.joined.request_dial(&seat, None, began), DialAttempt::Impossible));
    assert!(world.joined.failure_reason(&seat).is_none(), "it was there, and nobody knows what became of it");
}

#[tokio::test(start_paused = true)]
async fn a_session_that_nobody_fits_waits_for_one_lease_and_is_told_why() {
    let world = JoinedWorkersFixture::new();
    let (seat, spec) = world.add_placement(1, "a");
    let began = Instant::now();
    let _unfit = world.join("host-1", &["b"], Vec::new());
    assert!(matches!(world.joined.request_dial(&seat, Some(&spec), began), DialAttempt::HostAway));
    tokio::time::advance(LEASE).await;
    assert!(matches!(world.joined.request_dial(&seat, Some(&spec), began), DialAttempt::Impossible));
    assert_eq!(world.joined.failure_reason(&seat).unwrap().code, "worker_away");
}

#[tokio::test]
async fn what_nobody_wants_any_more_is_closed_now_or_when_its_process_comes_back() {
    let world = JoinedWorkersFixture::new();
    let mut guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.add_placement(1, "a");
    let _way = world.joined.request_dial(&seat, Some(&spec), Instant::now());
    assert!(matches!(guest.frames.recv().await, Some(DaemonJoinFrame::Open { .. })));
    world.joined.forget_strays(|worker| *worker != seat.worker);
    assert!(holder_file(&world.joined.dir, &seat.worker).exists(), "one that is known is left alone");
    world.joined.forget(&seat.worker);
    assert_eq!(guest.frames.recv().await, Some(DaemonJoinFrame::Close(seat.clone())));
    world.joined.forget_strays(|_| true);
    let guest = world.join("host-1", &["a"], vec![seat.clone()]);
    assert_eq!(guest.stale_sessions, [seat]);
}

#[tokio::test]
async fn a_newer_connection_of_a_process_takes_the_place_of_the_older() {
    let world = JoinedWorkersFixture::new();
    let mut older = world.join("host-1", &["a"], Vec::new());
    let mut newer = world.join("host-1", &["a"], Vec::new());
    assert_eq!(newer.name, "box");
    assert_eq!(older.frames.recv().await, None, "the older one ends");
    world.joined.release_connection(&older);
    let (seat, spec) = world.add_placement(1, "a");
    assert!(
        is_requested(&world.joined.request_dial(&seat, Some(&spec), Instant::now())),
        "and takes nothing with it"
    );
    assert!(newer.frames.recv().await.is_some());
}

#[tokio::test]
async fn a_revoked_token_ends_its_connections_and_lets_nobody_back() {
    let world = JoinedWorkersFixture::new();
    let mut guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.add_placement(1, "a");
    let _way = world.joined.request_dial(&seat, Some(&spec), Instant::now());
    world.joined.tokens.revoke(&world.token).unwrap();
    world.joined.expel(&world.token);
    assert!(matches!(guest.frames.recv().await, Some(DaemonJoinFrame::Open { .. })));
    assert_eq!(guest.frames.recv().await, None);
    assert!(matches!(world.joined.request_dial(&seat, None, Instant::now()), DialAttempt::Impossible));
    let unfit = world.joined.admit_host(hello("host-1", &["a"], Vec::new()), world.token.clone());
    assert_eq!(unfit.err().map(|(code, _)| code), Some("unauthorized"));
}

#[test]
fn a_hello_that_makes_no_sense_is_refused_with_its_reason() {
    let world = JoinedWorkersFixture::new();
    let refused = |change: &dyn Fn(&mut JoinHello)| {
        let mut hello = hello("host-1", &["a"], Vec::new());
        change(&mut hello);
        world.joined.admit_host(hello, world.token.clone()).err().map(|(code, _)| code)
    };
    assert_eq!(
        refused(&|hello| hello.versions = ProtocolVersions { min: 99, max: 99 }),
        Some("unsupported_version")
    );
    assert_eq!(refused(&|hello| hello.host = "../x".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.name = "a\nb".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.labels.push("a b".to_owned())), Some("invalid_value"));
    assert_eq!(refused(&|_| {}), None);
    let other = world.joined.tokens.create(None).unwrap().id;
    let taken = world.joined.admit_host(hello("host-1", &[], Vec::new()), other);
    assert_eq!(taken.err().map(|(code, _)| code), Some("host_taken"));
}
