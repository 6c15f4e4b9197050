//! What the documents name exists: files and folders of this repository, Rust items, the design pages that module
//! headers refer to, and the dependencies between the crates. Text is compared with text; nothing is compiled. Tables of
//! limits, events, codes and routes are compared in `docs.rs`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// The documents at the root. Those in `docs/` are all checked.
const ROOT_DOCUMENTS: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];
/// Documents for people who change the code. In these, a capitalised word in backticks is a Rust item.
const DEVELOPER_DOCUMENTS: [&str; 3] = ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/design/"];
/// Files of these types are ours wherever a path to them begins. Users have no such files in their homes and projects,
/// as far as our documents are concerned; TOML, YAML and JSON files they do have.
const OUR_FILE_TYPES: [&str; 5] = [".rs", ".py", ".sh", ".svg", ".md"];
/// What other crates, or HTTP, define and documents may still name.
const FOREIGN_ITEMS: [&str; 3] = ["Host", "Origin", "todo!"];

#[test]
fn every_path_in_a_document_exists() {
    let repository = Repository::open();
    let (mut checked, mut missing) = (0, Vec::new());
    for document in documents() {
        let (count, unresolved) = check_paths(&repository, &document);
        checked += count;
        missing.extend(unresolved);
    }
    assert!(missing.is_empty(), "documents name files that do not exist:\n{}", missing.join("\n"));
    assert!(checked > 100, "only {checked} paths were found");
}

#[test]
fn every_item_in_a_document_is_defined() {
    let items = RustItems::of_repository();
    let (mut checked, mut missing) = (0, Vec::new());
    for document in documents() {
        let (count, undefined) = check_items(&items, &document);
        checked += count;
        missing.extend(undefined);
    }
    assert!(missing.is_empty(), "documents name items that are not defined:\n{}", missing.join("\n"));
    assert!(checked > 20, "only {checked} items were found");
}

#[test]
fn every_design_page_is_named_by_a_module_and_listed_in_the_index() {
    let mut named = BTreeSet::new();
    for (path, source) in rust_files() {
        for (index, line) in source.lines().enumerate() {
            let Some(page) = line.strip_prefix("//! Design: ") else { continue };
            let place = format!("{path}:{}", index + 1);
            assert!(root().join(page).is_file(), "{place}: there is no page `{page}`");
            named.insert(page.to_owned());
        }
    }
    let pages: BTreeSet<String> = documents()
        .into_iter()
        .map(|document| document.path)
        .filter(|path| path.starts_with("docs/design/") && !path.ends_with("README.md"))
        .collect();
    assert_eq!(
        named, pages,
        "the pages that module headers name (left) are not those in docs/design (right)"
    );
    let index = file("docs/design/README.md");
    for page in &pages {
        let name = page.rsplit('/').next().unwrap();
        assert!(index.contains(&format!("]({name})")), "docs/design/README.md does not link `{name}`");
    }
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let mut broken = Vec::new();
    for document in documents() {
        let folder = root().join(&document.path).parent().unwrap().to_owned();
        for (index, line) in document.text.lines().enumerate() {
            for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let target = link.split('#').next().unwrap();
                if !target.is_empty() && !target.contains("://") && !folder.join(target).exists() {
                    broken.push(format!("{}:{}: `{link}`", document.path, index + 1));
                }
            }
        }
    }
    assert!(broken.is_empty(), "links lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn every_line_of_the_threat_model_names_a_test_that_exists() {
    let outcomes = hostile_outcomes();
    let (mut tests, mut ways, mut wrong) = (0, 0, Vec::new());
    for (index, line) in file("SECURITY.md").lines().enumerate().filter(|(_, line)| line.starts_with("| ")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let shown_by = cells[cells.len() - 2];
        if matches!(shown_by, "---" | "shown by") {
            continue;
        }
        let mut named = 0;
        for (name, path) in linked_tests(shown_by) {
            named += 1;
            if !is_test(&file(path), name) {
                wrong.push(format!("line {}: {path} has no test `{name}`", index + 1));
            }
        }
        tests += named;
        for way in shown_by.split("](").last().unwrap().split('`').skip(1).step_by(2) {
            ways += 1;
            named += 1;
            let said = [cells[2], cells[3], cells[4]].map(|cell| cell.starts_with("can") && cell != "cannot");
            match outcomes.get(way) {
                Some(outcome)
                    if outcome.iter().zip(said).all(|(is, said)| is.is_none_or(|is| is == said)) => {}
                outcome => wrong.push(format!("line {}: `{way}` is {outcome:?}", index + 1)),
            }
        }
        if named == 0 {
            wrong.push(format!("line {} names no test", index + 1));
        }
    }
    assert!(wrong.is_empty(), "the tables in SECURITY.md are wrong:\n{}", wrong.join("\n"));
    assert!(tests > 50 && ways > 40, "only {tests} tests and {ways} ways were found");
}

/// What each way of the hostile agent came to at `off`, `deck` and `workspace`, by the table in `docs/security.md`:
/// whether it was possible, for any user. `None` if nobody could try it.
fn hostile_outcomes() -> HashMap<String, [Option<bool>; 3]> {
    let page = file("docs/security.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let outcomes = rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let level = |root: usize| match (cells[root], cells[root + 1]) {
            ("possible", _) | (_, "possible") => Some(true),
            ("no", _) | (_, "no") => Some(false),
            _ => None,
        };
        (cells[0].trim_end_matches('`').to_owned(), [level(2), level(4), level(6)])
    });
    outcomes.collect()
}

/// The tests that a text links: their names, and the files that have them.
fn linked_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("[`").skip(1).filter_map(|link| link.split_once("`](")).filter_map(|(name, rest)| {
        let path = rest.split(')').next()?;
        path.ends_with(".rs").then_some((name, path))
    })
}

/// Whether a file has a test of this name: a function below `#[test]`, or a line of a macro that makes tests.
fn is_test(source: &str, name: &str) -> bool {
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    lines.iter().enumerate().any(|(index, line)| {
        let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
        let is_function =
            function.is_some_and(|rest| rest.strip_prefix(name).is_some_and(|rest| rest.starts_with('(')));
        let above = lines[index.saturating_sub(3)..index].iter();
        let is_marked =
            || above.clone().any(|line| line.starts_with("#[test") || line.starts_with("#[tokio::test"));
        let is_of_macro = line.strip_prefix(name).is_some_and(|rest| rest.starts_with(':'));
        is_of_macro || (is_function && is_marked())
    })
}

#[test]
fn the_crates_depend_on_each_other_as_architecture_says() {
    let mut shown: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in file("ARCHITECTURE.md").lines() {
        let Some((crates, dependencies)) = line.split_once('→') else { continue };
        for name in words_of_list(crates) {
            shown.insert(name, words_of_list(dependencies).collect());
        }
    }
    let mut known = BTreeMap::new();
    for name in folder_names(&root().join("crates")) {
        let manifest = file(&format!("crates/{name}/Cargo.toml"));
        let after = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
        let section = after.split("\n[").next().unwrap();
        let ours = section.lines().filter_map(|line| line.strip_prefix("qd-"));
        let ours: BTreeSet<String> =
            ours.map(|line| line.split(['.', ' ']).next().unwrap().to_owned()).collect();
        if !ours.is_empty() {
            known.insert(name, ours);
        }
    }
    assert_eq!(
        shown, known,
        "the graph in ARCHITECTURE.md (left) is not that of the Cargo.toml files (right)"
    );
}

#[test]
fn a_wrong_path_or_item_is_reported_with_its_document_and_line() {
    let text = [
        "# Title",
        "`crates/protocol/src/ids.rs`, `crates/protocol/src/ids.rs:7`, `docs/`.",
        "`docs/no.md` and `crates/protocol/src/no.rs:7` are not there.",
        "",
        "`journal/writer.rs` is short for a path, and `ring.rs` is beside it; `journal/no.rs` is not.",
        "",
        "Alone, `ring.rs` could be anywhere.",
        "",
        "`~/a/no.rs`, `$QD_HOME/no.rs`, `/no.rs`, `workers/key`, `log/`, `a/b.toml` are the user's.",
        "```",
        "`docs/no.md` in a code block",
        "```",
        "### `crates/core`",
        "`session/` has `commands.rs` and `no.rs`; `no/`, `cp",
        "docs/no.svg`.",
        "### Another",
        "`tests/workers_*.rs`, `tests/no_*.rs`",
    ];
    let document = Document { path: "ARCHITECTURE.md".to_owned(), text: text.join("\n") };
    let (_, missing) = check_paths(&Repository::open(), &document);
    let expected = [
        "3: `docs/no.md`",
        "3: `crates/protocol/src/no.rs:7`",
        "5: `journal/no.rs`",
        "7: `ring.rs`",
        "14: `no.rs`",
        "14: `no/`",
        "14: `docs/no.svg`",
        "17: `tests/no_*.rs`",
    ];
    assert_eq!(missing, expected.map(|place| format!("ARCHITECTURE.md:{place}")));

    let text = [
        "`SessionState`, `EventBody::KINDS`, `RunId`, `RunStarted`, `step()`, `session::step()`, `kinds!`,",
        "`run.started`, `QD_HOME`, `Idempotency-Key`, `a: B`, `fn` and `Todo list` are no items;",
        "`SessionStat`, `EventBody::NONE`, `stepp()`, `Session::stepp()`, `kindz!`, `Keyedd` are wrong.",
    ];
    let document = Document { path: "CONTRIBUTING.md".to_owned(), text: text.join("\n") };
    let (_, undefined) = check_items(&RustItems::of_repository(), &document);
    let wrong = ["SessionStat", "EventBody::NONE", "stepp()", "Session::stepp()", "kindz!", "Keyedd"];
    assert_eq!(undefined, wrong.map(|token| format!("CONTRIBUTING.md:3: `{token}`")));
}

/// A Markdown file of the repository.
struct Document {
    /// From the root.
    path: String,
    text: String,
}

/// A piece of inline code, and where it is.
struct CodeSpan<'a> {
    line: usize,
    text: String,
    /// The heading above it.
    heading: &'a str,
    /// Counts the paragraphs of the document.
    paragraph: usize,
}

/// The inline code of a document, outside of code blocks. A span may continue on the next line.
fn code_spans(document: &Document) -> Vec<CodeSpan<'_>> {
    let (mut spans, mut heading, mut paragraph, mut in_block) = (Vec::new(), "", 0, false);
    let mut open: Option<CodeSpan<'_>> = None;
    for (index, line) in document.text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if is_fence || in_block || line.trim().is_empty() || line.starts_with('#') {
            paragraph += 1;
            open = None;
        }
        if is_fence || in_block {
            continue;
        }
        if line.starts_with('#') {
            heading = line;
        }
        for (position, piece) in line.split('`').enumerate() {
            if position > 0 {
                match open.take() {
                    Some(span) => spans.push(span),
                    None => {
                        open = Some(CodeSpan { line: index + 1, text: String::new(), heading, paragraph });
                    }
                }
            }
            if let Some(span) = &mut open {
                span.text.push_str(piece);
            }
        }
        if let Some(span) = &mut open {
            span.text.push(' ');
        }
    }
    spans
}

/// Checks the paths in a document. Returns how many there are, and where those are that do not exist.
///
/// - A word that begins with a top folder of the repository is a path from the root.
/// - A word that ends like one of our files is a short path. It is found below `src` of the crate that the section's
///   heading names, or as `CRATE/REST` below `src` of that crate, or beside a path named earlier in the paragraph.
/// - In a section about a crate, a word that ends in `/` is a short path too.
/// - Everything else, such as a path in a home or a URL, is not ours.
fn check_paths(repository: &Repository, document: &Document) -> (usize, Vec<String>) {
    let (mut count, mut missing) = (0, Vec::new());
    let (mut paragraph, mut nearby) = (0, Vec::new());
    for span in code_spans(document) {
        if paragraph != span.paragraph {
            paragraph = span.paragraph;
            nearby = repository.folders_of_heading(span.heading);
        }
        for word in span.text.split_whitespace() {
            let word = word.trim_matches(['"', '\'', ',', ';', '(', ')']);
            let path = without_line(word);
            if path.starts_with(['/', '~', '$', '*', '{']) || path.contains("://") {
                continue;
            }
            let from_root = repository.top_folders.contains(path.split('/').next().unwrap());
            let is_ours = OUR_FILE_TYPES.iter().any(|kind| path.ends_with(kind))
                && (path.contains('/') || path.ends_with(".rs"));
            let is_folder_of_crate =
                path.ends_with('/') && !repository.folders_of_heading(span.heading).is_empty();
            if !(from_root && path.contains('/') || is_ours || is_folder_of_crate) {
                continue;
            }
            count += 1;
            match repository.resolve(path, &nearby) {
                Some(found) if found.is_dir() => nearby.push(found),
                Some(found) => nearby.push(found.parent().unwrap().to_owned()),
                None => missing.push(format!("{}:{}: `{word}`", document.path, span.line)),
            }
        }
    }
    (count, missing)
}

/// A path without the line number behind it.
fn without_line(word: &str) -> &str {
    match word.rsplit_once(':') {
        Some((path, line)) if line.starts_with(|c: char| c.is_ascii_digit()) => path,
        _ => word,
    }
}

struct Repository {
    top_folders: HashSet<String>,
    crates: HashSet<String>,
}

impl Repository {
    fn open() -> Self {
        let top_folders = folder_names(&root()).filter(|name| name != "target" && name != ".git").collect();
        Self { top_folders, crates: folder_names(&root().join("crates")).collect() }
    }

    /// The folders of the crates that a heading names.
    fn folders_of_heading(&self, heading: &str) -> Vec<PathBuf> {
        let crates = heading.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("crates/"));
        let crates = crates.filter(|name| self.crates.contains(*name));
        crates.map(|name| root().join("crates").join(name).join("src")).collect()
    }

    fn resolve(&self, path: &str, nearby: &[PathBuf]) -> Option<PathBuf> {
        let (first, rest) = path.split_once('/').unwrap_or((path, ""));
        if self.top_folders.contains(first) {
            return existing(root().join(path));
        }
        let beside = nearby.iter().find_map(|folder| existing(folder.join(path)));
        beside.or_else(|| existing(root().join("crates").join(first).join("src").join(rest)))
    }
}

/// The path, if it exists. The file name may contain one `*`.
fn existing(path: PathBuf) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?.to_owned();
    let Some((start, end)) = name.split_once('*') else { return path.exists().then_some(path) };
    let entries = std::fs::read_dir(path.parent()?).ok()?;
    let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.find(|name| name.starts_with(start) && name.ends_with(end)).map(|name| path.with_file_name(name))
}

/// Checks the Rust items in a document: `CamelCase`, `Type::item`, `function()` and `macro!`. Returns how many there are,
/// and where those are that are not defined.
fn check_items(items: &RustItems, document: &Document) -> (usize, Vec<String>) {
    let for_developers = DEVELOPER_DOCUMENTS.iter().any(|path| document.path.starts_with(path));
    let (mut count, mut undefined) = (0, Vec::new());
    for span in code_spans(document) {
        let Some(segments) = item_segments(&span.text, for_developers) else { continue };
        if FOREIGN_ITEMS.contains(&span.text.as_str()) {
            continue;
        }
        count += 1;
        if !items.are_defined(&segments) {
            undefined.push(format!("{}:{}: `{}`", document.path, span.line, span.text));
        }
    }
    (count, undefined)
}

/// The segments of a Rust path, if the text is one. A single word in lower case is one only with `()` or `!` behind it.
fn item_segments(text: &str, for_developers: bool) -> Option<Vec<&str>> {
    let (name, is_call) = match text.strip_suffix("()").or_else(|| text.strip_suffix('!')) {
        Some(name) => (name, true),
        None => (text, false),
    };
    let segments: Vec<&str> = name.split("::").collect();
    let is_name = |text: &&str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if !segments.iter().all(is_name) {
        return None;
    }
    let is_type = segments.iter().any(|name| humps(name) >= if for_developers { 1 } else { 2 });
    (is_call || segments.len() > 1 || is_type).then_some(segments)
}

/// How many capital letters with a small one behind them a name has; 0 if it does not begin with a capital letter.
fn humps(name: &str) -> usize {
    let letters: Vec<char> = name.chars().collect();
    let humps = letters.windows(2).filter(|pair| pair[0].is_uppercase() && pair[1].is_lowercase()).count();
    if name.starts_with(char::is_uppercase) { humps } else { 0 }
}

/// The names that are defined in the Rust files of our crates.
struct RustItems {
    /// The files that define a name.
    definitions: HashMap<String, BTreeSet<usize>>,
    sources: Vec<String>,
}

impl RustItems {
    fn of_repository() -> Self {
        let (mut definitions, mut sources): (HashMap<String, BTreeSet<usize>>, Vec<String>) =
            Default::default();
        for (index, (_, source)) in rust_files().into_iter().enumerate() {
            for name in defined_names(&source) {
                definitions.entry(name.to_owned()).or_default().insert(index);
            }
            sources.push(source);
        }
        Self { definitions, sources }
    }

    /// Whether all segments are defined, and the last one in a file that also has the type before it. A crate is a
    /// segment too.
    fn are_defined(&self, segments: &[&str]) -> bool {
        let is_crate = |name: &str| {
            let folder = name.strip_prefix("qd_").map(|name| name.replace('_', "-"));
            folder.is_some_and(|folder| root().join("crates").join(folder).is_dir())
        };
        let Some(files) = segments.last().and_then(|last| self.definitions.get(*last)) else { return false };
        segments.iter().all(|name| self.definitions.contains_key(*name) || is_crate(name))
            && segments.iter().rev().nth(1).is_none_or(|owner| {
                let is_module = owner.starts_with(char::is_lowercase);
                is_module || files.iter().any(|index| self.sources[*index].contains(owner))
            })
    }
}

/// The names that a Rust file defines, by simple rules about formatted text: what follows a keyword, the variants of
/// enums, and what is defined by a call of a macro, such as the ids.
fn defined_names(source: &str) -> Vec<&str> {
    let mut names = Vec::new();
    // The indentation of the variants, while we are in an enum or in the call of a macro.
    let mut variants: Option<usize> = None;
    for line in source.lines() {
        let code = line.trim_start();
        let indentation = line.len() - code.len();
        if code.starts_with("//") {
            continue;
        }
        if code.starts_with(['}', ')']) && variants.is_some_and(|variants| indentation < variants) {
            variants = None;
        }
        let mut words =
            code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
        let first = words.clone().next().unwrap_or_default();
        if variants == Some(indentation) && first.starts_with(char::is_uppercase) {
            names.push(first);
        }
        let is_modifier =
            |word: &&str| matches!(*word, "pub" | "crate" | "super" | "async" | "unsafe" | "const");
        let Some(keyword) = words.find(|word| !is_modifier(word)) else { continue };
        match keyword {
            "struct" | "enum" | "trait" | "type" | "static" | "fn" | "mod" | "macro_rules" => {
                names.extend(words.next());
            }
            name if code.contains("const ") => names.push(name),
            _ => {}
        }
        if keyword == "enum" && code.ends_with('{') {
            variants = Some(indentation + 4);
        } else if indentation == 0 && (code.ends_with("! {") || code.ends_with("!(")) {
            variants = Some(4);
        }
    }
    names
}

/// The documents at the root and below `docs`.
fn documents() -> Vec<Document> {
    let below_docs = files_below("docs", "md");
    let paths = ROOT_DOCUMENTS.iter().map(|path| (*path).to_owned()).chain(below_docs);
    paths.map(|path| Document { text: file(&path), path }).collect()
}

/// The Rust files of all crates, with their paths from the root.
fn rust_files() -> Vec<(String, String)> {
    files_below("crates", "rs").into_iter().map(|path| (path.clone(), file(&path))).collect()
}

/// The files of one type below a folder, by their paths from the root, sorted.
fn files_below(folder: &str, extension: &str) -> Vec<String> {
    let (mut folders, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap().map(Result::unwrap) {
            let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if Path::new(&path).extension().is_some_and(|kind| kind == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

fn folder_names(folder: &Path) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(folder).unwrap().map(Result::unwrap);
    let folders = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    folders.map(|entry| entry.file_name().into_string().unwrap())
}

/// The words of a list with commas.
fn words_of_list(text: &str) -> impl Iterator<Item = String> {
    text.split(',').map(|word| word.trim().to_owned())
}

/// A file of the repository, as text.
fn file(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
