//! An agent that tries everything to get further than its level lets it: `attacker.py`, in a session of the real binary. It
//! is judged by effects that can be seen from outside (`outside.py`, and the asks and processes here), never by its own
//! word. Each way is shown to succeed without confinement, so that its failure elsewhere means something.

mod table;
mod world;

use std::collections::BTreeMap;
use std::time::Duration;

use qd_testkit::client::TestClient;
use qd_testkit::mcp::tool_directory;
use qd_testkit::processes::all_processes;
use qd_testkit::{TestDaemon, TestHome, TestSession, poll_until, script::*};
use serde_json::{Value, json};

use table::{
    AttackColumn, AttackLevel, AttackOutcome, AttackUser, AttackWay, compare_with_page, ways_possible_before,
};
use world::HostileWorld;

/// What the daemon and its workers have in their environment.
const VARIABLES: [&str; 3] = ["daemon_environ", "daemon_memory", "worker_environ"];
/// Asks that the agent wants to answer, one for each way that could.
const ASKS: [&str; 6] =
    ["token_over_tcp", "socket_answer", "own_socket", "socket_setsid", "orphan_answers", "own_daemon"];
/// How often the agent tries everything, if a way fails that nothing closes.
const ATTEMPTS_MAX: u32 = 4;
/// How long all ways together may take. A safety net.
const ATTACK_LIMIT: Duration = Duration::from_secs(500);

macro_rules! columns {
    ($($name:ident: $level:ident, $user:ident;)*) => {
        $(
            #[tokio::test]
            async fn $name() {
                let column = AttackColumn { level: AttackLevel::$level, user: AttackUser::$user };
                attack_and_judge(column).await;
            }
        )*
    };
}

columns! {
    every_way_is_open_without_confinement_to_root: Off, Root;
    every_way_is_open_without_confinement_to_a_user: Off, Ordinary;
    at_deck_an_agent_of_root_reaches_neither_processes_nor_the_daemon: Deck, Root;
    at_deck_an_agent_of_a_user_reaches_neither_processes_nor_the_daemon: Deck, Ordinary;
    at_workspace_an_agent_of_root_writes_only_its_project_and_reads_no_keys: Workspace, Root;
    at_workspace_an_agent_of_a_user_writes_only_its_project_and_reads_no_keys: Workspace, Ordinary;
}

#[test]
fn the_agent_tries_at_least_sixty_ways() {
    assert!(AttackWay::all().len() >= 60);
}

#[expect(clippy::print_stdout, reason = "a failed test shows what came of each way")]
async fn attack_and_judge(column: AttackColumn) {
    let mut attempts = 0;
    let (attack, outcomes) = loop {
        let Some(mut attack) = HostileAttack::prepare(column).await else {
            println!("{column:?} cannot be tried here");
            return;
        };
        let outcomes = attack.run().await;
        attack.world.end_processes();
        attempts += 1;
        // Some ways are races with other processes, which the agent can lose. It can also try again.
        let ways = AttackWay::all();
        let known = ways_possible_before(column);
        let is_open = |way: &AttackWay| match column.level {
            AttackLevel::Off => !way.is_forbidden_at(column.level),
            _ => known.contains(way.name),
        };
        let is_lost = |way: &&AttackWay| is_open(way) && outcomes[way.name] == AttackOutcome::Prevented;
        let lost: Vec<&AttackWay> = ways.iter().filter(is_lost).collect();
        if lost.is_empty() || attempts == ATTEMPTS_MAX {
            break (attack, outcomes);
        }
        for way in lost {
            println!("attempt {attempts}: {} failed; {}", way.name, attack.failure(way.name));
        }
    };
    for way in AttackWay::all() {
        let outcome = outcomes[way.name];
        println!("{:<22} {outcome}", way.name);
        if way.is_forbidden_at(column.level) {
            assert_ne!(outcome, AttackOutcome::Possible, "{}; {}", way.name, attack.failure(way.name));
        } else if column.level == AttackLevel::Off {
            assert_ne!(outcome, AttackOutcome::Prevented, "{}; {}", way.name, attack.failure(way.name));
        }
    }
    compare_with_page(column, &outcomes);
}

/// A daemon with sessions for the attacker, and others for it to want something from.
struct HostileAttack {
    column: AttackColumn,
    daemon: TestDaemon,
    /// Over TCP, because the socket of another user's daemon does not serve us.
    client: TestClient,
    world: HostileWorld,
    /// The session in which the attacker runs, and the one from which it attacks the daemon itself.
    own: TestSession,
    last: TestSession,
    /// A session that the attacker has nothing to do with.
    other: TestSession,
    /// For each way that could answer an ask, the ask that it wants to answer.
    asks: BTreeMap<&'static str, String>,
}

impl HostileAttack {
    /// `None` if this machine cannot run the attack, or cannot confine agents at this level.
    async fn prepare(column: AttackColumn) -> Option<Self> {
        let home = TestHome::new();
        let world = HostileWorld::make(&home, column.user)?;
        let wrapper = world.daemon_wrapper();
        let runtime = world.runtime.display().to_string();
        let daemon = TestDaemon::start_in(home, |options| {
            options.tcp().wrapped_in(&wrapper.iter().map(String::as_str).collect::<Vec<_>>());
            options.env("XDG_RUNTIME_DIR", &runtime);
            for name in VARIABLES {
                options.env(&format!("HOSTILE_{name}"), &variable_secret(name));
            }
        })
        .await;
        let client = daemon.tcp();
        let workspace = client.workspace(&daemon.home.project_dir()).await;
        let settings =
            |worktree: bool| json!({"agent": "script", "sandbox": column.setting(), "worktree": worktree});
        let created = workspace.try_session(settings(true)).await;
        if created.status == 409 {
            created.expect_refusal(409, "sandbox_unavailable");
            return None;
        }
        let id = created.expect(201)["id"].as_str().unwrap().to_owned();
        let own = TestSession { client: client.clone(), workspace: workspace.id.clone(), id };
        let last = workspace.session_with(settings(false)).await;
        let other = workspace.session_with(settings(false)).await;
        let mut asks = BTreeMap::new();
        for way in ASKS {
            let asking = workspace.session_with(settings(false)).await;
            let run = asking.prompt_script(&[ask_bash("make")]).await;
            asks.insert(way, asking.wait_for_ask(&run).await);
        }
        for session in [&own, &last, &other] {
            session.run_script(&[say("ready")]).await;
        }
        Some(Self { column, daemon, client, world, own, last, other, asks })
    }

    /// Runs all ways, and judges each.
    async fn run(&mut self) -> BTreeMap<&'static str, AttackOutcome> {
        let mut outside = self.world.start_outside(&self.outside_config().await);
        let agent = self.worker(&self.other).await["processes"][0]["pid"].clone();
        let token = std::fs::read_to_string(tool_directory(&self.daemon.home, &self.other.id).join("token"));
        let token = token.expect("its agent has the tools");
        let facts = self.facts(outside.exchange(None).await, agent).await;
        std::fs::write(&self.world.facts, facts.to_string()).unwrap();
        self.run_attacker(&self.own, &[]).await;
        self.run_attacker(&self.own, &["orphan_answers"]).await;
        self.run_attacker(&self.last, &["kill_daemon", "own_daemon"]).await;
        let verdicts = outside.exchange(Some("judge")).await;
        outside.end().await;
        let mut possible: BTreeMap<&str, Option<bool>> =
            AttackWay::all().iter().map(|way| (way.name, verdicts[way.name].as_bool())).collect();
        for way in ["other_token", "other_token_environ"] {
            possible.insert(way, Some(self.found(way).is_some_and(|found| found == token)));
        }
        for way in ["other_socket", "other_mark"] {
            let is_answered = self.found(way).is_some_and(|answer| answer.starts_with("HTTP/1.1 200"));
            possible.insert(way, Some(is_answered));
        }
        if possible["setuid"].is_some() {
            possible.insert("setuid", Some(self.found("setuid").is_some_and(|found| found == ROOT_SECRET)));
        }
        let is_killed = self.daemon.exit_status().is_some();
        possible.insert("kill_daemon", Some(is_killed));
        if is_killed {
            // The attacker's own daemon holds the home.
            self.world.end_processes();
            self.daemon.start_again().await;
            self.client = self.daemon.tcp();
        }
        for (way, ask) in &self.asks {
            let answered = self.client.get(&format!("/v1/asks/{ask}")).await.json();
            possible.insert(*way, Some(answered["by"] == "user" && answered["state"] == "answered"));
        }
        let judge = |way: &AttackWay| match possible[way.name] {
            _ if !way.is_for(self.column.user) => AttackOutcome::NotApplicable,
            None => AttackOutcome::NotApplicable,
            Some(true) => AttackOutcome::Possible,
            Some(false) => AttackOutcome::Prevented,
        };
        AttackWay::all().iter().map(|way| (way.name, judge(way))).collect()
    }

    /// Runs the attacker below a session's agent, and waits until all of its processes have ended.
    async fn run_attacker(&self, session: &TestSession, ways: &[&str]) {
        let HostileWorld { python, scripts, facts, .. } = &self.world;
        let (python, attacker) =
            (python.display().to_string(), scripts.join("attacker.py").display().to_string());
        let facts = facts.display().to_string();
        let argv: Vec<&str> =
            [python.as_str(), &attacker, &facts].into_iter().chain(ways.iter().copied()).collect();
        session.prompt_script(&[spawn_detached(&argv)]).await;
        // From now on the daemon may be dead before it can answer anything, so the attacker's files say how far it is.
        let named = |state: &str| format!("{state}-{}", ways.join("-"));
        std::fs::write(self.world.out.join(named("go")), "go").unwrap();
        poll_until("the attack", async || self.found(&named("begun"))).await;
        let is_ours =
            |args: &[String]| args.contains(&facts) && args.iter().any(|arg| arg.ends_with("attacker.py"));
        // A process that forks and exits while the list is read can be missed, but not again and again.
        let ended = async {
            let mut unseen = 0;
            while unseen < 5 {
                tokio::time::sleep(Duration::from_millis(20)).await;
                let is_seen = all_processes().iter().any(|process| is_ours(&process.args));
                unseen = if is_seen { 0 } else { unseen + 1 };
            }
        };
        tokio::time::timeout(ATTACK_LIMIT, ended).await.expect("the attack ends");
    }

    async fn outside_config(&self) -> Value {
        let secrets: BTreeMap<&str, String> =
            VARIABLES.iter().map(|name| (*name, variable_secret(name))).collect();
        let ways: Vec<&str> = AttackWay::all().iter().map(|way| way.name).collect();
        json!({
            "home": self.daemon.home.path(), "world": self.world.folder, "out": self.world.out,
            "user_home": self.daemon.home.sibling_path("user"), "runtime": self.world.runtime, "ways": ways,
            "secrets": secrets, "daemon": self.daemon.pid(), "worker": self.worker(&self.own).await["pid"],
            "other_session": self.other.id, "repository": self.daemon.home.project_dir(),
        })
    }

    async fn worker(&self, session: &TestSession) -> Value {
        let workers = self.client.get("/v1/workers").await.list();
        workers.into_iter().find(|worker| worker["session_id"] == session.id).expect("it has a worker")
    }

    /// What the attacker is told: where everything is, but no secret.
    async fn facts(&self, mut facts: Value, other_agent: Value) -> Value {
        let tcp = self
            .daemon
            .listening()
            .iter()
            .find_map(|line| line.strip_prefix("listening on http://"))
            .unwrap();
        let own = self.own.show().await;
        let tried: Vec<&str> =
            AttackWay::all().iter().filter(|way| way.is_for(self.column.user)).map(|way| way.name).collect();
        let more = json!({
            "home": self.daemon.home.path(), "world": self.world.folder, "out": self.world.out, "qd": self.world.qd,
            "user_home": self.daemon.home.sibling_path("user"), "other_session": self.other.id, "other_agent": other_agent,
            "own_session": self.own.id, "other_path": self.other.path("/messages"),
            "asks": self.asks, "tcp": tcp, "worktree": own["worktree"], "diff": self.own.path("/diff"),
            "repository": self.daemon.home.project_dir(), "tried": tried,
            "setuid_cat": self.world.folder.join("setuid-cat"), "root_file": self.world.folder.join("root-file"),
        });
        facts.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        facts
    }

    /// What the attacker wrote about a way.
    fn found(&self, way: &str) -> Option<String> {
        std::fs::read_to_string(self.world.out.join(way)).ok()
    }

    /// Why a way failed, in the attacker's own words.
    fn failure(&self, way: &str) -> String {
        self.found(&format!("{way}.failed")).unwrap_or_else(|| "it says nothing".to_owned())
    }
}

/// What root's file contains, which an ordinary user reads with a setuid program.
const ROOT_SECRET: &str = "only root reads this";

/// The value of a variable of the daemon. Each has its own, so that no way can use another's.
fn variable_secret(name: &str) -> String {
    format!("{name:x<32}")
}
