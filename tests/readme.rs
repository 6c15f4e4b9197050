//! The README's console blocks, run as they stand: every command in order, in a new git repository with a home of its
//! own, and its output compared line by line. Ids, ages, process numbers and commit hashes may differ, but one id stays
//! one id from block to block. `QD_UPDATE=1` writes what the commands print into the README instead.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use qd_testkit::home::binary;
use qd_testkit::{TestHome, poll_until};

/// The directory in which the README's commands seem to run.
const SHOWN_DIR: &str = "/tmp/shop";
/// Output lines are cut here when the README is updated.
const SHOWN_COLUMNS: usize = 118;
/// Commands that change nothing. They are run again until they print what is expected: an agent needs a moment to start.
const READ_ONLY: &[&str] =
    &["qd ps", "qd status", "qd asks", "qd logs", "qd wait", "qd workers", "qd diff", "curl"];

/// Stands for output that a page does not show, because it has shown the like before.
const OMITTED: &str = "…";

/// One command of a console block, and what the README says it prints.
struct ConsoleCommand {
    line: String,
    output: Vec<String>,
}

/// A page cut into the text between console blocks and the commands in them.
enum PagePart {
    Text(String),
    Console(Vec<ConsoleCommand>),
}

fn readme() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")
}

fn parse_page(page: &str) -> Vec<PagePart> {
    let mut parts = Vec::new();
    for (nth, piece) in page.split("```console\n").enumerate() {
        let text = if nth == 0 {
            piece
        } else {
            let (block, text) = piece.split_once("```\n").expect("a console block ends");
            let mut commands: Vec<ConsoleCommand> = Vec::new();
            for line in block.lines() {
                match (line.strip_prefix("$ "), commands.last_mut()) {
                    (Some(line), _) => {
                        commands.push(ConsoleCommand { line: line.to_owned(), output: Vec::new() })
                    }
                    (None, Some(command)) => command.output.push(line.to_owned()),
                    (None, None) => panic!("a console block begins with a command, not with: {line}"),
                }
            }
            parts.push(PagePart::Console(commands));
            text
        };
        parts.push(PagePart::Text(text.to_owned()));
    }
    parts
}

/// Runs commands, and remembers which id of the page is which id here.
struct ConsoleSession {
    home: TestHome,
    ids: BTreeMap<String, String>,
}

impl ConsoleSession {
    /// A home, and a git repository with one commit as the project.
    async fn new() -> Self {
        let session = Self { home: TestHome::new(), ids: BTreeMap::new() };
        let identity = "-c user.name=Ann -c user.email=ann@example.org";
        let repository = format!("git init -qb main && git {identity} commit -q --allow-empty -m First");
        session.home.shell(&repository).await.expect_exit(0);
        let configure = "git config user.name Ann && git config user.email ann@example.org";
        session.home.shell(configure).await.expect_exit(0);
        session
    }

    /// Runs one command and gives what it printed, both streams together, with the directory's shown name.
    async fn run(&self, command: &str) -> String {
        let mut command = command.to_owned();
        for (shown, real) in &self.ids {
            command = command.replace(shown, real);
        }
        // A command may use the beginning of an id.
        for token in ids_in(&command) {
            if let Some((_, real)) = self.ids.iter().find(|(shown, _)| shown.starts_with(&token)) {
                command = command.replace(&token, real);
            }
        }
        let programs = binary().parent().expect("a program is in a directory").display().to_string();
        let output = self.home.shell(&format!("PATH={programs}:$PATH; exec 2>&1; {command}")).await;
        output.stdout.replace(self.home.project_dir().to_str().expect("a plain path"), SHOWN_DIR)
    }

    /// Says how the output differs from what the page shows, or learns the ids in it.
    fn compare(&mut self, shown: &[String], printed: &str) -> Result<(), String> {
        if shown == [OMITTED] {
            return Ok(());
        }
        let printed: Vec<&str> = printed.lines().collect();
        if shown.len() != printed.len() {
            return Err(format!("{} lines are shown, {} were printed", shown.len(), printed.len()));
        }
        let mut learnt = self.ids.clone();
        for (shown, printed) in shown.iter().zip(&printed) {
            let (shown_ids, printed_ids) = (ids_in(shown), ids_in(printed));
            for (shown, printed) in shown_ids.into_iter().zip(printed_ids) {
                let known = learnt.entry(shown.clone()).or_insert_with(|| printed.clone());
                if *known != printed {
                    return Err(format!("{shown} was {known} before and is {printed} now"));
                }
            }
            if !matches(&normalized(shown), &normalized(printed)) {
                return Err(format!("shown:   {shown}\nprinted: {printed}"));
            }
        }
        self.ids = learnt;
        Ok(())
    }
}

/// Whether a line is the shown one, of which `…` may stand for any part.
fn matches(shown: &str, printed: &str) -> bool {
    let mut pieces = shown.split('…');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = printed.strip_prefix(first.trim_end()) else { return false };
    for piece in pieces {
        match rest.split_once(piece.trim()) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    shown.ends_with('…') || rest.trim().is_empty()
}

/// The ids in a line: a known prefix, an underscore, and what follows.
fn ids_in(line: &str) -> Vec<String> {
    let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_id =
        |word: &&str| ["ws_", "ses_", "run_", "ask_", "wrk_"].iter().any(|prefix| word.starts_with(prefix));
    words.filter(is_id).map(str::to_owned).collect()
}

/// A line without what differs from one run to the next: ids, ages, numbers of two digits and more, hashes, the width
/// of columns.
fn normalized(line: &str) -> String {
    let mut plain = String::new();
    for (nth, word) in line.split_whitespace().enumerate() {
        let separator = if nth == 0 { "" } else { " " };
        write!(plain, "{separator}{}", normalized_word(word)).expect("a string takes any text");
    }
    plain
}

fn normalized_word(word: &str) -> String {
    let is_age = word
        .strip_suffix(['s', 'm'])
        .is_some_and(|age| !age.is_empty() && age.bytes().all(|b| b.is_ascii_digit()));
    let is_hash = word.len() == 12 && word.bytes().all(|b| b.is_ascii_hexdigit());
    if is_age || is_hash {
        return "*".to_owned();
    }
    let prefix = |id: &str| id.split_inclusive('_').next().unwrap_or_default().to_owned();
    let word = ids_in(word).iter().fold(word.to_owned(), |word, id| word.replace(id, &prefix(id)));
    let (mut plain, mut digits) = (String::new(), String::new());
    for char in word.chars().map(Some).chain([None]) {
        match char {
            Some(digit) if digit.is_ascii_digit() => digits.push(digit),
            other => {
                plain.push_str(if digits.len() < 2 { &digits } else { "*" });
                digits.clear();
                plain.extend(other);
            }
        }
    }
    plain
}

/// What the README shows of one line of output.
fn shown_line(line: &str) -> String {
    if line.chars().count() <= SHOWN_COLUMNS {
        return line.trim_end().to_owned();
    }
    line.chars().take(SHOWN_COLUMNS - 2).collect::<String>().trim_end().to_owned() + " …"
}

#[tokio::test]
async fn every_console_block_of_the_readme_is_what_the_program_prints() {
    let page = std::fs::read_to_string(readme()).unwrap();
    let update = std::env::var_os("QD_UPDATE").is_some();
    let mut session = ConsoleSession::new().await;
    let (mut commands, mut updated) = (0, String::new());
    for part in parse_page(&page) {
        let console = match part {
            PagePart::Text(text) => {
                updated.push_str(&text);
                continue;
            }
            PagePart::Console(console) => console,
        };
        updated.push_str("```console\n");
        for ConsoleCommand { line, output } in console {
            commands += 1;
            let line = match (update, ids_in(&line).as_slice()) {
                // The page uses the beginning of an id that it has shown.
                (true, [id]) => line.replace(id, &last_id(&updated, &id[..4])[..7]),
                _ => line,
            };
            let may_repeat = READ_ONLY.iter().any(|prefix| line.starts_with(prefix));
            let printed = if update {
                // Long enough for an agent to be where the text says that it is.
                tokio::time::sleep(std::time::Duration::from_millis(700)).await;
                session.run(&line).await
            } else if may_repeat {
                let mut tries = 0;
                poll_until(&format!("`{line}` to print what the README shows"), async || {
                    tries += 1;
                    let printed = session.run(&line).await;
                    match session.compare(&output, &printed) {
                        Ok(()) => Some(printed),
                        Err(_) if tries < 100 => None,
                        Err(why) => panic!("`{line}`:\n{why}\nall of it:\n{printed}"),
                    }
                })
                .await
            } else {
                let printed = session.run(&line).await;
                if let Err(why) = session.compare(&output, &printed) {
                    panic!("`{line}`:\n{why}\nall of it:\n{printed}");
                }
                printed
            };
            writeln!(updated, "$ {line}").unwrap();
            let printed = if output == [OMITTED] { OMITTED } else { &printed };
            for line in printed.lines() {
                writeln!(updated, "{}", shown_line(line)).unwrap();
            }
        }
        updated.push_str("```\n");
    }
    assert!(commands > 25, "only {commands} commands were found");
    if update {
        std::fs::write(readme(), updated).unwrap();
    }
}

/// The id of this kind that the page showed last.
fn last_id(page: &str, prefix: &str) -> String {
    ids_in(page).into_iter().rfind(|id| id.starts_with(prefix)).expect("the page has shown one")
}

#[test]
fn a_line_that_differs_in_more_than_numbers_is_noticed() {
    let line = "ses_r7dchz8jgtknfz4p  script  running  4s   -     fix    /tmp/shop";
    let same = "ses_a45v3axtpjsp2tv9  script  running  12s  -     fix    /tmp/shop";
    let other = "ses_a45v3axtpjsp2tv9  script  idle     12s  -     fix    /tmp/shop";
    assert!(matches(&normalized(line), &normalized(same)));
    assert!(!matches(&normalized(line), &normalized(other)));
    assert!(matches("data: {\"seq\": …", "data: {\"seq\": 3}") && !matches("data: {…", "date: {}"));
    assert!(!matches("queued at 1", "queued at 2") && !matches("one", "one two"));
}
