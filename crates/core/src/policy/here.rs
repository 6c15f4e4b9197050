//! Here-documents: what a command line hands to a command as text. A shell does not run that text, so it need not be
//! read as commands, if one thing is certain: that it is such text. Wherever quotes, comments or arithmetic could be
//! read in two ways, there is none to be found here.

use super::reading::SHELLS;

/// A here-document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Document {
    /// The text.
    pub(super) body: String,
    /// What becomes of it.
    pub(super) goes: Goes,
}

/// What becomes of the text of a here-document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goes {
    /// A command takes it as it is.
    Data,
    /// The same, and it is a patch that is applied.
    Patch,
    /// It is run, in a language that is not the shell's.
    Code,
    /// A shell may run it, or a part of it.
    Shell,
}

/// Commands that take what they are given as text.
const TAKERS: &[&str] =
    &["cat", "tee", "git", "patch", "apply_patch", "cd", "mkdir", "touch", "wc", "head", "gh"];

/// Interpreters of other languages.
pub(super) const INTERPRETERS: &[&str] =
    &["python", "python2", "python3", "node", "deno", "bun", "perl", "ruby", "php", "lua"];

/// Commands that could turn what another one gives out into commands, wherever they stand in a line.
const RUNNERS: &[&str] = &[
    "eval", "source", ".", "exec", "xargs", "parallel", "ssh", "sudo", "doas", "su", "env", "command",
    "busybox", "at", "batch", "crontab", "make", "watch", "script", "timeout", "nohup", "setsid",
];

/// The line without its here-documents, and these. None if it has none that could be told for certain.
pub(super) fn documents(line: &str) -> Option<(String, Vec<Document>)> {
    if !line.contains("<<") || line.contains(['\r', '\0']) {
        return None;
    }
    let mut scanner = Scanner { open: vec![Open::Plain], comment: false, word: false };
    let (mut rest, mut found) = (String::new(), Vec::new());
    let mut lines = line.split('\n');
    while let Some(text) = lines.next() {
        rest.push_str(text);
        rest.push('\n');
        for Delimiter { word, quoted, tabs } in scanner.line(text)? {
            let mut body = String::new();
            loop {
                let next = lines.next()?;
                let end = if tabs { next.trim_start_matches('\t') } else { next };
                if end == word {
                    break;
                }
                body.push_str(next);
                body.push('\n');
            }
            let goes = goes(text, quoted, &body);
            found.push(Document { body, goes });
        }
    }
    // Beside these the arrows may mean something else.
    if found.is_empty() || ["((", "${", "$'", "`"].iter().any(|odd| rest.contains(odd)) {
        return None;
    }
    if names(&rest).any(|name| SHELLS.contains(&name) || RUNNERS.contains(&name)) {
        found.iter_mut().for_each(|document| document.goes = Goes::Shell);
    }
    Some((rest, found))
}

/// What becomes of a document that belongs to this line.
fn goes(line: &str, quoted: bool, body: &str) -> Goes {
    if !quoted && (body.contains("$(") || body.contains('`')) {
        return Goes::Shell;
    }
    let heads: Vec<&str> = heads(line).collect();
    let any = |list: &[&str]| heads.iter().any(|head| list.contains(head));
    if heads.is_empty() || !heads.iter().all(|head| TAKERS.contains(head) || INTERPRETERS.contains(head)) {
        return Goes::Shell;
    }
    match () {
        () if any(INTERPRETERS) => Goes::Code,
        () if any(&["patch", "apply_patch"]) || line.contains("git apply") => Goes::Patch,
        () => Goes::Data,
    }
}

/// The names of the commands of one line, by a guess that is heedless of quotes.
fn heads(line: &str) -> impl Iterator<Item = &str> {
    line.split([';', '&', '|', '(', '{']).filter_map(|part| {
        let word = part.split_whitespace().find(|word| !word.contains('=') && !word.starts_with(['>', '<']));
        word.map(|word| word.trim_matches(['"', '\'']).rsplit('/').next().unwrap_or(word))
    })
}

/// Every word that could be the name of a command.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| c.is_whitespace() || ";&|(){}<>\"'=\\".contains(c);
    text.split(ends).map(|word| word.rsplit('/').next().unwrap_or(word))
}

struct Delimiter<'l> {
    word: &'l str,
    /// Whether nothing in the text is expanded.
    quoted: bool,
    /// `<<-`: tabs before the end do not count.
    tabs: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Plain,
    Double,
    Single,
}

/// Where in its quotes and substitutions a line is.
struct Scanner {
    open: Vec<Open>,
    comment: bool,
    /// Whether the character before belongs to a word.
    word: bool,
}

impl Scanner {
    /// The delimiters on one line of text. None if it could be read in two ways.
    fn line<'l>(&mut self, text: &'l str) -> Option<Vec<Delimiter<'l>>> {
        let mut found = Vec::new();
        (self.comment, self.word) = (false, false);
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            at += c.len_utf8();
            let top = *self.open.last()?;
            let before = self.word;
            self.word = !c.is_whitespace() && !";&|()<>".contains(c);
            match (top, c) {
                _ if self.comment => {}
                (Open::Single, '\'') => drop(self.open.pop()),
                (Open::Single, _) => {}
                (_, '\\') => at += text[at..].chars().next().map_or(0, char::len_utf8),
                (Open::Double, '"') => drop(self.open.pop()),
                (_, '$') if text[at..].starts_with('(') => {
                    at += 1;
                    self.open.push(Open::Plain);
                    self.word = false;
                }
                (Open::Double, _) => {}
                (Open::Plain, '"') => self.open.push(Open::Double),
                (Open::Plain, '\'') => self.open.push(Open::Single),
                (Open::Plain, '#') if !before => self.comment = true,
                (Open::Plain, '(') => self.open.push(Open::Plain),
                (Open::Plain, ')') if self.open.len() > 1 => drop(self.open.pop()),
                (Open::Plain, '<') if text[at..].starts_with("<<") => at += 2,
                (Open::Plain, '<') if text[at..].starts_with('<') => {
                    let (delimiter, length) = delimiter(&text[at + 1..])?;
                    at += 1 + length;
                    found.push(delimiter);
                }
                (Open::Plain, _) => {}
            }
        }
        // Where the line goes on below, the document begins after that.
        let whole = self.open.last() == Some(&Open::Plain) && !text.ends_with('\\');
        (found.is_empty() || whole).then_some(found)
    }
}

/// What ends the document, from right after the arrows, and how long it is written.
fn delimiter(text: &str) -> Option<(Delimiter<'_>, usize)> {
    let tabs = text.starts_with('-');
    let rest = text[usize::from(tabs)..].trim_start_matches([' ', '\t']);
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
    (ends && !word.is_empty()).then_some((Delimiter { word, quoted: quote.is_some(), tabs }, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(line: &str) -> Option<Goes> {
        documents(line).map(|(_, found)| found[0].goes)
    }

    #[test]
    fn a_document_goes_where_its_command_takes_it() {
        for (line, expected) in [
            ("cat > x <<'EOF'\nrm -rf /\nEOF", Goes::Data),
            ("cd src && cat <<-\"EOF\" > x\n\tx\n\tEOF\nls", Goes::Data),
            ("git commit -m \"$(cat <<'EOF'\nit's done\nEOF\n)\"", Goes::Data),
            ("cat <<EOF\n$HOME\nEOF", Goes::Data),
            ("cat <<'EOF'\nuse `x` or ${y}\nEOF", Goes::Data),
            ("cat <<EOF\n`rm x`\nEOF", Goes::Shell),
            ("apply_patch <<'EOF'\n*** Add File: x\nEOF", Goes::Patch),
            ("python3 - <<'PY'\nprint(1)\nPY", Goes::Code),
            ("cat <<EOF\n$(rm x)\nEOF", Goes::Shell),
            ("bash <<'EOF'\nrm x\nEOF", Goes::Shell),
            ("cat <<'EOF' | sh\nrm x\nEOF", Goes::Shell),
            ("sh -c \"$(\ncat <<'EOF'\nrm x\nEOF\n)\"", Goes::Shell),
            ("cat <<'EOF' > x\nrm x\nEOF\n. x", Goes::Shell),
            ("frob <<'EOF'\nrm x\nEOF", Goes::Shell),
        ] {
            assert_eq!(only(line), Some(expected), "{line:?}");
        }
    }

    #[test]
    fn what_only_looks_like_a_document_is_none() {
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
            assert_eq!(only(line), None, "{line:?}");
        }
    }

    #[test]
    fn what_follows_a_document_is_still_there() {
        let (rest, found) = documents("cat <<'A' <<'B'\n1\nA\n2\nB\nrm x").unwrap();
        assert_eq!(rest, "cat <<'A' <<'B'\nrm x\n");
        assert_eq!((found[0].body.as_str(), found[1].body.as_str()), ("1\n", "2\n"));
    }
}
