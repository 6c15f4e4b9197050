//! What `qd` adds to a real agent: to its own time from the start of its process to its first word, and to the memory
//! that it takes. Both sides run in turn against the scripted model; without `qd` the agent is started and asked by the
//! fewest messages of its own protocol. `-- gemini` measures one agent alone.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{BenchmarkTable, FakeModel, InstalledAgents, RealAgent, TestDaemon, TestHome};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

/// Starts of each kind that are measured; the middle one counts.
const STARTS: usize = 5;
/// What the scripted model's answer begins with.
const FIRST_WORD: &str = "ECHO[";

fn main() {
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let agents = [
        RealAgent::Claude,
        RealAgent::Codex,
        RealAgent::Gemini,
        RealAgent::Copilot,
        RealAgent::Opencode,
        RealAgent::Qwen,
    ];
    let chosen = agents.into_iter().filter(|cli| only.as_ref().is_none_or(|only| cli.name() == only));
    let mut times = BenchmarkTable::new(
        "From the start to the first word, with the daemon running (middle of 5)".to_owned(),
    );
    let mut sizes = BenchmarkTable::new("Memory of one session (Pss)".to_owned());
    for cli in chosen {
        runtime.as_ref().expect("a runtime starts").block_on(measure(cli, &mut times, &mut sizes));
    }
    println!("{times}\n{sizes}");
}

async fn measure(cli: RealAgent, times: &mut BenchmarkTable, sizes: &mut BenchmarkTable) {
    let model = FakeModel::start();
    let home = TestHome::new();
    let path = format!(
        "{}:{}",
        InstalledAgents::installed().bin().display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let daemon = TestDaemon::start_in(home, |options| {
        options.env("PATH", &path);
    })
    .await;
    let env = isolated_environment(cli, &daemon.home.sibling_path("agent"), &model);
    // Once each, so that what an agent does only the first time is done.
    raw(cli, &env, &daemon.home.project_dir());
    through(&daemon, cli, &env).await;
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    let mut memory = (0, 0);
    for _ in 0..STARTS {
        alone.push(raw(cli, &env, &daemon.home.project_dir()));
        let (time, ours, theirs) = through(&daemon, cli, &env).await;
        with.push(time);
        memory = (ours, theirs);
    }
    let (alone, with) = (middle(alone), middle(with));
    let ms = |time: Duration| format!("{} ms", time.as_millis());
    let added = with.saturating_sub(alone);
    let ratio = format!("{:.2} ×", with.as_secs_f64() / alone.as_secs_f64());
    times.add_row([
        cli.name(),
        &ms(with),
        &ms(alone),
        &ratio,
        &format!("+ {}", ms(added)),
        "the agent by itself",
    ]);
    let (ours, theirs) = memory;
    let mib = |kib: u64| format!("{:.1} MiB", kib as f64 / 1024.0);
    let share = format!("{:.1} %", 100.0 * ours as f64 / theirs.max(1) as f64);
    sizes.add_row([
        cli.name(),
        &mib(ours),
        &mib(theirs),
        &share,
        "",
        "worker and keeper, against the agent's own",
    ]);
}

fn middle(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The agent by itself: started, greeted, asked; until it says its first word.
fn raw(cli: RealAgent, env: &BTreeMap<String, String>, work: &Path) -> Duration {
    let argv = InstalledAgents::installed().argv(cli);
    let began = Instant::now();
    let mut child = Command::new(&argv[0])
        .args(&argv[1..])
        .env_clear()
        .envs(env)
        .current_dir(work)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the agent starts");
    let mut talk = Talk::of(&mut child);
    match cli {
        RealAgent::Claude => {
            talk.say(&json!({ "type": "user", "message": { "role": "user", "content": "hello" } }));
        }
        RealAgent::Codex => {
            talk.ask(1, "initialize", &json!({ "clientInfo": { "name": "bench", "version": "0" } }));
            talk.say(&json!({ "jsonrpc": "2.0", "method": "initialized" }));
            let started = talk.ask(2, "thread/start", &json!({ "cwd": work }));
            let input = json!([{ "type": "text", "text": "hello" }]);
            talk.send(3, "turn/start", &json!({ "threadId": started["thread"]["id"], "input": input }));
        }
        _ => {
            talk.ask(1, "initialize", &json!({ "protocolVersion": 1, "clientCapabilities": {} }));
            let opened = talk.ask(2, "session/new", &json!({ "cwd": work, "mcpServers": [] }));
            let prompt = json!([{ "type": "text", "text": "hello" }]);
            talk.send(3, "session/prompt", &json!({ "sessionId": opened["sessionId"], "prompt": prompt }));
        }
    }
    talk.first_word();
    let took = began.elapsed();
    let _gone = child.kill();
    let _status = child.wait();
    took
}

/// The two streams of an agent.
struct Talk {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Talk {
    fn of(child: &mut Child) -> Self {
        let input = child.stdin.take().expect("it has a stdin");
        Self { input, output: BufReader::new(child.stdout.take().expect("it has a stdout")) }
    }

    fn say(&mut self, line: &Value) {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).expect("the agent listens");
    }

    fn send(&mut self, id: u64, method: &str, params: &Value) {
        self.say(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
    }

    /// Sends a request and waits for its answer.
    fn ask(&mut self, id: u64, method: &str, params: &Value) -> Value {
        self.send(id, method, params);
        loop {
            let line: Value = serde_json::from_str(&self.line()).unwrap_or_default();
            if line["id"] == id && line.get("method").is_none() {
                return line["result"].clone();
            }
        }
    }

    fn first_word(&mut self) {
        while !self.line().contains(FIRST_WORD) {}
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).expect("the agent speaks text");
        assert!(read > 0, "the agent ended before it said anything");
        line
    }
}

/// The agent through `qd run`, until its first word is on our screen; then what the processes of the session take: ours,
/// and the agent's own.
async fn through(
    daemon: &TestDaemon,
    cli: RealAgent,
    env: &BTreeMap<String, String>,
) -> (Duration, u64, u64) {
    let session = daemon.session_with(json!({ "agent": cli.name(), "env": env })).await;
    let began = Instant::now();
    let mut command = daemon.home.command(&["run", "--session", session.id.as_str(), "hello"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("qd starts");
    let mut output = child.stdout.take().expect("it has a stdout");
    let mut said = Vec::new();
    let mut piece = [0; 4096];
    while !String::from_utf8_lossy(&said).contains(FIRST_WORD) {
        let read = output.read(&mut piece).await.expect("qd can be read");
        assert!(read > 0, "qd ended before the agent said anything: {}", String::from_utf8_lossy(&said));
        said.extend_from_slice(&piece[..read]);
    }
    let took = began.elapsed();
    let status = child.wait().await.expect("qd ends");
    assert!(status.success(), "{status}");
    let (mut ours, mut theirs) = (0, 0);
    for worker in daemon.home.worker_pids() {
        ours += pss(worker);
        for keeper in children(worker) {
            ours += pss(keeper);
            theirs += children(keeper).into_iter().map(tree).sum::<u64>();
        }
    }
    // The next start is not to have this one's processes beside it.
    let removed = daemon.home.command(&["rm", session.id.as_str()]).output().await.expect("qd starts");
    assert!(removed.status.success(), "{removed:?}");
    while !daemon.home.worker_pids().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (took, ours, theirs)
}

fn tree(pid: u32) -> u64 {
    pss(pid) + children(pid).into_iter().map(tree).sum::<u64>()
}

fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The share of memory that is this process's own, in KiB.
fn pss(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}
