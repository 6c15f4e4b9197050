//! What `qd` adds to a real agent: to the time from the start of its process to its first output, and to its memory.
//! Both sides run alternately against the scripted model. Without `qd`, the agent is started and prompted with the
//! minimum of messages in its own protocol. `-- gemini` measures only that agent.
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

/// Measured starts of each kind; the median counts.
const STARTS: usize = 5;
/// The beginning of the scripted model's answer.
const ANSWER_START: &str = "ECHO[";

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
    // One warm-up of each, for what an agent does only the first time.
    time_alone(cli, &env, &daemon.home.project_dir());
    time_through_qd(&daemon, cli, &env).await;
    let (mut alone, mut with) = (Vec::new(), Vec::new());
    let mut memory = (0, 0);
    for _ in 0..STARTS {
        alone.push(time_alone(cli, &env, &daemon.home.project_dir()));
        let (time, ours, theirs) = time_through_qd(&daemon, cli, &env).await;
        with.push(time);
        memory = (ours, theirs);
    }
    let (alone, with) = (median(alone), median(with));
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

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// The time of the agent without `qd`: started, initialized and prompted, until its first output.
fn time_alone(cli: RealAgent, env: &BTreeMap<String, String>, work: &Path) -> Duration {
    let argv = InstalledAgents::installed().argv(cli);
    let started_at = Instant::now();
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
    let mut connection = AgentConnection::of(&mut child);
    match cli {
        RealAgent::Claude => {
            connection
                .send_line(&json!({ "type": "user", "message": { "role": "user", "content": "hello" } }));
        }
        RealAgent::Codex => {
            connection.request(
                1,
                "initialize",
                &json!({ "clientInfo": { "name": "bench", "version": "0" } }),
            );
            connection.send_line(&json!({ "jsonrpc": "2.0", "method": "initialized" }));
            let started = connection.request(2, "thread/start", &json!({ "cwd": work }));
            let input = json!([{ "type": "text", "text": "hello" }]);
            connection.send(3, "turn/start", &json!({ "threadId": started["thread"]["id"], "input": input }));
        }
        _ => {
            connection.request(1, "initialize", &json!({ "protocolVersion": 1, "clientCapabilities": {} }));
            let opened = connection.request(2, "session/new", &json!({ "cwd": work, "mcpServers": [] }));
            let prompt = json!([{ "type": "text", "text": "hello" }]);
            connection.send(
                3,
                "session/prompt",
                &json!({ "sessionId": opened["sessionId"], "prompt": prompt }),
            );
        }
    }
    connection.wait_for_answer();
    let elapsed = started_at.elapsed();
    let _result = child.kill();
    let _status = child.wait();
    elapsed
}

/// The standard input and output of an agent.
struct AgentConnection {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl AgentConnection {
    fn of(child: &mut Child) -> Self {
        let input = child.stdin.take().expect("it has a stdin");
        Self { input, output: BufReader::new(child.stdout.take().expect("it has a stdout")) }
    }

    fn send_line(&mut self, line: &Value) {
        writeln!(self.input, "{line}").and_then(|()| self.input.flush()).expect("the agent reads its input");
    }

    fn send(&mut self, id: u64, method: &str, params: &Value) {
        self.send_line(&json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params }));
    }

    /// Sends a request and waits for its response.
    fn request(&mut self, id: u64, method: &str, params: &Value) -> Value {
        self.send(id, method, params);
        loop {
            let line: Value = serde_json::from_str(&self.read_line()).unwrap_or_default();
            if line["id"] == id && line.get("method").is_none() {
                return line["result"].clone();
            }
        }
    }

    fn wait_for_answer(&mut self) {
        while !self.read_line().contains(ANSWER_START) {}
    }

    fn read_line(&mut self) -> String {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).expect("the agent writes text");
        assert!(read > 0, "the agent exited before its first output");
        line
    }
}

/// The time of the agent through `qd run`, until its first output appears; and the memory of the session's processes:
/// ours, and the agent's.
async fn time_through_qd(
    daemon: &TestDaemon,
    cli: RealAgent,
    env: &BTreeMap<String, String>,
) -> (Duration, u64, u64) {
    let session = daemon.session_with(json!({ "agent": cli.name(), "env": env })).await;
    let started_at = Instant::now();
    let mut command = daemon.home.command(&["run", "--session", session.id.as_str(), "hello"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("qd starts");
    let mut output = child.stdout.take().expect("it has a stdout");
    let mut printed = Vec::new();
    let mut piece = [0; 4096];
    while !String::from_utf8_lossy(&printed).contains(ANSWER_START) {
        let read = output.read(&mut piece).await.expect("qd can be read");
        assert!(read > 0, "qd exited before the agent's output: {}", String::from_utf8_lossy(&printed));
        printed.extend_from_slice(&piece[..read]);
    }
    let elapsed = started_at.elapsed();
    let status = child.wait().await.expect("qd ends");
    assert!(status.success(), "{status}");
    let (mut ours, mut theirs) = (0, 0);
    for worker in daemon.home.worker_pids() {
        ours += pss(worker);
        for keeper in children(worker) {
            ours += pss(keeper);
            theirs += children(keeper).into_iter().map(tree_pss).sum::<u64>();
        }
    }
    // End this session's processes before the next start.
    let removed = daemon.home.command(&["rm", session.id.as_str()]).output().await.expect("qd starts");
    assert!(removed.status.success(), "{removed:?}");
    while !daemon.home.worker_pids().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    (elapsed, ours, theirs)
}

fn tree_pss(pid: u32) -> u64 {
    pss(pid) + children(pid).into_iter().map(tree_pss).sum::<u64>()
}

fn children(pid: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The proportional set size of a process in KiB.
fn pss(pid: u32) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}
