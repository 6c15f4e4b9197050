//! A conversation as text: what the agent says, and around it what it thinks, does and asks. It turns events into
//! pieces for one of two channels and keeps the lines whole; where the channels go is the verb's choice.

use qd_protocol::event::{
    Event, EventBody, MessageDelta, MessagePart, MessageRole, QueueReason, RunFinished, RunStopCause,
    ToolCallEvent,
};
use qd_protocol::{FinishReason, RunId, TokenUsage};
use serde_json::Value;

use super::style::TextStyle;
use super::{ask, text, tool};

/// How much of a plan's entry or a notice a line shows.
const PREVIEW_CHARS: usize = 200;

/// Where a piece belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputChannel {
    /// The agent's own words: data.
    Answer,
    /// Everything around them.
    Aside,
}

/// Some text for one channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChannelText {
    /// Where it belongs.
    pub(crate) channel: OutputChannel,
    /// The text, with its own line ends.
    pub(crate) text: String,
}

/// How a conversation is shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConversationOptions {
    /// Colours of the asides.
    pub(crate) style: TextStyle,
    /// Whether both channels end on the same screen or file, so that one must begin a line where the other left off.
    pub(crate) shared_screen: bool,
    /// Whether the prompts are shown too. `qd run` does not repeat what was just typed.
    pub(crate) show_prompts: bool,
    /// Whether the agent's words go to a terminal and are cleaned of control characters.
    pub(crate) strip_controls: bool,
}

/// A conversation so far, as far as its lines depend on it.
#[derive(Debug)]
pub(crate) struct ConversationRenderer {
    options: ConversationOptions,
    /// Whether the answer's last line is unfinished.
    answer_open: bool,
    /// Whether a thought's last line is unfinished.
    thought_open: bool,
    /// The run whose words have been streamed, so that its result is not said again.
    streamed_run: Option<RunId>,
}

impl ConversationRenderer {
    /// One that has not begun.
    pub(crate) fn new(options: ConversationOptions) -> Self {
        Self { options, answer_open: false, thought_open: false, streamed_run: None }
    }

    /// What one more event adds. A kind that this version does not know adds nothing.
    pub(crate) fn render_event(&mut self, event: &Event) -> Vec<ChannelText> {
        let data = event.data.to_string();
        let Ok(Some(body)) = EventBody::decode(&event.kind, data.as_bytes()) else { return Vec::new() };
        let mut out = Vec::new();
        self.render_body(&mut out, event.run_id.as_ref(), body);
        out
    }

    /// Whether words of this run have been shown already.
    pub(crate) fn has_streamed(&self, run: Option<&RunId>) -> bool {
        self.streamed_run.is_some() && self.streamed_run.as_ref() == run
    }

    /// Ends the unfinished line of the answer. A verb that stops in the middle calls it.
    pub(crate) fn end_line(&mut self) -> Vec<ChannelText> {
        let mut out = Vec::new();
        self.end_thought(&mut out);
        if std::mem::take(&mut self.answer_open) {
            out.push(ChannelText { channel: OutputChannel::Answer, text: "\n".to_owned() });
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
                        text::strip_controls(status),
                        text::first_line(&entry.content, PREVIEW_CHARS)
                    );
                    self.push_aside(out, &style.dim(&line));
                }
            }
            EventBody::NoticeShown(notice) => {
                self.push_aside(out, &style.yellow(&text::strip_controls(&notice.text)))
            }
            EventBody::AskOpened(opened) => {
                let block = ask::format_ask(&opened.ask);
                self.push_aside(out, &style.yellow(block.trim_end()));
            }
            EventBody::AskResolved(resolved) => {
                let outcome = ask::describe_outcome(resolved.ask.state, resolved.ask.answer.as_ref());
                self.push_aside(out, &style.dim(&format!("ask {}: {outcome}", resolved.ask_id)));
            }
            EventBody::SteerAccepted(steer) => self.render_user_text(out, "steer> ", &steer.text),
            EventBody::SteerMissed(missed) => {
                let line = if missed.next_run_id.is_some() {
                    "the turn did not take the steer; it runs next as a prompt"
                } else {
                    "the turn did not take the steer; its run was cancelled"
                };
                self.push_aside(out, &style.dim(line));
            }
            EventBody::RunQueued(queued) => {
                let why = match queued.reason {
                    QueueReason::Busy => "behind another run",
                    QueueReason::Halted => "a halt is set (`qd unhalt` lifts it)",
                    QueueReason::Capacity => "too many agents are alive",
                };
                self.push_aside(out, &style.dim(&format!("queued at {}: {why}", queued.position)));
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
            // The end of its run follows, and says it.
            EventBody::ErrorRaised(_) if run.is_some() => {}
            EventBody::ErrorRaised(error) => {
                self.push_aside(out, &style.red(&format!("error: {}", text::strip_controls(&error.message))))
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
                        &format!("{text}… ({} in all)", text::format_size(blob.size)),
                    );
                }
                MessagePart::File { file } => {
                    self.render_user_text(out, "> ", &format!("[{}, {}]", file.name, file.mime))
                }
                _ => {}
            }
        }
    }

    /// A person's words: a mark before the first line, as much room before the others.
    fn render_user_text(&mut self, out: &mut Vec<ChannelText>, mark: &str, words: &str) {
        let indent = format!("\n{}", " ".repeat(mark.len()));
        let words = text::strip_controls(words.trim_end()).replace('\n', &indent);
        self.push_aside(out, &self.options.style.cyan(&format!("{mark}{words}")));
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

    fn push_answer(&mut self, out: &mut Vec<ChannelText>, words: &str) {
        let words = if self.options.strip_controls { text::strip_controls(words) } else { words.to_owned() };
        self.answer_open = !words.ends_with('\n');
        out.push(ChannelText { channel: OutputChannel::Answer, text: words });
    }

    fn render_thought(&mut self, out: &mut Vec<ChannelText>, delta: &MessageDelta) {
        let words = text::strip_controls(&delta.text);
        if words.is_empty() || delta.after_run.is_some() {
            return;
        }
        if !self.thought_open {
            self.break_answer(out);
        }
        self.thought_open = !words.ends_with('\n');
        out.push(ChannelText { channel: OutputChannel::Aside, text: self.options.style.dim(&words) });
    }

    fn render_tool_started(&mut self, out: &mut Vec<ChannelText>, call: &ToolCallEvent) {
        let name = call.name.as_deref().unwrap_or("tool");
        let line = tool::summarize_call(name, call.input.as_ref().unwrap_or(&Value::Null));
        self.push_aside(out, &self.options.style.dim(&format!("tool {line}")));
    }

    fn render_tool_finished(&mut self, out: &mut Vec<ChannelText>, call: &ToolCallEvent) {
        let result = call.output.as_ref().and_then(tool::summarize_result);
        let result =
            result.or_else(|| call.text.clone().map(Value::String).as_ref().and_then(tool::summarize_result));
        if call.is_error == Some(true) {
            let what = result.unwrap_or_else(|| "no output".to_owned());
            self.push_aside(out, &self.options.style.red(&format!("tool failed: {what}")));
        } else if let Some(what) = result {
            self.push_aside(out, &self.options.style.dim(&format!("  = {what}")));
        }
    }

    fn render_finished(&mut self, out: &mut Vec<ChannelText>, run: Option<&RunId>, finished: &RunFinished) {
        self.end_thought(out);
        let said = self.has_streamed(run);
        if said {
            // Only then: one that leaves the queue ends while another speaks.
            self.streamed_run = None;
        }
        if !said && !finished.text.is_empty() {
            self.push_answer(out, &finished.text);
        }
        out.extend(self.end_line());
        let style = self.options.style;
        match finished.finish_reason {
            FinishReason::EndTurn => {}
            FinishReason::Cancelled => self.push_aside(out, &style.dim("cancelled")),
            other => self.push_aside(out, &style.red(&describe_failure(other, finished))),
        }
        if finished.processes.survivors > 0 {
            let line = format!("{} processes would not die", finished.processes.survivors);
            self.push_aside(out, &style.red(&line));
        }
        // Who has just typed the prompt wants the answer; who reads what happened wants to know what it cost, too.
        if self.options.show_prompts
            && let Some(line) = describe_usage(finished.usage)
        {
            self.push_aside(out, &style.dim(&line));
        }
    }

    /// A line of its own beside the answer.
    fn push_aside(&mut self, out: &mut Vec<ChannelText>, line: &str) {
        self.end_thought(out);
        self.break_answer(out);
        out.push(ChannelText { channel: OutputChannel::Aside, text: format!("{line}\n") });
    }

    fn end_thought(&mut self, out: &mut Vec<ChannelText>) {
        if std::mem::take(&mut self.thought_open) {
            out.push(ChannelText { channel: OutputChannel::Aside, text: "\n".to_owned() });
        }
    }

    /// Where both channels share a screen, leaves the answer's unfinished line. The break itself is no data.
    fn break_answer(&mut self, out: &mut Vec<ChannelText>) {
        if self.options.shared_screen && std::mem::take(&mut self.answer_open) {
            out.push(ChannelText { channel: OutputChannel::Aside, text: "\n".to_owned() });
        }
    }
}

/// What a run used, if it reported anything.
fn describe_usage(usage: TokenUsage) -> Option<String> {
    let TokenUsage { input_tokens, output_tokens, cost_usd } = usage;
    if usage == TokenUsage::default() {
        return None;
    }
    let money = if cost_usd > 0.0 { format!(", {}", text::format_dollars(cost_usd)) } else { String::new() };
    Some(format!("used {input_tokens} tokens in, {output_tokens} out{money}"))
}

/// A finish reason as it stands on the wire.
pub(crate) fn finish_reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::EndTurn => "end_turn",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Error => "error",
        FinishReason::MaxTokens => "max_tokens",
        FinishReason::MaxTurns => "max_turns",
        FinishReason::BudgetExceeded => "budget_exceeded",
        FinishReason::Timeout => "timeout",
        FinishReason::Refused => "refused",
        FinishReason::Interrupted => "interrupted",
    }
}

/// Why a run did not end well, with what the agent said last.
fn describe_failure(why: FinishReason, finished: &RunFinished) -> String {
    let Some(error) = &finished.error else {
        let lost = if why == FinishReason::Interrupted { " (its worker was lost)" } else { "" };
        return format!("run ended: {}{lost}", finish_reason_name(why));
    };
    let mut line =
        format!("run ended: {}: {}", finish_reason_name(why), text::strip_controls(&error.message));
    if let Some(status) = error.exit_status {
        line.push_str(&format!(" (exit status {status})"));
    }
    for last in &error.stderr {
        line.push_str(&format!("\n    {}", text::strip_controls(last)));
    }
    line
}

fn describe_stop_cause(cause: RunStopCause) -> &'static str {
    match cause {
        RunStopCause::User => "cancelled",
        RunStopCause::Parent => "the session above was cancelled",
        RunStopCause::Fleet => "its fleet was stopped",
        RunStopCause::Close => "the session closes",
        RunStopCause::Halt => "a halt was set",
        RunStopCause::Timeout => "over its time",
        RunStopCause::MaxTurns => "over its turns",
        RunStopCause::Budget => "over its budget",
    }
}

#[cfg(test)]
mod tests;
