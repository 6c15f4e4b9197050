//! `qd up`: starts a fleet from a file and watches it, or shows its plan with `--plan`. The fleet belongs to the
//! daemon; this verb can only ask to cancel it.

use std::path::Path;

use qd_fleetfile::FleetFileProblem;
use qd_protocol::api::{Agent, NewFleet};
use qd_protocol::fleet::Fleet;
use serde_json::json;

use super::VerbContext;
use super::fleet_watcher::{FleetWatchMode, FleetWatcher};
use super::workspace;
use crate::args::UpArgs;
use crate::client::stream::EventStream;
use crate::failure::{CliExitCode, CliFailure, Result};
use crate::render::plan;

pub(crate) async fn up(context: &VerbContext, flags: UpArgs) -> Result<CliExitCode> {
    let text = read_fleet_file(&flags.file)?;
    let spec = qd_fleetfile::parse_fleet_file(&text, flags.task.as_deref())
        .map_err(|problem| file_problem(&flags.file, &problem))?;
    if flags.plan {
        match context.out.json {
            true => context.out.print_json(&spec)?,
            false => context.out.print_data(&plan::render_plan(&spec, context.out.out_style()))?,
        }
    }
    let client = context.client().await?;
    let workspace = workspace::open_workspace(&client, flags.dir.as_deref()).await?;
    let agents: Vec<Agent> = client.list(&format!("/v1/agents?workspace={}", workspace.id)).await?;
    let names = spec.sessions.values().map(|member| member.agent.as_str());
    let env = workspace::passed_variables(&workspace, &agents, names.clone());
    let own_program =
        |name: &str| Some((name.to_owned(), workspace::own_program(&client, &workspace, &agents, name)?));
    let programs = names.filter_map(own_program).collect();
    let new = NewFleet { spec: text.into(), task: flags.task.clone(), env, programs };
    let refused = |failure| with_file_name(&flags.file, workspace::with_own_path(&client, failure));
    let path = format!("/v1/workspaces/{}/fleets", workspace.id);
    if flags.plan {
        let checked = client.post::<serde_json::Value>(&format!("{path}/check"), &new).await;
        checked.map_err(refused)?;
        return Ok(CliExitCode::Success);
    }
    if flags.detach {
        let fleet: Fleet = client.post(&path, &new).await.map_err(refused)?;
        return print_detached(context, &fleet);
    }
    // Open the stream before the fleet starts, so no event is missed.
    let stream = EventStream::from_now(&client, &format!("/v1/workspaces/{}/events", workspace.id)).await?;
    let fleet: Fleet = client.post(&path, &new).await.map_err(refused)?;
    FleetWatcher::new(&context.out, &client, fleet, &spec, FleetWatchMode::Started).watch(stream).await
}

fn read_fleet_file(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        return std::io::read_to_string(std::io::stdin())
            .map_err(|error| CliFailure::Usage(format!("cannot read stdin: {error}")));
    }
    std::fs::read_to_string(file)
        .map_err(|error| CliFailure::Usage(format!("cannot read {}: {error}", file.display())))
}

/// A mistake in the file, as `FILE:LINE:COLUMN: message`.
fn file_problem(file: &Path, problem: &FleetFileProblem) -> CliFailure {
    let (line, column) = (problem.position.line, problem.position.column);
    CliFailure::Usage(format!("{}:{line}:{column}: {}", file.display(), problem.message))
}

/// Adds the name of the fleet file to a refusal of the daemon, with line and column if they are known.
fn with_file_name(file: &Path, failure: CliFailure) -> CliFailure {
    match failure {
        CliFailure::Refused(mut refusal) => {
            let number = |name: &str| refusal.error.details.get(name).and_then(serde_json::Value::as_u64);
            let at = match (number("line"), number("column")) {
                (Some(line), Some(column)) => format!("{}:{line}:{column}", file.display()),
                _ => file.display().to_string(),
            };
            refusal.error.message = format!("{at}: {}", refusal.error.message);
            CliFailure::Refused(refusal)
        }
        other => other,
    }
}

fn print_detached(context: &VerbContext, fleet: &Fleet) -> Result<CliExitCode> {
    let id = &fleet.id;
    if context.out.json {
        context.out.print_json(&json!(fleet))?;
    } else {
        context.out.print_line(id.as_str())?;
        context.out.print_note(&format!("    qd attach {id}\n    qd ps --fleet {id}\n    qd down {id}"));
    }
    Ok(CliExitCode::Success)
}
