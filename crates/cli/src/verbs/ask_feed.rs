//! The open asks of all sessions and fleets, and every new one as it arrives, each once. What a verb does with them is
//! up to it.

use std::collections::{HashSet, VecDeque};

use qd_protocol::AskId;
use qd_protocol::event::{Ask, AskOpened};

use super::answer::PENDING_PATH;
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem};
use crate::failure::Result;

const OPENED_ASKS_PATH: &str = "/v1/events?kinds=ask.opened";

#[derive(Debug)]
pub(super) struct AskFeed<'a> {
    client: &'a DaemonClient,
    stream: EventStream,
    returned: HashSet<AskId>,
    waiting: VecDeque<Ask>,
}

impl<'a> AskFeed<'a> {
    /// Opens the stream before it reads the list, so no ask is missed in between.
    pub(super) async fn open(client: &'a DaemonClient) -> Result<Self> {
        let stream = EventStream::from_now(client, OPENED_ASKS_PATH).await?;
        let waiting = client.list::<Ask>(PENDING_PATH).await?.into();
        Ok(Self { client, stream, returned: HashSet::new(), waiting })
    }

    /// The next ask. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Ask> {
        loop {
            while let Some(ask) = self.waiting.pop_front() {
                if self.returned.insert(ask.id.clone()) {
                    return Ok(ask);
                }
            }
            match self.stream.next().await? {
                EventStreamItem::Gap => {
                    self.waiting.extend(self.client.list::<Ask>(PENDING_PATH).await?);
                }
                EventStreamItem::Event(arrived) => {
                    let opened: AskOpened =
                        serde_json::from_value(arrived.event.data).map_err(anyhow::Error::from)?;
                    self.waiting.push_back(opened.ask);
                }
            }
        }
    }
}
