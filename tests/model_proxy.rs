//! An agent without network reaches its model through a proxy of ours, and nothing else.

use std::sync::Arc;

use parking_lot::Mutex;
use qd_testkit::{TestDaemon, TestSession, poll_until, script::*};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What an agent runs to find out what it can reach. It gets a URL of its model, and writes what it found.
const EXPLORE: &str = r#"
import http.client, json, os, socket, sys, urllib.error, urllib.parse, urllib.request
model, result = sys.argv[1], sys.argv[2]
host, port = urllib.parse.urlsplit(model).hostname, urllib.parse.urlsplit(model).port or 443
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
def fetch(url):
    try:
        return urllib.request.urlopen(url).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code) + " " + error.read().decode()
    except OSError as error:
        return "unreachable"
def tunnel(port):
    connection = http.client.HTTPConnection(proxy.hostname, proxy.port)
    connection.set_tunnel(host, port)
    try:
        connection.request("GET", "/tunnelled")
        return connection.getresponse().read().decode()
    except OSError as error:
        return str(error)
def direct():
    try:
        socket.create_connection((host, port), 5)
        return "connected"
    except OSError:
        return "unreachable"
found = {
    "plain": fetch(model + "/plain?x=1"),
    "tunnelled": tunnel(port),
    "direct": direct(),
    "another host": fetch("http://example.invalid/"),
    "another port": tunnel(port % 65535 + 1),
    "own server": "",
}
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nmine")
    os._exit(0)
found["own server"] = fetch("http://localhost:%d/" % server.getsockname()[1])
open(result + ".part", "w").write(json.dumps(found))
os.rename(result + ".part", result)
"#;

/// A server on this machine that answers every request alike and remembers what it was asked.
struct AnsweringServer {
    port: u16,
    heads: Arc<Mutex<Vec<String>>>,
}

impl AnsweringServer {
    /// Serves as a model, or as a proxy that pretends to have reached it.
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let recorded = Arc::clone(&heads);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&recorded)));
            }
        });
        Self { port, heads }
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().clone()
    }
}

/// Answers the requests of one connection; after a `CONNECT`, those in the tunnel.
async fn answer(mut stream: TcpStream, heads: Arc<Mutex<Vec<String>>>) {
    let mut bytes = Vec::new();
    while let Ok(byte) = stream.read_u8().await {
        bytes.push(byte);
        if !bytes.ends_with(b"\r\n\r\n") {
            continue;
        }
        let head = String::from_utf8(std::mem::take(&mut bytes)).unwrap();
        let is_tunnel = head.starts_with("CONNECT ");
        heads.lock().push(head);
        let response = match is_tunnel {
            true => "HTTP/1.1 200 OK\r\n\r\n",
            false => "HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nthe model's!",
        };
        stream.write_all(response.as_bytes()).await.unwrap();
    }
}

/// Lets the agent of a session explore what it can reach.
async fn explore(session: &TestSession, model: &str) -> Value {
    let directory = session.run_script(&[config()]).await["text"].as_str().unwrap().to_owned();
    let directory = directory.split(' ').next().unwrap().trim_start_matches("cwd=").to_owned();
    let program = format!("{directory}/explore.py");
    let result = format!("{directory}/found.json");
    std::fs::write(&program, EXPLORE).unwrap();
    let run = session.prompt_script(&[spawn(&["python3", &program, model, &result]), sleep_forever()]).await;
    let found = poll_until("what the agent found", async || {
        serde_json::from_str(&std::fs::read_to_string(&result).ok()?).ok()
    })
    .await;
    session.cancel().await;
    session.wait(&run).await;
    found
}

async fn can_cut_off(daemon: &TestDaemon) -> bool {
    let workspace = daemon.workspace().await;
    let asked = workspace.try_session(json!({ "agent": "script", "network": "off" })).await;
    if asked.status != 201 {
        asked.expect_refusal(409, "sandbox_unavailable");
    }
    asked.status == 201
}

#[tokio::test]
async fn an_agent_without_network_reaches_its_model_and_its_own_servers_and_nothing_else() {
    let model = AnsweringServer::start().await;
    let settings = format!("model_hosts = [\"127.0.0.1:{}\"]\n", model.port);
    let daemon = TestDaemon::start_with_settings(&settings).await;
    if !can_cut_off(&daemon).await {
        return;
    }
    for level in ["deck", "workspace"] {
        let asked = json!({ "agent": "script", "sandbox": level, "network": "off" });
        let session = daemon.session_with(asked).await;
        let found = explore(&session, &format!("http://127.0.0.1:{}", model.port)).await;
        assert_eq!(found["plain"], "the model's!", "{level}: {found}");
        assert_eq!(found["tunnelled"], "the model's!", "{level}: {found}");
        assert_eq!(found["direct"], "unreachable", "{level}: {found}");
        let refused = found["another host"].as_str().unwrap();
        assert!(
            refused.starts_with("403 ") && refused.contains("reaches only its model"),
            "{level}: {found}"
        );
        assert!(found["another port"].as_str().unwrap().contains("403"), "{level}: {found}");
        // Python does not take a model on the same host for an exception, and the agent's own servers have its name.
        assert_eq!(found["own server"], "mine", "{level}: {found}");
        let heads = model.heads();
        let [plain, tunnelled] = &heads[heads.len() - 2..] else { panic!("{heads:?}") };
        assert!(plain.starts_with("GET /plain?x=1 HTTP/1.1\r\n"), "{plain}");
        assert!(plain.to_lowercase().contains(&format!("host: 127.0.0.1:{}\r\n", model.port)), "{plain}");
        assert!(tunnelled.starts_with("GET /tunnelled HTTP/1.1\r\n"), "{tunnelled}");
    }
}

#[tokio::test]
async fn the_way_to_the_model_leads_through_the_proxy_that_the_user_has_set() {
    let user_proxy = AnsweringServer::start().await;
    let daemon = TestDaemon::start_with_settings("model_hosts = [\"model.invalid:8443\"]\n").await;
    if !can_cut_off(&daemon).await {
        return;
    }
    let address = format!("http://me:hunter2@127.0.0.1:{}", user_proxy.port);
    let env = json!({ "HTTP_PROXY": address, "HTTPS_PROXY": address });
    let session = daemon.session_with(json!({ "agent": "script", "network": "off", "env": env })).await;
    let found = explore(&session, "http://model.invalid:8443").await;
    assert_eq!(found["plain"], "the model's!", "{found}");
    assert_eq!(found["tunnelled"], "the model's!", "{found}");
    let heads = user_proxy.heads();
    let [plain, connect, tunnelled] = &heads[..] else { panic!("{heads:?}") };
    assert!(plain.starts_with("GET http://model.invalid:8443/plain?x=1 HTTP/1.1\r\n"), "{plain}");
    assert!(connect.starts_with("CONNECT model.invalid:8443 HTTP/1.1\r\n"), "{connect}");
    for head in [plain, connect] {
        assert!(head.to_lowercase().contains("proxy-authorization: basic"), "{head}");
    }
    assert!(tunnelled.starts_with("GET /tunnelled HTTP/1.1\r\n"), "{tunnelled}");
}

#[tokio::test]
async fn the_proxy_serves_the_next_agent_of_a_session_too_in_the_same_sandbox_or_another() {
    let model = AnsweringServer::start().await;
    let settings = format!("model_hosts = [\"127.0.0.1:{}\"]\nidle_s = 1\n", model.port);
    let daemon = TestDaemon::start_with_settings(&settings).await;
    if !can_cut_off(&daemon).await {
        return;
    }
    let stays = daemon.session_with(json!({ "agent": "script", "network": "off" })).await;
    // A process that a turn has left keeps the sandbox.
    stays.run_script(&[spawn_detached(&["sleep", "600"])]).await;
    let ends = daemon.session_with(json!({ "agent": "script", "network": "off" })).await;
    for session in [&stays, &ends, &stays, &ends] {
        let found = explore(session, &format!("http://127.0.0.1:{}", model.port)).await;
        assert_eq!(found["tunnelled"], "the model's!", "{found}");
        std::fs::remove_file(daemon.home.project_dir().join("found.json")).unwrap();
        poll_until("the idle agents to be stopped", async || {
            daemon.home.processes_with_role("__script").is_empty().then_some(())
        })
        .await;
    }
}
