//! `qd doctor`: is everything as it should be, and if not, what to do. Each check is one line: ok, warn or bad.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use qd_daemon::config::Config;
use qd_daemon::home::Home;
use qd_protocol::api::{Agent, ManifestProblem, Version};
use qd_protocol::limits;
use serde::Serialize;

use super::Context;
use crate::client::Client;
use crate::failure::{Exit, Failure, Result};
use crate::render::style::Style;
use crate::render::text::size;

/// Free space below which a journal of a few days may not fit.
const ROOM: u64 = 1 << 30;

/// How serious it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Level {
    Ok,
    Warn,
    Bad,
}

/// What one check found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    level: Level,
    check: &'static str,
    message: String,
    /// What to do about it.
    advice: Option<String>,
}

/// Checks everything, or makes the lists anew.
pub(crate) async fn doctor(context: &Context, rebuild: bool) -> Result<Exit> {
    if rebuild {
        return make_anew(context).await;
    }
    let home = &context.whereabouts.home;
    let mut findings = vec![platform(), home_mode(home), settings(home), room(home.path())];
    match context.client().await {
        Ok(client) => {
            findings.extend(private_file("socket", &home.socket(), 0o600));
            findings.extend(private_file("token", &home.token_file(), 0o600));
            findings.extend(daemon(&client).await);
        }
        Err(failure) => {
            let advice = "look at what it said above, and into log/ in the home";
            findings.push(finding(Level::Bad, "daemon", failure.to_string(), advice));
        }
    }
    let worst = findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok);
    if context.out.json {
        context.out.value(&serde_json::json!({ "ok": worst != Level::Bad, "checks": findings }))?;
    } else {
        let lines: String = findings.iter().map(|finding| line(finding, context.out.out_style())).collect();
        context.out.data(&lines)?;
    }
    Ok(if worst == Level::Bad { Exit::Failed } else { Exit::Well })
}

async fn make_anew(context: &Context) -> Result<Exit> {
    if context.whereabouts.find(&context.out).await.is_ok() {
        return Err(Failure::Usage("the daemon is running; `qd stop` first, then again".to_owned()));
    }
    let report = crate::serve::rebuild(&context.whereabouts.home)?;
    if context.out.json {
        context.out.value(&report)?;
    } else {
        context.out.line(&format!(
            "made anew from {} events: {} workspaces, {} sessions, {} runs, {} asks",
            report.events, report.workspaces, report.sessions, report.runs, report.asks
        ))?;
    }
    Ok(Exit::Well)
}

fn platform() -> Finding {
    let message = format!("qd {} on {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS);
    if cfg!(target_os = "linux") {
        good("version", message)
    } else {
        let advice = "a process that leaves its group outlives a cancel here; Linux has no such hole";
        finding(Level::Warn, "version", message, advice)
    }
}

fn home_mode(home: &Home) -> Finding {
    let path = home.path();
    if !path.exists() {
        return good("home", format!("{} does not exist yet and is made by the first start", path.display()));
    }
    private_file("home", path, 0o700).unwrap_or_else(|| good("home", path.display().to_string()))
}

/// Whether a file or folder has its mode; none if it is not there.
fn private_file(check: &'static str, path: &Path, wanted: u32) -> Option<Finding> {
    let mode = path.metadata().ok()?.permissions().mode() & 0o777;
    let message = format!("{} has mode {mode:04o}", path.display());
    if mode == wanted {
        return Some(good(check, message));
    }
    let advice = format!("chmod {wanted:04o} {}", path.display());
    Some(finding(Level::Bad, check, message, &advice))
}

fn settings(home: &Home) -> Finding {
    match Config::load(home) {
        Ok(_) => good("settings", "can be read; `qd config` shows them".to_owned()),
        Err(error) => finding(Level::Bad, "settings", error.to_string(), "correct that line"),
    }
}

fn room(home: &Path) -> Finding {
    let there = home.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    match rustix::fs::statvfs(there) {
        Ok(disk) => judge_room(disk.f_bavail.saturating_mul(disk.f_frsize)),
        Err(error) => {
            finding(Level::Warn, "disk", format!("free space is not known: {error}"), "look with df")
        }
    }
}

fn judge_room(free: u64) -> Finding {
    let message = format!("{} free", size(free));
    if free < 2 * limits::RESERVE_BYTES {
        finding(Level::Bad, "disk", message, "free some space: prompts will be refused")
    } else if free < ROOM {
        finding(Level::Warn, "disk", message, "free some space; `qd gc` shows what could go")
    } else {
        good("disk", message)
    }
}

async fn daemon(client: &Client) -> Vec<Finding> {
    let mut findings = Vec::new();
    match client.get::<Version>("/v1/version").await {
        Ok(version) if version.version == env!("CARGO_PKG_VERSION") => {
            let message = format!("{} answers at {} (pid {})", version.version, client.host(), version.pid);
            findings.push(good("daemon", message));
        }
        Ok(version) => {
            let message = format!("version {} answers at {}", version.version, client.host());
            findings.push(finding(
                Level::Warn,
                "daemon",
                message,
                "`qd stop`, and the next verb starts yours",
            ));
        }
        Err(failure) => findings.push(finding(Level::Bad, "daemon", failure.to_string(), "qd stop")),
    }
    findings.push(match client.get::<serde_json::Value>("/v1/sessions?limit=1").await {
        Ok(_) => good("journal", "can be read".to_owned()),
        Err(failure) => {
            finding(Level::Bad, "journal", failure.to_string(), "`qd stop`, then `qd doctor --rebuild`")
        }
    });
    match client.list::<Agent>("/v1/agents?versions=true").await {
        Ok(agents) => findings.extend(agents.into_iter().map(agent)),
        Err(failure) => findings.push(finding(Level::Bad, "agent", failure.to_string(), "qd stop")),
    }
    match client.get::<Vec<ManifestProblem>>("/v1/agents/problems").await {
        Ok(problems) => findings.extend(problems.into_iter().map(|ManifestProblem { path, message }| {
            finding(Level::Warn, "manifest", format!("{path} does not count"), &message)
        })),
        Err(failure) => findings.push(finding(Level::Bad, "manifest", failure.to_string(), "qd stop")),
    }
    findings
}

fn agent(agent: Agent) -> Finding {
    if agent.available {
        let version = agent.version.as_deref().map(|version| format!(" {version}")).unwrap_or_default();
        let message = format!("{}{version} can start", agent.name);
        return match (&agent.version, &agent.tested) {
            (Some(found), Some(tested)) if is_older(found, tested) => {
                let advice = format!("it was tried with {tested}; what is older may behave otherwise");
                finding(Level::Warn, "agent", message, &advice)
            }
            _ => good("agent", message),
        };
    }
    let advice = agent.install.unwrap_or_else(|| "its program is not on the PATH of the daemon".to_owned());
    finding(Level::Warn, "agent", format!("{} cannot start here", agent.name), &advice)
}

/// Whether one version comes before another, by their numbers.
fn is_older(found: &str, tested: &str) -> bool {
    let numbers = |version: &str| -> Vec<u64> {
        version.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    numbers(found) < numbers(tested)
}

fn good(check: &'static str, message: String) -> Finding {
    Finding { level: Level::Ok, check, message, advice: None }
}

fn finding(level: Level, check: &'static str, message: String, advice: &str) -> Finding {
    Finding { level, check, message, advice: Some(advice.to_owned()) }
}

fn line(finding: &Finding, style: Style) -> String {
    let level = match finding.level {
        Level::Ok => style.green("ok  "),
        Level::Warn => style.yellow("warn"),
        Level::Bad => style.red("bad "),
    };
    let advice =
        finding.advice.as_ref().map(|advice| format!("\n               {advice}")).unwrap_or_default();
    format!("{level} {:<9} {}{advice}\n", finding.check, finding.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_wrong_and_what_to_do() {
        let bad = finding(Level::Bad, "disk", "1.0 MiB free".to_owned(), "free some space");
        assert_eq!(
            line(&bad, Style::new(false)),
            "bad  disk      1.0 MiB free\n               free some space\n"
        );
        assert_eq!(line(&good("home", "/h".to_owned()), Style::new(false)), "ok   home      /h\n");
    }

    #[test]
    fn a_mode_that_lets_others_in_is_bad() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert_eq!(private_file("token", &file, 0o600), None);
        std::fs::write(&file, "t").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let found = private_file("token", &file, 0o600).unwrap();
        assert_eq!(found.level, Level::Bad);
        assert!(found.advice.unwrap().starts_with("chmod 0600 "));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(private_file("token", &file, 0o600).unwrap().level, Level::Ok);
    }

    #[test]
    fn an_agent_that_is_older_than_the_one_that_was_tried_is_pointed_out() {
        assert!(is_older("2.1.9", "2.1.325") && is_older("0.9", "1.0.0"));
        assert!(!is_older("2.1.325", "2.1.325") && !is_older("3.0", "2.1.325"));
        let found = |version: &str| {
            let (version, tested) = (Some(version.to_owned()), Some("2.0.0".to_owned()));
            agent(Agent { name: "a".to_owned(), available: true, version, tested, ..Agent::default() })
        };
        assert_eq!((found("1.9.9").level, found("2.0.0").level), (Level::Warn, Level::Ok));
        assert_eq!(found("2.0.0").message, "a 2.0.0 can start");
    }

    #[test]
    fn little_room_is_a_warning_and_none_is_bad() {
        assert_eq!(judge_room(1 << 20).level, Level::Bad);
        assert_eq!(judge_room(512 << 20).level, Level::Warn);
        assert_eq!(judge_room(10 << 30).level, Level::Ok);
    }
}
