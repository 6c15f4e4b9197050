//! A command line, taken apart as a shell would: words, quotes, comments, separators. Nothing is expanded or run, and
//! a line whose meaning depends on running something is refused rather than guessed at; guesses for the sake of
//! caution live in `reading`.

/// A longer line is not split: what a person cannot read, a rule should not allow.
pub(super) const LINE_MAX: usize = 64 << 10;
/// Nor is one of more commands.
pub(super) const COMMANDS_MAX: usize = 1000;

/// One command of a line, between two separators.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ShellCommand {
    /// Its words in order, harmless redirections left out.
    pub(super) words: Vec<ShellWord>,
    /// Whether it reads what the command before it writes.
    pub(super) piped: bool,
}

/// One word of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ShellWord {
    /// As it was written, with its quotes; only continued lines are joined.
    pub(super) raw: String,
    /// What the command gets, variables and wildcards left as they are.
    pub(super) value: String,
    /// Whether a `$` in it will be replaced.
    expands: bool,
    /// Whether it has an unquoted `*`, `?`, `[` or brace.
    has_wildcard: bool,
    /// Whether an unquoted brace is open in it, so that a comma or two dots would make several words of it.
    has_open_brace: bool,
}

impl ShellCommand {
    /// The command as rules see it: its words as written, one space between them.
    pub(super) fn text(&self) -> String {
        let words: Vec<&str> = self.words.iter().map(|word| word.raw.as_str()).collect();
        words.join(" ")
    }
}

/// The commands of a line, or nothing if it cannot be told for certain which commands it runs.
pub(super) fn split(line: &str) -> Option<Vec<ShellCommand>> {
    if line.len() > LINE_MAX {
        return None;
    }
    // A terminal or a C string may end or change a line at such a character, and then it is another line.
    if line.chars().any(|c| c.is_control() && c != '\n' && c != '\t') {
        return None;
    }
    let mut reader = CommandLineParser { rest: line.chars(), ..CommandLineParser::default() };
    while let Some(c) = reader.rest.next() {
        reader.take_char(c)?;
    }
    reader.end_command(CommandSeparator::Newline)?;
    (!reader.expects_command && !reader.commands.is_empty()).then_some(reader.commands)
}

/// One line that gives a shell exactly these words.
pub(super) fn join<S: AsRef<str>>(words: &[S]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote_word(word.as_ref())).collect();
    quoted.join(" ")
}

/// Words that steer the shell rather than name a command. After `time`, too, bash reads on as at the beginning of a
/// command, assignments and all.
pub(super) const CONTROL_WORDS: &[&str] = &[
    "if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "select",
    "function", "coproc", "{", "}", "[[", "]]", "!", "time",
];

/// Whether a word in front of a command sets a variable, as in `PATH=/tmp git status`.
pub(super) fn is_assignment(word: &str) -> bool {
    let Some((name, _)) = word.split_once('=') else { return false };
    let name = name.strip_suffix('+').unwrap_or(name);
    let name = name.split_once('[').map_or(name, |(array, _)| array);
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn quote_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommandSeparator {
    /// `;` or `&`.
    End,
    /// A line break, which may also come where there is no command.
    Newline,
    /// `&&` or `||`.
    Condition,
    /// `|` or `|&`.
    Pipe,
}

/// A redirection whose target has not been read yet.
#[derive(Debug, Clone, Copy)]
struct PendingRedirection {
    /// `>&` or `<&`: the target is a descriptor.
    duplicates: bool,
}

#[derive(Debug)]
struct CommandLineParser<'l> {
    rest: std::str::Chars<'l>,
    commands: Vec<ShellCommand>,
    command: ShellCommand,
    word: Option<ShellWord>,
    redirection: Option<PendingRedirection>,
    /// After `&&`, `||` or `|` there must be a command.
    expects_command: bool,
    /// After `&>` nothing more of the command may come: a plain `sh` reads it as `&` and would run what follows.
    must_end: bool,
}

impl Default for CommandLineParser<'_> {
    fn default() -> Self {
        Self {
            rest: "".chars(),
            commands: Vec::new(),
            command: ShellCommand::default(),
            word: None,
            redirection: None,
            expects_command: false,
            must_end: false,
        }
    }
}

impl CommandLineParser<'_> {
    /// Takes one character outside quotes, and what belongs to it.
    fn take_char(&mut self, c: char) -> Option<()> {
        match c {
            ' ' | '\t' => self.end_word(),
            '\n' => self.end_command(CommandSeparator::Newline),
            ';' => self.end_command(CommandSeparator::End),
            '&' if self.take_if_next('&') => self.end_command(CommandSeparator::Condition),
            '&' if self.take_if_next('>') => {
                self.end_word()?;
                self.take_if_next('>');
                self.begin_redirection(false)?;
                self.must_end = true;
                Some(())
            }
            '&' => self.end_command(CommandSeparator::End),
            '|' if self.take_if_next('|') => self.end_command(CommandSeparator::Condition),
            '|' => {
                self.take_if_next('&');
                self.end_command(CommandSeparator::Pipe)
            }
            '#' if self.word.is_none() => {
                while self.peek().is_some_and(|c| c != '\n') {
                    self.rest.next();
                }
                Some(())
            }
            // Subshells, functions, arrays, substitutions.
            '(' | ')' | '`' => None,
            '<' | '>' => self.redirect(c),
            '\'' => self.take_single_quoted(),
            '"' => self.take_double_quoted(),
            '\\' => match self.rest.next()? {
                '\n' => Some(()),
                c => {
                    self.current_word().raw.push('\\');
                    self.push(c);
                    Some(())
                }
            },
            '$' => {
                if matches!(self.peek(), Some('\'' | '"')) {
                    return None;
                }
                self.take_dollar()
            }
            c => {
                let word = self.current_word();
                // `{push,--force}`: two words that no rule would see.
                if word.has_open_brace && (c == ',' || (c == '.' && word.raw.ends_with('.'))) {
                    return None;
                }
                word.has_open_brace |= c == '{';
                word.has_wildcard |= matches!(c, '*' | '?' | '[' | '{' | '}');
                self.push(c);
                Some(())
            }
        }
    }

    fn take_single_quoted(&mut self) -> Option<()> {
        self.current_word().raw.push('\'');
        loop {
            match self.rest.next()? {
                '\'' => break,
                c => self.push(c),
            }
        }
        self.current_word().raw.push('\'');
        Some(())
    }

    fn take_double_quoted(&mut self) -> Option<()> {
        self.current_word().raw.push('"');
        loop {
            match self.rest.next()? {
                '"' => break,
                '`' => return None,
                '$' => self.take_dollar()?,
                '\\' => match self.rest.next()? {
                    '\n' => {}
                    c @ ('$' | '`' | '"' | '\\') => {
                        self.current_word().raw.push('\\');
                        self.push(c);
                    }
                    c => {
                        self.push('\\');
                        self.push(c);
                    }
                },
                c => self.push(c),
            }
        }
        self.current_word().raw.push('"');
        Some(())
    }

    /// After a `$` that is not quoted away: a plain variable stays in the word, all that computes is refused.
    fn take_dollar(&mut self) -> Option<()> {
        self.push('$');
        self.current_word().expands = true;
        match self.peek() {
            Some('(' | '[') => None,
            // A line break here may hide one of those behind a continued line.
            Some('\\') => None,
            Some('{') => {
                self.rest.next();
                self.push('{');
                loop {
                    match self.rest.next()? {
                        '}' => break,
                        c if c.is_ascii_alphanumeric() || c == '_' => self.push(c),
                        _ => return None,
                    }
                }
                self.push('}');
                Some(())
            }
            _ => Some(()),
        }
    }

    fn redirect(&mut self, c: char) -> Option<()> {
        // Digits that touch the arrow are the descriptor, not a word. Of several digits not every shell thinks so.
        if let Some(word) = self.word.take_if(|word| word.raw.bytes().all(|b| b.is_ascii_digit()))
            && word.raw.len() > 1
        {
            return None;
        }
        self.end_word()?;
        let duplicates = match (c, self.peek()) {
            ('<', Some('<' | '>')) => return None,
            ('>', Some('>' | '|')) => {
                self.rest.next();
                false
            }
            (_, Some('&')) => {
                self.rest.next();
                true
            }
            _ => false,
        };
        self.begin_redirection(duplicates)
    }

    fn begin_redirection(&mut self, duplicates: bool) -> Option<()> {
        // Two arrows without a target between them.
        self.redirection.replace(PendingRedirection { duplicates }).is_none().then_some(())
    }

    fn end_word(&mut self) -> Option<()> {
        let Some(word) = self.word.take() else { return Some(()) };
        if let Some(redirection) = self.redirection.take() {
            let harmless = match word.raw.as_str() {
                "1" | "2" => redirection.duplicates,
                "/dev/null" => !redirection.duplicates,
                _ => false,
            };
            return harmless.then_some(());
        }
        if self.must_end || (self.command.words.is_empty() && !names_a_command(&word)) {
            return None;
        }
        self.command.words.push(word);
        Some(())
    }

    fn end_command(&mut self, separator: CommandSeparator) -> Option<()> {
        self.end_word()?;
        if self.redirection.is_some() {
            return None;
        }
        self.must_end = false;
        if self.command.words.is_empty() {
            return (separator == CommandSeparator::Newline).then_some(());
        }
        let part = std::mem::take(&mut self.command);
        if hides_a_command(&part) {
            return None;
        }
        if self.commands.len() == COMMANDS_MAX {
            return None;
        }
        self.commands.push(part);
        self.command.piped = separator == CommandSeparator::Pipe;
        self.expects_command = matches!(separator, CommandSeparator::Condition | CommandSeparator::Pipe);
        Some(())
    }

    fn current_word(&mut self) -> &mut ShellWord {
        self.word.get_or_insert_default()
    }

    fn push(&mut self, c: char) {
        let word = self.current_word();
        word.raw.push(c);
        word.value.push(c);
    }

    fn peek(&self) -> Option<char> {
        self.rest.clone().next()
    }

    fn take_if_next(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        if found {
            self.rest.next();
        }
        found
    }
}

/// Whether the first word says by itself which command is run.
fn names_a_command(word: &ShellWord) -> bool {
    !word.expands
        && (!word.has_wildcard || word.value == "[")
        && !word.value.is_empty()
        && !is_assignment(&word.raw)
        && !CONTROL_WORDS.contains(&word.value.as_str())
}

/// Whether the command is one that takes another as text, so that its words say nothing certain.
fn hides_a_command(part: &ShellCommand) -> bool {
    let mut words = part.words.iter().map(|word| word.value.as_str());
    match words.next() {
        Some("eval" | "exec" | "source" | "." | "builtin") => true,
        Some("command") => !matches!(words.next(), Some("-v" | "-V")),
        _ => false,
    }
}
