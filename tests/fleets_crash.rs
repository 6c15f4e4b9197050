//! A fleet of six sessions with a loop, a join and both kinds of fan-out, whose daemon dies at an append to the
//! journal: once just before and once just after each append. The fleet must end the same way, and nothing may start
//! twice.

use std::cell::Cell;
use std::collections::BTreeMap;

use hyper::Method;
use qd_testkit::{TestClient, TestDaemon, TestEvent, journal_rules, poll_until, within};
use serde_json::{Value, json};

/// `a` and `d` append a mark to a file each time they are prompted.
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
      prompt: '[{"say": "again:\n```cap-subtasks\n[\"one\", \"two\", \"three\"]\n```\n"}]'
    c: { agent: echo }
    d:
      agent: script
      prompt: '[{"spawn": {"argv": ["sh", "-c", "echo {{subtask}} >> marks"]}}]'
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [a, b] } }
    - { when: [a.done, b.done], route_to: review }
    - { when: review.done, match: again, route_to: lead, max: 1 }
    - { when: review.done, fan_out: { to: [c, d], split: by_subtask } }
"#;

/// The marks if nothing was done twice.
const MARKS: [&str; 3] = ["a1", "a2", "two"];

/// The outcome that must be the same however often the daemon died.
#[derive(Debug, PartialEq)]
struct FleetHistory {
    state: Value,
    /// The prompts of each session in order.
    prompts: BTreeMap<String, Vec<String>>,
    /// How often each route fired.
    routed: BTreeMap<u64, usize>,
    /// What the agents did, sorted: the sessions of one round run in parallel.
    marks: Vec<String>,
}

/// A daemon that is replaced by a new one when it dies.
struct RestartedDaemon {
    daemon: TestDaemon,
    deaths: u64,
}

impl RestartedDaemon {
    async fn begin(die_at: Option<&str>) -> Self {
        let daemon = TestDaemon::start_with(|options| {
            if let Some(die_at) = die_at {
                options.env("QD_DIE_AT", die_at);
            }
        });
        Self { daemon: daemon.await, deaths: 0 }
    }

    /// Sends one request, restarting the daemon until one answers.
    async fn request(
        &mut self,
        client: &TestClient,
        method: Method,
        path: &str,
        body: Option<&str>,
    ) -> Value {
        loop {
            let sent = client.send(method.clone(), path, body.map(|body| body.to_owned().into()));
            match within(path, sent).await {
                Ok(answer) => return answer.json(),
                Err(_) => self.restart_after_death().await,
            }
        }
    }

    /// Waits until the daemon has died and starts the next one, which does not die.
    async fn restart_after_death(&mut self) {
        let daemon = &mut self.daemon;
        poll_until("the death of the daemon", async || daemon.is_killed().then_some(())).await;
        daemon.unset("QD_DIE_AT");
        daemon.start_again().await;
        self.deaths += 1;
    }

    /// All events of the journal up to the end of the fleet.
    async fn journal(&mut self, fleet: &str) -> Vec<TestEvent> {
        let ended = |event: &TestEvent| event.kind == "fleet.finished" && event.data["fleet_id"] == fleet;
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
            self.restart_after_death().await;
        }
    }
}

/// Runs the fleet to its end; returns the outcome and how often the daemon died.
async fn run_fleet(die_at: Option<&str>) -> (FleetHistory, u64) {
    let mut restarted = RestartedDaemon::begin(die_at).await;
    let client = restarted.daemon.client();
    let place = json!({ "path": restarted.daemon.home.project_dir() }).to_string();
    let workspace =
        restarted.request(&client.with_key("w"), Method::POST, "/v1/workspaces", Some(&place)).await;
    let fleets = format!("/v1/workspaces/{}/fleets", workspace["id"].as_str().unwrap());
    let yaml = client.with_header("content-type", "application/yaml").with_key("f");
    let fleet = restarted.request(&yaml, Method::POST, &fleets, Some(FLEET)).await;
    let id = fleet["id"].as_str().unwrap_or_else(|| panic!("{fleet}")).to_owned();
    let journal = restarted.journal(&id).await;
    let deaths = restarted.deaths;
    journal_rules::check(&journal);
    let started = journal.iter().filter(|event| event.kind == "fleet.started");
    assert_eq!(started.count(), 1, "it was started twice");

    let shown = restarted.request(&client, Method::GET, &format!("{fleets}/{id}"), None).await;
    let mut prompts = BTreeMap::new();
    for (name, session) in shown["sessions"].as_object().unwrap() {
        let session = session["session_id"].as_str().unwrap();
        let own = journal.iter().filter(|event| event.session_id.as_deref() == Some(session));
        let accepted = own.filter(|event| event.kind == "run.accepted");
        let texts = accepted.map(|event| event.data["prompt"].as_str().unwrap().to_owned());
        prompts.insert(name.clone(), texts.collect());
    }
    let mut routed = BTreeMap::new();
    for event in journal.iter().filter(|event| event.kind == "fleet.routed") {
        *routed.entry(event.data["route"].as_u64().unwrap()).or_default() += 1;
    }
    let marks = restarted.daemon.home.project_dir().join("marks");
    // The fleet does not wait for the programs that write the marks.
    let mut marks: Vec<String> = poll_until("every mark", async || {
        let text = std::fs::read_to_string(&marks).ok()?;
        (text.lines().count() >= MARKS.len()).then(|| text.lines().map(str::to_owned).collect())
    })
    .await;
    marks.sort();
    (FleetHistory { state: shown["state"].clone(), prompts, routed, marks }, deaths)
}

/// Kills the daemon at one append after the other, until the fleet ends before the next append. Returns the number of
/// deaths.
async fn die_at_each(undisturbed: &FleetHistory, next: &Cell<u64>, over: &Cell<bool>) -> u64 {
    let mut died = 0;
    while !over.get() {
        let append = next.replace(next.get() + 1);
        let mut deaths = 0;
        for die_at in [append.to_string(), format!("{append}+")] {
            let (story, once) = run_fleet(Some(&die_at)).await;
            assert_eq!(story, *undisturbed, "with the daemon's death at append {die_at}");
            deaths += once;
        }
        over.set(over.get() || deaths == 0);
        died += deaths;
    }
    died
}

#[tokio::test]
async fn kill_9_at_each_append_of_a_fleet_leads_to_the_same_end_and_starts_nothing_twice() {
    let (undisturbed, _) = run_fleet(None).await;
    assert_eq!(undisturbed.state, "done");
    assert_eq!(undisturbed.marks, MARKS);
    let (next, over) = (Cell::new(1), Cell::new(false));
    let one = || die_at_each(&undisturbed, &next, &over);
    let (a, b, c) = tokio::join!(one(), one(), one());
    let died = a + b + c;
    println!("{died} deaths, before and after each of {} appends: the same end each time", next.get() - 1);
    assert!(died > 60, "the fleet ended before most deaths were tried: {died}");
}
