//! `qd agents`: who can be asked, and how to get those who cannot.

use qd_protocol::api::Agent;

use super::Context;
use crate::failure::{Exit, Result};
use crate::render::table::Table;

/// Lists known agents.
pub(crate) async fn agents(context: &Context) -> Result<Exit> {
    let agents: Vec<Agent> = context.client().await?.list("/v1/agents").await?;
    if context.out.json {
        context.out.value(&agents)?;
        return Ok(Exit::Well);
    }
    let mut table = Table::new(&["NAME", "HERE", "DRIVER", "ABOUT"]);
    for agent in agents {
        let here = if agent.available { "yes" } else { "no" };
        let about = match agent.install.filter(|_| !agent.available) {
            Some(how) => format!("{} (to install: {how})", agent.description),
            None => agent.description,
        };
        table.row([agent.name, here.to_owned(), agent.driver, about]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}
