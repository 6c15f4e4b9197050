//! Finds lines that two worktrees of one repository both changed, counted in their common base. It is reported before
//! either is merged, because the second merge would conflict.

use std::collections::HashMap;
use std::rc::Rc;

use qd_protocol::worktree::{LineRange, OverlapFile};

use crate::changes::{ChangesByFile, FileChange, Hunk, merge_base};
use crate::error::WorktreeResult;
use crate::git_worktree::GitWorktree;

/// The maximum number of ranges reported per file.
const RANGES_MAX: usize = 100;

/// All pairs of these worktrees that changed the same lines, by their indexes in the list. All must belong to one
/// repository.
pub fn find_overlaps(trees: &[GitWorktree]) -> WorktreeResult<Vec<(usize, usize, Vec<OverlapFile>)>> {
    let mut cache: HashMap<(usize, String), Rc<ChangesByFile>> = HashMap::new();
    let heads: Vec<String> = trees.iter().map(GitWorktree::head).collect::<WorktreeResult<_>>()?;
    let mut found = Vec::new();
    for first in 0..trees.len() {
        for second in first + 1..trees.len() {
            let Some(base) = merge_base(&trees[first].repository_git(), &heads[first], &heads[second])?
            else {
                continue;
            };
            let mut changes_of = |index: usize| -> WorktreeResult<Rc<ChangesByFile>> {
                if let Some(changes) = cache.get(&(index, base.clone())) {
                    return Ok(Rc::clone(changes));
                }
                let changes = Rc::new(trees[index].changes(&base)?);
                cache.insert((index, base.clone()), Rc::clone(&changes));
                Ok(changes)
            };
            let mut files = overlapping_files(&*changes_of(first)?, &*changes_of(second)?);
            // What the target branch changed between the starts of the two is the work of neither.
            for index in [first, second] {
                if !files.is_empty() {
                    let own = trees[index].own_changes(&heads[index])?;
                    files.retain(|file| own.contains_key(&file.path));
                }
            }
            if !files.is_empty() {
                found.push((first, second, files));
            }
        }
    }
    Ok(found)
}

/// The files in which both changed the same lines.
pub fn overlapping_files(first: &ChangesByFile, second: &ChangesByFile) -> Vec<OverlapFile> {
    let both = first.iter().filter_map(|(path, change)| Some((path, change, second.get(path)?)));
    both.filter_map(|(path, change, other)| {
        Some(OverlapFile { path: path.clone(), lines: overlapping_lines(change, other)? })
    })
    .collect()
}

/// The lines that both changed, or `None` if they do not overlap. The list is empty if either changed the file as a
/// whole.
fn overlapping_lines(first: &FileChange, second: &FileChange) -> Option<Vec<LineRange>> {
    if first.hunks.is_empty() || second.hunks.is_empty() {
        return Some(Vec::new());
    }
    let pairs = first.hunks.iter().flat_map(|hunk| second.hunks.iter().map(move |other| (hunk, other)));
    let lines: Vec<LineRange> =
        pairs.filter_map(|(hunk, other)| hunk_overlap(*hunk, *other)).take(RANGES_MAX).collect();
    (!lines.is_empty()).then_some(lines)
}

/// The lines that both hunks touch. An insertion overlaps a change to an adjacent line, because git could not know
/// which comes first.
fn hunk_overlap(one: Hunk, other: Hunk) -> Option<LineRange> {
    let last = |hunk: Hunk| if hunk.count == 0 { hunk.start } else { hunk.start + hunk.count - 1 };
    let first = |hunk: Hunk, other: Hunk| match (hunk.count, other.count) {
        // An insertion after line 4 touches a hunk that starts at line 5.
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
        let changes =
            |hunks: &[Hunk]| ChangesByFile::from([("f".to_owned(), FileChange { hunks: hunks.to_vec() })]);
        let found = overlapping_files(&changes(&[]), &changes(&[hunk(9, 1)]));
        assert_eq!(found, [OverlapFile { path: "f".to_owned(), lines: Vec::new() }]);
        assert_eq!(overlapping_files(&changes(&[hunk(1, 1)]), &changes(&[hunk(9, 1)])), []);
        assert_eq!(overlapping_files(&changes(&[hunk(1, 1)]), &ChangesByFile::new()), []);
    }
}
