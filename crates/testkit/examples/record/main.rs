//! Records what `qd` and a real agent say to each other, for the replays of the drivers' tests: `cargo build -p qd`, then
//! `cargo run -p qd-testkit --example record -- gemini`, and perhaps the names of the scenes. The recordings go to
//! `crates/worker/tests/recorded`, where a README says what is in them.
//!
//! `qd` is the real binary, the agent is the pinned one in a home of its own, and the model is the scripted one. Between
//! `qd` and the agent stands this program once more, under the agent's name: it passes every line on and keeps it.
//!
//! - `scenes`: what the agent is put through.
//! - `tee`: this program in the agent's place.
//! - `tape`: what was kept, made into a recording.
#![expect(clippy::print_stderr, reason = "whoever records wants to see how far it is")]

mod scenes;
mod tape;
mod tee;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{FakeModel, InstalledAgents, RealAgent, TestDaemon, TestHome};
use serde_json::{Value, json};

use self::scenes::Scene;
use self::tape::{Header, Tape};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [tee, log, program @ ..] if tee == tee::WORD => tee::run(Path::new(log), program),
        [agent, scenes @ ..] => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(record(agent, scenes));
        }
        [] => panic!("the first argument is one of {:?}", RealAgent::ALL.map(agent_of)),
    }
}

/// The name of an agent's manifest, which is that of its recordings.
fn agent_of(cli: RealAgent) -> &'static str {
    match cli {
        RealAgent::ClaudeAcp => "claude-acp",
        other => other.name(),
    }
}

async fn record(agent: &str, wanted: &[String]) {
    let cli = RealAgent::ALL.into_iter().find(|cli| agent_of(*cli) == agent);
    let cli = cli.unwrap_or_else(|| panic!("the agent is one of {:?}", RealAgent::ALL.map(agent_of)));
    let mut version = None;
    for scene in Scene::ALL {
        if !wanted.is_empty() && !wanted.iter().any(|name| name == scene.name()) {
            continue;
        }
        let stage = Stage::new(cli).await;
        if !stage.can(scene) {
            eprintln!("{agent} has no {}", scene.name());
            continue;
        }
        if version.is_none() {
            version = Some(stage.version().await);
        }
        let session = stage.session().await;
        scene.play(&stage, &session).await;
        let conversation = session.show().await["agent_session_id"].as_str().map(str::to_owned);
        session.close().await;
        stage.daemon.home.wait_for_no_agents().await;
        let header = Header {
            agent: agent.to_owned(),
            version: version.clone().unwrap_or_default(),
            resume: conversation.filter(|_| scene == Scene::Resume),
        };
        let file = stage.keep(&header, scene);
        eprintln!("{}", file.display());
    }
}

/// One agent in a home of its own, with somebody in between who listens.
pub(crate) struct Stage {
    cli: RealAgent,
    model: FakeModel,
    pub(crate) daemon: TestDaemon,
    /// What the list of agents says of it.
    about: Value,
    log: PathBuf,
}

impl Stage {
    async fn new(cli: RealAgent) -> Self {
        let (model, home) = (FakeModel::start(), TestHome::new());
        let (log, between) = (home.sibling_path("log.jsonl"), home.sibling_path("between"));
        put_between(cli, &between, &log);
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{}:{path}", between.display(), InstalledAgents::installed().bin().display());
        let daemon = TestDaemon::start_in(home, |options| {
            options.env("PATH", &path);
        })
        .await;
        let list = daemon.client().get("/v1/agents").await.list();
        let about = list.into_iter().find(|one| one["name"] == agent_of(cli)).expect("it is built in");
        Self { cli, model, daemon, about, log }
    }

    fn can(&self, scene: Scene) -> bool {
        scene.needs().is_none_or(|what| self.about[what] == true)
    }

    async fn version(&self) -> String {
        let list = self.daemon.client().get("/v1/agents?versions=true").await.list();
        let about = list.iter().find(|one| one["name"] == agent_of(self.cli)).expect("it is built in");
        about["version"].as_str().expect("a program that is installed tells its version").to_owned()
    }

    async fn session(&self) -> qd_testkit::TestSession {
        let env = isolated_environment(self.cli, &self.daemon.home.sibling_path("agent"), &self.model);
        self.daemon.session_with(json!({ "agent": agent_of(self.cli), "env": env })).await
    }

    /// Notes what the session does, before it does it.
    pub(crate) fn note(&self, what: &Value) {
        tee::append(&self.log, &json!({ "!": what }));
    }

    /// Makes a recording of what was said.
    fn keep(&self, header: &Header, scene: Scene) -> PathBuf {
        let log = std::fs::read_to_string(&self.log).expect("something was said");
        let places = [
            (self.daemon.home.project_dir(), "/w"),
            (self.daemon.home.sibling_path("agent"), "/home/user"),
            (
                InstalledAgents::installed().bin().parent().expect("a folder has a parent").to_owned(),
                "/agents",
            ),
        ];
        let mut names: Vec<(String, &str)> =
            places.into_iter().map(|(path, name)| (path.display().to_string(), name)).collect();
        names.push((self.model.url(), "http://model"));
        names.push((self.model.address().to_string(), "model"));
        // Not a key of anybody, but it looks like one.
        names.push(("a-key-of-nobody".to_owned(), "scripted"));
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/recorded").join(&header.agent);
        std::fs::create_dir_all(&dir).expect("the folder of recordings can be written");
        let file = dir.join(scene.name()).with_extension("jsonl");
        std::fs::write(&file, Tape::of(&log).recording(header, &names)).expect("a recording can be written");
        file
    }
}

/// A folder for the path in which the agent's name is ours.
fn put_between(cli: RealAgent, folder: &Path, log: &Path) {
    let me = std::env::current_exe().expect("a process knows its own file");
    let real =
        InstalledAgents::installed().program(cli).iter().map(|word| format!(" '{word}'")).collect::<String>();
    let script =
        format!("#!/bin/sh\nexec '{}' {} '{}'{real} \"$@\"\n", me.display(), tee::WORD, log.display());
    std::fs::create_dir_all(folder).expect("the home can be written");
    let file = folder.join(cli.name());
    std::fs::write(&file, script).expect("the home can be written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
}
