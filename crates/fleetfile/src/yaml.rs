//! YAML as a tree in which every node knows its place. Only what a fleet needs of it: one document, aliases within a
//! bound, no tags that make types, no key twice.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use crate::{Place, Problem};

/// Nodes in one file, those that aliases stand for counted each time: what keeps a small file from becoming a huge tree.
const NODES_MAX: usize = 100_000;
/// How deep it may go. A fleet goes six levels deep.
const DEPTH_MAX: usize = 32;

/// A value and where it stands.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) place: Place,
    pub(crate) value: Value,
}

#[derive(Debug, Clone)]
pub(crate) enum Value {
    /// A word, a number or a text; `quoted` ones are texts whatever they look like.
    Scalar {
        text: String,
        quoted: bool,
    },
    List(Vec<Node>),
    /// In the order of the file.
    Map(Vec<(Key, Node)>),
}

/// A key and where it stands.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    pub(crate) place: Place,
    pub(crate) name: String,
}

impl Node {
    /// Something is wrong with it.
    pub(crate) fn problem(&self, message: impl Into<String>) -> Problem {
        Problem { place: self.place, message: message.into(), key: None, nearest: None }
    }

    /// What it is, for people.
    pub(crate) fn what(&self) -> &'static str {
        match &self.value {
            Value::Scalar { .. } if self.is_nothing() => "nothing",
            Value::Scalar { .. } => "a single value",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
        }
    }

    /// Whether nothing was written.
    pub(crate) fn is_nothing(&self) -> bool {
        match &self.value {
            Value::Scalar { text, quoted: false } => {
                matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }
}

/// Reads one document.
pub(crate) fn read(text: &str) -> Result<Node, Problem> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let at = error.marker();
            Problem {
                place: Place { line: at.line(), column: at.col() + 1 },
                message: format!("this is not YAML: {}", error.info()),
                key: None,
                nearest: None,
            }
        })?;
        builder.take(event, span)?;
    }
    builder.root.ok_or_else(|| Problem {
        place: Place { line: 1, column: 1 },
        message: "the file is empty; a fleet begins with `fleet:`".to_owned(),
        key: None,
        nearest: None,
    })
}

#[derive(Default)]
struct Builder {
    root: Option<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    documents: usize,
}

/// A list or map whose end has not come.
struct Open {
    place: Place,
    anchor: usize,
    kind: Kind,
}

enum Kind {
    List(Vec<Node>),
    Map { entries: Vec<(Key, Node)>, key: Option<Key> },
}

impl Builder {
    fn take(&mut self, event: Event<'_>, span: Span) -> Result<(), Problem> {
        let place = Place { line: span.start.line(), column: span.start.col() + 1 };
        let problem =
            |message: &str| Problem { place, message: message.to_owned(), key: None, nearest: None };
        match event {
            Event::DocumentStart(_) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(problem("a file holds one fleet: there is a second document"));
                }
            }
            Event::Scalar(text, style, anchor, _) => {
                let value = Value::Scalar { text: text.into_owned(), quoted: style != ScalarStyle::Plain };
                self.close(Node { place, value }, anchor)?;
            }
            Event::SequenceStart(anchor, _) => {
                self.open(Open { place, anchor, kind: Kind::List(Vec::new()) })?;
            }
            Event::MappingStart(anchor, _) => {
                self.open(Open { place, anchor, kind: Kind::Map { entries: Vec::new(), key: None } })?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(Open { place, anchor, kind }) = self.open.pop() {
                    let value = match kind {
                        Kind::List(items) => Value::List(items),
                        Kind::Map { entries, .. } => Value::Map(entries),
                    };
                    self.close(Node { place, value }, anchor)?;
                }
            }
            Event::Alias(anchor) => {
                let meant = self.anchors.get(&anchor).cloned();
                let meant = meant.ok_or_else(|| problem("this alias stands for nothing"))?;
                self.close(Node { place, ..meant }, 0)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn open(&mut self, open: Open) -> Result<(), Problem> {
        if self.open.len() >= DEPTH_MAX {
            let message = format!("this is nested more than {DEPTH_MAX} deep");
            return Err(Problem { place: open.place, message, key: None, nearest: None });
        }
        self.open.push(open);
        Ok(())
    }

    /// A node is complete: it goes where it belongs.
    fn close(&mut self, node: Node, anchor: usize) -> Result<(), Problem> {
        self.nodes += size(&node);
        if self.nodes > NODES_MAX {
            return Err(node.problem(format!("the file has more than {NODES_MAX} values")));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut().map(|open| &mut open.kind) {
            None => self.root = Some(node),
            Some(Kind::List(items)) => items.push(node),
            Some(Kind::Map { entries, key }) => match key.take() {
                None => *key = Some(as_key(&node, entries)?),
                Some(key) => entries.push((key, node)),
            },
        }
        Ok(())
    }
}

/// How many nodes it adds to those that were counted when they came: all of them, where it is an alias for them.
fn size(node: &Node) -> usize {
    match &node.value {
        Value::Scalar { .. } => 1,
        Value::List(items) => 1 + items.iter().map(size).sum::<usize>(),
        Value::Map(entries) => 1 + entries.iter().map(|(_, value)| 1 + size(value)).sum::<usize>(),
    }
}

fn as_key(node: &Node, entries: &[(Key, Node)]) -> Result<Key, Problem> {
    let Value::Scalar { text, .. } = &node.value else {
        return Err(node.problem(format!("a key is a word, not {}", node.what())));
    };
    if let Some((first, _)) = entries.iter().find(|(key, _)| key.name == *text) {
        let mut problem = node.problem(format!("`{text}` is here twice; first in line {}", first.place.line));
        problem.key = Some(text.clone());
        return Err(problem);
    }
    Ok(Key { place: node.place, name: text.clone() })
}
