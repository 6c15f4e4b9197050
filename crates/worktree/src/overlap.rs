//! Where two worktrees of one repository changed the same lines, as those were where the two parted. Said before either
//! is merged: whoever comes second meets a conflict.

use std::collections::HashMap;
use std::rc::Rc;

use qd_protocol::worktree::{LineRange, OverlapFile};

use crate::changes::{ChangesByFile, FileChange, Hunk, merge_base};
use crate::error::WorktreeResult;
use crate::git_worktree::GitWorktree;

/// Places of one file that are told; more of them say no more.
const RANGES_MAX: usize = 100;

/// Every two of these worktrees that changed the same lines, by their places in the list. They are of one repository.
pub fn find_overlaps(trees: &[GitWorktree]) -> WorktreeResult<Vec<(usize, usize, Vec<OverlapFile>)>> {
    let mut known: HashMap<(usize, String), Rc<ChangesByFile>> = HashMap::new();
    let heads: Vec<String> = trees.iter().map(GitWorktree::head).collect::<WorktreeResult<_>>()?;
    let mut found = Vec::new();
    for one in 0..trees.len() {
        for other in one + 1..trees.len() {
            let Some(base) = merge_base(&trees[one].repository_git(), &heads[one], &heads[other])? else {
                continue;
            };
            let mut of = |at: usize| -> WorktreeResult<Rc<ChangesByFile>> {
                if let Some(changes) = known.get(&(at, base.clone())) {
                    return Ok(Rc::clone(changes));
                }
                let changes = Rc::new(trees[at].changes(&base)?);
                known.insert((at, base.clone()), Rc::clone(&changes));
                Ok(changes)
            };
            let files = overlapping_files(&*of(one)?, &*of(other)?);
            if !files.is_empty() {
                found.push((one, other, files));
            }
        }
    }
    Ok(found)
}

/// Where both changed something.
pub fn overlapping_files(one: &ChangesByFile, other: &ChangesByFile) -> Vec<OverlapFile> {
    let both = one.iter().filter_map(|(path, change)| Some((path, change, other.get(path)?)));
    both.filter_map(|(path, change, other)| {
        Some(OverlapFile { path: path.clone(), lines: overlapping_lines(change, other)? })
    })
    .collect()
}

/// The lines that both changed; none of them if the file as a whole; `None` if they keep clear of each other.
fn overlapping_lines(one: &FileChange, other: &FileChange) -> Option<Vec<LineRange>> {
    if one.hunks.is_empty() || other.hunks.is_empty() {
        return Some(Vec::new());
    }
    let pairs = one.hunks.iter().flat_map(|hunk| other.hunks.iter().map(move |other| (hunk, other)));
    let lines: Vec<LineRange> =
        pairs.filter_map(|(hunk, other)| hunk_overlap(*hunk, *other)).take(RANGES_MAX).collect();
    (!lines.is_empty()).then_some(lines)
}

/// An insertion meets what changes a line beside it: git would not know which comes first.
fn hunk_overlap(one: Hunk, other: Hunk) -> Option<LineRange> {
    let last = |hunk: Hunk| if hunk.count == 0 { hunk.start } else { hunk.start + hunk.count - 1 };
    let first = |hunk: Hunk, beside: Hunk| match (hunk.count, beside.count) {
        // A place after line 4 lies at the beginning of a hunk that starts with line 5.
        (1.., 0) => hunk.start.saturating_sub(1),
        _ => hunk.start,
    };
    let (from, to) = (first(one, other).max(first(other, one)), last(one).min(last(other)));
    (from <= to).then(|| LineRange { first: from.max(1), last: to.max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hunk(start: u64, count: u64) -> Hunk {
        Hunk { start, count }
    }

    fn lines(first: u64, last: u64) -> Option<LineRange> {
        Some(LineRange { first, last })
    }

    #[test]
    fn hunks_meet_where_they_share_lines_or_a_place() {
        for (one, other, expected) in [
            (hunk(3, 4), hunk(5, 9), lines(5, 6)),
            (hunk(3, 1), hunk(4, 1), None),
            (hunk(0, 0), hunk(0, 0), lines(1, 1)),
            (hunk(7, 0), hunk(7, 0), lines(7, 7)),
            (hunk(7, 0), hunk(8, 0), None),
            (hunk(4, 0), hunk(5, 2), lines(4, 4)),
            (hunk(6, 0), hunk(5, 2), lines(6, 6)),
            (hunk(7, 0), hunk(5, 2), None),
            (hunk(2, 0), hunk(5, 2), None),
        ] {
            assert_eq!(hunk_overlap(one, other), expected, "{one:?} {other:?}");
            assert_eq!(hunk_overlap(other, one), expected, "{other:?} {one:?}");
        }
    }

    #[test]
    fn a_file_that_is_not_text_overlaps_as_a_whole() {
        let of =
            |hunks: &[Hunk]| ChangesByFile::from([("f".to_owned(), FileChange { hunks: hunks.to_vec() })]);
        let found = overlapping_files(&of(&[]), &of(&[hunk(9, 1)]));
        assert_eq!(found, [OverlapFile { path: "f".to_owned(), lines: Vec::new() }]);
        assert_eq!(overlapping_files(&of(&[hunk(1, 1)]), &of(&[hunk(9, 1)])), []);
        assert_eq!(overlapping_files(&of(&[hunk(1, 1)]), &ChangesByFile::new()), []);
    }
}
