//! Policies: what a session's agent may do without approval. The code that applies a policy is in `qd-core`.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How much harm a tool call could do.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Risk {
    /// Only reads, and only inside the workspace.
    Low,
    /// Changes the workspace, runs unknown code, reads outside the workspace or fetches from the network.
    #[default]
    Medium,
    /// Destroys, spends, writes outside the workspace, or touches secrets. Never allowed by default.
    High,
}

/// What a policy or a rule decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Verdict)]
pub enum PolicyVerdict {
    /// A person must approve.
    Ask,
    Allow,
    Deny,
}

/// One rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Rule)]
pub struct PolicyRule {
    /// The agent's name for the tool. `*` matches any number of characters, `?` matches one. Defaults to any tool.
    #[serde(default = "any_tool")]
    pub tool: String,
    /// Pattern for the tool's main argument (command, path or URL), with `*` and `?` as in a shell. Without it, the
    /// rule applies to any argument.
    #[serde(rename = "match", default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    pub decision: PolicyVerdict,
    /// In an allow rule, the highest risk that it allows; the default is `medium`. In a deny or ask rule, the lowest
    /// risk that it applies to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub risk: Option<Risk>,
}

fn any_tool() -> String {
    "*".to_owned()
}

/// One verdict for everything, or a list of rules of which the first that matches decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// `ask`, `allow` or `deny`. Even `allow` asks for high-risk calls.
    Always(PolicyVerdict),
    /// The first rule that matches decides. If none matches, a person must approve.
    Rules(Vec<PolicyRule>),
}

impl Default for Policy {
    fn default() -> Self {
        Self::Always(PolicyVerdict::Ask)
    }
}

impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Always(verdict) => verdict.serialize(serializer),
            Self::Rules(rules) => rules.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PolicyVisitor;
        impl<'de> serde::de::Visitor<'de> for PolicyVisitor {
            type Value = Policy;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("`ask`, `allow`, `deny` or a list of rules")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Policy, E> {
                match text {
                    "ask" => Ok(Policy::Always(PolicyVerdict::Ask)),
                    "allow" => Ok(Policy::Always(PolicyVerdict::Allow)),
                    "deny" => Ok(Policy::Always(PolicyVerdict::Deny)),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Policy, A::Error> {
                use serde::de::Error;
                let mut rules = Vec::new();
                loop {
                    let number = rules.len() + 1;
                    let next = seq.next_element::<PolicyRule>();
                    match next.map_err(|error| A::Error::custom(format_args!("rule {number}: {error}")))? {
                        Some(rule) => rules.push(rule),
                        None => return Ok(Policy::Rules(rules)),
                    }
                }
            }
        }
        deserializer.deserialize_any(PolicyVisitor)
    }
}

impl utoipa::PartialSchema for Policy {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        use utoipa::openapi::schema::{ArrayBuilder, OneOfBuilder, Schema};
        Schema::OneOf(
            OneOfBuilder::new()
                .item(<PolicyVerdict as utoipa::PartialSchema>::schema())
                .item(ArrayBuilder::new().items(<PolicyRule as utoipa::PartialSchema>::schema()))
                .description(Some(
                    "One verdict for everything, or a list of rules of which the first that matches decides.",
                ))
                .build(),
        )
        .into()
    }
}

impl utoipa::ToSchema for Policy {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_a_word_or_a_list_of_rules() {
        for text in [
            "\"ask\"",
            "\"allow\"",
            "\"deny\"",
            r#"[{"tool":"Bash","match":"git status*","decision":"allow"}]"#,
        ] {
            let policy: Policy = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&policy).unwrap(), text);
        }
        for (text, hint) in [
            ("\"perhaps\"", "`ask`, `allow`, `deny`"),
            (r#"[{"tool":"Bash","decison":"allow"}]"#, "rule 1: unknown field `decison`"),
            ("[{\"decision\":\"allow\"},\n {}]", "rule 2: missing field `decision` at line 2 column 3"),
            (r#"[{"decision":"allow"}, "deny"]"#, "rule 2: invalid type"),
            ("7", "a list of rules"),
        ] {
            let error = serde_json::from_str::<Policy>(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
