//! Finds the sessions that a last message addresses: a line that begins with `@NAME` addresses that session. Mentions
//! inside a fenced block are quotations and do not count.

use std::collections::BTreeSet;

use qd_protocol::RunId;
use qd_protocol::event::{EventBody, FinishReason, FleetMentioned, RouteAssignment, RouteSource};
use qd_protocol::limits::FLEET_MENTIONS_MAX;

use super::{FinishedRun, FleetEffect, FleetStepBuilder};

/// The names after an `@` at the beginning of a line, each once and in order. Only whole words count: `@dev1` does
/// not mention `dev`.
pub fn find_mentions(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let mut fence: Option<(char, usize)> = None;
    for line in text.lines() {
        let bare = line.trim();
        let mark = bare.chars().next().filter(|mark| matches!(mark, '`' | '~'));
        let length = mark.map_or(0, |mark| bare.chars().take_while(|c| *c == mark).count());
        match (fence, mark) {
            (None, Some(mark)) if length >= 3 => fence = Some((mark, length)),
            (Some((open, least)), Some(mark)) if mark == open && length >= least && bare.len() == length => {
                fence = None;
            }
            (None, _) => {
                let Some(rest) = line.strip_prefix('@') else { continue };
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-')));
                let name = &rest[..end.unwrap_or(rest.len())];
                if !name.is_empty() && seen.insert(name) {
                    found.push(name);
                }
            }
            _ => {}
        }
    }
    found
}

impl FleetStepBuilder<'_> {
    /// Sends a last message to the sessions that it mentions, if the fleet file enables mentions. Returns whether it
    /// was sent to any. Only successful runs send, and no session sends to itself.
    pub(super) fn send_to_mentioned(&mut self, name: &str, ended: &FinishedRun) -> bool {
        if !self.spec.mentions || self.stopping.is_some() || ended.reason != FinishReason::EndTurn {
            return false;
        }
        let is_other_session =
            |mentioned: &&str| *mentioned != name && self.spec.sessions.contains_key(*mentioned);
        let mut names: Vec<&str> = find_mentions(&ended.text).into_iter().filter(is_other_session).collect();
        if names.is_empty() {
            return false;
        }
        let remaining = FLEET_MENTIONS_MAX.saturating_sub(self.mention_count) as usize;
        let error = (names.len() > remaining).then(|| {
            let refused = names.split_off(remaining).join(", ");
            format!(
                "{name} mentions {refused}, but a fleet sends at most {FLEET_MENTIONS_MAX} messages because of mentions"
            )
        });
        let round = self.mention_count + 1;
        let cause = format!("at-{round}");
        let assignment = |target: &&str| RouteAssignment {
            session: (*target).to_owned(),
            runs: vec![RunId::of_fleet(&self.id, &cause, target, 0, 0)],
            subtasks: Vec::new(),
        };
        let to: Vec<RouteAssignment> = names.iter().map(assignment).collect();
        let is_sent = !to.is_empty();
        let from = RouteSource { session: name.to_owned(), runs: vec![ended.run.clone()] };
        self.emit(EventBody::FleetMentioned(FleetMentioned {
            fleet_id: self.id.clone(),
            round,
            from,
            to,
            error,
        }));
        if is_sent {
            self.add_effect(FleetEffect::DispatchRuns);
        }
        is_sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mention_begins_a_line_and_is_a_whole_word() {
        assert_eq!(
            find_mentions("@dev1: go\nask @lead too\n@dev\n@dev1 again\n@ x\n@review, please"),
            ["dev1", "dev", "review"]
        );
        assert_eq!(find_mentions("done\r\n@a\r\n"), ["a"]);
    }

    #[test]
    fn mentions_in_a_fence_do_not_count() {
        assert_eq!(find_mentions("```\n@a\n```\n@b"), ["b"]);
        assert_eq!(find_mentions("~~~~\n@a\n~~~\n@b\n~~~~\n@c"), ["c"]);
    }
}
