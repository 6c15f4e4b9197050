//! Real programs in terminals, with a manifest only where they cannot be understood without one.

use std::time::Duration;

use qd_keeper::procfs;
use qd_link::record;
use qd_link::socket::{ClientUpgrade, IncomingFrame, Socket};
use qd_link::terminal_handshake::TerminalRequestError;
use qd_protocol::event::{AskAnswer, PermissionDecision};
use qd_protocol::link::{
    AgentCommand, AgentExitReason, AgentUpdate, AskResolution, TurnStopReason, TurnUpdate,
};
use qd_protocol::manifest::Manifest;

use qd_protocol::frame::terminal::{SUBPROTOCOL, ViewerFrame};
use qd_protocol::worker::{AgentSpec, Secret};
use tokio::net::UnixStream;

use crate::harness::{DaemonSide, WorkerUnderTest, agent_spec, secret, wait_until_all_exited};

/// A shell without anybody's settings.
const BASH: &str = "pty:bash --norc --noprofile";

/// Parses a manifest from JSON.
fn parse_manifest(text: &str) -> Box<Manifest> {
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    Box::new(serde_json::from_value(value).unwrap())
}

/// A person who watches a terminal.
struct TerminalViewer {
    socket: Socket<UnixStream>,
    /// The output shown so far, as it arrived.
    shown: String,
}

impl TerminalViewer {
    async fn connect(
        worker: &WorkerUnderTest,
        spec: &AgentSpec,
        secret: &Secret,
    ) -> Result<Self, TerminalRequestError> {
        let stream = record::connect_to_worker(worker.home.path(), spec.worker.as_str()).await.unwrap();
        let subprotocol = Some(SUBPROTOCOL.to_owned());
        let upgrade = ClientUpgrade { host: "worker".into(), path: "/".into(), subprotocol, token: None };
        let (mut socket, _) = Socket::connect(stream, &upgrade).await.unwrap();
        qd_link::terminal_handshake::request_terminal(
            &mut socket,
            spec.session.clone(),
            spec.worker.clone(),
            secret,
        )
        .await?;
        Ok(Self { socket, shown: String::new() })
    }

    async fn wait_for(&mut self, expected: &str) {
        let wait = async {
            while !self.shown.contains(expected) {
                match self.socket.next().await.unwrap() {
                    IncomingFrame::Binary(paint) => self.shown.push_str(std::str::from_utf8(&paint).unwrap()),
                    IncomingFrame::Text(text) => self.shown.push_str(text.as_str()),
                    IncomingFrame::Alive => {}
                }
            }
        };
        let seen = tokio::time::timeout(Duration::from_secs(20), wait).await;
        seen.unwrap_or_else(|_| panic!("{expected:?} is not in {:?}", self.shown));
        self.shown.clear();
    }

    async fn type_keys(&mut self, keys: &'static str) {
        self.socket.queue_binary(keys.as_bytes().into()).unwrap();
        self.socket.flush().await.unwrap();
    }
}

async fn run_prompt(daemon: &mut DaemonSide, run: &str, prompt: &str) -> String {
    daemon.prompt(run, prompt);
    let ended = daemon.wait_for_end(run).await;
    assert_eq!(ended.outcome.stop, TurnStopReason::EndTurn, "{prompt}: {:?}", ended.outcome);
    ended.text
}

#[tokio::test]
async fn a_shell_needs_no_manifest_and_keeps_its_memory() {
    let (worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    assert_eq!(run_prompt(&mut daemon, "a", "echo hi").await, "hi");
    assert_eq!(run_prompt(&mut daemon, "b", "X=1").await, "");
    assert_eq!(run_prompt(&mut daemon, "c", "echo $X").await, "1");
    assert_eq!(run_prompt(&mut daemon, "d", "echo a\n\necho b").await, "a\nb");
    assert_eq!(run_prompt(&mut daemon, "e", "printf 'no end'").await, "no end");
    assert_eq!(run_prompt(&mut daemon, "f", "clear; echo after").await, "after");
    let long = "word ".repeat(200);
    assert_eq!(run_prompt(&mut daemon, "g", &format!("echo {long}")).await, long.trim_end());
    let numbers: Vec<String> = (1..=500).map(|n| n.to_string()).collect();
    assert_eq!(run_prompt(&mut daemon, "h", "seq 500").await, numbers.join("\n"));
    assert_eq!(
        run_prompt(&mut daemon, "i", "echo $TERM; tty | cut -c1-9; stty size").await,
        "xterm-256color\n/dev/pts/\n40 120"
    );
    let home = worker.home.path().canonicalize().unwrap();
    assert_eq!(run_prompt(&mut daemon, "j", "pwd").await, home.to_str().unwrap());
}

#[tokio::test]
async fn what_a_shell_says_comes_while_it_works() {
    let (_worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    daemon.prompt("a", "echo first; until test -e go; do sleep 0.05; done; echo second");
    daemon.wait_for_text("first").await;
    std::fs::write(_worker.home.path().join("go"), "").unwrap();
    assert_eq!(daemon.wait_for_end("a").await.text, "\nsecond");
}

#[tokio::test]
async fn an_interpreter_needs_no_manifest() {
    let (_worker, mut daemon) = WorkerUnderTest::attached("pty:python3 -q", |_| {}).await;
    assert_eq!(run_prompt(&mut daemon, "a", "x = 20 + 1").await, "");
    assert_eq!(run_prompt(&mut daemon, "b", "x * 2").await, "42");
    assert_eq!(run_prompt(&mut daemon, "c", "for n in range(2):\n    print(n)\n\n").await, "0\n1");
    assert!(run_prompt(&mut daemon, "d", "1 / 0").await.contains("ZeroDivisionError"));
}

#[tokio::test]
async fn a_cancelled_turn_leaves_nothing_and_the_shell_goes_on() {
    let (worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    let spec = agent_spec(&worker.home, BASH, "one");
    assert_eq!(run_prompt(&mut daemon, "a", "X=kept").await, "");
    daemon.prompt("b", "setsid -f sleep 601; echo begun; sleep 600");
    daemon.wait_for_text("begun").await;
    daemon.cancel("b");
    let ended = daemon.wait_for_end("b").await;
    assert_eq!((ended.outcome.stop, ended.outcome.processes.survivors), (TurnStopReason::Cancelled, 0));
    assert_eq!(procfs::find_marked(&spec.mark).len(), 1, "only the shell is left");
    // On a busy machine the shell is interrupted a second time, and also says that its program was terminated.
    let text = run_prompt(&mut daemon, "c", "echo $X").await;
    assert!(["kept", "kept\nTerminated"].contains(&text.as_str()), "{text:?}");
}

#[tokio::test]
async fn a_turn_that_ignores_its_interrupt_is_ended_and_the_shell_goes_on() {
    let (_worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    assert_eq!(run_prompt(&mut daemon, "a", "X=kept").await, "");
    daemon.prompt("b", "sh -c 'trap \"\" INT; echo begun; sleep 600; sleep 600'");
    daemon.wait_for_text("begun").await;
    daemon.cancel("b");
    let ended = daemon.wait_for_end("b").await;
    assert_eq!((ended.outcome.stop, ended.outcome.processes.survivors), (TurnStopReason::Cancelled, 0));
    let text = run_prompt(&mut daemon, "c", "echo $X").await;
    assert!(text.contains("kept"), "{text:?}");
}

#[tokio::test]
async fn a_cancel_right_behind_its_prompt_is_not_lost() {
    let (_worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    for n in 0..10 {
        let name = format!("run{n}");
        daemon.prompt(&name, "sleep 600");
        tokio::time::sleep(Duration::from_millis(n * 7)).await;
        daemon.cancel(&name);
        assert_eq!(daemon.wait_for_end(&name).await.outcome.stop, TurnStopReason::Cancelled);
    }
    assert_eq!(run_prompt(&mut daemon, "after", "echo fine").await, "fine");
}

#[tokio::test]
async fn a_program_that_shows_nothing_is_refused_with_a_clear_word() {
    let (mut worker, spec) = WorkerUnderTest::with("pty:cat", |_| {}).await;
    let mut daemon = worker.attach(&spec, 0, None);
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it is no success") };
    assert!(error.message.starts_with("cannot tell when cat has finished"), "{error:?}");
    assert!(error.message.contains("`idle`"), "{error:?}");
    wait_until_all_exited(&spec).await;
    worker.wait_for_exit().await;
}

#[tokio::test]
async fn a_program_that_ends_in_its_turn_or_before_it_is_told_with_its_last_lines() {
    let (_worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    daemon.prompt("a", "echo goodbye; exit 3");
    let AgentExitReason::Failed(error) = daemon.wait_for_gone().await else { panic!("it failed") };
    assert_eq!(error.exit_status, Some(3), "{error:?}");
    assert!(error.stderr.iter().any(|line| line == "goodbye"), "{error:?}");

    let (worker, spec) = WorkerUnderTest::with("pty:sh -c 'echo no such thing; exit 4'", |_| {}).await;
    let AgentExitReason::Failed(error) = worker.attach(&spec, 0, None).wait_for_gone().await else {
        panic!("it failed")
    };
    assert_eq!((error.exit_status, &error.stderr[..]), (Some(4), &["no such thing".to_owned()][..]));

    let (worker, spec) = WorkerUnderTest::with("pty:/no/such/program", |_| {}).await;
    let AgentExitReason::Failed(error) = worker.attach(&spec, 0, None).wait_for_gone().await else {
        panic!("it failed")
    };
    assert!(error.stderr[0].contains("/no/such/program could not be started"), "{error:?}");
}

#[tokio::test]
async fn a_full_screen_program_is_driven_by_its_manifest() {
    let (worker, mut daemon) = WorkerUnderTest::attached("pager", |host| {
        let text: String = (1..=200).map(|n| format!("line {n}\n")).collect();
        std::fs::write(host.agents[0].cwd.join("book"), text).unwrap();
        // The prompt of `less` is `:`, or `(END)` at the end of the file; it reports a failed search in the same line.
        host.agents[0].manifest = Some(parse_manifest(
            r#"{"agent": {"name": "pager", "driver": "pty"},
                "startup": {"command": ["less", "-M", "-PM:$", "book"], "ready_when": {"pattern": "^:$"},
                            "env": {"LESSHISTFILE": "-"}},
                "pty": {"rows": 10},
                "parse": {"idle": ["^:$", "^Pattern not found"], "error_lines": ["^Pattern not found"]}}"#,
        ));
    })
    .await;
    let lines = |range: std::ops::RangeInclusive<u32>| {
        range.map(|n| format!("line {n}")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(run_prompt(&mut daemon, "a", "/line 150").await, lines(150..=158));
    assert_eq!(
        run_prompt(&mut daemon, "b", "/line 155").await,
        lines(159..=163),
        "what it did not show before"
    );
    let spec = agent_spec(&worker.home, "pager", "one");
    assert_eq!(procfs::find_marked(&spec.mark).len(), 1);
}

/// A program that asks two questions about every prompt.
async fn start_asker() -> (WorkerUnderTest, DaemonSide) {
    let script = r#"printf '> '; while read -r line; do
        printf 'Do %s? [y/n] ' "$line"; read -r yes; echo "yes: $yes"
        printf 'Which?\n 1. red\n 2. blue\n'; read -r which; echo "which: $which"
        printf '> '; done"#;
    WorkerUnderTest::attached("asker", |host| {
        let mut manifest = parse_manifest(
            r#"{"agent": {"name": "asker", "driver": "pty"},
                "parse": {"ask_yes_no": ["\\[y/n\\]"], "ask_options": ["^Which"], "error_lines": ["^which: 2"]}}"#,
        );
        manifest.startup.command = vec!["sh".into(), "-c".into(), script.into()];
        host.agents[0].manifest = Some(manifest);
    })
    .await
}

#[tokio::test]
async fn what_a_program_asks_is_asked_and_answered_by_keys() {
    let (_worker, mut daemon) = start_asker().await;
    daemon.prompt("a", "it");
    let mut prompts = Vec::new();
    let (mut text, mut number) = (String::new(), 1000);
    let outcome = loop {
        match daemon.next_update().await {
            AgentUpdate::Ask { ask, .. } => {
                prompts.push(ask.prompt.clone());
                number += 1;
                let answer = match ask.options.is_empty() {
                    true => {
                        AskAnswer { decision: Some(PermissionDecision::AllowOnce), ..AskAnswer::default() }
                    }
                    false => AskAnswer { value: Some("blue".into()), ..AskAnswer::default() },
                };
                let number = qd_protocol::EventNumber(number);
                daemon.link.send(AgentCommand::Answer {
                    number,
                    ask: ask.id,
                    answer: AskResolution::Answered(answer),
                });
            }
            AgentUpdate::Turn { update: TurnUpdate::Text { text: piece }, .. } => text.push_str(&piece),
            AgentUpdate::TurnEnded { outcome, .. } => break outcome,
            _ => {}
        }
    };
    assert_eq!(prompts, ["Do it? [y/n]", "Which?"]);
    assert!(text.contains("yes: y") && text.contains("which: 2"), "{text}");
    assert_eq!(outcome.stop, TurnStopReason::Error, "its manifest says that this line means failure");
    assert_eq!(outcome.error.unwrap().message, "which: 2");
}

#[tokio::test]
async fn what_somebody_at_the_terminal_answers_is_no_longer_asked() {
    let (worker, mut daemon) = start_asker().await;
    let spec = agent_spec(&worker.home, "asker", "one");
    let mut viewer = TerminalViewer::connect(&worker, &spec, &secret()).await.unwrap();
    daemon.prompt("a", "it");
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ask { .. })).await;
    viewer.wait_for("[y/n]").await;
    viewer.type_keys("y\r").await;
    daemon.wait_for(|update| matches!(update, AgentUpdate::AskWithdrawn { .. })).await;
    daemon.wait_for(|update| matches!(update, AgentUpdate::Ask { .. })).await;
    viewer.type_keys("1\r").await;
    let mut updates = daemon.wait_for(|update| matches!(update, AgentUpdate::TurnEnded { .. })).await;
    assert!(updates.iter().any(|update| matches!(update, AgentUpdate::AskWithdrawn { .. })));
    let Some(AgentUpdate::TurnEnded { outcome, .. }) = updates.pop() else { panic!("the end") };
    assert_eq!(outcome.stop, TurnStopReason::EndTurn);
}

#[tokio::test]
async fn any_number_of_viewers_may_watch_if_they_know_the_secret() {
    let (worker, mut daemon) = WorkerUnderTest::attached(BASH, |_| {}).await;
    let spec = agent_spec(&worker.home, BASH, "one");
    assert_eq!(run_prompt(&mut daemon, "a", "echo before").await, "before");
    let mut first = TerminalViewer::connect(&worker, &spec, &secret()).await.unwrap();
    let mut second = TerminalViewer::connect(&worker, &spec, &secret()).await.unwrap();
    first.wait_for("before").await;
    second.wait_for("before").await;
    first.type_keys("echo by hand\r").await;
    second.wait_for("by hand").await;
    second.socket.send(&ViewerFrame::Size { cols: 91, rows: 17 }).await.unwrap();
    first.wait_for("by hand").await;
    assert_eq!(run_prompt(&mut daemon, "b", "stty size").await, "17 91");
    drop(first);
    daemon.prompt("c", "exit");
    second.wait_for("over").await;
    let wrong = TerminalViewer::connect(&worker, &spec, &Secret("wrong".to_owned())).await;
    assert!(matches!(wrong, Err(TerminalRequestError::WrongSecret)), "the worker is of no use to a stranger");
}
