//! `qd cost`: the sums of what sessions have used, by agent, model, session, workspace and day.

use qd_testkit::script::{cost, late, say, usage};
use qd_testkit::{TestDaemon, TestSession, poll_until};
use serde_json::{Value, json};

async fn report(daemon: &TestDaemon, query: &str) -> Value {
    // On a busy machine, the index may take longer than a request waits.
    poll_until("a complete report", async || {
        let report = daemon.client().get(&format!("/v1/usage{query}")).await.expect(200);
        (report["complete"] == true).then_some(report)
    })
    .await
}

/// Keys, input tokens and costs of the rows.
fn rows(report: &Value) -> Vec<(Value, u64, Value)> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| (row["key"].clone(), row["input_tokens"].as_u64().unwrap(), row["cost_usd"].clone()))
        .collect()
}

/// The sums of all sessions as their own routes show them.
async fn sum_of_sessions(daemon: &TestDaemon) -> (u64, u64, f64) {
    let sessions = daemon.client().get("/v1/sessions").await.list();
    sessions.iter().fold((0, 0, 0.0), |(input, output, cost), session| {
        let usage = &session["usage"];
        (
            input + usage["input_tokens"].as_u64().unwrap(),
            output + usage["output_tokens"].as_u64().unwrap(),
            cost + usage["cost_usd"].as_f64().unwrap(),
        )
    })
}

#[track_caller]
fn assert_total(report: &Value, (input, output, cost): (u64, u64, f64)) {
    let total = &report["total"];
    assert_eq!(
        (total["input_tokens"].as_u64(), total["output_tokens"].as_u64()),
        (Some(input), Some(output))
    );
    let shown = total["cost_usd"].as_f64().unwrap_or_default();
    assert!((shown - cost).abs() < 1e-9, "{shown} is not {cost}");
}

#[tokio::test]
async fn every_grouping_adds_up_to_the_usage_of_the_sessions() {
    let daemon = TestDaemon::start().await;
    let workspace = daemon.workspace().await;
    let small = json!({ "agent": "script", "model": "small", "title": "first" });
    let (first, second) = (workspace.session_with(small).await, workspace.session("script").await);
    first.run_script(&[usage(100, 10, 0.25), usage(50, 5, 0.1), say("x")]).await;
    first.patch(json!({ "model": "large" })).await;
    first.run_script(&[usage(1000, 1, 1.5)]).await;
    second.run_script(&[usage(7, 3, 0.0), usage(7, 3, 0.0)]).await;
    let other_dir = daemon.home.sibling_path("other");
    std::fs::create_dir(&other_dir).unwrap();
    let third = daemon.client().workspace(&other_dir).await.session("script").await;
    third.run_script(&[cost(0.5)]).await;
    let sum = sum_of_sessions(&daemon).await;
    for by in ["agent", "model", "session", "workspace", "day"] {
        let report = report(&daemon, &format!("?by={by}")).await;
        assert_total(&report, sum);
        let rows = rows(&report);
        assert_eq!(rows.iter().map(|(_, input, _)| input).sum::<u64>(), sum.0, "{by}: {rows:?}");
        let total = &report["total"];
        assert_eq!((&total["runs"], &total["runs_without_cost"]), (&json!(4), &json!(1)), "{by}");
    }
    assert_eq!(
        rows(&report(&daemon, "?by=model").await),
        [
            (json!("large"), 1000, json!(1.5)),
            (Value::Null, 15, json!(0.5)),
            (json!("small"), 150, json!(0.35)),
        ]
    );
    let sessions = report(&daemon, "?by=session").await;
    assert_eq!(rows(&sessions)[2], (json!(second.id), 14, Value::Null), "an unknown cost is not zero");
    assert_eq!(sessions["rows"][0]["label"], "first");
    assert_eq!(sessions["rows"][0]["input_tokens"], first.show().await["usage"]["input_tokens"]);
    let workspaces = report(&daemon, "?by=workspace").await;
    assert_eq!(workspaces["rows"][1]["label"], json!(other_dir.canonicalize().unwrap()));
}

#[tokio::test]
async fn usage_from_after_a_run_counts_and_a_restart_and_a_rebuild_change_nothing() {
    let mut daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    for round in 0..3 {
        let run = session.prompt_script(&[usage(10 + round, 2, 0.125), late("late")]).await;
        session.wait_for_run_event(&run, "usage.reported").await;
        daemon.restart().await;
        session.wait(&run).await;
    }
    let before = report(&daemon, "?by=session").await;
    assert_total(&before, (33, 6, 0.375));
    assert_total(&before, sum_of_sessions(&daemon).await);
    daemon.qd(&["search", "--rebuild"]).await.ok();
    assert_eq!(report(&daemon, "?by=session").await["rows"], before["rows"]);
}

#[tokio::test]
async fn the_command_line_shows_a_table_with_bars_and_says_what_is_unknown() {
    let daemon = TestDaemon::start().await;
    let (known, unknown) = (daemon.session("script").await, daemon.session("script").await);
    known.run_script(&[usage(1_234_567, 89, 2.5)]).await;
    unknown.run_script(&[usage(10, 1, 0.0)]).await;
    report(&daemon, "").await;
    let output = daemon.qd(&["cost", "--by", "session"]).await;
    assert!(output.stderr.contains("1 of 2 runs reported tokens but no cost"), "{}", output.stderr);
    let table = output.ok();
    let line = |text: &str| table.lines().find(|line| line.contains(text)).unwrap().to_owned();
    assert!(table.starts_with("SESSION"), "{table}");
    let known_line = line(&known.id);
    assert!(known_line.contains("1,234,567  ") && known_line.contains("$2.50  █"), "{table}");
    assert!(line(&unknown.id).ends_with("unknown"), "{table}");
    assert!(line("total").ends_with("over $2.50"), "{table}");
    let by_agent = daemon.qd(&["cost", "--since", "1h", "--json"]).await.json();
    assert_eq!((&by_agent["by"], &by_agent["rows"][0]["key"]), (&json!("agent"), &json!("script")));
    let command = daemon.qd(&["cost", "--since", "2999-01-01", "--json"]).await.json();
    assert_eq!((&command["rows"], &command["total"]["input_tokens"]), (&json!([]), &json!(0)));
    for bad in [&["cost", "--by", "hour"][..], &["cost", "--since", "later"]] {
        daemon.qd(bad).await.expect_exit(2);
    }
}

#[tokio::test]
async fn days_are_those_of_the_callers_zone() {
    let daemon = TestDaemon::start().await;
    let session = daemon.session("script").await;
    let run = session.run_script(&[usage(5, 5, 0.5)]).await;
    let events = session.events_of(run["id"].as_str().unwrap()).await;
    let reported = events.iter().find(|event| event.kind == "usage.reported").unwrap();
    let date = async |zone: &str| -> String {
        let report = report(&daemon, &format!("?by=day&zone={zone}")).await;
        report["rows"][0]["key"].as_str().unwrap().to_owned()
    };
    assert_eq!(date("UTC").await, reported.ts[..10]);
    let (west, east) = (date("-12:00").await, date("%2B14:00").await);
    assert!(west < east, "somewhere it is always another day: {west} {east}");
    for bad in ["?zone=Mars", "?by=hour", "?since=7d", "?what=x", "?zone="] {
        daemon.client().get(&format!("/v1/usage{bad}")).await.expect_refusal(400, "invalid_value");
    }
}

#[tokio::test]
async fn a_purged_session_no_longer_counts() {
    let daemon = TestDaemon::start().await;
    let (kept, purged): (TestSession, TestSession) =
        (daemon.session("script").await, daemon.session("script").await);
    kept.run_script(&[usage(1, 1, 0.25)]).await;
    purged.run_script(&[usage(10, 10, 0.5)]).await;
    assert_total(&report(&daemon, "").await, (11, 11, 0.75));
    daemon.qd(&["rm", "--purge", &purged.id]).await.ok();
    let client = daemon.client();
    let is_gone = async || (client.get(&purged.path("")).await.status == 404).then_some(());
    poll_until("the end of the session", is_gone).await;
    assert_total(&report(&daemon, "").await, (1, 1, 0.25));
    assert_total(&report(&daemon, "").await, sum_of_sessions(&daemon).await);
}
