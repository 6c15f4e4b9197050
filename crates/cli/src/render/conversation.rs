//! A conversation as text: the agent's answer, and around it its thoughts, tool calls and asks. Events become pieces of
//! text for one of two channels, with lines kept whole. The verb decides where the channels go.

use qd_protocol::event::{
    Event, EventBody, MessageDelta, MessagePart, MessageRole, ModeChangeSource, ProcessCleanup, QueueReason,
    RunFinished, RunStopCause, SurvivingProcess, ToolCallEvent,
};
use qd_protocol::{FinishReason, RunId, TokenUsage};
use serde_json::Value;

use super::session_cells::{self, outcome_word};
use super::style::TextStyle;
use super::visible_text::{ProseStream, show_on_one_line, show_prose};
use super::{ask, text, tool};
use crate::local_time::format_local_time;

/// How much of a plan entry or a reason one line shows.
const PREVIEW_CHARS: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputChannel {
    /// The agent's own text: data.
    Answer,
    /// Everything else.
    Aside,
}

/// A piece of text for one channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChannelText {
    pub(crate) channel: OutputChannel,
    /// The text, including its newlines.
    pub(crate) text: String,
}

/// How a conversation is shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConversationOptions {
    /// Style of the asides.
    pub(crate) style: TextStyle,
    /// Whether both channels go to the same screen or file, so an aside must not start in the middle of the answer's
    /// line.
    pub(crate) shared_screen: bool,
    /// Whether prompts and usage are shown too. `qd run` does not repeat what was just typed.
    pub(crate) show_prompts: bool,
    /// Columns of the screen that shows the asides, if it is one.
    pub(crate) width: Option<usize>,
    /// Whether the answer goes to a terminal, so hidden characters are shown. Elsewhere it is data and stays exact.
    pub(crate) answer_on_terminal: bool,
}

/// Renders the events of a session one by one. Holds only the state that later lines depend on.
#[derive(Debug)]
pub(crate) struct ConversationRenderer {
    options: ConversationOptions,
    /// The answer and the thoughts, which arrive in pieces.
    answer: ProseStream,
    thought: ProseStream,
    /// Whether the answer's last line lacks its newline.
    answer_open: bool,
    /// Whether the agent has used a tool since, so that what it says next is another message.
    message_ended: bool,
    /// Whether a thought's last line lacks its newline.
    thought_open: bool,
    /// The run whose text has been streamed, so its result is not printed again.
    streamed_run: Option<RunId>,
    /// Whether the agent's context is nearly full, which was shown when it became so.
    context_full: bool,
}

impl ConversationRenderer {
    pub(crate) fn new(options: ConversationOptions) -> Self {
        Self {
            options,
            answer: ProseStream::default(),
            thought: ProseStream::default(),
            answer_open: false,
            message_ended: false,
            thought_open: false,
            streamed_run: None,
            context_full: false,
        }
    }

    /// The text that one more event adds. Unknown kinds add nothing.
    pub(crate) fn render_event(&mut self, event: &Event) -> Vec<ChannelText> {
        let data = event.data.to_string();
        let Ok(Some(body)) = EventBody::decode(&event.kind, data.as_bytes()) else { return Vec::new() };
        let mut out = Vec::new();
        self.render_body(&mut out, event.run_id.as_ref(), body);
        out
    }

    /// Whether text of this run has been shown already.
    pub(crate) fn has_streamed(&self, run: Option<&RunId>) -> bool {
        self.streamed_run.is_some() && self.streamed_run.as_ref() == run
    }

    /// Ends open lines. Also called by a verb that stops in the middle of an answer.
    pub(crate) fn end_line(&mut self) -> Vec<ChannelText> {
        let mut out = Vec::new();
        self.end_thought(&mut out);
        let mut text = String::new();
        self.answer.finish(&mut text);
        if std::mem::take(&mut self.answer_open) || !text.is_empty() {
            text.push('\n');
            out.push(ChannelText { channel: OutputChannel::Answer, text });
        }
        out
    }

    fn render_body(&mut self, out: &mut Vec<ChannelText>, run: Option<&RunId>, body: EventBody) {
        let style = self.options.style;
        match body {
            EventBody::MessageCreated(message) if message.role == MessageRole::User => {
                self.render_prompt(out, &message.parts)
            }
            EventBody::TextDelta(delta) => self.render_delta(out, run, &delta),
            EventBody::ThoughtDelta(delta) => self.render_thought(out, &delta),
            EventBody::ToolStarted(call) => self.render_tool_started(out, &call),
            EventBody::ToolFinished(call) => self.render_tool_finished(out, &call),
            EventBody::PlanUpdated(plan) => {
                for entry in plan.entries {
                    let status = if entry.status.is_empty() { "-" } else { &entry.status };
                    let line = format!(
                        "plan [{}] {}",
                        show_on_one_line(status),
                        text::first_line(&entry.content, PREVIEW_CHARS)
                    );
                    self.push_aside(out, &style.dim(&line));
                }
            }
            EventBody::NoticeShown(notice) => self.push_aside(out, &style.yellow(&show_prose(&notice.text))),
            EventBody::ModeChanged(changed) => {
                let line = match changed.by {
                    ModeChangeSource::User => "mode set to",
                    ModeChangeSource::Agent => "the agent switched to mode",
                };
                let mode = text::first_line(&changed.mode, PREVIEW_CHARS);
                self.push_aside(out, &style.dim(&format!("{line} {mode}")));
            }
            EventBody::ContextUpdated(updated) => {
                let full = session_cells::describe_full_context(Some(updated.context));
                if let Some(line) = full.as_ref().filter(|_| !self.context_full) {
                    self.push_aside(out, &style.yellow(line));
                }
                self.context_full = full.is_some();
            }
            EventBody::ContextCompacted(compacted) => {
                let before = compacted.used_before.map(|tokens| format!(" of {tokens} tokens"));
                let line = format!("the agent compacted its conversation{}", before.unwrap_or_default());
                self.push_aside(out, &style.yellow(&line));
            }
            EventBody::AskOpened(opened) => {
                let block = ask::format_ask(&opened.ask, style, self.options.width);
                self.push_aside(out, block.trim_end_matches('\n'));
            }
            EventBody::AskResolved(resolved) => {
                let outcome = ask::describe_outcome(resolved.ask.state, resolved.ask.answer.as_ref());
                self.push_aside(out, &style.dim(&format!("ask {}: {outcome}", resolved.ask_id)));
            }
            EventBody::SteerAccepted(steer) => self.render_user_text(out, "steer> ", &steer.text),
            EventBody::SteerMissed(missed) => {
                let line = if missed.next_run_id.is_some() {
                    "the steer came too late for this turn; it runs next as a prompt"
                } else {
                    "the steer was not delivered: its run was cancelled"
                };
                self.push_aside(out, &style.dim(line));
            }
            EventBody::RunQueued(queued) => {
                let why = match queued.reason {
                    QueueReason::Busy => "behind another run".to_owned(),
                    QueueReason::Halted => "halted (`qd unhalt` lifts it)".to_owned(),
                    QueueReason::Capacity => "waiting for a free agent slot".to_owned(),
                    QueueReason::Quota => {
                        let until = queued.until.map(|until| format!(" until {}", format_local_time(until)));
                        format!("the quota is exhausted{}", until.unwrap_or_default())
                    }
                };
                self.push_aside(out, &style.dim(&format!("queued at {}: {why}", queued.position)));
            }
            EventBody::QuotaReached(reached) => {
                let line = format!(
                    "the quota of {} is exhausted until {}; queued prompts wait (`qd quota release {}` lets them start)",
                    reached.agent,
                    format_local_time(reached.until),
                    reached.account
                );
                self.push_aside(out, &style.yellow(&line));
            }
            EventBody::RunMoved(moved) => {
                self.push_aside(out, &style.dim(&format!("moved to place {} in the queue", moved.position)));
            }
            EventBody::RunCancelRequested(cancel) => {
                let reason = cancel
                    .reason
                    .map(|why| format!(": {}", text::first_line(&why, PREVIEW_CHARS)))
                    .unwrap_or_default();
                self.push_aside(
                    out,
                    &style.dim(&format!("stopping, {}{reason}", describe_stop_cause(cancel.by))),
                );
            }
            EventBody::RunFinished(finished) => self.render_finished(out, run, &finished),
            // The error of a run is part of its `run.finished`, which follows.
            EventBody::ErrorRaised(_) if run.is_some() => {}
            EventBody::ErrorRaised(error) => {
                self.push_aside(out, &style.red(&format!("error: {}", show_prose(&error.message))))
            }
            EventBody::SessionClosed(_) => self.push_aside(out, &style.dim("session closed")),
            _ => {}
        }
    }

    fn render_prompt(&mut self, out: &mut Vec<ChannelText>, parts: &[MessagePart]) {
        if !self.options.show_prompts {
            return;
        }
        for part in parts {
            match part {
                MessagePart::Text { text, blob: None } => self.render_user_text(out, "> ", text),
                MessagePart::Text { text, blob: Some(blob) } => {
                    self.render_user_text(
                        out,
                        "> ",
                        &format!("{text}… ({} in total)", text::format_size(blob.size)),
                    );
                }
                MessagePart::File { file } => {
                    self.render_user_text(out, "> ", &format!("[{}, {}]", file.name, file.mime))
                }
                _ => {}
            }
        }
    }

    /// Renders text of a user, with `prefix` before the first line and the other lines indented to match.
    fn render_user_text(&mut self, out: &mut Vec<ChannelText>, prefix: &str, content: &str) {
        let indent = format!("\n{}", " ".repeat(prefix.len()));
        let content = show_prose(content.trim_end()).replace('\n', &indent);
        self.push_aside(out, &self.options.style.cyan(&format!("{prefix}{content}")));
    }

    fn render_delta(&mut self, out: &mut Vec<ChannelText>, run: Option<&RunId>, delta: &MessageDelta) {
        if delta.after_run.is_some() {
            self.push_aside(
                out,
                &self.options.style.dim(&format!("late: {}", text::first_line(&delta.text, PREVIEW_CHARS))),
            );
            return;
        }
        if delta.text.is_empty() {
            return;
        }
        self.end_thought(out);
        self.streamed_run = run.cloned();
        self.push_answer(out, &delta.text);
    }

    fn push_answer(&mut self, out: &mut Vec<ChannelText>, answer: &str) {
        let mut text = String::new();
        match self.options.answer_on_terminal {
            true => self.answer.push(answer, &mut text),
            false => text.push_str(answer),
        }
        if text.is_empty() {
            return;
        }
        // Two messages with a tool between them would run into one line, where nothing else is printed in between.
        if std::mem::take(&mut self.message_ended) && self.answer_open {
            text.insert(0, '\n');
        }
        self.answer_open = !text.ends_with('\n');
        out.push(ChannelText { channel: OutputChannel::Answer, text });
    }

    fn render_thought(&mut self, out: &mut Vec<ChannelText>, delta: &MessageDelta) {
        if delta.after_run.is_some() {
            return;
        }
        let mut thought = String::new();
        self.thought.push(&delta.text, &mut thought);
        if thought.is_empty() {
            return;
        }
        if !self.thought_open {
            self.break_answer(out);
        }
        self.thought_open = !thought.ends_with('\n');
        out.push(ChannelText { channel: OutputChannel::Aside, text: self.options.style.dim(&thought) });
    }

    fn render_tool_started(&mut self, out: &mut Vec<ChannelText>, call: &ToolCallEvent) {
        self.message_ended = true;
        let name = call.name.as_deref().unwrap_or("tool");
        let line = tool::summarize_call(name, call.input.as_ref().unwrap_or(&Value::Null));
        self.push_aside(out, &self.options.style.dim(&format!("tool {line}")));
    }

    fn render_tool_finished(&mut self, out: &mut Vec<ChannelText>, call: &ToolCallEvent) {
        let result = call.output.as_ref().and_then(tool::summarize_result);
        let result =
            result.or_else(|| call.text.clone().map(Value::String).as_ref().and_then(tool::summarize_result));
        if call.is_error == Some(true) {
            let output = result.unwrap_or_else(|| "no output".to_owned());
            self.push_aside(out, &self.options.style.red(&format!("tool failed: {output}")));
        } else if let Some(output) = result {
            self.push_aside(out, &self.options.style.dim(&format!("  = {output}")));
        }
    }

    fn render_finished(&mut self, out: &mut Vec<ChannelText>, run: Option<&RunId>, finished: &RunFinished) {
        self.end_thought(out);
        let streamed = self.has_streamed(run);
        if streamed {
            // Only for its own run: a queued run can be cancelled while another one is streaming.
            self.streamed_run = None;
        }
        if !streamed && !finished.text.is_empty() {
            self.push_answer(out, &finished.text);
        }
        out.extend(self.end_line());
        let style = self.options.style;
        match finished.finish_reason {
            FinishReason::EndTurn => {}
            reason @ FinishReason::Cancelled => self.push_aside(out, &style.dim(outcome_word(reason))),
            other => self.push_aside(out, &style.red(&describe_failure(other, finished))),
        }
        if finished.processes.survivors > 0 {
            self.push_aside(out, &style.red(&describe_survivors(&finished.processes)));
        }
        // `qd run` prints only the answer; `qd logs` and `qd attach` also print what the run cost.
        if self.options.show_prompts
            && let Some(line) = describe_usage(finished.usage)
        {
            self.push_aside(out, &style.dim(&line));
        }
    }

    /// Adds a line of its own to the asides.
    fn push_aside(&mut self, out: &mut Vec<ChannelText>, line: &str) {
        self.end_thought(out);
        self.break_answer(out);
        out.push(ChannelText { channel: OutputChannel::Aside, text: format!("{line}\n") });
    }

    fn end_thought(&mut self, out: &mut Vec<ChannelText>) {
        let mut text = String::new();
        self.thought.finish(&mut text);
        if std::mem::take(&mut self.thought_open) || !text.is_empty() {
            text.push('\n');
            out.push(ChannelText { channel: OutputChannel::Aside, text });
        }
    }

    /// Ends the answer's open line if both channels share a screen. The newline is an aside, because it is not data.
    fn break_answer(&mut self, out: &mut Vec<ChannelText>) {
        if self.options.shared_screen && std::mem::take(&mut self.answer_open) {
            out.push(ChannelText { channel: OutputChannel::Aside, text: "\n".to_owned() });
        }
    }
}

/// The tokens and money that a run used. `None` if the agent reported nothing.
fn describe_usage(usage: TokenUsage) -> Option<String> {
    let TokenUsage { input_tokens, output_tokens, cost_usd } = usage;
    if usage == TokenUsage::default() {
        return None;
    }
    let money = if cost_usd > 0.0 { format!(", {}", text::format_dollars(cost_usd)) } else { String::new() };
    Some(format!("used {input_tokens} tokens in, {output_tokens} out{money}"))
}

/// Why a run failed, with the last lines of the agent's stderr.
fn describe_failure(reason: FinishReason, finished: &RunFinished) -> String {
    let Some(error) = &finished.error else {
        let lost = if reason == FinishReason::Interrupted { " (its worker was lost)" } else { "" };
        return format!("run {}{lost}", outcome_word(reason));
    };
    let mut line = format!("run {}: {}", outcome_word(reason), show_prose(&error.message));
    if let Some(status) = error.exit_status {
        line.push_str(&format!(" (exit status {status})"));
    }
    for last in &error.stderr {
        line.push_str(&format!("\n    {}", show_on_one_line(last)));
    }
    line
}

/// How many processes of a stopped run are still alive, and which.
fn describe_survivors(processes: &ProcessCleanup) -> String {
    let ProcessCleanup { survivors, surviving, .. } = processes;
    let describe = |SurvivingProcess { pid, name }: &SurvivingProcess| {
        let name = show_on_one_line(name);
        pid.map_or_else(|| name.to_string(), |pid| format!("{name} (pid {pid})"))
    };
    let names: Vec<String> = surviving.iter().map(describe).collect();
    let processes = if *survivors == 1 { "process" } else { "processes" };
    let which = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    format!("{survivors} {processes} could not be killed{which}")
}

fn describe_stop_cause(cause: RunStopCause) -> &'static str {
    match cause {
        RunStopCause::User => "cancelled",
        RunStopCause::Parent => "the parent session was cancelled",
        RunStopCause::Fleet => "its fleet was stopped",
        RunStopCause::Close => "the session is being closed",
        RunStopCause::Halt => "everything was halted",
        RunStopCause::Timeout => "timeout reached",
        RunStopCause::MaxTurns => "turn limit reached",
        RunStopCause::Budget => "budget exceeded",
        RunStopCause::JournalLimit => "the agent said too much",
    }
}

#[cfg(test)]
mod tests;
