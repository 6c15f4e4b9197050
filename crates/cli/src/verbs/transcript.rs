//! Events on their way to the streams: as raw JSON lines, or as a conversation. Also how the past of a session is
//! read, page by page.

use qd_protocol::event::Event;
use qd_protocol::{RunId, Seq};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::client::DaemonClient;
use crate::client::stream::ReceivedEvent;
use crate::failure::Result;
use crate::output::CliOutput;
use crate::refs::ResolvedSession;
use crate::render::conversation::{ChannelText, ConversationOptions, ConversationRenderer, OutputChannel};

/// Where a conversation goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TranscriptLayout {
    /// The agent's words are the data, the rest is beside them: `qd run`.
    Answer,
    /// All of it is the data: `qd logs`, `qd attach`.
    Whole,
}

/// A conversation that is being printed.
#[derive(Debug)]
pub(super) struct TranscriptPrinter<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    layout: TranscriptLayout,
    conversation: ConversationRenderer,
}

impl<'a> TranscriptPrinter<'a> {
    /// One that has not begun.
    pub(super) fn new(out: &'a CliOutput, client: &'a DaemonClient, layout: TranscriptLayout) -> Self {
        let look = match layout {
            TranscriptLayout::Answer => ConversationOptions {
                style: out.err_style(),
                shared_screen: out.out_tty && out.err_tty,
                show_prompts: false,
                strip_controls: out.out_tty,
            },
            TranscriptLayout::Whole => ConversationOptions {
                style: out.out_style(),
                shared_screen: true,
                show_prompts: true,
                strip_controls: out.out_tty,
            },
        };
        Self { out, client, layout, conversation: ConversationRenderer::new(look) }
    }

    /// Prints what some more events add.
    pub(super) async fn show(&mut self, batch: impl IntoIterator<Item = ReceivedEvent>) -> Result<()> {
        let mut pieces = Vec::new();
        let mut lines = String::new();
        for ReceivedEvent { mut event, line } in batch {
            if self.out.json {
                lines.push_str(&line);
                lines.push('\n');
                continue;
            }
            if event.kind == "run.finished" && !self.conversation.has_streamed(event.run_id.as_ref()) {
                self.fetch_text(&mut event).await?;
            }
            pieces.append(&mut self.conversation.render_event(&event));
        }
        if !lines.is_empty() {
            self.out.print_data(&lines)?;
        }
        self.print(pieces)
    }

    /// Ends an unfinished line, before something else is said or nothing more is.
    pub(super) fn end_line(&mut self) -> Result<()> {
        let pieces = self.conversation.end_line();
        self.print(pieces)
    }

    /// Neighbours for the same stream are printed at once.
    fn print(&self, pieces: Vec<ChannelText>) -> Result<()> {
        let mut rest = pieces.as_slice();
        while let Some(first) = rest.first() {
            let beside = |piece: &ChannelText| {
                self.layout == TranscriptLayout::Answer && piece.channel == OutputChannel::Aside
            };
            let same = rest.iter().take_while(|piece| beside(piece) == beside(first)).count();
            let text: String = rest[..same].iter().map(|piece| piece.text.as_str()).collect();
            if beside(first) {
                self.out.print_stderr(&text);
            } else {
                self.out.print_data(&text)?;
            }
            rest = &rest[same..];
        }
        Ok(())
    }

    /// A result too large for its event is kept beside the journal; people want all of it.
    async fn fetch_text(&self, finished: &mut Event) -> Result<()> {
        if let Some(sha256) = finished.data["blob"]["sha256"].as_str() {
            let whole = self.client.get_bytes(&format!("/v1/blobs/{sha256}")).await?;
            finished.data["text"] = String::from_utf8_lossy(&whole).into();
        }
        Ok(())
    }
}

/// Some of a session's past after `after`, and where to go on; nothing when there is no more.
pub(super) async fn read_page(
    client: &DaemonClient,
    session: &ResolvedSession,
    after: Seq,
) -> Result<(Vec<ReceivedEvent>, Seq)> {
    let page: RawEventPage =
        client.get(&format!("{}/events?after={after}&limit={PAGE_SIZE}", session.path())).await?;
    let arrived = page.events.into_iter().map(|raw| {
        let line = raw.get().to_owned();
        let event = serde_json::from_str(&line).map_err(anyhow::Error::from)?;
        Ok(ReceivedEvent { event, line })
    });
    Ok((arrived.collect::<Result<Vec<_>>>()?, page.next_after))
}

/// Whether an event belongs to this run.
pub(super) fn is_of_run(event: &Event, run: &RunId) -> bool {
    event.run_id.as_ref() == Some(run)
}

/// Events that are read at once.
const PAGE_SIZE: usize = qd_protocol::limits::PAGE_MAX;

/// An answer of `…/events`, its events kept as they were written.
#[derive(Deserialize)]
struct RawEventPage {
    events: Vec<Box<RawValue>>,
    next_after: Seq,
}
