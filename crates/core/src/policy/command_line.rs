//! Splits a command line as a shell would: words, quotes, comments, separators. Nothing is expanded or run, and a
//! line whose meaning depends on running something is refused rather than guessed. Guesses for the sake of caution
//! are in `line_analysis`.

/// Longer lines are not split: a rule should not allow what a person could not read.
pub(super) const LINE_MAX: usize = 64 << 10;
/// Lines with more commands are not split.
pub(super) const COMMANDS_MAX: usize = 1000;

/// One command of a line, between two separators.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ShellCommand {
    /// Its words in order, without harmless redirections.
    pub(super) words: Vec<ShellWord>,
    /// It reads the output of the previous command.
    pub(super) piped: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ShellWord {
    /// The word as written, with its quotes; only continued lines are joined.
    pub(super) raw: String,
    /// The word as the command gets it, except that variables and wildcards are not expanded.
    pub(super) value: String,
    /// A `$` in it will be expanded.
    expands: bool,
    /// It has an unquoted `*`, `?`, `[` or brace.
    has_wildcard: bool,
    /// An unquoted brace is open in it, so a comma or two dots would turn it into several words.
    has_open_brace: bool,
}

impl ShellCommand {
    /// The command as rules see it: its words as written, separated by one space.
    pub(super) fn text(&self) -> String {
        let words: Vec<&str> = self.words.iter().map(|word| word.raw.as_str()).collect();
        words.join(" ")
    }
}

/// The commands of a line, or `None` if it is not certain which commands it runs.
pub(super) fn split(line: &str) -> Option<Vec<ShellCommand>> {
    if line.len() > LINE_MAX {
        return None;
    }
    // A terminal or a C string may end or change the line at a control character, which makes it another line.
    if line.chars().any(|c| c.is_control() && c != '\n' && c != '\t') {
        return None;
    }
    let mut parser = CommandLineParser { rest: line.chars(), ..CommandLineParser::default() };
    while let Some(c) = parser.rest.next() {
        parser.take_char(c)?;
    }
    parser.end_command(CommandSeparator::Newline)?;
    (!parser.expects_command && !parser.commands.is_empty()).then_some(parser.commands)
}

/// A line that gives a shell exactly these words.
pub(super) fn join<S: AsRef<str>>(words: &[S]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| quote_word(word.as_ref())).collect();
    quoted.join(" ")
}

/// Words that control the shell rather than name a command. After `time`, bash continues as at the beginning of a
/// command, including assignments.
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
    /// A line break, which may also come without a command before it.
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
    /// After `&>` the command must end: a plain `sh` reads it as `&` and would run whatever follows.
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
    /// Handles one character outside quotes, and any characters that belong to it.
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
                // `{push,--force}` becomes two words that no rule would see.
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

    /// Handles an unescaped `$`: a plain variable stays in the word, anything computed is refused.
    fn take_dollar(&mut self) -> Option<()> {
        self.push('$');
        self.current_word().expands = true;
        match self.peek() {
            Some('(' | '[') => None,
            // A backslash may hide one of those behind a continued line.
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
        // Digits directly before the arrow are the descriptor, not a word. For several digits, shells disagree.
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
        // `None` for two arrows without a target between them.
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
        let command = std::mem::take(&mut self.command);
        if hides_a_command(&command) {
            return None;
        }
        if self.commands.len() == COMMANDS_MAX {
            return None;
        }
        self.commands.push(command);
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

    fn take_if_next(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.rest.next();
        }
        found
    }
}

/// Whether the first word alone shows which command is run.
fn names_a_command(word: &ShellWord) -> bool {
    !word.expands
        && (!word.has_wildcard || word.value == "[")
        && !word.value.is_empty()
        && !is_assignment(&word.raw)
        && !CONTROL_WORDS.contains(&word.value.as_str())
}

/// Whether the command takes another command as text, so that its words prove nothing.
fn hides_a_command(command: &ShellCommand) -> bool {
    let mut words = command.words.iter().map(|word| word.value.as_str());
    match words.next() {
        Some("eval" | "exec" | "source" | "." | "builtin") => true,
        Some("command") => !matches!(words.next(), Some("-v" | "-V")),
        _ => false,
    }
}
