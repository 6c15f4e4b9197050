//! Records what `qd` and a real agent send each other, for the replay tests of the drivers. The recordings go to
//! `crates/drivers/tests/recorded`, where a README describes them and how to make them.
//!
//! `qd` is the real binary, the agent is the pinned one in a home of its own, and the model is the scripted one.
//! Between `qd` and the agent this program runs a second time, under the agent's name: it passes every line on and
//! logs it.
//!
//! - `scenes`: the scenarios that are recorded.
//! - `tee`: this program in the agent's place.
//! - `tape`: turns the log into a recording.
#![expect(clippy::print_stderr, reason = "shows the progress of recording")]

mod scenes;
mod tape;
mod tee;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{FakeModel, InstalledAgents, RealAgent, TestDaemon, TestHome};
use serde_json::{Value, json};

use self::scenes::Scene;
use self::tape::{Recording, RecordingHeader};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [mode, log, program @ ..] if mode == tee::MODE_ARG => tee::run(Path::new(log), program),
        [agent, scenes @ ..] => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be built").block_on(record(agent, scenes));
        }
        [] => panic!("the first argument is one of {:?}", RealAgent::ALL.map(manifest_name)),
    }
}

/// The name of the agent's manifest, which is also the name of its recordings.
fn manifest_name(cli: RealAgent) -> &'static str {
    match cli {
        RealAgent::ClaudeAcp => "claude-acp",
        other => other.name(),
    }
}

async fn record(agent: &str, wanted: &[String]) {
    let cli = RealAgent::ALL.into_iter().find(|cli| manifest_name(*cli) == agent);
    let cli = cli.unwrap_or_else(|| panic!("the agent is one of {:?}", RealAgent::ALL.map(manifest_name)));
    let mut version = None;
    for scene in Scene::ALL {
        if !wanted.is_empty() && !wanted.iter().any(|name| name == scene.name()) {
            continue;
        }
        let setup = SceneSetup::new(cli).await;
        if !setup.can(scene) {
            eprintln!("{agent} does not support {}", scene.name());
            continue;
        }
        if version.is_none() {
            version = Some(setup.version().await);
        }
        let session = setup.session().await;
        scene.play(&setup, &session).await;
        let conversation = session.show().await["agent_session_id"].as_str().map(str::to_owned);
        session.close().await;
        setup.daemon.home.wait_for_no_agents().await;
        let header = RecordingHeader {
            agent: agent.to_owned(),
            version: version.clone().unwrap_or_default(),
            resume: conversation.filter(|_| scene == Scene::Resume),
        };
        let file = setup.save_recording(&header, scene);
        eprintln!("{}", file.display());
    }
}

/// One agent in a home of its own, with the logging program in between.
pub(crate) struct SceneSetup {
    cli: RealAgent,
    model: FakeModel,
    pub(crate) daemon: TestDaemon,
    /// The agent's entry in the list of agents.
    agent_info: Value,
    log: PathBuf,
}

impl SceneSetup {
    async fn new(cli: RealAgent) -> Self {
        let (model, home) = (FakeModel::start(), TestHome::new());
        let (log, wrapper_dir) = (home.sibling_path("log.jsonl"), home.sibling_path("wrapper_dir"));
        install_wrapper(cli, &wrapper_dir, &log);
        let path = std::env::var("PATH").unwrap_or_default();
        let path =
            format!("{}:{}:{path}", wrapper_dir.display(), InstalledAgents::installed().bin().display());
        let daemon = TestDaemon::start_in(home, |options| {
            options.env("PATH", &path);
        })
        .await;
        let list = daemon.client().get("/v1/agents").await.list();
        let agent_info =
            list.into_iter().find(|entry| entry["name"] == manifest_name(cli)).expect("it is built in");
        Self { cli, model, daemon, agent_info, log }
    }

    fn can(&self, scene: Scene) -> bool {
        scene.needs().is_none_or(|capability| self.agent_info[capability] == true)
    }

    /// The mode of the agent beside `plan`, in which it starts.
    pub(crate) fn usual_mode(&self) -> &str {
        let modes = self.agent_info["modes"].as_array().expect("it has modes");
        modes.iter().filter_map(Value::as_str).find(|mode| *mode != "plan").expect("it has another mode")
    }

    /// The agent's version. It is asked for again if the agent takes too long to start, as it may on a busy machine.
    async fn version(&self) -> String {
        qd_testkit::poll_until("the agent's version", async || {
            let list = self.daemon.client().get("/v1/agents?versions=true").await.list();
            let agent_info = list.iter().find(|entry| entry["name"] == manifest_name(self.cli));
            agent_info.expect("it is built in")["version"].as_str().map(str::to_owned)
        })
        .await
    }

    async fn session(&self) -> qd_testkit::TestSession {
        let env = isolated_environment(self.cli, &self.daemon.home.sibling_path("agent"), &self.model);
        self.daemon.session_with(json!({ "agent": manifest_name(self.cli), "env": env })).await
    }

    /// Logs an action of the session, before it is done.
    pub(crate) fn log_action(&self, action: &Value) {
        tee::append(&self.log, &json!({ "!": action }));
    }

    /// Turns the log into a recording.
    fn save_recording(&self, header: &RecordingHeader, scene: Scene) -> PathBuf {
        let log = std::fs::read_to_string(&self.log).expect("something was said");
        let paths = [
            (self.daemon.home.project_dir(), "/w"),
            (self.daemon.home.sibling_path("agent"), "/home/user"),
            (self.daemon.home.path(), "/home/qd"),
            (
                InstalledAgents::installed().bin().parent().expect("a folder has a parent").to_owned(),
                "/agents",
            ),
        ];
        let mut names: Vec<(String, &str)> =
            paths.into_iter().map(|(path, name)| (path.display().to_string(), name)).collect();
        names.push((self.model.url(), "http://model"));
        names.push((self.model.address().to_string(), "model"));
        // It is not a real key, but it looks like one.
        names.push(("a-key-of-nobody".to_owned(), "scripted"));
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers/tests/recorded").join(&header.agent);
        std::fs::create_dir_all(&dir).expect("the folder of recordings can be written");
        let file = dir.join(scene.name()).with_extension("jsonl");
        std::fs::write(&file, Recording::from_log(&log).to_text(header, &names))
            .expect("a recording can be written");
        file
    }
}

/// Creates a folder for PATH in which the agent's name is a script that runs this program.
fn install_wrapper(cli: RealAgent, folder: &Path, log: &Path) {
    let this_program = std::env::current_exe().expect("a process knows its own file");
    let real =
        InstalledAgents::installed().program(cli).iter().map(|word| format!(" '{word}'")).collect::<String>();
    let script = format!(
        "#!/bin/sh\nexec '{}' {} '{}'{real} \"$@\"\n",
        this_program.display(),
        tee::MODE_ARG,
        log.display()
    );
    std::fs::create_dir_all(folder).expect("the home can be written");
    let file = folder.join(cli.name());
    std::fs::write(&file, script).expect("the home can be written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
}
