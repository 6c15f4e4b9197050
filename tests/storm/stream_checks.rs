//! Compares what readers saw with the journal: nothing lost, doubled, reordered or changed.

use std::collections::BTreeSet;

use qd_testkit::TestEvent;

use super::deck::StormDeck;
use super::readers::StormReading;
use super::record::{EventTrace, session_hash, trace};

/// Checks one reader. The events of purged sessions may be gone from the journal, so they do not count.
pub(crate) fn check_reading(
    deck: &StormDeck,
    journal: &[TestEvent],
    purged: &BTreeSet<String>,
    reading: &StormReading,
) {
    let Some(kind) = reading.kind else { return };
    let purged: BTreeSet<u64> = purged.iter().map(|session| session_hash(session)).collect();
    let expected = journal.iter().filter(|event| kind.reads(deck, event)).map(trace);
    let expected: Vec<EventTrace> = expected.filter(|event| !purged.contains(&event.session)).collect();
    let end_seq = journal.last().map_or(0, |event| event.seq);
    for (at, visit) in reading.visits.iter().enumerate() {
        // A reader may be ahead of the journal as it was read.
        let is_judged = |event: &&EventTrace| event.seq <= end_seq && !purged.contains(&event.session);
        let seen: Vec<EventTrace> = visit.iter().filter(is_judged).copied().collect();
        let (Some(first), Some(last)) = (seen.first(), seen.last()) else { continue };
        let begin = expected.partition_point(|event| event.seq < first.seq);
        let end = expected.partition_point(|event| event.seq <= last.seq);
        let due = &expected[begin..end];
        if let Some(difference) = first_difference(&seen, due) {
            deck.violation(
                None,
                format!("the reader {kind:?} (visit {at}) differs from the journal: {difference}"),
            );
        }
        let is_steady = reading.visits.len() == 1;
        if is_steady && begin > 0 {
            deck.violation(None, format!("the reader {kind:?} missed the first {begin} events"));
        }
        if is_steady && end < expected.len() {
            let missed = expected.len() - end;
            deck.violation(None, format!("the reader {kind:?} stopped {missed} events before the end"));
        }
    }
}

fn first_difference(seen: &[EventTrace], due: &[EventTrace]) -> Option<String> {
    let at = seen.iter().zip(due).position(|(seen, due)| seen != due);
    let at = at.or((seen.len() != due.len()).then_some(seen.len().min(due.len())))?;
    let describe = |events: &[EventTrace]| {
        events
            .get(at)
            .map_or("nothing".to_owned(), |event| format!("seq {} ({:x})", event.seq, event.content))
    };
    Some(format!("saw {} instead of {}", describe(seen), describe(due)))
}
