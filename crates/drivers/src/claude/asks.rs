//! Asks before the agent uses a tool: permission requests, and the questions of its tool for asking people. Nothing is
//! sent here. A [`ClaudeAsk`] puts its questions to the session and knows which response the agent then gets.

use qd_link::LinkClosed;
use qd_protocol::AskId;
use qd_protocol::event::{AskAnswer, PermissionDecision};
use qd_protocol::link::AskRequest;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::asks::{QUESTIONS_MAX, listable_options, permission_request, question_request};
use crate::turn::DriverTurn;

/// A tool that the agent wants to use. Its suggestions for permanent rules are not read: permission is given once, so
/// that every later call is judged by the policy again.
#[derive(Debug, Deserialize)]
pub(super) struct ClaudeApprovalRequest {
    pub(super) tool_name: String,
    #[serde(default)]
    input: Map<String, Value>,
    #[serde(default)]
    description: Option<String>,
    /// Whether the tool needs an answer from a person, not just permission.
    #[serde(default)]
    requires_user_interaction: bool,
}

/// An ask that the agent waits for.
#[derive(Debug)]
pub(super) enum ClaudeAsk {
    /// A permission request for a tool.
    Permission { ask: AskRequest, input: Map<String, Value> },
    /// Questions, asked one after the other. The answers are put into the tool's arguments.
    Questions { asks: Vec<(AskRequest, ClaudeQuestion)>, input: Map<String, Value> },
}

/// A question in the agent's format.
#[derive(Debug, Deserialize)]
pub(super) struct ClaudeQuestion {
    question: String,
    #[serde(default)]
    options: Vec<ClaudeQuestionOption>,
    #[serde(default, rename = "multiSelect")]
    many: bool,
}

#[derive(Debug, Deserialize)]
struct ClaudeQuestionOption {
    label: String,
}

impl ClaudeAsk {
    /// Builds the ask for a request. `plan` is the plan to approve, which the tool's arguments may leave out.
    pub(super) fn from_request(
        request: ClaudeApprovalRequest,
        plan: Option<&str>,
    ) -> Result<Self, getrandom::Error> {
        let ClaudeApprovalRequest { tool_name, input, description, requires_user_interaction } = request;
        if requires_user_interaction && let Some(questions) = parse_questions(&input) {
            let asks = questions.into_iter().map(|question| Ok((question.to_ask()?, question)));
            return Ok(Self::Questions { asks: asks.collect::<Result<_, _>>()?, input });
        }
        let prompt = plan.map(str::to_owned).or(description);
        let ask = permission_request(tool_name, Value::Object(input.clone()), prompt)?;
        Ok(Self::Permission { ask, input })
    }

    /// The ids with which its questions are withdrawn.
    pub(super) fn ask_ids(&self) -> Vec<AskId> {
        match self {
            Self::Permission { ask, .. } => vec![ask.id.clone()],
            Self::Questions { asks, .. } => asks.iter().map(|(ask, _)| ask.id.clone()).collect(),
        }
    }

    /// Asks the session, waits for the answer, and returns the response for the agent.
    pub(super) async fn ask_and_wait(self, turn: &DriverTurn<'_>) -> Result<Value, LinkClosed> {
        match self {
            Self::Permission { ask, input } => {
                let Some(answer) = turn.ask(ask).await? else { return Ok(deny_answer(NOBODY_ANSWERS)) };
                Ok(match answer.decision.is_some_and(PermissionDecision::allows) {
                    true => allow_answer(input),
                    false => deny_answer(answer.reason.as_deref().unwrap_or(NOT_ALLOWED)),
                })
            }
            Self::Questions { asks, mut input } => {
                let mut answers = Map::new();
                for (ask, question) in asks {
                    let Some(answer) = turn.ask(ask).await? else { return Ok(deny_answer(NOBODY_ANSWERS)) };
                    match question.parse_answer(&answer) {
                        Some(value) => answers.insert(question.question, value.into()),
                        None => return Ok(deny_answer(answer.reason.as_deref().unwrap_or(NOT_ANSWERED))),
                    };
                }
                input.insert("answers".to_owned(), answers.into());
                Ok(allow_answer(input))
            }
        }
    }
}

impl ClaudeQuestion {
    fn to_ask(&self) -> Result<AskRequest, getrandom::Error> {
        let labels: Vec<_> = self.options.iter().map(|option| option.label.clone()).collect();
        let options = listable_options(labels);
        // A choice of several cannot be offered as options, so the prompt lists them.
        if self.many && !options.is_empty() {
            let prompt = format!("{} (any of: {})", self.question, options.join(", "));
            return question_request(prompt, Vec::new());
        }
        question_request(self.question.clone(), options)
    }

    /// The value that the agent gets for an answer. `None` if the answer does not fit the question.
    fn parse_answer(&self, answer: &AskAnswer) -> Option<String> {
        let value = answer.value.as_deref()?;
        let is_option = |label: &str| self.options.iter().any(|option| option.label == label);
        if !self.many || is_option(value) {
            return Some(value.to_owned());
        }
        let labels: Vec<_> = value.split(',').map(str::trim).collect();
        labels.iter().all(|label| is_option(label)).then(|| labels.join(", "))
    }
}

fn parse_questions(input: &Map<String, Value>) -> Option<Vec<ClaudeQuestion>> {
    let questions = Vec::<ClaudeQuestion>::deserialize(input.get("questions")?).ok()?;
    (1..=QUESTIONS_MAX).contains(&questions.len()).then_some(questions)
}

/// The response if the turn is cancelled before anybody has answered, or if no turn is running.
pub(super) fn unattended_answer() -> Value {
    deny_answer(NOBODY_ANSWERS)
}

const NOBODY_ANSWERS: &str = "Nobody answers this any more; stop here.";
const NOT_ALLOWED: &str = "This was not allowed.";
const NOT_ANSWERED: &str = "The question was not answered.";

fn allow_answer(input: Map<String, Value>) -> Value {
    json!({"behavior": "allow", "updatedInput": input})
}

fn deny_answer(why: &str) -> Value {
    json!({"behavior": "deny", "message": why})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask_for(request: Value, plan: Option<&str>) -> ClaudeAsk {
        ClaudeAsk::from_request(ClaudeApprovalRequest::deserialize(request).unwrap(), plan).unwrap()
    }

    fn answer(value: Option<&str>) -> AskAnswer {
        AskAnswer { value: value.map(str::to_owned), ..AskAnswer::default() }
    }

    #[test]
    fn a_permission_names_the_tool_and_its_arguments_as_the_agent_does() {
        let request = json!({"tool_name": "Bash", "input": {"command": "ls"}, "description": "Lists",
            "permission_suggestions": [{"type": "addRules"}]});
        let ClaudeAsk::Permission { ask, input } = ask_for(request, None) else { panic!("a permission") };
        assert_eq!((ask.tool.as_deref(), ask.prompt.as_str()), (Some("Bash"), "Lists"));
        assert_eq!(ask.input, json!({"command": "ls"}));
        assert_eq!(allow_answer(input), json!({"behavior": "allow", "updatedInput": {"command": "ls"}}));
        let plan = json!({"tool_name": "ExitPlanMode", "input": {}, "requires_user_interaction": true});
        let ClaudeAsk::Permission { ask, .. } = ask_for(plan, Some("do it")) else { panic!("a permission") };
        assert_eq!(ask.prompt, "do it");
    }

    #[test]
    fn every_question_is_an_ask_of_its_own() {
        let options = json!([{"label": "Red", "description": "r"}, {"label": "Blue"}]);
        let request = json!({"tool_name": "AskUserQuestion", "requires_user_interaction": true, "input": {"questions": [
            {"question": "Which?", "header": "h", "options": options, "multiSelect": false},
            {"question": "All of them?", "options": options, "multiSelect": true},
        ]}});
        let ClaudeAsk::Questions { asks, .. } = ask_for(request, None) else { panic!("questions") };
        let [(one, which), (other, all)] = &asks[..] else { panic!("two") };
        assert_eq!(
            (one.prompt.as_str(), &one.options[..]),
            ("Which?", &["Red".to_owned(), "Blue".to_owned()][..])
        );
        assert_eq!((other.prompt.as_str(), other.options.len()), ("All of them? (any of: Red, Blue)", 0));
        assert_eq!(which.parse_answer(&answer(Some("Blue"))).as_deref(), Some("Blue"));
        assert_eq!(which.parse_answer(&answer(None)), None);
        assert_eq!(all.parse_answer(&answer(Some("Red,Blue"))).as_deref(), Some("Red, Blue"));
        assert_eq!(all.parse_answer(&answer(Some("Red, Green"))), None);
    }
}
