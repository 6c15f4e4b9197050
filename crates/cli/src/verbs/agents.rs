//! `qd agents`: the known agents, where they can run, and how to install the missing ones.

use qd_protocol::api::{Agent, CostReport, JoinedWorker};

use super::{VerbContext, workspace};
use crate::failure::{CliExitCode, Result};
use crate::render::style::TextStyle;
use crate::render::table::TextTable;

/// A narrower terminal has no place for a column that says what each agent is.
const ABOUT_WIDTH_MIN: usize = 100;

/// Lists known agents. The table also has those of joined machines; the JSON does not.
pub(crate) async fn agents(context: &VerbContext) -> Result<CliExitCode> {
    let client = context.client().await?;
    let agents: Vec<Agent> = client.list("/v1/agents?versions=true").await?;
    if context.out.json {
        context.out.print_json(&agents)?;
        return Ok(CliExitCode::Success);
    }
    let joined: Vec<JoinedWorker> = client.list("/v1/workers/joined").await?;
    let is_in_own_path = |agent: &Agent| workspace::own_program_of(&client, agent).is_some();
    let agents: Vec<ListedAgent> = agents
        .into_iter()
        .map(|agent| ListedAgent { in_own_path: !agent.available && is_in_own_path(&agent), agent })
        .collect();
    context.out.print_data(&render(&agents, &joined, context.out.out_style(), context.out.width()))?;
    Ok(CliExitCode::Success)
}

/// An agent, and whether only this process finds its program, not the daemon.
#[derive(Debug)]
struct ListedAgent {
    agent: Agent,
    in_own_path: bool,
}

impl ListedAgent {
    /// Whether sessions that are started from here can use it.
    fn is_usable(&self) -> bool {
        self.agent.available || self.in_own_path
    }
}

/// The agents, and below them the commands that install the missing ones. A command that is cut is of no use, so these
/// are no column of the table.
fn render(agents: &[ListedAgent], joined: &[JoinedWorker], style: TextStyle, width: Option<usize>) -> String {
    let with_about = width.is_none_or(|width| width >= ABOUT_WIDTH_MIN);
    let mut out = table(agents, joined, with_about).render(style, width);
    let mut commands = TextTable::untitled(2);
    let missing = agents.iter().filter(|listed| !listed.is_usable());
    let missing: Vec<_> =
        missing.filter_map(|listed| Some((&listed.agent.name, listed.agent.install.as_ref()?))).collect();
    if !missing.is_empty() {
        out.push_str(&format!("\n{}\n", style.bold("TO INSTALL")));
    }
    for (name, command) in missing {
        commands.add_row([name.clone(), command.clone()]);
    }
    out.push_str(&commands.render_rows(style, width, "  "));
    out
}

fn table(agents: &[ListedAgent], joined: &[JoinedWorker], with_about: bool) -> TextTable {
    const TITLES: [&str; 5] = ["NAME", "WHERE", "DRIVER", "CAN", "ABOUT"];
    let columns = if with_about { TITLES.len() } else { TITLES.len() - 1 };
    let mut table = TextTable::new(&TITLES[..columns]);
    // What an agent is for can be guessed from its name; what it can do cannot.
    table.set_min_width(3, usize::MAX);
    table.set_min_width(1, "not installed".len());
    for ListedAgent { agent, in_own_path } in agents {
        let location = match (&agent.version, agent.available) {
            (Some(version), true) => format!("here, {version}"),
            (None, true) => "here".to_owned(),
            (_, false) if *in_own_path => "in your PATH".to_owned(),
            (_, false) => "not installed".to_owned(),
        };
        let Agent { name, driver, description, .. } = agent;
        let row = [name.clone(), location, driver.clone(), abilities(agent), description.clone()];
        table.add_row(row.into_iter().take(columns));
    }
    for machine in joined.iter().filter(|machine| machine.connected) {
        for label in &machine.labels {
            for agent in &machine.agents {
                let about = "On a joined machine.".to_owned();
                let name = format!("{agent}@{label}");
                let row = [name, machine.name.clone(), "joined".to_owned(), "-".to_owned(), about];
                table.add_row(row.into_iter().take(columns));
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
        (!agent.modes.is_empty(), "modes"),
        (agent.cost != CostReport::Nothing, if agent.cost == CostReport::Money { "cost" } else { "tokens" }),
    ];
    let names: Vec<&str> = features.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect();
    if names.is_empty() { "-".to_owned() } else { names.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;
    use qd_catalog::programs::ProgramVersions;
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
        let shown = table(&[], &[machine("box", true), machine("gone", false)], true);
        let shown = shown.render(TextStyle::new(false), None);
        assert!(shown.contains("script@gpu") && shown.contains("box") && !shown.contains("gone"), "{shown}");
    }

    #[test]
    fn the_agents_read_well() {
        let machine = JoinedWorker {
            name: "ml-box.lan".to_owned(),
            labels: vec!["gpu".to_owned()],
            agents: vec!["claude".to_owned()],
            sessions: Vec::new(),
            connected: true,
            joined_at: Millis(0),
            lease_expires_at: Millis(0),
            version: "1.2.0".to_owned(),
        };
        let catalog = qd_catalog::Catalog::built_in();
        let listed = |entry: &qd_catalog::CatalogEntry| {
            let agent = qd_catalog::agent_listing(&entry.manifest, "", &ProgramVersions::default());
            // What is installed where the tests run must not matter.
            let available = matches!(agent.name.as_str(), "claude" | "echo" | "script");
            let version = (agent.name == "claude").then(|| "2.1.12".to_owned());
            let in_own_path = agent.name == "codex";
            ListedAgent { agent: Agent { available, version, ..agent }, in_own_path }
        };
        let agents: Vec<ListedAgent> = catalog.entries().map(listed).collect();
        let machine = [machine];
        assert_view("agents", |style, width| render(&agents, &machine, style, width));
    }
}
