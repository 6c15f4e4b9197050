//! `qd workers`: the processes that hold live agents.

use qd_protocol::Millis;
use qd_protocol::api::Worker;

use super::Context;
use crate::failure::{Exit, Result};
use crate::render::table::Table;
use crate::render::text;

/// Lists live workers.
pub(crate) async fn workers(context: &Context) -> Result<Exit> {
    let workers: Vec<Worker> = context.client().await?.list("/v1/workers").await?;
    if context.out.json {
        context.out.value(&workers)?;
        return Ok(Exit::Well);
    }
    let now = Millis::now();
    let mut table = Table::new(&["ID", "SESSION", "PID", "AGE"]);
    for worker in workers {
        let age = text::age(worker.started_at, now);
        table.row([worker.id, worker.session_id.to_string(), worker.pid.to_string(), age]);
    }
    context.out.data(&table.render(context.out.out_style(), context.out.width()))?;
    Ok(Exit::Well)
}
