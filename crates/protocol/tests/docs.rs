//! The pages under `docs/` say what the code says: limits, event kinds, codes, routes, metrics, settings, and links that
//! lead somewhere. Text is compared with text, source against page, so that no page can go stale unseen.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use qd_protocol::{ErrorCode, EventBody};

#[test]
fn every_limit_is_on_its_page_with_its_value() {
    let source = file("crates/protocol/src/limits.rs");
    let mut known: BTreeMap<&str, u64> = BTreeMap::new();
    for line in source.lines().filter_map(|line| line.strip_prefix("pub const ")) {
        let (name, rest) = line.split_once(':').unwrap();
        let (_, sum) = rest.split_once('=').unwrap();
        let value = DocsSum::value(sum.trim().trim_end_matches(';'), &known);
        known.insert(name, value);
    }
    assert!(known.len() > 20, "the source is read wrongly: {known:?}");
    let page = file("docs/limits.md");
    let shown: BTreeMap<&str, u64> =
        rows(&page).iter().filter_map(|row| Some((code(row[0])?, amount(row[1])))).collect();
    assert_eq!(shown, known, "docs/limits.md (left) is not crates/protocol/src/limits.rs (right)");
}

#[test]
fn every_kind_of_event_is_on_its_page() {
    let page = file("docs/events.md");
    let shown: BTreeSet<&str> = rows(&page).iter().filter_map(|row| code(row[0])).collect();
    let known: BTreeSet<&str> = EventBody::KINDS.iter().copied().collect();
    assert_eq!(shown, known, "docs/events.md (left) is not EventBody::KINDS (right)");
}

#[test]
fn every_code_is_on_the_page_with_its_status() {
    let page = file("docs/api.md");
    let shown: BTreeMap<&str, u16> =
        rows(&page).iter().filter_map(|row| Some((code(row[0])?, row[1].parse().ok()?))).collect();
    let known: BTreeMap<&str, u16> =
        ErrorCode::ALL.iter().map(|code| (code.as_str(), code.status())).collect();
    assert_eq!(shown, known, "docs/api.md (left) is not ErrorCode::ALL (right)");
}

#[test]
fn every_route_is_on_the_page_with_its_methods() {
    let document: serde_json::Value = serde_json::from_str(&file("docs/openapi.json")).unwrap();
    let mut known = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        known.extend(item.as_object().unwrap().keys().map(|method| (path.clone(), method.to_uppercase())));
    }
    let page = file("docs/api.md");
    let mut shown = BTreeSet::new();
    for row in rows(&page) {
        let Some((methods, path)) = row[0].split_once(" `/") else { continue };
        let path = format!("/{}", path.trim_end_matches('`'));
        shown.extend(methods.split(", ").map(|method| (path.clone(), method.to_owned())));
    }
    assert_eq!(shown, known, "docs/api.md (left) is not docs/openapi.json (right)");
}

#[test]
fn every_metric_is_on_its_page() {
    let source = file("crates/daemon/src/metrics.rs");
    let ours = |text: &str| -> BTreeSet<String> {
        let name = |piece: &str| -> String {
            piece.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect()
        };
        let parts = ["_bucket", "_sum", "_count"];
        let whole =
            |name: String| parts.iter().find_map(|part| name.strip_suffix(part)).unwrap_or(&name).to_owned();
        text.split("quarterdeck_").skip(1).map(|piece| whole(name(piece))).collect()
    };
    let page = file("docs/operations.md");
    assert_eq!(ours(&page), ours(&source), "docs/operations.md (left) is not metrics.rs (right)");
}

#[test]
fn every_setting_is_on_its_page() {
    let source = file("crates/home/src/config.rs");
    let keys = source.split("const KEYS").nth(1).unwrap().split(';').nth(1).unwrap();
    let page = file("docs/operations.md");
    let example = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let shown: BTreeSet<&str> = example.lines().filter_map(|line| line.split(" = ").next()).collect();
    let known: BTreeSet<&str> = keys.split('"').skip(1).step_by(2).collect();
    assert_eq!(shown, known, "the example in docs/operations.md (left) is not KEYS in config.rs (right)");
}

#[test]
fn every_link_between_the_pages_leads_somewhere() {
    let mut looked_at = 0;
    for folder in [root(), root().join("docs")] {
        for page in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            if page.extension().is_none_or(|kind| kind != "md") {
                continue;
            }
            let text = std::fs::read_to_string(&page).unwrap();
            for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                if link.starts_with("http") || link.starts_with('#') {
                    continue;
                }
                let target = folder.join(link.split('#').next().unwrap());
                assert!(target.exists(), "{} links to {link}, which is not there", page.display());
                looked_at += 1;
            }
        }
    }
    assert!(looked_at > 10, "only {looked_at} links were found");
}

#[test]
fn a_sum_is_read_as_the_compiler_reads_it() {
    let known = BTreeMap::from([("A", 100)]);
    for (text, value) in
        [("7", 7), ("8 << 20", 8 << 20), ("A - (3 << 2)", 88), ("24 * 3600 + 1 << 1", 172_802)]
    {
        assert_eq!(DocsSum::value(text, &known), value, "{text}");
    }
}

/// A file of the repository, as text.
fn file(path: &str) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rows of a page's tables, cell by cell.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let lines = page.lines().filter(|line| line.starts_with("| "));
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// What a cell names, if it is one word of code.
fn code(cell: &str) -> Option<&str> {
    cell.strip_prefix('`')?.strip_suffix('`').filter(|word| !word.contains(['`', ' ', '/', '{']))
}

/// A number with or without a unit.
fn amount(cell: &str) -> u64 {
    let (number, unit) = cell.split_once(' ').unwrap_or((cell, ""));
    let unit = match unit {
        "" | "s" => 1,
        "min" => 60,
        "h" => 3600,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        other => panic!("`{other}` is no unit"),
    };
    number.parse::<u64>().unwrap() * unit
}

/// The value of a constant as it stands in the source: numbers, names, parentheses and four operators.
struct DocsSum<'a> {
    words: std::iter::Peekable<std::vec::IntoIter<String>>,
    known: &'a BTreeMap<&'a str, u64>,
}

impl<'a> DocsSum<'a> {
    fn value(text: &str, known: &'a BTreeMap<&'a str, u64>) -> u64 {
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
        DocsSum { words: words.into_iter().peekable(), known }.shifted()
    }

    fn shifted(&mut self) -> u64 {
        let mut value = self.added();
        while self.words.next_if(|word| word == "<<").is_some() {
            value <<= self.added();
        }
        value
    }

    fn added(&mut self) -> u64 {
        let mut value = self.multiplied();
        while let Some(sign) = self.words.next_if(|word| word == "+" || word == "-") {
            let more = self.multiplied();
            value = if sign == "+" { value + more } else { value - more };
        }
        value
    }

    fn multiplied(&mut self) -> u64 {
        let mut value = self.one();
        while self.words.next_if(|word| word == "*").is_some() {
            value *= self.one();
        }
        value
    }

    fn one(&mut self) -> u64 {
        let word = self.words.next().unwrap();
        if word == "(" {
            let value = self.shifted();
            assert_eq!(self.words.next().as_deref(), Some(")"));
            return value;
        }
        let number = word.replace('_', "").parse().ok();
        number
            .or_else(|| self.known.get(word.as_str()).copied())
            .unwrap_or_else(|| panic!("`{word}` is no number"))
    }
}
