//! `qd up`: a fleet from its file, watched to its end; `--plan` shows what it would do. The fleet belongs to the daemon:
//! whatever happens here can at most ask for its cancel.

use std::path::Path;

use qd_fleetfile::Problem;
use qd_protocol::api::{Agent, NewFleet};
use qd_protocol::fleet::Fleet;
use serde_json::json;

use super::Context;
use super::crew::Crew;
use super::workspace;
use crate::args::Up;
use crate::client::stream::EventStream;
use crate::failure::{Exit, Failure, Result};
use crate::render::plan;

/// Starts a fleet, or shows what it would be.
pub(crate) async fn up(context: &Context, flags: Up) -> Result<Exit> {
    let text = read(&flags.file)?;
    let spec =
        qd_fleetfile::read(&text, flags.task.as_deref()).map_err(|problem| wrong(&flags.file, &problem))?;
    if flags.plan {
        match context.out.json {
            true => context.out.value(&spec)?,
            false => context.out.data(&plan::plan(&spec, context.out.out_style()))?,
        }
        return Ok(Exit::Well);
    }
    let client = context.client().await?;
    let workspace = workspace::of(&client, flags.dir.as_deref()).await?;
    let agents: Vec<Agent> = client.list(&format!("/v1/agents?workspace={}", workspace.id)).await?;
    let names = spec.sessions.values().map(|member| member.agent.as_str());
    let env = workspace::variables(&workspace, &agents, names);
    let new = NewFleet { spec: text.into(), task: flags.task.clone(), env };
    let path = format!("/v1/workspaces/{}/fleets", workspace.id);
    if flags.detach {
        let fleet: Fleet = client.post(&path, &new).await.map_err(|failure| named(&flags.file, failure))?;
        return detached(context, &fleet);
    }
    // The stream first: whatever the fleet does from its first moment on is then on it.
    let stream = EventStream::from_now(&client, &format!("/v1/workspaces/{}/events", workspace.id)).await?;
    let fleet: Fleet = client.post(&path, &new).await.map_err(|failure| named(&flags.file, failure))?;
    Crew::new(&context.out, &client, fleet, &spec).watch(stream).await
}

fn read(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        return std::io::read_to_string(std::io::stdin())
            .map_err(|error| Failure::Usage(format!("stdin could not be read: {error}")));
    }
    std::fs::read_to_string(file)
        .map_err(|error| Failure::Usage(format!("{} could not be read: {error}", file.display())))
}

/// A mistake in the file, as compilers say it.
fn wrong(file: &Path, problem: &Problem) -> Failure {
    let (line, column) = (problem.place.line, problem.place.column);
    Failure::Usage(format!("{}:{line}:{column}: {}", file.display(), problem.message))
}

/// The daemon's refusal, with the file that it is about.
fn named(file: &Path, failure: Failure) -> Failure {
    match failure {
        Failure::Refused(mut refusal) => {
            refusal.error.message = format!("{}: {}", file.display(), refusal.error.message);
            Failure::Refused(refusal)
        }
        other => other,
    }
}

fn detached(context: &Context, fleet: &Fleet) -> Result<Exit> {
    let id = &fleet.id;
    if context.out.json {
        context.out.value(&json!(fleet))?;
    } else {
        context.out.line(id.as_str())?;
        context.out.note(&format!("    qd ps --fleet {id}\n    qd down {id}"));
    }
    Ok(Exit::Well)
}
