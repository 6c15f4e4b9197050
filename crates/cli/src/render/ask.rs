//! Asks as text: what the agent wants, the commands that answer it, the prompt for answering in place, and the parsing
//! of a typed answer. The daemon validates every answer; nothing is decided here.

use qd_protocol::api::AnswerRequest;
use qd_protocol::event::{Ask, AskAnswer, AskKind, AskStatus, PermissionDecision};
use qd_protocol::policy::Risk;
use serde_json::Value;

use super::ask_input::{AskInputLine, AskLineKind, describe_input};
use super::style::TextStyle;
use super::visible_text::{show_content_line, show_hidden};
use super::{text, tool};

/// How much of a reason or an answer one line shows.
const PREVIEW_CHARS: usize = 200;
/// Before every line below the first of an ask. What an agent wrote never begins in the first column, so it cannot be
/// taken for something that `qd` says.
const INDENT: &str = "    ";
/// Before the continuation of a line that is wider than the screen.
const CONTINUATION: &str = "    ↪ ";
/// Lines are not wrapped to less than this, however narrow the screen is.
const TEXT_COLUMNS_MIN: usize = 20;

/// What the agent wants, in one line, and how many more lines there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AskSummary {
    pub(crate) first_line: String,
    pub(crate) more_lines: usize,
}

impl AskSummary {
    /// At most `width` characters, with the number of the lines that are not shown.
    pub(crate) fn fit(&self, width: Option<usize>) -> String {
        let more = match self.more_lines {
            0 => String::new(),
            lines => format!(" +{}", text::count_lines(lines)),
        };
        let room = width.map_or(usize::MAX, |width| width.saturating_sub(more.chars().count()));
        format!("{}{more}", text::truncate(&self.first_line, room))
    }
}

/// What the agent wants, for a line of a list.
pub(crate) fn summarize(ask: &Ask) -> AskSummary {
    match (ask.kind, &ask.tool) {
        (AskKind::Permission, Some(name)) => {
            let (first_line, more_lines) = tool::call_lines(name, &ask.input);
            AskSummary { first_line, more_lines }
        }
        _ => {
            let mut lines = prompt_lines(ask).into_iter();
            let first_line = show_hidden(&lines.next().unwrap_or_else(|| "permission".to_owned()));
            AskSummary { first_line, more_lines: lines.count() }
        }
    }
}

/// The whole ask: what the agent wants, with the id, the risk and the options of a question. Lines are wrapped to
/// `width`.
pub(crate) fn format_ask(ask: &Ask, style: TextStyle, width: Option<usize>) -> String {
    let risk = match ask.kind {
        AskKind::Permission => format!(" (risk {})", risk_name(ask.risk)),
        AskKind::Question => String::new(),
    };
    format_text(ask_text(ask), (&format!("ask {}: ", ask.id), &risk), style, width)
}

/// The whole ask after its answer: the id, how it ended, and what was wanted.
pub(crate) fn format_resolved(ask: &Ask, style: TextStyle, width: Option<usize>) -> String {
    let outcome = describe_outcome(ask.state, ask.answer.as_ref());
    let mut text = ask_text(ask);
    // What helped to decide is no longer needed.
    text.options.clear();
    if ask.kind == AskKind::Permission {
        text.rest.clear();
    }
    format_text(text, (&format!("{} {outcome} (", ask.id), ")"), style, width)
}

/// What the agent wants, between two texts on the first line if it is a single line that fits, else below them.
fn format_text(
    text: AskText,
    (before, after): (&str, &str),
    style: TextStyle,
    width: Option<usize>,
) -> String {
    let AskText { title, inline, block, rest, options } = text;
    let columns = |line: &str| line.chars().map(text::columns_at_most).sum::<usize>();
    let heading = |middle: &str| {
        let line = show_hidden(&format!("{before}{middle}{after}"));
        Some(line).filter(|line| width.is_none_or(|width| columns(line) <= width))
    };
    let (heading, block) = match (inline.and_then(|inline| heading(&inline)), heading(&title)) {
        (Some(inline), _) => (inline, Vec::new()),
        (None, Some(title)) => (title, block),
        (None, None) if columns(&title) <= TEXT_COLUMNS_MIN => (format!("{before}{title}{after}"), block),
        // The name of the tool is too long for the first line.
        (None, None) => {
            let tool = AskInputLine { kind: AskLineKind::Argument, text: format!("tool: {title}") };
            (format!("{before}permission{after}"), [vec![tool], block].concat())
        }
    };
    let mut out = format!("{}\n", style.yellow(&heading));
    for line in block.iter().chain(&rest).chain(&options) {
        push_wrapped(&mut out, line, style, width);
    }
    out
}

/// The text of an ask, in parts.
struct AskText {
    /// A word for the heading, if `inline` does not fit there.
    title: String,
    /// The same as `block`, in one line. `None` if it takes more than one.
    inline: Option<String>,
    block: Vec<AskInputLine>,
    /// What comes below in any case: the rest of a question, or what the agent says about a permission.
    rest: Vec<AskInputLine>,
    /// The numbered options of a question.
    options: Vec<AskInputLine>,
}

fn ask_text(ask: &Ask) -> AskText {
    let mut prompt = prompt_lines(ask);
    let argument = |text| AskInputLine { kind: AskLineKind::Argument, text };
    let numbered =
        |(i, option): (usize, &String)| argument(format!("{}. {}", i + 1, option.replace('\n', "\\n")));
    let options = ask.options.iter().enumerate().map(numbered).collect();
    if ask.kind == AskKind::Question {
        let rest = prompt.split_off(prompt.len().min(1));
        let verbatim = |text| AskInputLine { kind: AskLineKind::Verbatim, text };
        return AskText {
            title: "question".to_owned(),
            inline: prompt.first().cloned(),
            block: prompt.into_iter().map(verbatim).collect(),
            rest: rest.into_iter().map(verbatim).collect(),
            options,
        };
    }
    let title = ask.tool.as_deref().unwrap_or("permission").replace('\n', "\\n");
    let block = describe_input(&ask.input);
    let inline = match &block[..] {
        [] => Some(title.clone()),
        [only] => {
            let value = ask.input.as_object().and_then(|map| map.values().next()).and_then(Value::as_str);
            let value = value.filter(|value| only.text.ends_with(value));
            Some(format!("{title}: {}", value.unwrap_or(&only.text)))
        }
        _ => None,
    };
    if prompt.len() == 1 && ask.tool.as_ref() == prompt.first() {
        prompt.clear();
    }
    AskText { title, inline, block, rest: prompt.into_iter().map(argument).collect(), options }
}

/// The lines of the agent's own words, without the blank ones around them.
fn prompt_lines(ask: &Ask) -> Vec<String> {
    let prompt = ask.prompt.trim_matches('\n').trim_end();
    if prompt.is_empty() { Vec::new() } else { prompt.split('\n').map(str::to_owned).collect() }
}

/// Appends a line, indented and marked by its kind. A line that is wider than the screen goes on below, marked as such:
/// a line break of the terminal would look like one of the text.
fn push_wrapped(out: &mut String, line: &AskInputLine, style: TextStyle, width: Option<usize>) {
    let (mark, paint): (&str, fn(TextStyle, &str) -> String) = match line.kind {
        AskLineKind::Argument => ("", |_, text| text.to_owned()),
        AskLineKind::Verbatim => ("| ", |_, text| text.to_owned()),
        AskLineKind::Removed => ("- ", TextStyle::red),
        AskLineKind::Added => ("+ ", TextStyle::green),
        AskLineKind::Unchanged => ("  ", TextStyle::dim),
    };
    let margin = CONTINUATION.chars().count();
    let columns = width.map_or(usize::MAX, |width| width.saturating_sub(margin).max(TEXT_COLUMNS_MIN));
    let shown = match line.kind {
        AskLineKind::Argument | AskLineKind::Verbatim => show_hidden(&line.text),
        AskLineKind::Removed | AskLineKind::Added | AskLineKind::Unchanged => show_content_line(&line.text),
    };
    for (i, piece) in split_columns(&shown, columns).into_iter().enumerate() {
        let before = if i == 0 { format!("{INDENT}{mark}") } else { CONTINUATION.to_owned() };
        let text = paint(style, &format!("{before}{piece}"));
        out.push_str(text.trim_end_matches(' '));
        out.push('\n');
    }
}

/// Splits a text into pieces that each fit into so many columns. A text that is empty is one piece.
fn split_columns(text: &str, columns: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let (mut start, mut used) = (0, 0);
    for (at, c) in text.char_indices() {
        let needed = text::columns_at_most(c);
        if used + needed > columns && at > start {
            pieces.push(&text[start..at]);
            (start, used) = (at, 0);
        }
        used += needed;
    }
    pieces.push(&text[start..]);
    pieces
}

/// The commands that answer the ask from any terminal, one per line.
pub(crate) fn answer_commands(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Permission => format!("    qd allow {0}\n    qd deny {0} [REASON]\n", ask.id),
        AskKind::Question => format!("    qd answer {} VALUE\n", ask.id),
    }
}

/// The prompt for answering on the terminal.
pub(crate) fn answer_prompt(ask: &Ask) -> String {
    match ask.kind {
        AskKind::Permission if ask.risk == Risk::High => {
            "allow? y(es once), n(o), or say why not: ".to_owned()
        }
        AskKind::Permission => "allow? y(es once), a(lways), n(o), or say why not: ".to_owned(),
        AskKind::Question if ask.options.is_empty() => "answer: ".to_owned(),
        AskKind::Question => "answer, by number or in full: ".to_owned(),
    }
}

/// The prompt for the first of these asks. If there are several, it says which is answered, because the last one on the
/// terminal is another. Empty without asks.
pub(crate) fn prompt_for_first(asks: &[Ask], width: Option<usize>) -> String {
    match asks {
        [] => String::new(),
        [only] => answer_prompt(only),
        [first, ..] => {
            let room = width.map(|width| width.saturating_sub(INDENT.len()).max(TEXT_COLUMNS_MIN));
            let wanted = summarize(first).fit(room);
            let (open, id, prompt) = (asks.len(), &first.id, answer_prompt(first));
            format!("{open} asks are open. This answers {id}:\n{INDENT}{wanted}\n{prompt}")
        }
    }
}

/// The first of these asks again, with the prompt for it: what was shown since may have hidden it. Empty without asks.
pub(crate) fn first_with_prompt(asks: &[Ask], style: TextStyle, width: Option<usize>) -> String {
    let Some(first) = asks.first() else { return String::new() };
    format!("{}{}", format_ask(first, style, width), answer_prompt(first))
}

/// Parses a typed line as an answer. The error is the text to print instead; an empty line is never an answer.
pub(crate) fn parse_answer(ask: &Ask, line: &str) -> Result<AnswerRequest, String> {
    let line = line.trim();
    if line.is_empty() {
        return Err(answer_prompt(ask));
    }
    if ask.kind == AskKind::Question {
        let value = choose_option(&ask.options, line)?;
        return Ok(AnswerRequest { value: Some(value), ..AnswerRequest::default() });
    }
    let decision = |word: &str| AnswerRequest { decision: Some(word.to_owned()), ..AnswerRequest::default() };
    Ok(match line.to_ascii_lowercase().as_str() {
        "y" | "yes" => decision("allow_once"),
        "a" | "always" => decision("allow_always"),
        "n" | "no" => decision("deny"),
        // `n REASON` is what `qd asks` takes.
        _ => {
            let reason = line.strip_prefix("n ").unwrap_or(line).trim_start();
            AnswerRequest { reason: Some(reason.to_owned()), ..decision("deny") }
        }
    })
}

/// How an ask ended, in a few words.
pub(crate) fn describe_outcome(state: AskStatus, answer: Option<&AskAnswer>) -> String {
    let Some(answer) = answer else {
        return if state == AskStatus::Pending { "pending" } else { "withdrawn" }.to_owned();
    };
    let reason = answer.reason.as_deref().filter(|reason| !reason.is_empty());
    match (answer.decision, &answer.value) {
        (Some(PermissionDecision::AllowOnce), _) => "allowed once".to_owned(),
        (Some(PermissionDecision::AllowAlways), _) => "allowed always".to_owned(),
        (Some(PermissionDecision::Deny), _) => {
            reason.map_or_else(|| "denied".to_owned(), |why| format!("denied: {}", preview(why)))
        }
        (None, Some(value)) => format!("answered: {}", preview(value)),
        (None, None) => "answered".to_owned(),
    }
}

/// The first line of a text, with the number of further lines.
fn preview(text: &str) -> String {
    let more = text.lines().filter(|line| !line.trim().is_empty()).count().saturating_sub(1);
    let first = text::first_line(text, PREVIEW_CHARS);
    if more == 0 { first } else { format!("{first} (+{})", text::count_lines(more)) }
}

/// The name of a risk, as in JSON.
pub(crate) fn risk_name(risk: Risk) -> &'static str {
    match risk {
        Risk::Low => "low",
        Risk::Medium => "medium",
        Risk::High => "high",
    }
}

/// The options with their numbers, in one line.
pub(crate) fn list_options(options: &[String]) -> String {
    let numbered = options.iter().enumerate().map(|(i, option)| format!("{}. {}", i + 1, one_line(option)));
    numbered.collect::<Vec<_>>().join(", ")
}

/// The text with hidden characters shown, so it stays one line.
fn one_line(text: &str) -> String {
    show_hidden(text).replace('\n', "\\n")
}

/// The chosen option, by full text or by number. Without options, any text is an answer.
pub(crate) fn choose_option(options: &[String], line: &str) -> Result<String, String> {
    if options.is_empty() {
        return Ok(line.to_owned());
    }
    if let Some(exact) = options.iter().find(|option| option.trim() == line) {
        return Ok(exact.clone());
    }
    let numbered = line.parse::<usize>().ok().and_then(|number| options.get(number.checked_sub(1)?));
    numbered.cloned().ok_or_else(|| format!("answer with one of: {}\n", list_options(options)))
}

#[cfg(test)]
pub(crate) mod tests;
