//! Renders the change that a tool made to a file as a unified diff with one hunk.

/// Unchanged lines shown before and after a change.
const CONTEXT_LINES: usize = 3;

/// The change from `old` to `new` in the format of `diff -u`, as one hunk.
pub(super) fn unified_diff(path: &str, old: &str, new: &str) -> String {
    let (before, after): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let shorter = before.len().min(after.len());
    let same = |pairs: &mut dyn Iterator<Item = (&&str, &&str)>| pairs.take_while(|(a, b)| a == b).count();
    let head = same(&mut before.iter().zip(&after));
    let tail = same(&mut before.iter().rev().zip(after.iter().rev())).min(shorter - head);
    if head == before.len() && head == after.len() {
        return format!("--- {path}\n+++ {path}\n");
    }
    let first = head.saturating_sub(CONTEXT_LINES);
    let removed = &before[head..before.len() - tail];
    let added = &after[head..after.len() - tail];
    let below = &before[before.len() - tail..][..tail.min(CONTEXT_LINES)];
    let context = head - first + below.len();
    let mut text = format!(
        "--- {path}\n+++ {path}\n@@ -{},{} +{},{} @@\n",
        first + 1,
        context + removed.len(),
        first + 1,
        context + added.len()
    );
    let mut push_lines = |prefix: char, lines: &[&str]| {
        for line in lines {
            text.push(prefix);
            text.push_str(line);
            text.push('\n');
        }
    };
    push_lines(' ', &before[first..head]);
    push_lines('-', removed);
    push_lines('+', added);
    push_lines(' ', below);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_shown_with_what_is_around_it() {
        let old = "a\nb\nc\nd\ne\nf\ng\n";
        let new = "a\nb\nc\nd\nE\nF2\nf\ng\n";
        assert_eq!(
            unified_diff("x", old, new),
            "--- x\n+++ x\n@@ -2,6 +2,7 @@\n b\n c\n d\n-e\n+E\n+F2\n f\n g\n"
        );
        assert_eq!(unified_diff("x", "", "new\n"), "--- x\n+++ x\n@@ -1,0 +1,1 @@\n+new\n");
        assert_eq!(unified_diff("x", "old\n", ""), "--- x\n+++ x\n@@ -1,1 +1,0 @@\n-old\n");
        assert_eq!(unified_diff("x", "a\na\n", "a\n"), "--- x\n+++ x\n@@ -1,2 +1,1 @@\n a\n-a\n");
        assert_eq!(unified_diff("x", "same\n", "same\n"), "--- x\n+++ x\n");
    }
}
