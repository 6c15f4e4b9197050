//! `qd agents`: the known agents, where they can run, and how to install the missing ones.

use qd_protocol::api::{Agent, CostReport, JoinedWorker};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::render::table::TextTable;

/// Lists known agents. The table also has those of joined machines; the JSON does not.
pub(crate) async fn agents(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let agents: Vec<Agent> = client.list("/v1/agents?versions=true").await?;
    if context.out.json {
        context.out.print_json(&agents)?;
        return Ok(CliExitCode::Success);
    }
    let joined: Vec<JoinedWorker> = client.list("/v1/workers/joined").await?;
    let table = table(agents, &joined);
    context.out.print_data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

fn table(agents: Vec<Agent>, joined: &[JoinedWorker]) -> TextTable {
    let mut table = TextTable::new(&["NAME", "VERSION", "WHERE", "DRIVER", "CAN", "ABOUT"]);
    for agent in agents {
        let location = if agent.available { "here" } else { "not installed" };
        let can = abilities(&agent);
        let about = match agent.install.filter(|_| !agent.available) {
            Some(how) => format!("{} (to install: {how})", agent.description),
            None => agent.description,
        };
        let version = agent.version.unwrap_or_else(|| "-".to_owned());
        table.add_row([agent.name, version, location.to_owned(), agent.driver, can, about]);
    }
    for machine in joined.iter().filter(|machine| machine.connected) {
        for label in &machine.labels {
            for agent in &machine.agents {
                let about = "On a joined machine.".to_owned();
                let none = || "-".to_owned();
                let name = format!("{agent}@{label}");
                table.add_row([name, none(), machine.name.clone(), "joined".to_owned(), none(), about]);
            }
        }
    }
    table
}

/// The optional features of an agent, separated by spaces.
fn abilities(agent: &Agent) -> String {
    let features = [
        (agent.approvals, "ask"),
        (agent.questions, "question"),
        (agent.steers, "steer"),
        (agent.resumes, "resume"),
        (agent.cost != CostReport::Nothing, if agent.cost == CostReport::Money { "cost" } else { "tokens" }),
    ];
    let names: Vec<&str> = features.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::style::TextStyle;
    use qd_protocol::Millis;

    #[test]
    fn agents_of_connected_machines_are_listed_as_name_and_label() {
        let machine = |name: &str, connected| JoinedWorker {
            name: name.to_owned(),
            labels: vec!["gpu".to_owned()],
            agents: vec!["script".to_owned()],
            sessions: Vec::new(),
            connected,
            joined_at: Millis(0),
            lease_expires_at: Millis(0),
            version: String::new(),
        };
        let shown = table(Vec::new(), &[machine("box", true), machine("gone", false)]);
        let shown = shown.render(TextStyle::new(false), None);
        assert!(shown.contains("script@gpu") && shown.contains("box") && !shown.contains("gone"), "{shown}");
    }
}
