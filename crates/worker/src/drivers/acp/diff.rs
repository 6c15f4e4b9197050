//! What a tool changed in a file, as text: the lines that went and the lines that came, with a little around them.

/// Lines around a change that are shown.
const CONTEXT_LINES: usize = 3;

/// The change from one text to another, in the form that people know from `diff -u`, as one hunk.
pub(super) fn unified_diff(path: &str, old: &str, new: &str) -> String {
    let (before, after): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let shorter = before.len().min(after.len());
    let same = |pairs: &mut dyn Iterator<Item = (&&str, &&str)>| pairs.take_while(|(a, b)| a == b).count();
    let head = same(&mut before.iter().zip(&after));
    let tail = same(&mut before.iter().rev().zip(after.iter().rev())).min(shorter - head);
    if head == before.len() && head == after.len() {
        return format!("--- {path}\n+++ {path}\n");
    }
    let from = head.saturating_sub(CONTEXT_LINES);
    let gone = &before[head..before.len() - tail];
    let come = &after[head..after.len() - tail];
    let below = &before[before.len() - tail..][..tail.min(CONTEXT_LINES)];
    let around = head - from + below.len();
    let mut text = format!(
        "--- {path}\n+++ {path}\n@@ -{},{} +{},{} @@\n",
        from + 1,
        around + gone.len(),
        from + 1,
        around + come.len()
    );
    let mut put = |mark: char, lines: &[&str]| {
        for line in lines {
            text.push(mark);
            text.push_str(line);
            text.push('\n');
        }
    };
    put(' ', &before[from..head]);
    put('-', gone);
    put('+', come);
    put(' ', below);
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
