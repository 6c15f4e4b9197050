//! Who is chosen, who is believed and for how long, without a connection: frames are read from the outbox of each.

use qd_protocol::frame::v1::Versions;

use super::control::Guest;
use super::route::Way;
use super::*;
use crate::home::Home;

const LEASE: Duration = Duration::from_secs(60);

struct World {
    _folder: tempfile::TempDir,
    joined: Arc<Joined>,
    token: TokenId,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::resolve(Some(folder.path().join("home")));
        home.prepare().unwrap();
        let keys = Keys(home.worker_key().unwrap());
        let tokens = Arc::new(Tokens::open(&home, keys.clone()).unwrap());
        let token = tokens.make(None).unwrap().id;
        let joined = Arc::new(Joined::new(home.workers(), keys, tokens, LEASE));
        Self { _folder: folder, joined, token }
    }

    /// A process joins that offers `echo`.
    fn join(&self, host: &str, labels: &[&str], seats: Vec<SeatName>) -> Guest {
        let hello = hello(host, labels, seats);
        self.joined.welcome(hello, self.token.clone()).unwrap_or_else(|unfit| panic!("{unfit:?}"))
    }

    /// A session of `echo@label` is to have a worker.
    fn place(&self, n: u8, label: &str) -> (SeatName, AgentSpec) {
        let session = SessionId::from_random(&[n; 4]);
        let worker = WorkerId::from_random(&[n; 4]);
        let wanted = Elsewhere { agent: "echo".to_owned(), label: label.to_owned() };
        let placement = Placement::new(session.clone(), wanted, None);
        self.joined.lock().placements.insert(worker.clone(), placement);
        let spec = AgentSpec::new(session.clone(), worker.clone(), "echo", "/");
        (SeatName { session, worker }, spec)
    }

    fn host_of(&self, seat: &SeatName) -> Option<String> {
        self.joined.lock().placements.get(&seat.worker)?.host.clone()
    }

    fn refuse(&self, guest: &Guest, seat: &SeatName) {
        let SeatName { session, worker } = seat;
        let frame = serde_json::json!({
            "refused": { "session": session, "worker": worker, "code": "path_not_found", "message": "not here" }
        });
        self.joined.take(guest, &frame.to_string());
    }
}

fn hello(host: &str, labels: &[&str], seats: Vec<SeatName>) -> Hello {
    let agent = Agent { name: "echo".to_owned(), available: true, ..Agent::default() };
    Hello {
        versions: Versions::OURS,
        software: "test".to_owned(),
        host: host.to_owned(),
        name: "box".to_owned(),
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        agents: vec![agent],
        seats,
    }
}

fn is_asked(way: &Way) -> bool {
    matches!(way, Way::Asked(..))
}

#[test]
fn an_agent_elsewhere_is_a_name_and_a_label() {
    let parse = |text| Elsewhere::parse(text).map(|Elsewhere { agent, label }| (agent, label));
    assert_eq!(parse("echo@gpu-1"), Some(("echo".to_owned(), "gpu-1".to_owned())));
    for text in ["echo", "@gpu", "echo@", "echo@a b", "echo@a/b"] {
        assert_eq!(parse(text), None, "{text}");
    }
}

#[tokio::test]
async fn a_session_goes_to_the_least_busy_of_those_that_fit_and_stays_there() {
    let world = World::new();
    let mut one = world.join("host-1", &["a", "b"], Vec::new());
    let two = world.join("host-2", &["a"], Vec::new());
    assert_eq!((one.name.as_str(), two.name.as_str()), ("box", "box-2"), "they can be told apart");
    let began = Instant::now();
    let mut hosts = Vec::new();
    for n in 0..4 {
        let (seat, spec) = world.place(n, "a");
        assert!(is_asked(&world.joined.ask(&seat, Some(&spec), began)));
        hosts.push(world.host_of(&seat).unwrap());
        let again = world.joined.ask(&seat, None, began);
        assert!(is_asked(&again) && world.host_of(&seat).as_ref() == hosts.last());
    }
    assert_eq!(hosts, ["host-1", "host-2", "host-1", "host-2"]);
    let (seat, spec) = world.place(9, "b");
    assert!(is_asked(&world.joined.ask(&seat, Some(&spec), began)));
    assert_eq!(world.host_of(&seat).as_deref(), Some("host-1"));
    let Some(ToWorker::Open { spec, secret }) = one.orders.recv().await else { panic!("it is told") };
    assert_eq!(spec.agent, "echo");
    assert_eq!(secret, world.joined.keys.secret(spec.worker.as_str()));
}

#[tokio::test]
async fn a_process_can_speak_only_of_what_it_was_given() {
    let world = World::new();
    let (one, two) = (world.join("host-1", &["a"], Vec::new()), world.join("host-2", &["b"], Vec::new()));
    let (seat, spec) = world.place(1, "a");
    assert!(is_asked(&world.joined.ask(&seat, Some(&spec), Instant::now())));
    world.refuse(&two, &seat);
    assert!(world.joined.reason(&seat).is_none(), "it is not its business");
    assert!(world.joined.expects(&seat, &world.token).is_err(), "who asked has gone away");
    let way = world.joined.ask(&seat, Some(&spec), Instant::now());
    assert!(is_asked(&way) && world.joined.expects(&seat, &world.token).is_ok());
    let other = world.joined.tokens.make(None).unwrap().id;
    assert!(world.joined.expects(&seat, &other).is_err(), "another token was given nothing");
    world.refuse(&one, &seat);
    let reason = world.joined.reason(&seat).unwrap();
    assert_eq!((reason.code.as_str(), reason.message.as_str()), ("path_not_found", "box: not here"));
    assert!(matches!(world.joined.ask(&seat, Some(&spec), Instant::now()), Way::Never));
}

#[tokio::test(start_paused = true)]
async fn a_silent_process_is_waited_for_as_long_as_its_lease_and_no_longer() {
    let world = World::new();
    let guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.place(1, "a");
    let began = Instant::now();
    assert!(is_asked(&world.joined.ask(&seat, Some(&spec), began)));
    tokio::time::advance(LEASE * 2).await;
    assert!(is_asked(&world.joined.ask(&seat, None, began)), "one that is connected is not silent");
    world.joined.heard(&guest);
    world.joined.part(&guest);
    tokio::time::advance(LEASE - Duration::from_secs(1)).await;
    assert!(matches!(world.joined.ask(&seat, None, began), Way::Away));
    let seats = vec![seat.clone()];
    let mut guest = world.join("host-1", &["a"], seats);
    assert!(guest.unwanted.is_empty(), "its session waits for it");
    assert!(is_asked(&world.joined.ask(&seat, None, began)));
    assert!(matches!(guest.orders.recv().await, Some(ToWorker::Dial(_))));
    world.joined.part(&guest);
    tokio::time::advance(LEASE).await;
    assert!(matches!(world.joined.ask(&seat, None, began), Way::Never));
    assert!(world.joined.reason(&seat).is_none(), "it was there, and nobody knows what became of it");
}

#[tokio::test(start_paused = true)]
async fn a_session_that_nobody_fits_waits_for_one_lease_and_is_told_why() {
    let world = World::new();
    let (seat, spec) = world.place(1, "a");
    let began = Instant::now();
    let _unfit = world.join("host-1", &["b"], Vec::new());
    assert!(matches!(world.joined.ask(&seat, Some(&spec), began), Way::Away));
    tokio::time::advance(LEASE).await;
    assert!(matches!(world.joined.ask(&seat, Some(&spec), began), Way::Never));
    assert_eq!(world.joined.reason(&seat).unwrap().code, "worker_away");
}

#[tokio::test]
async fn what_nobody_wants_any_more_is_closed_now_or_when_its_process_comes_back() {
    let world = World::new();
    let mut guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.place(1, "a");
    let _way = world.joined.ask(&seat, Some(&spec), Instant::now());
    assert!(matches!(guest.orders.recv().await, Some(ToWorker::Open { .. })));
    world.joined.end_strays(|worker| *worker != seat.worker);
    assert!(whereabouts(&world.joined.dir, &seat.worker).exists(), "one that is known is left alone");
    world.joined.forget(&seat.worker);
    assert_eq!(guest.orders.recv().await, Some(ToWorker::Close(seat.clone())));
    world.joined.end_strays(|_| true);
    let guest = world.join("host-1", &["a"], vec![seat.clone()]);
    assert_eq!(guest.unwanted, [seat]);
}

#[tokio::test]
async fn a_newer_connection_of_a_process_takes_the_place_of_the_older() {
    let world = World::new();
    let mut older = world.join("host-1", &["a"], Vec::new());
    let mut newer = world.join("host-1", &["a"], Vec::new());
    assert_eq!(newer.name, "box");
    assert_eq!(older.orders.recv().await, None, "the older one ends");
    world.joined.part(&older);
    let (seat, spec) = world.place(1, "a");
    assert!(is_asked(&world.joined.ask(&seat, Some(&spec), Instant::now())), "and takes nothing with it");
    assert!(newer.orders.recv().await.is_some());
}

#[tokio::test]
async fn a_revoked_token_ends_its_connections_and_lets_nobody_back() {
    let world = World::new();
    let mut guest = world.join("host-1", &["a"], Vec::new());
    let (seat, spec) = world.place(1, "a");
    let _way = world.joined.ask(&seat, Some(&spec), Instant::now());
    world.joined.tokens.revoke(&world.token).unwrap();
    world.joined.expel(&world.token);
    assert!(matches!(guest.orders.recv().await, Some(ToWorker::Open { .. })));
    assert_eq!(guest.orders.recv().await, None);
    assert!(matches!(world.joined.ask(&seat, None, Instant::now()), Way::Never));
    let unfit = world.joined.welcome(hello("host-1", &["a"], Vec::new()), world.token.clone());
    assert_eq!(unfit.err().map(|(code, _)| code), Some("unauthorized"));
}

#[test]
fn a_hello_that_makes_no_sense_is_refused_with_its_reason() {
    let world = World::new();
    let refused = |change: &dyn Fn(&mut Hello)| {
        let mut hello = hello("host-1", &["a"], Vec::new());
        change(&mut hello);
        world.joined.welcome(hello, world.token.clone()).err().map(|(code, _)| code)
    };
    assert_eq!(refused(&|hello| hello.versions = Versions { min: 99, max: 99 }), Some("unsupported_version"));
    assert_eq!(refused(&|hello| hello.host = "../x".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.name = "a\nb".to_owned()), Some("invalid_value"));
    assert_eq!(refused(&|hello| hello.labels.push("a b".to_owned())), Some("invalid_value"));
    assert_eq!(refused(&|_| {}), None);
    let other = world.joined.tokens.make(None).unwrap().id;
    let taken = world.joined.welcome(hello("host-1", &[], Vec::new()), other);
    assert_eq!(taken.err().map(|(code, _)| code), Some("host_taken"));
}
