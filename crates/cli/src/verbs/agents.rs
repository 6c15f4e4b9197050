//! `qd agents`: who can be asked, where, and how to get those who cannot.

use qd_protocol::api::{Agent, JoinedWorker};

use super::Context;
use crate::failure::{Exit, Result};
use crate::render::table::Table;

/// Lists known agents, and in the table those of machines that have joined.
pub(crate) async fn agents(context: &Context) -> Result<Exit> {
    let client = context.client().await?;
    let agents: Vec<Agent> = client.list("/v1/agents").await?;
    if context.out.json {
        context.out.value(&agents)?;
        return Ok(Exit::Well);
    }
    let joined: Vec<JoinedWorker> = client.list("/v1/workers/joined").await?;
    let table = table(agents, &joined);
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}

fn table(agents: Vec<Agent>, joined: &[JoinedWorker]) -> Table {
    let mut table = Table::new(&["NAME", "WHERE", "DRIVER", "ABOUT"]);
    for agent in agents {
        let place = if agent.available { "here" } else { "nowhere" };
        let about = match agent.install.filter(|_| !agent.available) {
            Some(how) => format!("{} (to install: {how})", agent.description),
            None => agent.description,
        };
        table.row([agent.name, place.to_owned(), agent.driver, about]);
    }
    for machine in joined.iter().filter(|machine| machine.connected) {
        for label in &machine.labels {
            for agent in &machine.agents {
                let about = "On a machine that has joined.".to_owned();
                table.row([format!("{agent}@{label}"), machine.name.clone(), "joined".to_owned(), about]);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::style::Style;
    use qd_protocol::Millis;

    #[test]
    fn agents_of_machines_that_are_there_are_listed_as_sessions_name_them() {
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
        let shown = shown.render(Style::new(false), None);
        assert!(shown.contains("script@gpu  box") && !shown.contains("gone"), "{shown}");
    }
}
