//! Parses YAML into a tree in which every node knows its position. Supports only what a fleet file needs: one
//! document, a bounded number of aliases, no type tags, no duplicate keys.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use crate::{FilePosition, FleetFileProblem};

/// How many nodes a file may have. The nodes behind an alias count each time, so a small file cannot become a huge
/// tree.
const NODES_MAX: usize = 100_000;
/// How deep nodes may be nested. A fleet needs six levels.
const DEPTH_MAX: usize = 32;

#[derive(Debug, Clone)]
pub(crate) struct YamlNode {
    pub(crate) position: FilePosition,
    pub(crate) value: YamlValue,
}

#[derive(Debug, Clone)]
pub(crate) enum YamlValue {
    /// A word, a number or a text. If `quoted`, it is a text whatever it looks like.
    Scalar {
        text: String,
        quoted: bool,
    },
    List(Vec<YamlNode>),
    /// In the order of the file.
    Map(Vec<(YamlKey, YamlNode)>),
}

#[derive(Debug, Clone)]
pub(crate) struct YamlKey {
    pub(crate) position: FilePosition,
    pub(crate) name: String,
}

impl YamlNode {
    /// A problem at this node's position.
    pub(crate) fn problem(&self, message: impl Into<String>) -> FleetFileProblem {
        FleetFileProblem { position: self.position, message: message.into(), key: None, suggestion: None }
    }

    /// The entry of a map with this key.
    pub(crate) fn child(&self, name: &str) -> Option<(&YamlKey, &YamlNode)> {
        let YamlValue::Map(entries) = &self.value else { return None };
        entries.iter().find(|(key, _)| key.name == name).map(|(key, node)| (key, node))
    }

    /// The kind of node, for messages.
    pub(crate) fn kind_name(&self) -> &'static str {
        match &self.value {
            YamlValue::Scalar { .. } if self.is_null() => "nothing",
            YamlValue::Scalar { .. } => "a single value",
            YamlValue::List(_) => "a list",
            YamlValue::Map(_) => "a map",
        }
    }

    /// Nothing was written, or an explicit null.
    pub(crate) fn is_null(&self) -> bool {
        match &self.value {
            YamlValue::Scalar { text, quoted: false } => {
                matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL")
            }
            _ => false,
        }
    }
}

/// Parses one document.
pub(crate) fn parse_document(text: &str) -> Result<YamlNode, FleetFileProblem> {
    let mut builder = YamlTreeBuilder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let at = error.marker();
            FleetFileProblem {
                position: FilePosition { line: at.line(), column: at.col() + 1 },
                message: format!("this is not YAML: {}", error.info()),
                key: None,
                suggestion: None,
            }
        })?;
        builder.handle_event(event, span)?;
    }
    builder.root.ok_or_else(|| FleetFileProblem {
        position: FilePosition { line: 1, column: 1 },
        message: "the file is empty; a fleet begins with `fleet:`".to_owned(),
        key: None,
        suggestion: None,
    })
}

#[derive(Default)]
struct YamlTreeBuilder {
    root: Option<YamlNode>,
    open_collections: Vec<OpenCollection>,
    anchors: HashMap<usize, YamlNode>,
    nodes: usize,
    documents: usize,
}

/// A list or map whose end has not been reached.
struct OpenCollection {
    position: FilePosition,
    anchor: usize,
    kind: CollectionKind,
}

enum CollectionKind {
    List(Vec<YamlNode>),
    Map { entries: Vec<(YamlKey, YamlNode)>, key: Option<YamlKey> },
}

impl YamlTreeBuilder {
    fn handle_event(&mut self, event: Event<'_>, span: Span) -> Result<(), FleetFileProblem> {
        let position = FilePosition { line: span.start.line(), column: span.start.col() + 1 };
        let problem = |message: &str| FleetFileProblem {
            position,
            message: message.to_owned(),
            key: None,
            suggestion: None,
        };
        match event {
            Event::DocumentStart(_) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(problem("a file must hold one fleet, but there is a second document"));
                }
            }
            Event::Scalar(text, style, anchor, _) => {
                let value =
                    YamlValue::Scalar { text: text.into_owned(), quoted: style != ScalarStyle::Plain };
                self.add_node(YamlNode { position, value }, anchor)?;
            }
            Event::SequenceStart(anchor, _) => {
                self.open_collection(OpenCollection {
                    position,
                    anchor,
                    kind: CollectionKind::List(Vec::new()),
                })?;
            }
            Event::MappingStart(anchor, _) => {
                self.open_collection(OpenCollection {
                    position,
                    anchor,
                    kind: CollectionKind::Map { entries: Vec::new(), key: None },
                })?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(OpenCollection { position, anchor, kind }) = self.open_collections.pop() {
                    let value = match kind {
                        CollectionKind::List(items) => YamlValue::List(items),
                        CollectionKind::Map { entries, .. } => YamlValue::Map(entries),
                    };
                    self.add_node(YamlNode { position, value }, anchor)?;
                }
            }
            Event::Alias(anchor) => {
                let target = self.anchors.get(&anchor).cloned();
                let target = target.ok_or_else(|| problem("this alias has no anchor"))?;
                self.add_node(YamlNode { position, ..target }, 0)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn open_collection(&mut self, open: OpenCollection) -> Result<(), FleetFileProblem> {
        if self.open_collections.len() >= DEPTH_MAX {
            let message = format!("this is nested more than {DEPTH_MAX} deep");
            return Err(FleetFileProblem { position: open.position, message, key: None, suggestion: None });
        }
        self.open_collections.push(open);
        Ok(())
    }

    /// Adds a complete node to the collection that it belongs to.
    fn add_node(&mut self, node: YamlNode, anchor: usize) -> Result<(), FleetFileProblem> {
        self.nodes += node_count(&node);
        if self.nodes > NODES_MAX {
            return Err(node.problem(format!("the file has more than {NODES_MAX} values")));
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open_collections.last_mut().map(|open| &mut open.kind) {
            None => self.root = Some(node),
            Some(CollectionKind::List(items)) => items.push(node),
            Some(CollectionKind::Map { entries, key }) => match key.take() {
                None => *key = Some(to_key(&node, entries)?),
                Some(key) => entries.push((key, node)),
            },
        }
        Ok(())
    }
}

/// How many nodes a node counts for. An alias counts as all the nodes that it stands for.
fn node_count(node: &YamlNode) -> usize {
    match &node.value {
        YamlValue::Scalar { .. } => 1,
        YamlValue::List(items) => 1 + items.iter().map(node_count).sum::<usize>(),
        YamlValue::Map(entries) => 1 + entries.iter().map(|(_, value)| 1 + node_count(value)).sum::<usize>(),
    }
}

fn to_key(node: &YamlNode, entries: &[(YamlKey, YamlNode)]) -> Result<YamlKey, FleetFileProblem> {
    let YamlValue::Scalar { text, .. } = &node.value else {
        return Err(node.problem(format!("a key must be a word, not {}", node.kind_name())));
    };
    if let Some((first, _)) = entries.iter().find(|(key, _)| key.name == *text) {
        let mut problem =
            node.problem(format!("`{text}` is given twice; the first is in line {}", first.position.line));
        problem.key = Some(text.clone());
        return Err(problem);
    }
    Ok(YamlKey { position: node.position, name: text.clone() })
}
