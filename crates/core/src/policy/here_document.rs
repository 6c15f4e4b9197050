//! Here-documents: text that a command line passes to a command. A shell does not run that text, so it need not be
//! analysed as commands, as long as it certainly is such text. Where quotes, comments or arithmetic are ambiguous, no
//! here-document is recognised.

use super::line_analysis::SHELLS;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HereDocument {
    pub(super) body: String,
    pub(super) used_as: HereDocumentUse,
}

/// How the text of a here-document is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HereDocumentUse {
    /// A command takes it as plain text.
    Data,
    /// It is a patch that is applied.
    Patch,
    /// It is run by an interpreter of a language other than the shell's.
    Code,
    /// A shell may run it, or part of it.
    Shell,
}

/// Commands that treat their input as plain text.
const TEXT_CONSUMERS: &[&str] =
    &["cat", "tee", "git", "patch", "apply_patch", "cd", "mkdir", "touch", "wc", "head", "gh"];

/// Interpreters of languages other than the shell's.
pub(super) const INTERPRETERS: &[&str] =
    &["python", "python2", "python3", "node", "deno", "bun", "perl", "ruby", "php", "lua"];

/// Commands that could run the output of another command, wherever they are in the line.
const COMMAND_RUNNERS: &[&str] = &[
    "eval", "source", ".", "exec", "xargs", "parallel", "ssh", "sudo", "doas", "su", "env", "command",
    "busybox", "at", "batch", "crontab", "make", "watch", "script", "timeout", "nohup", "setsid",
];

/// The line without its here-documents, and the documents. `None` if none could be recognised with certainty.
pub(super) fn extract_here_documents(line: &str) -> Option<(String, Vec<HereDocument>)> {
    if !line.contains("<<") || line.contains(['\r', '\0']) {
        return None;
    }
    let mut scanner = QuoteScanner { contexts: vec![QuoteContext::Plain], in_comment: false, in_word: false };
    let (mut rest, mut found) = (String::new(), Vec::new());
    let mut lines = line.split('\n');
    while let Some(text) = lines.next() {
        rest.push_str(text);
        rest.push('\n');
        for DocumentDelimiter { word, quoted, strips_tabs } in scanner.scan_line(text)? {
            let mut body = String::new();
            loop {
                let next = lines.next()?;
                let end = if strips_tabs { next.trim_start_matches('\t') } else { next };
                if end == word {
                    break;
                }
                body.push_str(next);
                body.push('\n');
            }
            let used_as = classify_document(text, quoted, &body);
            found.push(HereDocument { body, used_as });
        }
    }
    // Next to any of these, `<<` may mean something else.
    if found.is_empty() || ["((", "${", "$'", "`"].iter().any(|odd| rest.contains(odd)) {
        return None;
    }
    if possible_command_names(&rest).any(|name| SHELLS.contains(&name) || COMMAND_RUNNERS.contains(&name)) {
        found.iter_mut().for_each(|document| document.used_as = HereDocumentUse::Shell);
    }
    Some((rest, found))
}

/// How a document that belongs to this line is used.
fn classify_document(line: &str, quoted: bool, body: &str) -> HereDocumentUse {
    if !quoted && (body.contains("$(") || body.contains('`')) {
        return HereDocumentUse::Shell;
    }
    let names: Vec<&str> = command_names(line).collect();
    let any = |list: &[&str]| names.iter().any(|name| list.contains(name));
    if names.is_empty()
        || !names.iter().all(|name| TEXT_CONSUMERS.contains(name) || INTERPRETERS.contains(name))
    {
        return HereDocumentUse::Shell;
    }
    match () {
        () if any(INTERPRETERS) => HereDocumentUse::Code,
        () if any(&["patch", "apply_patch"]) || line.contains("git apply") => HereDocumentUse::Patch,
        () => HereDocumentUse::Data,
    }
}

/// The command names in one line, guessed without regard to quotes.
fn command_names(line: &str) -> impl Iterator<Item = &str> {
    line.split([';', '&', '|', '(', '{']).filter_map(|part| {
        let word = part.split_whitespace().find(|word| !word.contains('=') && !word.starts_with(['>', '<']));
        word.map(|word| word.trim_matches(['"', '\'']).rsplit('/').next().unwrap_or(word))
    })
}

/// Every word that could be a command name.
fn possible_command_names(text: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| c.is_whitespace() || ";&|(){}<>\"'=\\".contains(c);
    text.split(ends).map(|word| word.rsplit('/').next().unwrap_or(word))
}

struct DocumentDelimiter<'l> {
    word: &'l str,
    /// Nothing in the text is expanded.
    quoted: bool,
    /// `<<-`: leading tabs before the delimiter are ignored.
    strips_tabs: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QuoteContext {
    Plain,
    Double,
    Single,
}

/// Tracks in which quotes and substitutions the current position is.
struct QuoteScanner {
    contexts: Vec<QuoteContext>,
    in_comment: bool,
    /// The previous character belongs to a word.
    in_word: bool,
}

impl QuoteScanner {
    /// The here-document delimiters on one line. `None` if the line is ambiguous.
    fn scan_line<'l>(&mut self, text: &'l str) -> Option<Vec<DocumentDelimiter<'l>>> {
        let mut found = Vec::new();
        (self.in_comment, self.in_word) = (false, false);
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            at += c.len_utf8();
            let top = *self.contexts.last()?;
            let was_in_word = self.in_word;
            self.in_word = !c.is_whitespace() && !";&|()<>".contains(c);
            match (top, c) {
                _ if self.in_comment => {}
                (QuoteContext::Single, '\'') => drop(self.contexts.pop()),
                (QuoteContext::Single, _) => {}
                (_, '\\') => at += text[at..].chars().next().map_or(0, char::len_utf8),
                (QuoteContext::Double, '"') => drop(self.contexts.pop()),
                (_, '$') if text[at..].starts_with('(') => {
                    at += 1;
                    self.contexts.push(QuoteContext::Plain);
                    self.in_word = false;
                }
                (QuoteContext::Double, _) => {}
                (QuoteContext::Plain, '"') => self.contexts.push(QuoteContext::Double),
                (QuoteContext::Plain, '\'') => self.contexts.push(QuoteContext::Single),
                (QuoteContext::Plain, '#') if !was_in_word => self.in_comment = true,
                (QuoteContext::Plain, '(') => self.contexts.push(QuoteContext::Plain),
                (QuoteContext::Plain, ')') if self.contexts.len() > 1 => drop(self.contexts.pop()),
                (QuoteContext::Plain, '<') if text[at..].starts_with("<<") => at += 2,
                (QuoteContext::Plain, '<') if text[at..].starts_with('<') => {
                    let (delimiter, length) = parse_delimiter(&text[at + 1..])?;
                    at += 1 + length;
                    found.push(delimiter);
                }
                (QuoteContext::Plain, _) => {}
            }
        }
        // If the line continues on the next one, the document would only begin after that.
        let is_complete = self.contexts.last() == Some(&QuoteContext::Plain) && !text.ends_with('\\');
        (found.is_empty() || is_complete).then_some(found)
    }
}

/// Parses the delimiter right after `<<`. Returns it with its length in bytes.
fn parse_delimiter(text: &str) -> Option<(DocumentDelimiter<'_>, usize)> {
    let strips_tabs = text.starts_with('-');
    let rest = text[usize::from(strips_tabs)..].trim_start_matches([' ', '\t']);
    let quote = rest.chars().next().filter(|c| matches!(c, '\'' | '"'));
    let word = if quote.is_some() { &rest[1..] } else { rest };
    let length = word.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(word.len());
    let (word, after) = word.split_at(length);
    let after = match quote {
        Some(quote) => after.strip_prefix(quote)?,
        None => after,
    };
    let ends = after.chars().next().is_none_or(|c| c.is_whitespace() || ";&|)<>".contains(c));
    let length = text.len() - after.len();
    (ends && !word.is_empty())
        .then_some((DocumentDelimiter { word, quoted: quote.is_some(), strips_tabs }, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_document_use(line: &str) -> Option<HereDocumentUse> {
        extract_here_documents(line).map(|(_, found)| found[0].used_as)
    }

    #[test]
    fn the_use_of_a_document_depends_on_its_command() {
        for (line, expected) in [
            ("cat > x <<'EOF'\nrm -rf /\nEOF", HereDocumentUse::Data),
            ("cd src && cat <<-\"EOF\" > x\n\tx\n\tEOF\nls", HereDocumentUse::Data),
            ("git commit -m \"$(cat <<'EOF'\nit's done\nEOF\n)\"", HereDocumentUse::Data),
            ("cat <<EOF\n$HOME\nEOF", HereDocumentUse::Data),
            ("cat <<'EOF'\nuse `x` or ${y}\nEOF", HereDocumentUse::Data),
            ("cat <<EOF\n`rm x`\nEOF", HereDocumentUse::Shell),
            ("apply_patch <<'EOF'\n*** Add File: x\nEOF", HereDocumentUse::Patch),
            ("python3 - <<'PY'\nprint(1)\nPY", HereDocumentUse::Code),
            ("cat <<EOF\n$(rm x)\nEOF", HereDocumentUse::Shell),
            ("bash <<'EOF'\nrm x\nEOF", HereDocumentUse::Shell),
            ("cat <<'EOF' | sh\nrm x\nEOF", HereDocumentUse::Shell),
            ("sh -c \"$(\ncat <<'EOF'\nrm x\nEOF\n)\"", HereDocumentUse::Shell),
            ("cat <<'EOF' > x\nrm x\nEOF\n. x", HereDocumentUse::Shell),
            ("frob <<'EOF'\nrm x\nEOF", HereDocumentUse::Shell),
        ] {
            assert_eq!(first_document_use(line), Some(expected), "{line:?}");
        }
    }

    #[test]
    fn text_that_only_looks_like_a_document_is_none() {
        for line in [
            "cat \"<<'EOF'\"\nrm x\nEOF",
            "cat '<<EOF'\nrm x\nEOF",
            "cat \\<<EOF\nrm x\nEOF",
            "cat # <<'EOF'\nrm x\nEOF",
            "cat $((1<<EOF))\nrm x\nEOF",
            "cat ${x:-<<'EOF'}\nrm x\nEOF",
            "cat <<< EOF\nrm x\nEOF",
            "cat <<'EOF'\nrm x",
            "cat <<'EOF'x\nrm x\nEOF",
            "cat <<'EOF' \\\n; rm x\nEOF\nEOF",
            "cat <<'EOF' \"\n\"; rm x\nEOF\nEOF",
            "cat `x <<'EOF'\nrm x\nEOF`",
        ] {
            assert_eq!(first_document_use(line), None, "{line:?}");
        }
    }

    #[test]
    fn text_after_a_document_is_kept() {
        let (rest, found) = extract_here_documents("cat <<'A' <<'B'\n1\nA\n2\nB\nrm x").unwrap();
        assert_eq!(rest, "cat <<'A' <<'B'\nrm x\n");
        assert_eq!((found[0].body.as_str(), found[1].body.as_str()), ("1\n", "2\n"));
    }
}
