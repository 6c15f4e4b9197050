//! The commands that wait for an agent: in order, each once, a cancel before the rest. No task, lock or transport is
//! known here, so local links and sockets share it.

use std::collections::VecDeque;

use qd_protocol::link::AgentCommand;
use qd_protocol::{EventNumber, RunId};

/// How far out of number order commands may arrive and still be recognized as new. The events of one commit cause a
/// few commands each, and those may be sent in any order.
const REORDER_MAX: usize = 16;

/// The waiting commands. The queue needs no bound of its own: a session has at most one prompt with its cancel and
/// kill outstanding, one answer per ask, and steers, which the agent's side accepts at once whatever its turn does.
#[derive(Debug, Default)]
pub(crate) struct CommandQueue {
    queue: VecDeque<AgentCommand>,
    seen_numbers: SeenNumbers,
}

impl CommandQueue {
    /// Queues a command, unless it is a repeat. A cancel or kill goes before everything that waits, but not before the
    /// prompt of its own run: the agent would ignore the cancel of a run that it has not started.
    pub(crate) fn push(&mut self, command: AgentCommand) {
        let repeat = match &command {
            // A sender without a journal gives a kill the number of its cancel. A kill that arrives twice does no harm.
            AgentCommand::Kill { run, .. } => self.queue.iter().any(
                |queued| matches!(queued, AgentCommand::Kill { run: queued_run, .. } if queued_run == run),
            ),
            _ => !self.seen_numbers.insert(command.number()),
        };
        if repeat {
            return;
        }
        match stopped_run(&command) {
            Some(run) => {
                let prompt = self.queue.iter().position(
                    |queued| matches!(queued, AgentCommand::Prompt { run: queued_run, .. } if queued_run == run),
                );
                let front = prompt.map_or(0, |at| at + 1);
                let ahead =
                    self.queue.iter().skip(front).take_while(|queued| stopped_run(queued).is_some()).count();
                self.queue.insert(front + ahead, command);
            }
            None => self.queue.push_back(command),
        }
    }

    /// Queues everything that waits in `other`. The numbers that `other` has already handed out are not taken over.
    pub(crate) fn append(&mut self, mut other: Self) {
        while let Some(command) = other.pop() {
            self.push(command);
        }
    }

    /// Every command up to this number has been queued before, or comes too late to be told from a repeat.
    pub(crate) fn all_seen_upto(&self) -> EventNumber {
        self.seen_numbers.all_seen_upto.unwrap_or_default()
    }

    /// Takes the next command. Frees the memory with the last one, because most links are idle most of the time.
    pub(crate) fn pop(&mut self) -> Option<AgentCommand> {
        let next = self.queue.pop_front();
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
        next
    }
}

fn stopped_run(command: &AgentCommand) -> Option<&RunId> {
    match command {
        AgentCommand::Cancel { run, .. } | AgentCommand::Kill { run, .. } => Some(run),
        AgentCommand::Prompt { .. } | AgentCommand::Steer { .. } | AgentCommand::Answer { .. } => None,
    }
}

/// The numbers seen so far, in bounded memory: the highest few one by one, and all up to `all_seen_upto`.
#[derive(Debug, Default)]
struct SeenNumbers {
    all_seen_upto: Option<EventNumber>,
    /// Sorted.
    recent: Vec<EventNumber>,
}

impl SeenNumbers {
    /// Records a number and returns whether it is new.
    fn insert(&mut self, number: EventNumber) -> bool {
        if self.all_seen_upto.is_some_and(|floor| number <= floor) {
            return false;
        }
        let Err(at) = self.recent.binary_search(&number) else { return false };
        self.recent.insert(at, number);
        if self.recent.len() > REORDER_MAX {
            self.all_seen_upto = Some(self.recent.remove(0));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use qd_protocol::AskId;
    use qd_protocol::link::{AskResolution, TurnLimits};

    use super::*;

    fn run(name: &str) -> RunId {
        RunId::parse(name).unwrap()
    }

    fn prompt(number: u64, name: &str) -> AgentCommand {
        AgentCommand::Prompt {
            number: EventNumber(number),
            run: run(name),
            prompt: String::new(),
            mode: None,
            files: Vec::new(),
            messages: Vec::new(),
            limits: TurnLimits::default(),
        }
    }

    fn steer(number: u64) -> AgentCommand {
        AgentCommand::Steer { number: EventNumber(number), run: run("a"), text: String::new() }
    }

    fn answer(number: u64) -> AgentCommand {
        AgentCommand::Answer {
            number: EventNumber(number),
            ask: AskId::parse("ask").unwrap(),
            answer: AskResolution::Withdrawn,
        }
    }

    fn cancel(number: u64, name: &str) -> AgentCommand {
        AgentCommand::Cancel { number: EventNumber(number), run: run(name) }
    }

    fn kill(number: u64, name: &str) -> AgentCommand {
        AgentCommand::Kill { number: EventNumber(number), run: run(name) }
    }

    fn queue_order(inputs: impl IntoIterator<Item = AgentCommand>) -> Vec<AgentCommand> {
        let mut queue = CommandQueue::default();
        inputs.into_iter().for_each(|command| queue.push(command));
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn a_cancel_and_then_its_kill_overtake_what_waits() {
        let order = queue_order([steer(1), answer(2), cancel(3, "a"), steer(4), kill(3, "a")]);
        assert_eq!(order, [cancel(3, "a"), kill(3, "a"), steer(1), answer(2), steer(4)]);
    }

    #[test]
    fn a_cancel_does_not_overtake_the_prompt_that_it_cancels() {
        let order = queue_order([prompt(1, "a"), steer(2), cancel(3, "a")]);
        assert_eq!(order, [prompt(1, "a"), cancel(3, "a"), steer(2)]);
        let order = queue_order([prompt(1, "b"), cancel(2, "a")]);
        assert_eq!(order, [cancel(2, "a"), prompt(1, "b")]);
    }

    #[test]
    fn a_repeated_command_is_applied_once() {
        let once = [prompt(1, "a"), steer(4), answer(6), cancel(9, "a"), kill(9, "a")];
        let twice = once.iter().chain(&once).cloned();
        assert_eq!(queue_order(twice), queue_order(once));
    }

    #[test]
    fn a_repeat_is_told_from_a_command_that_is_a_little_late() {
        assert_eq!(queue_order([steer(5), steer(4), steer(5), steer(4)]), [steer(5), steer(4)]);
        let mut seen = SeenNumbers::default();
        assert!((1..1000).all(|number| seen.insert(EventNumber(number))));
        assert!((1..1000).all(|number| !seen.insert(EventNumber(number))));
        assert!(seen.recent.len() <= REORDER_MAX);
    }
}
