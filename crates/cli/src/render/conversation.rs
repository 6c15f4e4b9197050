//! A conversation as text: what the agent says, and around it what it thinks, does and asks. It turns events into
//! pieces for one of two channels and keeps the lines whole; where the channels go is the verb's choice.

use qd_protocol::event::{Body, Delta, Event, Part, QueueReason, Role, RunFinished, StopCause, Tool};
use qd_protocol::{FinishReason, RunId, Usage};
use serde_json::Value;

use super::style::Style;
use super::{ask, text, tool};

/// How much of a plan's entry or a notice a line shows.
const HEAD: usize = 200;

/// Where a piece belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// The agent's own words: data.
    Answer,
    /// Everything around them.
    Aside,
}

/// Some text for one channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Where it belongs.
    pub(crate) channel: Channel,
    /// The text, with its own line ends.
    pub(crate) text: String,
}

/// How a conversation is shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Colours of the asides.
    pub(crate) style: Style,
    /// Whether both channels end on the same screen or file, so that one must begin a line where the other left off.
    pub(crate) joined: bool,
    /// Whether the prompts are shown too. `qd run` does not repeat what was just typed.
    pub(crate) prompts: bool,
    /// Whether the agent's words go to a terminal and are cleaned of control characters.
    pub(crate) clean: bool,
}

/// A conversation so far, as far as its lines depend on it.
#[derive(Debug)]
pub(crate) struct Conversation {
    look: Look,
    /// Whether the answer's last line is unfinished.
    answer_open: bool,
    /// Whether a thought's last line is unfinished.
    thought_open: bool,
    /// The run whose words have been streamed, so that its result is not said again.
    streamed: Option<RunId>,
}

impl Conversation {
    /// One that has not begun.
    pub(crate) fn new(look: Look) -> Self {
        Self { look, answer_open: false, thought_open: false, streamed: None }
    }

    /// What one more event adds. A kind that this version does not know adds nothing.
    pub(crate) fn show(&mut self, event: &Event) -> Vec<Piece> {
        let data = event.data.to_string();
        let Ok(Some(body)) = Body::decode(&event.kind, data.as_bytes()) else { return Vec::new() };
        let mut out = Vec::new();
        self.add(&mut out, event.run_id.as_ref(), body);
        out
    }

    /// Whether words of this run have been shown already.
    pub(crate) fn has_said(&self, run: Option<&RunId>) -> bool {
        self.streamed.is_some() && self.streamed.as_ref() == run
    }

    /// Ends the unfinished line of the answer. A verb that stops in the middle calls it.
    pub(crate) fn end_line(&mut self) -> Vec<Piece> {
        let mut out = Vec::new();
        self.end_thought(&mut out);
        if std::mem::take(&mut self.answer_open) {
            out.push(Piece { channel: Channel::Answer, text: "\n".to_owned() });
        }
        out
    }

    fn add(&mut self, out: &mut Vec<Piece>, run: Option<&RunId>, body: Body) {
        let style = self.look.style;
        match body {
            Body::MessageCreated(message) if message.role == Role::User => self.prompt(out, &message.parts),
            Body::TextDelta(delta) => self.words(out, run, &delta),
            Body::ThoughtDelta(delta) => self.thought(out, &delta),
            Body::ToolStarted(call) => self.tool_started(out, &call),
            Body::ToolFinished(call) => self.tool_finished(out, &call),
            Body::PlanUpdated(plan) => {
                for entry in plan.entries {
                    let status = if entry.status.is_empty() { "-" } else { &entry.status };
                    let line = format!("plan [{}] {}", text::clean(status), text::head(&entry.content, HEAD));
                    self.aside(out, &style.dim(&line));
                }
            }
            Body::NoticeShown(notice) => self.aside(out, &style.yellow(&text::clean(&notice.text))),
            Body::AskOpened(opened) => {
                let block = ask::block(&opened.ask);
                self.aside(out, &style.yellow(block.trim_end()));
            }
            Body::AskResolved(resolved) => {
                let outcome = ask::outcome(resolved.ask.state, resolved.ask.answer.as_ref());
                self.aside(out, &style.dim(&format!("ask {}: {outcome}", resolved.ask_id)));
            }
            Body::SteerAccepted(steer) => self.speech(out, "steer> ", &steer.text),
            Body::SteerMissed(missed) => {
                let line = if missed.next_run_id.is_some() {
                    "the turn did not take the steer; it runs next as a prompt"
                } else {
                    "the turn did not take the steer; its run was cancelled"
                };
                self.aside(out, &style.dim(line));
            }
            Body::RunQueued(queued) => {
                let why = match queued.reason {
                    QueueReason::Busy => "behind another run",
                    QueueReason::Halted => "a halt is set (`qd unhalt` lifts it)",
                    QueueReason::Capacity => "too many agents are alive",
                };
                self.aside(out, &style.dim(&format!("queued at {}: {why}", queued.position)));
            }
            Body::RunCancelRequested(cancel) => {
                let reason =
                    cancel.reason.map(|why| format!(": {}", text::head(&why, HEAD))).unwrap_or_default();
                self.aside(out, &style.dim(&format!("stopping, {}{reason}", stop_cause(cancel.by))));
            }
            Body::RunFinished(finished) => self.finished(out, run, &finished),
            // The end of its run follows, and says it.
            Body::ErrorRaised(_) if run.is_some() => {}
            Body::ErrorRaised(error) => {
                self.aside(out, &style.red(&format!("error: {}", text::clean(&error.message))))
            }
            Body::SessionClosed(_) => self.aside(out, &style.dim("session closed")),
            _ => {}
        }
    }

    fn prompt(&mut self, out: &mut Vec<Piece>, parts: &[Part]) {
        if !self.look.prompts {
            return;
        }
        for part in parts {
            match part {
                Part::Text { text, blob: None } => self.speech(out, "> ", text),
                Part::Text { text, blob: Some(blob) } => {
                    self.speech(out, "> ", &format!("{text}… ({} in all)", text::size(blob.size)));
                }
                Part::File { file } => self.speech(out, "> ", &format!("[{}, {}]", file.name, file.mime)),
                _ => {}
            }
        }
    }

    /// A person's words: a mark before the first line, as much room before the others.
    fn speech(&mut self, out: &mut Vec<Piece>, mark: &str, words: &str) {
        let indent = format!("\n{}", " ".repeat(mark.len()));
        let words = text::clean(words.trim_end()).replace('\n', &indent);
        self.aside(out, &self.look.style.cyan(&format!("{mark}{words}")));
    }

    fn words(&mut self, out: &mut Vec<Piece>, run: Option<&RunId>, delta: &Delta) {
        if delta.after_run.is_some() {
            self.aside(out, &self.look.style.dim(&format!("late: {}", text::head(&delta.text, HEAD))));
            return;
        }
        if delta.text.is_empty() {
            return;
        }
        self.end_thought(out);
        self.streamed = run.cloned();
        self.answer(out, &delta.text);
    }

    fn answer(&mut self, out: &mut Vec<Piece>, words: &str) {
        let words = if self.look.clean { text::clean(words) } else { words.to_owned() };
        self.answer_open = !words.ends_with('\n');
        out.push(Piece { channel: Channel::Answer, text: words });
    }

    fn thought(&mut self, out: &mut Vec<Piece>, delta: &Delta) {
        let words = text::clean(&delta.text);
        if words.is_empty() || delta.after_run.is_some() {
            return;
        }
        if !self.thought_open {
            self.break_answer(out);
        }
        self.thought_open = !words.ends_with('\n');
        out.push(Piece { channel: Channel::Aside, text: self.look.style.dim(&words) });
    }

    fn tool_started(&mut self, out: &mut Vec<Piece>, call: &Tool) {
        let name = call.name.as_deref().unwrap_or("tool");
        let line = tool::call(name, call.input.as_ref().unwrap_or(&Value::Null));
        self.aside(out, &self.look.style.dim(&format!("tool {line}")));
    }

    fn tool_finished(&mut self, out: &mut Vec<Piece>, call: &Tool) {
        let result = call.output.as_ref().and_then(tool::result);
        let result = result.or_else(|| call.text.clone().map(Value::String).as_ref().and_then(tool::result));
        if call.is_error == Some(true) {
            let what = result.unwrap_or_else(|| "no output".to_owned());
            self.aside(out, &self.look.style.red(&format!("tool failed: {what}")));
        } else if let Some(what) = result {
            self.aside(out, &self.look.style.dim(&format!("  = {what}")));
        }
    }

    fn finished(&mut self, out: &mut Vec<Piece>, run: Option<&RunId>, finished: &RunFinished) {
        self.end_thought(out);
        let said = self.has_said(run);
        if said {
            // Only then: one that leaves the queue ends while another speaks.
            self.streamed = None;
        }
        if !said && !finished.text.is_empty() {
            self.answer(out, &finished.text);
        }
        out.extend(self.end_line());
        let style = self.look.style;
        match finished.finish_reason {
            FinishReason::EndTurn => {}
            FinishReason::Cancelled => self.aside(out, &style.dim("cancelled")),
            other => self.aside(out, &style.red(&ending(other, finished))),
        }
        if finished.processes.survivors > 0 {
            let line = format!("{} processes would not die", finished.processes.survivors);
            self.aside(out, &style.red(&line));
        }
        // Who has just typed the prompt wants the answer; who reads what happened wants to know what it cost, too.
        if self.look.prompts
            && let Some(line) = used(finished.usage)
        {
            self.aside(out, &style.dim(&line));
        }
    }

    /// A line of its own beside the answer.
    fn aside(&mut self, out: &mut Vec<Piece>, line: &str) {
        self.end_thought(out);
        self.break_answer(out);
        out.push(Piece { channel: Channel::Aside, text: format!("{line}\n") });
    }

    fn end_thought(&mut self, out: &mut Vec<Piece>) {
        if std::mem::take(&mut self.thought_open) {
            out.push(Piece { channel: Channel::Aside, text: "\n".to_owned() });
        }
    }

    /// Where both channels share a screen, leaves the answer's unfinished line. The break itself is no data.
    fn break_answer(&mut self, out: &mut Vec<Piece>) {
        if self.look.joined && std::mem::take(&mut self.answer_open) {
            out.push(Piece { channel: Channel::Aside, text: "\n".to_owned() });
        }
    }
}

/// What a run used, if it reported anything.
fn used(usage: Usage) -> Option<String> {
    let Usage { input_tokens, output_tokens, cost_usd } = usage;
    if usage == Usage::default() {
        return None;
    }
    let money = if cost_usd > 0.0 { format!(", {}", text::dollars(cost_usd)) } else { String::new() };
    Some(format!("used {input_tokens} tokens in, {output_tokens} out{money}"))
}

/// A finish reason as it stands on the wire.
pub(crate) fn reason(reason: FinishReason) -> &'static str {
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
fn ending(why: FinishReason, finished: &RunFinished) -> String {
    let Some(error) = &finished.error else {
        let lost = if why == FinishReason::Interrupted { " (its worker was lost)" } else { "" };
        return format!("run ended: {}{lost}", reason(why));
    };
    let mut line = format!("run ended: {}: {}", reason(why), text::clean(&error.message));
    if let Some(status) = error.exit_status {
        line.push_str(&format!(" (exit status {status})"));
    }
    for last in &error.stderr {
        line.push_str(&format!("\n    {}", text::clean(last)));
    }
    line
}

fn stop_cause(cause: StopCause) -> &'static str {
    match cause {
        StopCause::User => "cancelled",
        StopCause::Parent => "the session above was cancelled",
        StopCause::Fleet => "its fleet was stopped",
        StopCause::Close => "the session closes",
        StopCause::Halt => "a halt was set",
        StopCause::Timeout => "over its time",
        StopCause::MaxTurns => "over its turns",
        StopCause::Budget => "over its budget",
    }
}

#[cfg(test)]
mod tests;
