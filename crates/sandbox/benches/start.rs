//! Compares the start of `/bin/true` in a sandbox, until it is reaped, with its plain start in the same run. The sandbox
//! is made anew each time. Prints a table, and fails if a level costs more than it may; a number as argument sets the
//! rounds.
#![expect(clippy::print_stdout, reason = "a benchmark's table is its output")]
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop where it does")]

use std::path::Path;
use std::process::Command;

use qd_protocol::sandbox::SandboxLevel;
use qd_protocol::sandbox_spec::SandboxSpec;
use qd_sandbox::SandboxPlan;

const PROGRAM: &str = env!("CARGO_BIN_EXE_sandbox-under-test");
/// What each level may cost, in milliseconds.
const LEVELS: [(SandboxLevel, f64); 2] = [(SandboxLevel::Deck, 2.0), (SandboxLevel::Workspace, 4.0)];

fn main() {
    let rounds: u32 = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(200);
    let folder = tempfile::tempdir().unwrap();
    let (home, workspace) = (folder.path().join("home"), folder.path().join("project"));
    std::fs::create_dir_all(home.join("mail")).unwrap();
    std::fs::create_dir_all(workspace.join(".git/hooks")).unwrap();
    let spec = SandboxSpec {
        mail_folder: Some(home.join("mail")),
        home,
        workspace: workspace.clone(),
        credential_paths: vec!["~/.ssh".to_owned()],
        ..SandboxSpec::default()
    };
    let plan = |level| SandboxPlan::new(&spec, level, &workspace, |name| std::env::var(name).ok());
    let plans = LEVELS.map(|(level, _)| serde_json::to_string(&plan(level)).unwrap());
    let output = Command::new(Path::new(PROGRAM))
        .arg("time")
        // The first round warms the caches.
        .arg((rounds + 1).to_string())
        .args(plans)
        .output()
        .unwrap();
    let rows = String::from_utf8(output.stdout).unwrap();
    let times = |column: usize| {
        let cell = |row: &str| row.split(' ').nth(column).unwrap().parse::<f64>().unwrap() / 1e3;
        let mut times: Vec<f64> = rows.lines().skip(1).map(cell).collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let at = |times: &[f64], share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    println!("{:<24}{:>10}{:>10}{:>14}", "", "p50 ms", "p95 ms", "p50 added ms");
    let plain = times(0);
    println!("{:<24}{:>10.2}{:>10.2}", "plain", at(&plain, 0.5), at(&plain, 0.95));
    let mut missed = Vec::new();
    for (column, (level, limit)) in LEVELS.into_iter().enumerate() {
        let times = times(column + 1);
        let added = at(&times, 0.5) - at(&plain, 0.5);
        let name = format!("{level:?}").to_lowercase();
        println!("{name:<24}{:>10.2}{:>10.2}{added:>14.2}", at(&times, 0.5), at(&times, 0.95));
        if added > limit {
            missed.push(format!("{name} costs {added:.2} ms; the limit is {limit} ms"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("; "));
}
