//! The agent's to-do list, which it keeps by tools: one of them replaces the whole list, newer versions add and change
//! single tasks. Both become a plan. A task counts when its call has succeeded.

use std::collections::VecDeque;

use qd_protocol::event::PlanEntry;
use serde_json::Value;

/// The tool whose arguments are the whole list.
pub(super) const TODO_TOOL: &str = "TodoWrite";
/// The tool that adds a task. Its result has the number of the task.
const CREATE_TOOL: &str = "TaskCreate";
/// The tool that changes a task.
const UPDATE_TOOL: &str = "TaskUpdate";
/// The status with which a task is removed.
const DELETED: &str = "deleted";
/// The most calls remembered that have not ended, and the most tasks; beyond that, the oldest is forgotten.
const TASKS_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct ClaudeTaskList {
    tasks: VecDeque<ClaudeTask>,
    /// Ids and arguments of unfinished calls that add or change a task.
    open_calls: VecDeque<(String, ClaudeTaskCall)>,
}

#[derive(Debug)]
struct ClaudeTask {
    number: String,
    entry: PlanEntry,
}

#[derive(Debug)]
enum ClaudeTaskCall {
    Create { subject: String },
    Update { number: String, subject: Option<String>, status: Option<String> },
}

impl ClaudeTaskList {
    /// Records that a tool call started. Returns the plan if the call itself has the whole list.
    pub(super) fn start_call(&mut self, call_id: &str, tool: &str, input: &Value) -> Option<Vec<PlanEntry>> {
        let call = match tool {
            TODO_TOOL => return whole_list(input),
            CREATE_TOOL => ClaudeTaskCall::Create { subject: text(&input["subject"])? },
            UPDATE_TOOL => {
                let (subject, status) = (text(&input["subject"]), text(&input["status"]));
                ClaudeTaskCall::Update { number: text(&input["taskId"])?, subject, status }
            }
            _ => return None,
        };
        push_bounded(&mut self.open_calls, (call_id.to_owned(), call));
        None
    }

    /// Records that a tool call ended. Returns the plan if the call has changed it.
    pub(super) fn finish_call(
        &mut self,
        call_id: &str,
        output: &Value,
        is_error: bool,
    ) -> Option<Vec<PlanEntry>> {
        let at = self.open_calls.iter().position(|(id, _)| id == call_id)?;
        let (_, call) = self.open_calls.remove(at)?;
        if is_error {
            return None;
        }
        match call {
            ClaudeTaskCall::Create { subject } => {
                let entry = PlanEntry { content: subject, status: "pending".to_owned() };
                push_bounded(&mut self.tasks, ClaudeTask { number: task_number(output)?, entry });
            }
            ClaudeTaskCall::Update { number, status, .. } if status.as_deref() == Some(DELETED) => {
                self.tasks.retain(|task| task.number != number);
            }
            ClaudeTaskCall::Update { number, subject, status } => {
                let entry = &mut self.tasks.iter_mut().find(|task| task.number == number)?.entry;
                entry.content = subject.unwrap_or(std::mem::take(&mut entry.content));
                entry.status = status.unwrap_or(std::mem::take(&mut entry.status));
            }
        }
        Some(self.tasks.iter().map(|task| task.entry.clone()).collect())
    }
}

fn whole_list(input: &Value) -> Option<Vec<PlanEntry>> {
    let entry = |todo: &Value| {
        Some(PlanEntry {
            content: text(&todo["content"])?,
            status: text(&todo["status"]).unwrap_or_default(),
        })
    };
    input["todos"].as_array()?.iter().map(entry).collect()
}

/// The number in a result such as `Task #1 created successfully: read it`.
fn task_number(output: &Value) -> Option<String> {
    let digits: String =
        output.as_str()?.split_once('#')?.1.chars().take_while(char::is_ascii_digit).collect();
    (!digits.is_empty()).then_some(digits)
}

fn text(value: &Value) -> Option<String> {
    value.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn push_bounded<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() >= TASKS_MAX {
        list.pop_front();
    }
    list.push_back(item);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tasks_that_are_added_changed_and_removed_one_by_one_are_a_plan() {
        let mut list = ClaudeTaskList::default();
        let mut call = |tool: &str, input: Value, output: &str, is_error: bool| {
            assert_eq!(list.start_call("c", tool, &input), None);
            let plan = list.finish_call("c", &json!(output), is_error)?;
            Some(
                plan.into_iter()
                    .map(|entry| format!("{} {}", entry.content, entry.status))
                    .collect::<Vec<_>>(),
            )
        };
        let create = |subject: &str| json!({"subject": subject, "description": "d"});
        let update = |status: &str| json!({"taskId": "1", "status": status});
        let created = call("TaskCreate", create("read"), "Task #1 created successfully: read", false);
        assert_eq!(created.unwrap(), ["read pending"]);
        call("TaskCreate", create("write"), "Task #2 created successfully: write", false);
        assert_eq!(call("TaskCreate", create("no"), "refused", true), None);
        let updated = call("TaskUpdate", update("in_progress"), "Updated task #1 status", false);
        assert_eq!(updated.unwrap(), ["read in_progress", "write pending"]);
        let removed = call("TaskUpdate", update("deleted"), "Updated task #1 deleted", false);
        assert_eq!(removed.unwrap(), ["write pending"]);
        assert_eq!(call("TaskUpdate", update("completed"), "Task not found", false), None, "it is gone");
        assert_eq!(call("Bash", json!({}), "", false), None);
    }
}
