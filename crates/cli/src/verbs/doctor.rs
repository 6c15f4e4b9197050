//! `qd doctor`: checks the installation and suggests fixes. Each check prints one line: ok, warn or bad.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use qd_home::{DaemonConfig, DaemonHome};
use qd_protocol::api::{
    Agent, DaemonVersion, JournalCheckReport, JournalDamage, ManifestProblem, WorkerToken,
};
use qd_protocol::limits;
use qd_protocol::sandbox::SandboxLevel;
use qd_protocol::sandbox_spec::SandboxSupport;
use serde::Serialize;

use super::{VerbContext, workspace};
use crate::client::DaemonClient;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::style::TextStyle;
use crate::render::text::format_size;
use crate::render::visible_text::show_hidden;

/// Below this much free space, a journal of a few days may not fit.
const LOW_DISK_BYTES: u64 = 1 << 30;

/// For damage in what the events can restore.
const REBUILD_ADVICE: &str = "run `qd stop`, copy the home, then run `qd doctor --rebuild`; if that fails, restore a backup of the journal";
/// For damage in the events themselves, which exist nowhere else.
const RESTORE_ADVICE: &str = "copy the home, then restore a backup of the journal (docs/operations.md, Backup); \
     what is not damaged can still be read until then";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum DoctorLevel {
    Ok,
    Warn,
    Bad,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct DoctorFinding {
    level: DoctorLevel,
    check: &'static str,
    message: String,
    /// How to fix it.
    advice: Option<String>,
}

/// Runs all checks, or rebuilds the lists.
pub(crate) async fn doctor(context: &VerbContext, rebuild: bool) -> Result<CliExitCode> {
    if rebuild {
        return rebuild_lists(context).await;
    }
    let home = &context.locator.home;
    let mut findings =
        vec![check_platform(), check_home(home), check_settings(home), check_disk(home.path())];
    findings.extend(check_sandbox(&qd_keeper::probe_sandbox_support()));
    match context.client().await {
        Ok(client) => {
            findings.extend(check_mode("socket", &home.socket(), 0o600));
            findings.extend(check_mode("token", &home.token_file(), 0o600));
            findings.extend(check_daemon(&client).await);
        }
        Err(failure) => {
            let advice = "see the message above and the files in log/ in the home";
            findings.push(finding(DoctorLevel::Bad, "daemon", failure.to_string(), advice));
            findings.extend(check_journal_file(home));
        }
    }
    let worst = findings.iter().map(|finding| finding.level).max().unwrap_or(DoctorLevel::Ok);
    if context.out.json {
        context
            .out
            .print_json(&serde_json::json!({ "ok": worst != DoctorLevel::Bad, "checks": findings }))?;
    } else {
        let lines: String =
            findings.iter().map(|finding| format_finding(finding, context.out.out_style())).collect();
        context.out.print_data(&lines)?;
    }
    Ok(if worst == DoctorLevel::Bad { CliExitCode::Failed } else { CliExitCode::Success })
}

async fn rebuild_lists(context: &VerbContext) -> Result<CliExitCode> {
    match context.locator.connect(&context.out).await {
        Ok(_) => return Err(CliFailure::Usage("the daemon is running; run `qd stop` first".to_owned())),
        Err(failure @ CliFailure::Unresponsive(_)) => return Err(failure),
        Err(_) => {}
    }
    let report = crate::serve::rebuild_lists(&context.locator.home)?;
    if context.out.json {
        context.out.print_json(&report)?;
    } else {
        context.out.print_line(&format!(
            "rebuilt from {} events: {} workspaces, {} sessions, {} runs, {} asks",
            report.events, report.workspaces, report.sessions, report.runs, report.asks
        ))?;
    }
    Ok(CliExitCode::Success)
}

fn check_platform() -> DoctorFinding {
    let message = format!("qd {} on {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS);
    if cfg!(target_os = "linux") {
        ok_finding("version", message)
    } else {
        let advice = "processes that leave their process group survive a cancel here; on Linux they do not";
        finding(DoctorLevel::Warn, "version", message, advice)
    }
}

fn check_home(home: &DaemonHome) -> DoctorFinding {
    let path = home.path();
    if !path.exists() {
        return ok_finding(
            "home",
            format!("{} does not exist yet; the daemon creates it on first start", path.display()),
        );
    }
    check_mode("home", path, 0o700).unwrap_or_else(|| ok_finding("home", path.display().to_string()))
}

/// Checks the mode of a file or directory. `None` if it does not exist.
fn check_mode(check: &'static str, path: &Path, wanted: u32) -> Option<DoctorFinding> {
    let mode = path.metadata().ok()?.permissions().mode() & 0o777;
    let message = format!("{} has mode {mode:04o}", path.display());
    if mode == wanted {
        return Some(ok_finding(check, message));
    }
    let advice = format!("chmod {wanted:04o} {}", path.display());
    Some(finding(DoctorLevel::Bad, check, message, &advice))
}

fn check_settings(home: &DaemonHome) -> DoctorFinding {
    match DaemonConfig::load(home) {
        Ok(_) => ok_finding("settings", "valid; `qd config` shows them".to_owned()),
        Err(error) => finding(DoctorLevel::Bad, "settings", error.to_string(), "fix that line"),
    }
}

fn check_disk(home: &Path) -> DoctorFinding {
    let existing = home.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(existing) {
        Ok(disk) => judge_free_space(disk.f_bavail.saturating_mul(disk.f_frsize)),
        Err(error) => {
            finding(DoctorLevel::Warn, "disk", format!("free space is unknown: {error}"), "check with df")
        }
    }
}

fn judge_free_space(free: u64) -> DoctorFinding {
    let message = format!("{} free", format_size(free));
    if free < 2 * limits::RESERVE_BYTES {
        finding(DoctorLevel::Bad, "disk", message, "free some space: prompts will be refused")
    } else if free < LOW_DISK_BYTES {
        finding(DoctorLevel::Warn, "disk", message, "free some space; `qd gc` shows what can be deleted")
    } else {
        ok_finding("disk", message)
    }
}

/// Warns about a token of an earlier release, which is not bound to labels.
fn check_worker_token(token: &WorkerToken) -> Option<DoctorFinding> {
    if token.labels.is_some() {
        return None;
    }
    let id = &token.id;
    let message = format!("worker token {id} was made by an earlier release and joins with any label");
    let advice = format!(
        "create another with `qd workers token NAME --label LABEL`, then run `qd workers revoke {id}`"
    );
    Some(finding(DoctorLevel::Warn, "token", message, &advice))
}

/// One line for each level of confinement: whether this machine gives it, and what it protects.
fn check_sandbox(support: &SandboxSupport) -> Vec<DoctorFinding> {
    let missing = support.missing.as_deref().unwrap_or("see docs/sandbox.md");
    let line = |given: bool, name: &str, what: &str| match given {
        true => ok_finding("sandbox", format!("{name:<13} {what}")),
        false => finding(DoctorLevel::Warn, "sandbox", format!("{name:<13} not available here"), missing),
    };
    let mut findings = vec![
        line(
            support.strongest >= SandboxLevel::Deck,
            "deck",
            "agents cannot reach other processes, the home or the daemon",
        ),
        line(
            support.strongest >= SandboxLevel::Workspace,
            "workspace",
            "agents write only to their project and read no credentials",
        ),
        line(support.network_off, "network off", "agents reach no network"),
    ];
    if support.leaves_abstract_sockets {
        let message = "agents with network reach abstract sockets of other programs".to_owned();
        let advice = "a kernel with Landlock closes them, from Linux 6.12 on; so does network=off";
        findings.push(finding(DoctorLevel::Warn, "sandbox", message, advice));
    }
    findings
}

async fn check_daemon(client: &DaemonClient) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    match client.get::<DaemonVersion>("/v1/version").await {
        Ok(version) if version.version == env!("CARGO_PKG_VERSION") => {
            let message =
                format!("version {} runs at {} (pid {})", version.version, client.host(), version.pid);
            findings.push(ok_finding("daemon", message));
        }
        Ok(version) => {
            let message = format!("version {} runs at {}", version.version, client.host());
            findings.push(finding(
                DoctorLevel::Warn,
                "daemon",
                message,
                "run `qd stop`; the next command starts this version",
            ));
        }
        Err(failure) => findings.push(finding(
            DoctorLevel::Bad,
            "daemon",
            failure.to_string(),
            "run `qd stop` and try again",
        )),
    }
    findings.push(match client.get::<serde_json::Value>("/v1/sessions?limit=1").await {
        Ok(_) => ok_finding("journal", "readable".to_owned()),
        Err(failure) => finding(DoctorLevel::Bad, "journal", failure.to_string(), REBUILD_ADVICE),
    });
    match client.get::<JournalCheckReport>("/v1/journal/check").await {
        Ok(report) => findings.extend(check_damage(&report)),
        Err(failure) => {
            let advice = "run `qd stop` and try again; `qd doctor` then starts this version";
            findings.push(finding(DoctorLevel::Bad, "journal", failure.to_string(), advice));
        }
    }
    // A daemon that may not show its tokens has nothing to be advised about.
    if let Ok(tokens) = client.list::<WorkerToken>("/v1/workers/tokens").await {
        findings.extend(tokens.iter().filter_map(check_worker_token));
    }
    match client.list::<Agent>("/v1/agents?versions=true").await {
        Ok(agents) => findings.extend(agents.into_iter().map(|agent| {
            let own_program = workspace::own_program_of(client, &agent);
            check_agent(agent, own_program)
        })),
        Err(failure) => findings.push(finding(
            DoctorLevel::Bad,
            "agent",
            failure.to_string(),
            "run `qd stop` and try again",
        )),
    }
    match client.get::<Vec<ManifestProblem>>("/v1/agents/problems").await {
        Ok(problems) => findings.extend(problems.into_iter().map(|ManifestProblem { path, message }| {
            finding(DoctorLevel::Warn, "manifest", format!("{path} is ignored"), &message)
        })),
        Err(failure) => findings.push(finding(
            DoctorLevel::Bad,
            "manifest",
            failure.to_string(),
            "run `qd stop` and try again",
        )),
    }
    findings
}

/// One finding for each damaged place in the journal.
fn check_damage(report: &JournalCheckReport) -> Vec<DoctorFinding> {
    if report.damage.is_empty() {
        let message = format!("undamaged: {} rows, {}", report.rows, format_size(report.bytes));
        return vec![ok_finding("journal", message)];
    }
    let bad = |damage: &JournalDamage| {
        let advice = if damage.rebuildable { REBUILD_ADVICE } else { RESTORE_ADVICE };
        finding(DoctorLevel::Bad, "journal", damage.to_string(), advice)
    };
    report.damage.iter().map(bad).collect()
}

/// What is wrong with the journal's file while no daemon can start; `None` if it seems whole.
fn check_journal_file(home: &DaemonHome) -> Option<DoctorFinding> {
    let problem = crate::serve::find_journal_problem(home)?;
    Some(finding(DoctorLevel::Bad, "journal", problem, RESTORE_ADVICE))
}

/// `own_program` is the agent's program as this process finds it, if the daemon finds another or none.
fn check_agent(agent: Agent, own_program: Option<String>) -> DoctorFinding {
    if agent.available {
        let version = agent.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
        let message = format!("{}{version} is installed", agent.name);
        return match (&agent.version, &agent.tested) {
            (Some(found), Some(tested)) if is_older(found, tested) => {
                let advice = format!("tested with {tested}; older versions may behave differently");
                finding(DoctorLevel::Warn, "agent", message, &advice)
            }
            _ => ok_finding("agent", message),
        };
    }
    if let Some(program) = own_program {
        let message = format!("{} is in your PATH, but not in the daemon's: {program}", agent.name);
        return ok_finding("agent", message);
    }
    let advice = agent.install.unwrap_or_else(|| "its program is not on the daemon's PATH".to_owned());
    finding(DoctorLevel::Warn, "agent", format!("{} is not installed", agent.name), &advice)
}

/// Whether version `found` is lower than `tested`, compared number by number.
fn is_older(found: &str, tested: &str) -> bool {
    let numbers = |version: &str| -> Vec<u64> {
        version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    numbers(found) < numbers(tested)
}

fn ok_finding(check: &'static str, message: String) -> DoctorFinding {
    DoctorFinding { level: DoctorLevel::Ok, check, message, advice: None }
}

fn finding(level: DoctorLevel, check: &'static str, message: String, advice: &str) -> DoctorFinding {
    DoctorFinding { level, check, message, advice: Some(advice.to_owned()) }
}

fn format_finding(finding: &DoctorFinding, style: TextStyle) -> String {
    let level = match finding.level {
        DoctorLevel::Ok => style.green("ok  "),
        DoctorLevel::Warn => style.yellow("warn"),
        DoctorLevel::Bad => style.red("bad "),
    };
    let advice =
        finding.advice.as_ref().map(|advice| format!("\n               {advice}")).unwrap_or_default();
    // Messages quote manifests and answers of other programs.
    let (message, advice) = (show_hidden(&finding.message), show_hidden(&advice));
    format!("{level} {:<9} {message}{advice}\n", finding.check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

    #[test]
    fn a_finding_shows_the_problem_and_the_fix() {
        let bad = finding(DoctorLevel::Bad, "disk", "1.0 MiB free".to_owned(), "free some space");
        assert_eq!(
            format_finding(&bad, TextStyle::new(false)),
            "bad  disk      1.0 MiB free\n               free some space\n"
        );
        assert_eq!(
            format_finding(&ok_finding("home", "/h".to_owned()), TextStyle::new(false)),
            "ok   home      /h\n"
        );
    }

    #[test]
    fn a_mode_that_lets_others_in_is_bad() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert_eq!(check_mode("token", &file, 0o600), None);
        std::fs::write(&file, "t").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let found = check_mode("token", &file, 0o600).unwrap();
        assert_eq!(found.level, DoctorLevel::Bad);
        assert!(found.advice.unwrap().starts_with("chmod 0600 "));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(check_mode("token", &file, 0o600).unwrap().level, DoctorLevel::Ok);
    }

    #[test]
    fn an_agent_older_than_the_tested_version_is_a_warning() {
        assert!(is_older("2.1.9", "2.1.325") && is_older("0.9", "1.0.0"));
        assert!(!is_older("2.1.325", "2.1.325") && !is_older("3.0", "2.1.325"));
        let found = |version: &str| {
            let (version, tested) = (Some(version.to_owned()), Some("2.0.0".to_owned()));
            let name = "a".to_owned();
            check_agent(Agent { name, available: true, version, tested, ..Agent::default() }, None)
        };
        assert_eq!((found("1.9.9").level, found("2.0.0").level), (DoctorLevel::Warn, DoctorLevel::Ok));
        assert_eq!(found("2.0.0").message, "a 2.0.0 is installed");
        let missing = || Agent { name: "a".to_owned(), ..Agent::default() };
        assert_eq!(check_agent(missing(), None).level, DoctorLevel::Warn);
        assert_eq!(check_agent(missing(), Some("/opt/a".to_owned())).level, DoctorLevel::Ok);
    }

    #[test]
    fn damage_in_the_events_needs_a_backup_and_in_the_lists_a_rebuild() {
        let damage = |table: &str, rebuildable| JournalDamage {
            table: table.to_owned(),
            first: Some(7),
            last: Some(9),
            sessions: vec!["ses_1".to_owned()],
            rebuildable,
            detail: "malformed".to_owned(),
        };
        let damage = vec![damage("events", false), damage("runs", true)];
        let found = check_damage(&JournalCheckReport { damage, ..JournalCheckReport::default() });
        assert!(found.iter().all(|finding| finding.level == DoctorLevel::Bad));
        let text = "the table events is damaged from seq 7 to 9, in events of ses_1: malformed";
        assert_eq!(found[0].message, text);
        assert!(found[0].advice.as_ref().unwrap().contains("restore a backup"));
        assert!(found[1].advice.as_ref().unwrap().contains("--rebuild"));
        let sound =
            check_damage(&JournalCheckReport { rows: 3, bytes: 2048, ..JournalCheckReport::default() });
        assert_eq!(sound, [ok_finding("journal", "undamaged: 3 rows, 2.0 KiB".to_owned())]);
    }

    #[test]
    fn each_level_that_the_machine_lacks_is_a_warning_with_the_reason() {
        let levels = |strongest, network_off| {
            let missing = Some("user namespaces are off".to_owned());
            check_sandbox(&SandboxSupport { strongest, network_off, missing, ..SandboxSupport::default() })
        };
        let warned = |findings: &[DoctorFinding]| {
            findings.iter().map(|finding| finding.level == DoctorLevel::Warn).collect::<Vec<_>>()
        };
        assert_eq!(warned(&levels(SandboxLevel::Off, false)), [true, true, true]);
        assert_eq!(warned(&levels(SandboxLevel::Deck, true)), [false, true, false]);
        assert_eq!(warned(&levels(SandboxLevel::Workspace, true)), [false, false, false]);
        assert_eq!(levels(SandboxLevel::Off, false)[0].advice.as_deref(), Some("user namespaces are off"));
    }

    #[test]
    fn abstract_sockets_that_the_kernel_leaves_open_are_a_warning() {
        let support = SandboxSupport {
            strongest: SandboxLevel::Workspace,
            network_off: true,
            leaves_abstract_sockets: true,
            missing: None,
        };
        let last = check_sandbox(&support).pop().unwrap();
        assert_eq!(last.level, DoctorLevel::Warn);
        assert!(last.advice.unwrap().contains("6.12"));
    }

    #[test]
    fn little_disk_space_is_a_warning_and_almost_none_is_bad() {
        assert_eq!(judge_free_space(1 << 20).level, DoctorLevel::Bad);
        assert_eq!(judge_free_space(512 << 20).level, DoctorLevel::Warn);
        assert_eq!(judge_free_space(10 << 30).level, DoctorLevel::Ok);
    }

    #[test]
    fn findings_read_well() {
        let findings = [
            ok_finding("home", "/home/ann/.local/share/quarterdeck".to_owned()),
            finding(DoctorLevel::Warn, "agent", "claude 2.3.0 is installed".to_owned(), "tested with 2.1.12"),
            finding(
                DoctorLevel::Bad,
                "manifest",
                "/home/ann/agents/own.toml: unknown field `comand`\x1b[2K".to_owned(),
                "correct the file, or remove it",
            ),
        ];
        assert_view("doctor", |style, _| findings.iter().map(|one| format_finding(one, style)).collect());
    }
}
