//! The ways of the hostile agent, what came of each, and the table of all of them in `docs/security.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::path::PathBuf;

const WAYS: &str = include_str!("ways.txt");
/// What the table stands between.
const TABLE_BEGINS: &str = "<!-- what the hostile agent tried, written by tests/hostile -->\n";
const TABLE_ENDS: &str = "<!-- end -->";

/// How strongly the agent is confined, as the table's columns name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum AttackLevel {
    Off,
    Deck,
    Workspace,
}

/// Who runs the daemon and its agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttackUser {
    Root,
    Ordinary,
}

/// One run of the suite, which is one column of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttackColumn {
    pub(crate) level: AttackLevel,
    pub(crate) user: AttackUser,
}

/// One thing that the agent tries.
#[derive(Debug, Clone)]
pub(crate) struct AttackWay {
    pub(crate) name: &'static str,
    /// `None` if every user can try it.
    only: Option<AttackUser>,
    /// The weakest level at which it must not succeed; `None` if no level forbids it.
    pub(crate) forbidden_from: Option<AttackLevel>,
    description: &'static str,
}

/// What came of an attempt, as seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttackOutcome {
    Possible,
    Prevented,
    /// It cannot be tried on this machine or by this user.
    NotApplicable,
}

impl AttackColumn {
    pub(crate) const ALL: [Self; 6] = {
        use AttackLevel::{Deck, Off, Workspace};
        use AttackUser::{Ordinary, Root};
        [
            Self { level: Off, user: Root },
            Self { level: Off, user: Ordinary },
            Self { level: Deck, user: Root },
            Self { level: Deck, user: Ordinary },
            Self { level: Workspace, user: Root },
            Self { level: Workspace, user: Ordinary },
        ]
    };

    /// The level as a setting of a session.
    pub(crate) fn setting(self) -> &'static str {
        match self.level {
            AttackLevel::Off => "off",
            AttackLevel::Deck => "deck",
            AttackLevel::Workspace => "workspace",
        }
    }

    /// Its place among the columns of the table.
    fn index(self) -> usize {
        Self::ALL.iter().position(|known| *known == self).unwrap()
    }

    fn title(self) -> String {
        let user = if self.user == AttackUser::Root { "root" } else { "user" };
        format!("{}, {user}", self.setting())
    }
}

impl AttackWay {
    /// All ways, in the order in which they are tried.
    pub(crate) fn all() -> Vec<Self> {
        WAYS.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(Self::parse).collect()
    }

    fn parse(line: &'static str) -> Self {
        let fields: Vec<&str> = line.splitn(4, '|').map(str::trim).collect();
        let [name, who, forbidden, description] = fields[..] else { panic!("four fields: {line}") };
        let only = match who {
            "any" => None,
            "root" => Some(AttackUser::Root),
            "user" => Some(AttackUser::Ordinary),
            _ => panic!("nobody is {who}"),
        };
        let forbidden_from = match forbidden {
            "always" => Some(AttackLevel::Off),
            "deck" => Some(AttackLevel::Deck),
            "workspace" => Some(AttackLevel::Workspace),
            "never" => None,
            _ => panic!("there is no level {forbidden}"),
        };
        Self { name, only, forbidden_from, description }
    }

    /// Whether this user can try it at all.
    pub(crate) fn is_for(&self, user: AttackUser) -> bool {
        self.only.is_none_or(|only| only == user)
    }

    pub(crate) fn is_forbidden_at(&self, level: AttackLevel) -> bool {
        self.forbidden_from.is_some_and(|from| from <= level)
    }
}

impl fmt::Display for AttackOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Possible => "possible",
            Self::Prevented => "no",
            Self::NotApplicable => "n/a",
        })
    }
}

/// Compares one column with the page. With `QD_UPDATE=1` it is written there instead. What cannot be tried on this machine
/// is compared with nothing, because another machine may have been able to.
pub(crate) fn compare_with_page(column: AttackColumn, outcomes: &BTreeMap<&str, AttackOutcome>) {
    let path = page_path();
    // Columns are written by several processes.
    let lock = File::open(&path).unwrap();
    lock.lock().unwrap();
    let page = fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(TABLE_BEGINS).expect("the page has the table");
    let (table, after) = rest.split_once(TABLE_ENDS).expect("the table has an end");
    let index = column.index();
    let shown = read_cells(table);
    if std::env::var_os("QD_UPDATE").is_some() {
        let table = render_table(&shown, index, outcomes);
        return fs::write(&path, format!("{before}{TABLE_BEGINS}{table}{TABLE_ENDS}{after}")).unwrap();
    }
    for way in AttackWay::all() {
        let now = outcomes[way.name].to_string();
        let written = shown.get(way.name).map_or("?", |cells| cells[index].as_str());
        let is_same = written == now || [written, &now].contains(&"n/a");
        assert!(
            is_same,
            "docs/security.md says `{written}` about {} at {}, but it is `{now}`: run this test with QD_UPDATE=1",
            way.name,
            column.title()
        );
    }
}

/// The ways that the page calls possible for a column.
pub(crate) fn ways_possible_before(column: AttackColumn) -> BTreeSet<String> {
    let page = fs::read_to_string(page_path()).unwrap();
    let table = page.split_once(TABLE_BEGINS).and_then(|(_, rest)| rest.split_once(TABLE_ENDS));
    let cells = table.map(|(table, _)| read_cells(table)).unwrap_or_default();
    let possible = AttackOutcome::Possible.to_string();
    cells.into_iter().filter(|(_, cells)| cells[column.index()] == possible).map(|(way, _)| way).collect()
}

fn page_path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/security.md")
}

/// The cells of each way.
fn read_cells(table: &str) -> BTreeMap<String, Vec<String>> {
    let rows = table.lines().skip(2).map(|line| line.trim_matches('|').split('|').map(str::trim));
    let rows = rows.map(|cells| cells.map(str::to_owned).collect::<Vec<_>>());
    let rows = rows.filter(|cells| cells.len() == 2 + AttackColumn::ALL.len());
    rows.map(|cells| (cells[0].trim_matches('`').to_owned(), cells[2..].to_vec())).collect()
}

fn render_table(
    shown: &BTreeMap<String, Vec<String>>,
    index: usize,
    outcomes: &BTreeMap<&str, AttackOutcome>,
) -> String {
    let titles = AttackColumn::ALL.map(AttackColumn::title).join(" | ");
    let mut table =
        format!("| way | what it tries | {titles} |\n|{}\n", " --- |".repeat(2 + AttackColumn::ALL.len()));
    for way in AttackWay::all() {
        let unknown = || vec!["?".to_owned(); AttackColumn::ALL.len()];
        let mut cells = shown.get(way.name).cloned().unwrap_or_else(unknown);
        let now = outcomes[way.name];
        // What another machine could try is not forgotten.
        if now != AttackOutcome::NotApplicable || cells[index] == "?" {
            cells[index] = now.to_string();
        }
        table.push_str(&format!("| `{}` | {} | {} |\n", way.name, way.description, cells.join(" | ")));
    }
    table
}
