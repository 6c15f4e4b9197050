//! The patterns of policy rules: `*` matches any run of characters, `?` matches one, everything else is literal. This
//! module only compares text with text; callers normalise the text first where needed.

/// Whether `pattern` matches the whole of `text`.
///
/// Each literal run between two stars is matched at its first occurrence. That is always right, because the next star
/// can absorb whatever follows. So there is no backtracking: the time is linear in the text for patterns without `?`,
/// and at worst the text length times the longest run with a `?`.
pub(super) fn matches(pattern: &str, text: &str) -> bool {
    let mut runs = pattern.split('*');
    let first = runs.next().unwrap_or_default();
    let Some(mut rest) = strip(first, text) else { return false };
    let Some(last) = runs.next_back() else { return rest.is_empty() };
    for run in runs {
        match find(run, rest) {
            Some(after) => rest = after,
            None => return false,
        }
    }
    ends_with(last, rest)
}

/// The rest of `text` after `run`, if `text` begins with it.
fn strip<'t>(run: &str, text: &'t str) -> Option<&'t str> {
    if !run.contains('?') {
        return text.strip_prefix(run);
    }
    let mut chars = text.chars();
    for wanted in run.chars() {
        let found = chars.next()?;
        if wanted != '?' && wanted != found {
            return None;
        }
    }
    Some(chars.as_str())
}

/// The rest of `text` after the first occurrence of `run`.
fn find<'t>(run: &str, text: &'t str) -> Option<&'t str> {
    if !run.contains('?') {
        return text.find(run).map(|at| &text[at + run.len()..]);
    }
    text.char_indices().find_map(|(at, _)| strip(run, &text[at..]))
}

fn ends_with(run: &str, text: &str) -> bool {
    if !run.contains('?') {
        return text.ends_with(run);
    }
    let mut chars = text.chars().rev();
    run.chars().rev().all(|wanted| chars.next().is_some_and(|found| wanted == '?' || wanted == found))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::matches;

    #[test]
    fn a_pattern_covers_the_whole_text_or_nothing() {
        for (pattern, text, expected) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", "any\nthing", true),
            ("git status", "git status", true),
            ("git status", "git status ", false),
            ("git status*", "git status --short", true),
            ("git status*", "xgit status", false),
            ("*.rs", "src/lib.rs", true),
            ("*.rs", "src/lib.rsx", false),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("**", "x", true),
            ("?", "ä", true),
            ("?", "", false),
            ("?", "ab", false),
            ("a?c*", "abcdef", true),
            ("*a?c*", "xxacabc", true),
            ("*a?", "aab", true),
            ("*?*", "", false),
            ("[ab]", "a", false),
            ("[ab]", "[ab]", true),
            ("a\\*", "a\\b", true),
            ("{a,b}", "a", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern:?} on {text:?}");
        }
    }

    /// A matcher that backtracks to every star would never finish.
    #[test]
    fn a_pattern_of_many_stars_comes_to_an_end() {
        let text = "a".repeat(20_000);
        assert!(!matches(&format!("{}b", "a*".repeat(500)), &text));
        assert!(!matches(&format!("{}b", "*?a".repeat(200)), &text));
    }

    /// The plain definition, which takes exponential time.
    fn by_definition(pattern: &[char], text: &[char]) -> bool {
        match (pattern.split_first(), text.split_first()) {
            (None, _) => text.is_empty(),
            (Some(('*', more)), None) => by_definition(more, text),
            (Some(('*', more)), Some((_, rest))) => by_definition(more, text) || by_definition(pattern, rest),
            (Some(('?', more)), Some((_, rest))) => by_definition(more, rest),
            (Some((wanted, more)), Some((found, rest))) => wanted == found && by_definition(more, rest),
            (Some(_), None) => false,
        }
    }

    proptest! {
        #[test]
        fn the_fast_way_gives_the_answer_of_the_definition(pattern in "[abä*?]{0,9}", text in "[abä]{0,9}") {
            let (p, t): (Vec<_>, Vec<_>) = (pattern.chars().collect(), text.chars().collect());
            prop_assert_eq!(matches(&pattern, &text), by_definition(&p, &t));
        }
    }
}
