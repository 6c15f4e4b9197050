//! Homes that earlier releases left behind, opened with this build: nothing is missing, open work goes on, and a worker
//! that speaks as its release did is found again. The fixtures are made by `tests/fixtures/make_home.py`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use futures_util::{SinkExt, StreamExt};
use hmac::{Hmac, KeyInit, Mac};
use qd_testkit::{TestClient, TestDaemon, TestHome, TestSession, poll_until};
use serde_json::{Value, json};
use sha2::Sha256;
use tokio::net::UnixListener;
use tokio_tungstenite::accept_hdr_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

/// The root directory of every fixture. It is as long as the path of a temporary home, so that one can be replaced by
/// the other in any file, also in the database.
const FIXTURE_ROOT: &str = "/tmp/qdFIXTUR";

/// A fixture unpacked into a temporary home.
struct OldHome {
    home: TestHome,
    /// What the API of that release answered before its daemon was killed.
    expected: Value,
    fixture: PathBuf,
}

impl OldHome {
    fn unpack(release: &str) -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures")
            .join(format!("home-{release}"));
        let home = TestHome::new();
        let root = home.path().parent().unwrap().to_owned();
        let root_text = root.to_str().unwrap();
        assert_eq!(
            root_text.len(),
            FIXTURE_ROOT.len(),
            "{root_text} can stand in the place of {FIXTURE_ROOT}"
        );
        let unpacked = std::process::Command::new("tar")
            .args(["-xzf", fixture.join("home.tar.gz").to_str().unwrap(), "-C", root_text])
            .status();
        assert!(unpacked.unwrap().success());
        replace_in_files(&root, FIXTURE_ROOT.as_bytes(), root_text.as_bytes());
        let expected = fs::read_to_string(fixture.join("expected.json")).unwrap();
        let expected = serde_json::from_str(&expected.replace(FIXTURE_ROOT, root_text)).unwrap();
        Self { home, expected, fixture }
    }

    /// An id that the fixture's maker wrote down.
    fn named(&self, name: &str) -> String {
        self.expected["named"][name].as_str().unwrap().to_owned()
    }

    /// The frames between daemon and worker, in order: who said it, and what.
    fn recorded_frames(&self) -> Vec<(String, Value)> {
        let text = fs::read_to_string(self.fixture.join("link.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| (line["from"].as_str().unwrap().to_owned(), line["frame"].clone())).collect()
    }

    fn session(&self, client: &TestClient, title: &str) -> TestSession {
        let sessions = self.expected["sessions"].as_array().unwrap();
        let session = sessions.iter().find(|session| session["title"] == title).unwrap();
        TestSession {
            client: client.clone(),
            workspace: session["workspace_id"].as_str().unwrap().to_owned(),
            id: session["id"].as_str().unwrap().to_owned(),
        }
    }
}

/// Replaces every occurrence in every file below a directory.
fn replace_in_files(dir: &Path, old: &[u8], new: &[u8]) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            replace_in_files(&path, old, new);
        } else if kind.is_file() {
            let mut content = fs::read(&path).unwrap();
            let found: Vec<usize> = (0..content.len().saturating_sub(old.len() - 1))
                .filter(|&at| content[at..].starts_with(old))
                .collect();
            if found.is_empty() {
                continue;
            }
            for at in found {
                content[at..at + new.len()].copy_from_slice(new);
            }
            let permissions = fs::metadata(&path).unwrap().permissions();
            fs::remove_file(&path).unwrap();
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, permissions).unwrap();
        }
    }
}

/// Whether all that was there before is there now. A later release may add fields and entries, and change none.
fn contains(now: &Value, before: &Value) -> Result<(), String> {
    match (now, before) {
        (Value::Object(now), Value::Object(before)) => before.iter().try_for_each(|(key, before)| {
            let now = now.get(key).ok_or_else(|| format!("`{key}` is missing"))?;
            contains(now, before).map_err(|problem| format!("{key}: {problem}"))
        }),
        (Value::Array(now), Value::Array(before)) if now.len() >= before.len() => {
            before.iter().zip(now).enumerate().try_for_each(|(at, (before, now))| {
                contains(now, before).map_err(|problem| format!("[{at}]: {problem}"))
            })
        }
        _ if now == before => Ok(()),
        _ => Err(format!("{before} has become {now}")),
    }
}

#[track_caller]
fn expect_contains(what: &str, now: &Value, before: &Value) {
    if let Err(problem) = contains(now, before) {
        panic!("{what}: {problem}");
    }
}

fn by_id<'a>(list: &'a [Value], id: &Value) -> &'a Value {
    list.iter().find(|one| one["id"] == *id).unwrap_or_else(|| panic!("{id} is missing"))
}

/// Everything that had ended stays as it was, to the letter.
async fn expect_history(old: &OldHome, client: &TestClient) {
    let workspace = old.named("workspace");
    let list = async |path: &str| client.get(path).await.list();
    expect_contains("workspaces", &json!(list("/v1/workspaces").await), &old.expected["workspaces"]);

    let sessions = list("/v1/sessions").await;
    for before in old.expected["sessions"].as_array().unwrap() {
        let now = by_id(&sessions, &before["id"]);
        for field in ["agent", "title", "parent", "model", "policy", "worktree", "created_at", "workspace_id"]
        {
            assert_eq!(now[field], before[field], "{field} of {}", before["title"]);
        }
        if before["busy"] == false {
            // That its worker is gone has updated it since.
            let mut before = before.clone();
            before.as_object_mut().unwrap().remove("updated_at");
            expect_contains(&format!("session {}", before["title"]), now, &before);
        }
    }
    let runs = list(&format!("/v1/workspaces/{workspace}/runs")).await;
    for before in old.expected["runs"].as_array().unwrap() {
        let now = by_id(&runs, &before["id"]);
        assert_eq!(now["prompt"], before["prompt"]);
        if before["state"] == "finished" {
            expect_contains("a run", now, before);
        }
    }
    let asks = list("/v1/asks").await;
    for before in old.expected["asks"].as_array().unwrap() {
        let now = by_id(&asks, &before["id"]);
        assert_eq!(
            (&now["kind"], &now["input"], &now["prompt"]),
            (&before["kind"], &before["input"], &before["prompt"])
        );
        if before["state"] != "pending" {
            expect_contains("an ask", now, before);
        }
    }
    let fleets = list(&format!("/v1/workspaces/{workspace}/fleets")).await;
    for before in old.expected["fleets"].as_array().unwrap() {
        let now = by_id(&fleets, &before["id"]);
        if before["state"] == "done" {
            expect_contains("a fleet", now, before);
        }
    }
    let mail = list("/v1/mail").await;
    for before in old.expected["mail"].as_array().unwrap() {
        // A claim is over by now, so this one waits again.
        if before["state"] != "claimed" {
            expect_contains("a message", by_id(&mail, &before["id"]), before);
        }
    }
    for before in old.expected["sessions"].as_array().unwrap() {
        let id = before["id"].as_str().unwrap();
        let session = TestSession { client: client.clone(), workspace: workspace.clone(), id: id.to_owned() };
        let events = json!(session.events().await);
        expect_contains(&format!("events of {}", before["title"]), &events, &old.expected["events"][id]);
        if before["busy"] == false {
            expect_contains("messages", &json!(session.messages().await), &old.expected["messages"][id]);
        }
    }
}

/// Everything that was under way comes to its end, with the halt lifted.
async fn expect_open_work_to_end(old: &OldHome, client: &TestClient) {
    assert_eq!(client.get("/v1/halt").await.expect(200)["halted"], true, "a halt survives");
    client.delete("/v1/halt").await.expect(200);

    let spooled = old.session(client, "spooled");
    let run = spooled.wait(&old.named("spooled_run")).await;
    assert_eq!(
        (&run["finish_reason"], &run["text"]),
        (&json!("end_turn"), &json!("said before, said after"))
    );

    let lost = old.session(client, "lost");
    assert_eq!(lost.wait(&old.named("lost_run")).await["finish_reason"], "interrupted");
    let behind = lost.runs().await.last().unwrap()["id"].as_str().unwrap().to_owned();
    assert_eq!(lost.wait(&behind).await["text"], "after the loss");

    let held = old.session(client, "held");
    assert_eq!(held.wait(&old.named("held_run")).await["text"], "held back", "a queued run starts");

    let fleets = format!("/v1/workspaces/{}/fleets", old.named("workspace"));
    let question = client.pending_asks().await.into_iter().find(|ask| ask["fleet_id"].is_string());
    let question = question.expect("a fleet waits for a person");
    client.answer_ask(question["id"].as_str().unwrap(), &json!({ "value": "go on" })).await.expect(200);
    let fleet_ends = async |id: &str| {
        poll_until("the end of a fleet", async || {
            let fleet = client.get(&format!("{fleets}/{id}")).await.expect(200);
            (fleet["state"] == "done").then_some(fleet)
        })
        .await
    };
    let answered = fleet_ends(question["fleet_id"].as_str().unwrap()).await;
    assert!(answered["result"].to_string().contains("go on"), "{answered}");
    fleet_ends(&old.named("held_fleet")).await;

    // A session that resumes its own conversation, in the worktree that it had.
    let worktree = old.session(client, "worktree");
    let run = worktree.run_script(&[json!({ "read": "ADDED" })]).await;
    assert_eq!(run["text"], "by an agent\n");
    let with_rules = old.session(client, "asked");
    let run =
        with_rules.run_script(&[json!({"ask": {"tool": "Bash", "input": {"command": "make again"}}})]).await;
    assert_eq!(run["text"], "allowed", "`allow_always` is remembered");
    let spent = old.session(client, "out of money");
    assert_eq!(spent.wait(&spent.prompt("more").await).await["finish_reason"], "budget_exceeded");
}

/// Waits until no run of the whole home is unfinished.
async fn expect_all_runs_to_finish(old: &OldHome, client: &TestClient) {
    poll_until("the end of every run", async || {
        let runs = client.get(&format!("/v1/workspaces/{}/runs", old.named("workspace"))).await.list();
        runs.iter().all(|run| run["state"] == "finished").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_home_of_release_0_1_0_is_all_there_and_its_open_work_goes_on() {
    let mut old = OldHome::unpack("0.1.0");
    let daemon = TestDaemon::start_in(std::mem::take(&mut old.home), |_| {}).await;
    expect_history(&old, &daemon.client()).await;
    expect_open_work_to_end(&old, &daemon.client()).await;
    expect_all_runs_to_finish(&old, &daemon.client()).await;
    // Its worker was not there, so its ask had nobody left to wait for the answer.
    let waiting = old.session(&daemon.client(), "waiting");
    assert_eq!(waiting.run(&old.named("asking_run")).await["finish_reason"], "interrupted");
    assert_eq!(waiting.run(&old.named("queued_run")).await["text"], "behind");
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_read_is_rebuilt_from_the_events() {
    let mut old = OldHome::unpack("0.1.0");
    let journal = rusqlite::Connection::open(old.home.path().join("journal.db")).unwrap();
    let spoiled =
        journal.execute("UPDATE snapshots SET state = CAST('{\"of\": \"a later release\"}' AS BLOB)", []);
    assert!(spoiled.unwrap() > 0, "the home has snapshots");
    drop(journal);
    let daemon = TestDaemon::start_in(std::mem::take(&mut old.home), |_| {}).await;
    expect_history(&old, &daemon.client()).await;
    expect_open_work_to_end(&old, &daemon.client()).await;
    expect_all_runs_to_finish(&old, &daemon.client()).await;
}

#[tokio::test]
async fn a_worker_that_speaks_as_release_0_1_0_did_is_found_again() {
    let mut old = OldHome::unpack("0.1.0");
    let worker = tokio::spawn(RecordedWorker::open(&old).play());
    let daemon = TestDaemon::start_in(std::mem::take(&mut old.home), |_| {}).await;
    let waiting = old.session(&daemon.client(), "waiting");
    waiting.wait_for_event("the worker", |event| event.kind == "worker.reattached").await;

    let ask = old.named("ask");
    assert!(
        daemon.client().pending_asks().await.iter().any(|open| open["id"] == ask),
        "the ask is still open"
    );
    daemon.client().answer_ask(&ask, &json!({ "decision": "allow_once" })).await.expect(200);
    let asked = waiting.wait(&old.named("asking_run")).await;
    assert_eq!(
        (&asked["finish_reason"], &asked["text"]),
        (&json!("end_turn"), &json!("may I? allowed thanks"))
    );
    daemon.client().delete("/v1/halt").await.expect(200);
    assert_eq!(waiting.wait(&old.named("queued_run")).await["text"], "behind");
    qd_testkit::journal_rules::check(&waiting.events().await);

    daemon.client().delete(&waiting.path("")).await;
    worker.await.unwrap();
}

/// The worker of the fixture's session `waiting`, played from the recording: only its nonce and its proof are new.
struct RecordedWorker {
    listener: UnixListener,
    /// Held for as long as the worker is to count as alive.
    _lock: File,
    secret: String,
    frames: Vec<(String, Value)>,
}

impl RecordedWorker {
    fn open(old: &OldHome) -> Self {
        let (worker, workers) = (old.named("worker"), old.home.path().join("workers"));
        let lock = File::options().write(true).open(workers.join(format!("{worker}.lock"))).unwrap();
        lock.try_lock().unwrap();
        let key = fs::read_to_string(workers.join("key")).unwrap();
        Self {
            listener: UnixListener::bind(workers.join(format!("{worker}.sock"))).unwrap(),
            _lock: lock,
            secret: hmac_hex(key.trim(), format!("secret:{worker}").as_bytes()),
            frames: old.recorded_frames(),
        }
    }

    /// Says what was recorded, each frame after the daemon has said what it answered. How often the daemon
    /// acknowledges, and which limits it sends, may differ; its commands may not.
    async fn play(self) {
        const NONCE: &str = "0123456789abcdef0123456789abcdef";
        #[expect(clippy::result_large_err, reason = "the callback's type is the library's")]
        let choose = |_: &Request, mut response: Response| {
            response.headers_mut().insert("sec-websocket-protocol", "quarterdeck.v1".parse().unwrap());
            Ok(response)
        };
        let (stream, _) = self.listener.accept().await.unwrap();
        let mut daemon = accept_hdr_async(stream, choose).await.unwrap();
        let mut daemons_nonce = String::new();
        for (from, recorded) in self.frames {
            if from == "worker" {
                let mut frame = recorded;
                if let Some(hello) = frame.get_mut("hello") {
                    let words = format!("worker\n{daemons_nonce}\n{NONCE}\n");
                    hello["nonce"] = json!(NONCE);
                    hello["proof"] = json!(hmac_hex(&self.secret, words.as_bytes()));
                }
                daemon.send(Message::text(frame.to_string())).await.unwrap();
                continue;
            }
            let wanted = command_name(&recorded);
            if ["ack", "limits"].contains(&wanted.as_str()) {
                continue;
            }
            loop {
                let frame = daemon.next().await.expect("the daemon keeps the connection").unwrap();
                let Message::Text(text) = frame else { continue };
                let frame: Value = serde_json::from_str(&text).unwrap();
                if command_name(&frame) == wanted {
                    if let Some(nonce) = frame["hello"]["nonce"].as_str() {
                        daemons_nonce = nonce.to_owned();
                    }
                    break;
                }
            }
        }
    }
}

/// What a daemon's frame tells the worker to do: `hello`, `ack`, `close`, or the command below `do`.
fn command_name(frame: &Value) -> String {
    let key = |value: &Value| match value {
        Value::String(name) => name.clone(),
        Value::Object(fields) => fields.keys().next().cloned().unwrap_or_default(),
        _ => String::new(),
    };
    match frame.get("do") {
        Some(command) => key(command),
        None => key(frame),
    }
}

fn hmac_hex(key: &str, message: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).unwrap();
    mac.update(message);
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}
