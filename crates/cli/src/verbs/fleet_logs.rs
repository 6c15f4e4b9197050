//! A fleet as `qd attach` and `qd logs` show it: the live display from its start on, or the conversations of its sessions
//! in the order in which things were said.

use std::collections::{BTreeMap, HashMap};

use qd_protocol::event::{EventBody, FleetStarted};
use qd_protocol::fleet::{Fleet, FleetStatus};
use qd_protocol::{Millis, Seq, SessionId};

use super::VerbContext;
use super::fleet_watcher::{FleetWatchMode, FleetWatcher};
use super::transcript::{TranscriptLayout, TranscriptPrinter, read_page};
use crate::client::DaemonClient;
use crate::client::stream::{EventStream, EventStreamItem, ReceivedEvent};
use crate::failure::{CliExitCode, Result};
use crate::output::CliOutput;
use crate::refs::{ResolvedFleet, ResolvedSession};

/// Follows a fleet from its start until it ends, as `qd up` does.
pub(super) async fn attach_fleet(
    context: &VerbContext,
    client: &DaemonClient,
    fleet: &ResolvedFleet,
) -> Result<CliExitCode> {
    let view: Fleet = client.get(&fleet.path()).await?;
    let events = format!("/v1/workspaces/{}/events", fleet.workspace);
    let (started, seq) = find_start(client, &events, fleet).await?;
    // Its state then; the events tell what it became.
    let view = Fleet { state: FleetStatus::Running, ..view };
    let watcher = FleetWatcher::new(&context.out, client, view, &started.spec, FleetWatchMode::Attached);
    watcher.watch(EventStream::after(client, &events, seq)).await
}

/// The event with which the fleet started, and its position.
async fn find_start(
    client: &DaemonClient,
    events: &str,
    fleet: &ResolvedFleet,
) -> Result<(FleetStarted, Seq)> {
    let mut starts = EventStream::after(client, &format!("{events}?kinds=fleet.started"), Seq(0));
    loop {
        let EventStreamItem::Event(arrived) = starts.next().await? else { continue };
        let body = EventBody::decode(&arrived.event.kind, arrived.event.data.to_string().as_bytes());
        if let Some(EventBody::FleetStarted(started)) = body.unwrap_or(None)
            && started.fleet_id.as_str() == fleet.id
        {
            return Ok((started, arrived.event.seq));
        }
    }
}

/// Prints what the sessions of a fleet said so far, and with `follow` goes on until the fleet has ended.
pub(super) async fn log_fleet(
    context: &VerbContext,
    client: &DaemonClient,
    fleet: &ResolvedFleet,
    follow: bool,
    since: Option<Millis>,
) -> Result<CliExitCode> {
    let view: Fleet = client.get(&fleet.path()).await?;
    let mut events = Vec::new();
    // A session that is read first may say more before the last one is read.
    let mut read_through: HashMap<SessionId, Seq> = HashMap::new();
    for member in view.sessions.values() {
        let session = ResolvedSession { workspace: fleet.workspace.clone(), id: member.session_id.clone() };
        let mut after = Seq(0);
        loop {
            let (page, next) = read_page(client, &session, after).await?;
            if page.is_empty() {
                break;
            }
            after = next;
            events.extend(page);
        }
        read_through.insert(session.id, after);
    }
    events.retain(|arrived| since.is_none_or(|since| arrived.event.ts >= since));
    events.sort_by_key(|arrived| arrived.event.seq);
    let mut transcript = FleetTranscript::new(&context.out, client, &view);
    for arrived in events {
        transcript.show(arrived).await?;
    }
    if follow && !view.state.is_final() {
        let path = format!("/v1/workspaces/{}/events", fleet.workspace);
        let first_unread = read_through.values().min().copied().unwrap_or(Seq(0));
        let mut stream = EventStream::after(client, &path, first_unread);
        loop {
            let EventStreamItem::Event(arrived) = stream.next().await? else { continue };
            let event = &arrived.event;
            let is_end = event.kind == "fleet.finished" && event.data["fleet_id"] == fleet.id.as_str();
            let read = event.session_id.as_ref().and_then(|session| read_through.get(session));
            if read.is_some_and(|read| event.seq > *read) {
                transcript.show(*arrived).await?;
            }
            if is_end {
                break;
            }
        }
    }
    transcript.end_line()?;
    Ok(CliExitCode::Success)
}

/// The conversations of several sessions on one screen. A line with the name of the session precedes what it says
/// whenever another one spoke before.
struct FleetTranscript<'a> {
    out: &'a CliOutput,
    names: BTreeMap<SessionId, String>,
    sessions: BTreeMap<SessionId, TranscriptPrinter<'a>>,
    speaker: Option<SessionId>,
}

impl<'a> FleetTranscript<'a> {
    fn new(out: &'a CliOutput, client: &'a DaemonClient, fleet: &Fleet) -> Self {
        let names =
            fleet.sessions.iter().map(|(name, member)| (member.session_id.clone(), name.clone())).collect();
        let printer = || TranscriptPrinter::new(out, client, TranscriptLayout::Whole);
        let sessions = fleet.sessions.values().map(|member| (member.session_id.clone(), printer())).collect();
        Self { out, names, sessions, speaker: None }
    }

    async fn show(&mut self, ReceivedEvent { event, line }: ReceivedEvent) -> Result<()> {
        if self.out.json {
            return Ok(self.out.print_exact(&format!("{line}\n"))?);
        }
        let Some(session) = event.session_id.clone() else { return Ok(()) };
        let Some(printer) = self.sessions.get_mut(&session) else { return Ok(()) };
        let pieces = printer.render(event).await?;
        if pieces.is_empty() {
            return Ok(());
        }
        if self.speaker.as_ref() != Some(&session) {
            self.end_line()?;
            let name = self.names.get(&session).map_or(session.as_str(), String::as_str);
            self.out.print_line(&self.out.out_style().bold(&format!("── {name} ({session})")))?;
            self.speaker = Some(session.clone());
        }
        self.sessions.get(&session).map_or(Ok(()), |printer| printer.print(pieces))
    }

    fn end_line(&mut self) -> Result<()> {
        match self.speaker.as_ref().and_then(|session| self.sessions.get_mut(session)) {
            Some(printer) => printer.end_line(),
            None => Ok(()),
        }
    }
}
