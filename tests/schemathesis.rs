//! schemathesis sends generated requests to every route of `docs/openapi.json`, valid ones and wrong ones, and compares each
//! answer with the document: status, content type, headers and body. Then it goes on from what answers name: it makes
//! workspaces and sessions, prompts these and follows up on them. `tests/schemathesis` has its pinned packages, and the
//! hooks that let requests meet things that exist.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use qd_testkit::TestDaemon;
use qd_testkit::git::make_repository;

const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,\
                      response_headers_conformance,response_schema_conformance";

#[tokio::test]
async fn every_route_answers_generated_requests_as_its_description_says() {
    // Always the same requests, unless somebody wants others.
    let seed = std::env::var("QD_SEED").unwrap_or_else(|_| "1".to_owned());
    println!("QD_SEED={seed}");
    let program = install();
    let mut daemon = TestDaemon::start_with(|options| _ = options.tcp()).await;
    let address = daemon.listening().iter().find_map(|line| line.strip_prefix("listening on http"));
    let url = format!("http{}", address.unwrap());
    make_repository(&daemon.home.project_dir());
    let folder = daemon.home.sibling_path("schemathesis");
    std::fs::create_dir(&folder).unwrap();
    let mut command = Command::new(program);
    command
        .args(["--config-file", tests_folder().join("schemathesis/schemathesis.toml").to_str().unwrap()])
        .args(["run", tests_folder().join("../docs/openapi.json").to_str().unwrap(), "--url", &url])
        .args(["--seed", &seed, "--checks", CHECKS])
        .args([
            "--phases",
            "examples,coverage,fuzzing,stateful",
            "--suppress-health-check",
            "all",
            "--no-shrink",
        ])
        .args(["--continue-on-failure", "--warnings", "off", "--no-color"])
        // A busy machine may be slow. A request that hangs is ended by the limit that every test has.
        .args(["--request-timeout", "600"])
        .env("SCHEMATHESIS_HOOKS", "real_ids")
        .env("PYTHONPATH", tests_folder().join("schemathesis"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("QD_URL", &url)
        .env("QD_TOKEN", daemon.token())
        .env("QD_PROJECT", daemon.home.project_dir())
        .current_dir(&folder)
        .stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let summary = report.split("SUMMARY").nth(1).unwrap_or(&report);
    println!("{summary}");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "with QD_SEED={seed}: {report}{stderr}");
    // The one route that the requests may not reach with effect: it would have ended the run.
    daemon.tcp().post("/v1/shutdown", &serde_json::json!({ "workers": true })).await.expect(202);
    assert_eq!(daemon.wait_for_exit().await, Some(0));
}

/// Installs schemathesis if necessary. If that fails, the test fails; it is not skipped.
fn install() -> PathBuf {
    let output = Command::new(tests_folder().join("schemathesis/install")).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "failed to install schemathesis: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).unwrap().trim_end().into()
}

fn tests_folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests"))
}
