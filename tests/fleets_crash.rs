//! A fleet of six with a loop, a join and both kinds of fan-out, whose daemon dies at an append of its journal: at each
//! of them once, by turns just before it is kept and just after. It must come to the same end, and nothing may be
//! started twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hyper::Method;
use qd_testkit::{Client, Daemon, Event, poll, rules, within};
use serde_json::{Value, json};

/// How many daemons are at it at the same time.
const AT_ONCE: usize = 4;

/// `a` and `review` are processes that leave a mark each time they are prompted.
const FLEET: &str = r#"
fleet:
  task: build it
  sessions:
    lead: { agent: echo }
    a:
      agent: script
      prompt: '[{"spawn": {"argv": ["sh", "-c", "echo a{{round}} >> marks"]}}, {"say": "made"}]'
    b: { agent: echo }
    review:
      agent: script
      prompt: '[{"spawn": {"argv": ["sh", "-c", "echo review{{round}} >> marks"]}},
        {"say": "again:\n```cap-subtasks\n[\"one\", \"two\", \"three\"]\n```\n"}]'
    c: { agent: echo }
    d: { agent: echo }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [a, b] } }
    - { when: [a.done, b.done], route_to: review }
    - { when: review.done, match: again, route_to: lead, max: 1 }
    - { when: review.done, fan_out: { to: [c, d], split: by_subtask } }
"#;

/// What has to be the same, however often the daemon died.
#[derive(Debug, PartialEq)]
struct Story {
    state: Value,
    /// The prompts of each session, in order.
    told: BTreeMap<String, Vec<String>>,
    /// How often each route fired.
    routed: BTreeMap<u64, usize>,
    /// What the agents did, in no order: the loop's rounds overlap with nothing, the sessions of one do.
    marks: Vec<String>,
}

/// A daemon, or the one after it.
struct Life {
    daemon: Daemon,
    deaths: u64,
}

impl Life {
    async fn begin(die_at: Option<&str>) -> Self {
        let daemon = Daemon::start_with(|options| {
            if let Some(die_at) = die_at {
                options.env("QD_DIE_AT", die_at);
            }
        });
        Self { daemon: daemon.await, deaths: 0 }
    }

    /// One request, whoever answers it.
    async fn ask(&mut self, client: &Client, method: Method, path: &str, body: Option<&str>) -> Value {
        loop {
            let sent = client.send(method.clone(), path, body.map(|body| body.to_owned().into()));
            match within(path, sent).await {
                Ok(answer) => return answer.json(),
                Err(_) => self.go_on().await,
            }
        }
    }

    /// Waits for the death of the daemon and starts the next, which lives on.
    async fn go_on(&mut self) {
        let daemon = &mut self.daemon;
        poll("the death of the daemon", async || daemon.has_died().then_some(())).await;
        daemon.unset("QD_DIE_AT");
        daemon.start_again().await;
        self.deaths += 1;
    }

    /// Everything in the journal, once the fleet has ended.
    async fn journal(&mut self, fleet: &str) -> Vec<Event> {
        let ended = |event: &Event| event.kind == "fleet.finished" && event.data["fleet_id"] == fleet;
        loop {
            if let Ok(mut stream) = self.daemon.client().try_stream("/v1/events?after=0").await {
                let mut seen = Vec::new();
                while let Ok(Some(event)) = within("the end of the fleet", stream.try_next()).await {
                    seen.push(event);
                    if seen.last().is_some_and(ended) {
                        return seen;
                    }
                }
            }
            self.go_on().await;
        }
    }
}

/// Lives through the fleet; tells how often the daemon died of it.
async fn live(die_at: Option<&str>) -> (Story, u64) {
    let mut life = Life::begin(die_at).await;
    let client = life.daemon.client();
    let place = json!({ "path": life.daemon.home.work() }).to_string();
    let workspace = life.ask(&client.with_key("w"), Method::POST, "/v1/workspaces", Some(&place)).await;
    let fleets = format!("/v1/workspaces/{}/fleets", workspace["id"].as_str().unwrap());
    let yaml = client.with("content-type", "application/yaml").with_key("f");
    let fleet = life.ask(&yaml, Method::POST, &fleets, Some(FLEET)).await;
    let id = fleet["id"].as_str().unwrap_or_else(|| panic!("{fleet}")).to_owned();
    let journal = life.journal(&id).await;
    let deaths = life.deaths;
    rules::check(&journal);
    let started = journal.iter().filter(|event| event.kind == "fleet.started");
    assert_eq!(started.count(), 1, "it was started twice");

    let shown = life.ask(&client, Method::GET, &format!("{fleets}/{id}"), None).await;
    let mut told = BTreeMap::new();
    for (name, session) in shown["sessions"].as_object().unwrap() {
        let session = session["session_id"].as_str().unwrap();
        let own = journal.iter().filter(|event| event.session_id.as_deref() == Some(session));
        let accepted = own.filter(|event| event.kind == "run.accepted");
        let prompts = accepted.map(|event| event.data["prompt"].as_str().unwrap().to_owned());
        told.insert(name.clone(), prompts.collect());
    }
    let mut routed = BTreeMap::new();
    for event in journal.iter().filter(|event| event.kind == "fleet.routed") {
        *routed.entry(event.data["route"].as_u64().unwrap()).or_default() += 1;
    }
    let marks = std::fs::read_to_string(life.daemon.home.work().join("marks")).unwrap();
    let mut marks: Vec<String> = marks.lines().map(str::to_owned).collect();
    marks.sort();
    (Story { state: shown["state"].clone(), told, routed, marks }, deaths)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_at_each_append_of_a_fleet_leads_to_the_same_end_and_starts_nothing_twice() {
    let calm = Arc::new(live(None).await.0);
    assert_eq!(calm.state, "done");
    assert_eq!(calm.marks, ["a1", "a2", "review1", "review2"]);
    let (next, over) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicBool::new(false)));
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let (calm, next, over) = (calm.clone(), next.clone(), over.clone());
        workers.spawn(async move {
            let mut died = 0;
            while !over.load(Ordering::Relaxed) {
                let append = next.fetch_add(1, Ordering::Relaxed);
                let die_at = format!("{append}{}", if append % 2 == 0 { "+" } else { "" });
                let (story, deaths) = live(Some(&die_at)).await;
                assert_eq!(story, *calm, "with the daemon's death at append {die_at}");
                died += deaths;
                if deaths == 0 {
                    over.store(true, Ordering::Relaxed);
                }
            }
            died
        });
    }
    let died: u64 = workers.join_all().await.into_iter().sum();
    println!("{died} appends of the journal, a death at each: the same end each time");
    assert!(died > 60, "the fleet was over before it was tried: {died}");
}
