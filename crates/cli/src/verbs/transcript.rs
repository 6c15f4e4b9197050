//! Prints events as raw JSON lines or as a conversation, and reads the history of a session page by page.

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

/// Which parts of a conversation go to stdout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TranscriptLayout {
    /// The answer goes to stdout, everything else to stderr: `qd run`.
    Answer,
    /// Everything goes to stdout: `qd logs`, `qd attach`.
    Whole,
}

#[derive(Debug)]
pub(super) struct TranscriptPrinter<'a> {
    out: &'a CliOutput,
    client: &'a DaemonClient,
    layout: TranscriptLayout,
    conversation: ConversationRenderer,
}

impl<'a> TranscriptPrinter<'a> {
    pub(super) fn new(out: &'a CliOutput, client: &'a DaemonClient, layout: TranscriptLayout) -> Self {
        let options = match layout {
            TranscriptLayout::Answer => ConversationOptions {
                style: out.err_style(),
                shared_screen: out.out_tty && out.err_tty,
                show_prompts: false,
                width: out.err_width(),
                answer_on_terminal: out.out_tty,
            },
            TranscriptLayout::Whole => ConversationOptions {
                style: out.out_style(),
                shared_screen: true,
                show_prompts: true,
                width: out.width(),
                answer_on_terminal: out.out_tty,
            },
        };
        Self { out, client, layout, conversation: ConversationRenderer::new(options) }
    }

    /// Prints some more events.
    pub(super) async fn show(&mut self, batch: impl IntoIterator<Item = ReceivedEvent>) -> Result<()> {
        let mut pieces = Vec::new();
        let mut lines = String::new();
        for ReceivedEvent { event, line } in batch {
            if self.out.json {
                lines.push_str(&line);
                lines.push('\n');
                continue;
            }
            pieces.append(&mut self.render(event).await?);
        }
        if !lines.is_empty() {
            self.out.print_exact(&lines)?;
        }
        self.print(pieces)
    }

    /// What an event adds to the output, as one text: its JSON line, or its pieces of the conversation.
    pub(super) async fn render_text(
        &mut self,
        ReceivedEvent { event, line }: ReceivedEvent,
    ) -> Result<String> {
        if self.out.json {
            return Ok(format!("{line}\n"));
        }
        Ok(self.render(event).await?.into_iter().map(|piece| piece.text).collect())
    }

    /// What an event adds to the conversation; empty if it shows nothing.
    pub(super) async fn render(&mut self, mut event: Event) -> Result<Vec<ChannelText>> {
        if event.kind == "run.finished" && !self.conversation.has_streamed(event.run_id.as_ref()) {
            self.fetch_text(&mut event).await?;
        }
        Ok(self.conversation.render_event(&event))
    }

    /// Ends an unfinished line before other output, or at the end.
    pub(super) fn end_line(&mut self) -> Result<()> {
        let pieces = self.conversation.end_line();
        self.print(pieces)
    }

    /// Prints the pieces; adjacent ones for the same stream are written together.
    pub(super) fn print(&self, pieces: Vec<ChannelText>) -> Result<()> {
        let mut rest = pieces.as_slice();
        while let Some(first) = rest.first() {
            let to_stderr = |piece: &ChannelText| {
                self.layout == TranscriptLayout::Answer && piece.channel == OutputChannel::Aside
            };
            // An answer is data where nobody looks at it, and stays exact.
            let is_exact = |piece: &ChannelText| piece.channel == OutputChannel::Answer && !self.out.out_tty;
            let way = |piece: &ChannelText| (to_stderr(piece), is_exact(piece));
            let same = rest.iter().take_while(|piece| way(piece) == way(first)).count();
            let text: String = rest[..same].iter().map(|piece| piece.text.as_str()).collect();
            match way(first) {
                (true, _) => self.out.print_stderr(&text),
                (false, true) => self.out.print_exact(&text)?,
                (false, false) => self.out.print_data(&text)?,
            }
            rest = &rest[same..];
        }
        Ok(())
    }

    /// Replaces a truncated result with the full text: a result too large for its event is stored as a blob.
    async fn fetch_text(&self, finished: &mut Event) -> Result<()> {
        if let Some(sha256) = finished.data["blob"]["sha256"].as_str() {
            let blob = self.client.get_bytes(&format!("/v1/blobs/{sha256}")).await?;
            finished.data["text"] = String::from_utf8_lossy(&blob).into();
        }
        Ok(())
    }
}

/// One page of a session's events after `after`, and the position of the next page. The page is empty at the end.
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

pub(super) fn is_of_run(event: &Event, run: &RunId) -> bool {
    event.run_id.as_ref() == Some(run)
}

/// Events per page.
const PAGE_SIZE: usize = qd_protocol::limits::PAGE_MAX;

/// A response of `…/events`, with each event as raw JSON.
#[derive(Deserialize)]
struct RawEventPage {
    events: Vec<Box<RawValue>>,
    next_after: Seq,
}
