//! How a lead splits its work: its message contains a fenced block tagged `cap-subtasks` with a JSON array of strings.

use qd_protocol::limits::SUBTASKS_MAX;

const BLOCK_TAG: &str = "cap-subtasks";

/// Why the subtasks of a message cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubtaskError {
    #[error("its last message has no ```cap-subtasks block with a JSON array of strings")]
    Missing,
    #[error("the ```cap-subtasks block of its last message is not closed by ```")]
    Unclosed,
    #[error("the ```cap-subtasks block of its last message is not a JSON array of strings: {0}")]
    Invalid(String),
    #[error("the ```cap-subtasks block of its last message is empty or has an empty entry")]
    Blank,
    #[error(
        "the ```cap-subtasks block of its last message has {0} entries; at most {SUBTASKS_MAX} are allowed"
    )]
    TooMany(usize),
}

/// The subtasks in a message. If it has several blocks the last one counts, since a lead may change its mind.
pub fn parse_subtasks(text: &str) -> Result<Vec<String>, SubtaskError> {
    let block = last_block(text)?;
    let entries: Vec<String> =
        serde_json::from_str(block).map_err(|error| SubtaskError::Invalid(error.to_string()))?;
    if entries.is_empty() || entries.iter().any(|entry| entry.trim().is_empty()) {
        return Err(SubtaskError::Blank);
    }
    if entries.len() > SUBTASKS_MAX {
        return Err(SubtaskError::TooMany(entries.len()));
    }
    Ok(entries)
}

/// Finds the last `cap-subtasks` block. Works line by line, like Markdown: a fence is three or more fence characters
/// at the beginning of a line, and is closed by at least as many.
fn last_block(text: &str) -> Result<&str, SubtaskError> {
    let mut found = Err(SubtaskError::Missing);
    let mut fence: Option<(char, usize, Option<usize>)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let (start, end) = (at, at + line.len());
        at = end;
        let bare = line.trim();
        let mark = bare.chars().next().filter(|mark| matches!(mark, '`' | '~'));
        let length = mark.map_or(0, |mark| bare.chars().take_while(|c| *c == mark).count());
        match (fence, mark) {
            (None, Some(mark)) if length >= 3 => {
                let is_ours = bare[length..].split_whitespace().next() == Some(BLOCK_TAG);
                fence = Some((mark, length, is_ours.then_some(end)));
            }
            (Some((open, least, begin)), Some(mark))
                if mark == open && length >= least && bare.chars().all(|c| c == mark) =>
            {
                if let Some(begin) = begin {
                    found = Ok(&text[begin..start]);
                }
                fence = None;
            }
            _ => {}
        }
    }
    match fence {
        Some((_, _, Some(_))) => Err(SubtaskError::Unclosed),
        _ => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_counts_and_other_fences_do_not_hide_it() {
        let text = "Plan:\n```json\n[\"no\"]\n```\n```cap-subtasks\n[\"old\"]\n```\nBetter:\n~~~~ cap-subtasks\n[\"a\",\n \"b ``` c\"]\n~~~~\nDone.";
        assert_eq!(parse_subtasks(text).unwrap(), ["a", "b ``` c"]);
        let quoted = "````\n```cap-subtasks\n[\"shown, not meant\"]\n```\n````\n";
        assert_eq!(parse_subtasks(quoted), Err(SubtaskError::Missing));
        assert_eq!(parse_subtasks("  ```cap-subtasks\r\n[\"a\"]\r\n  ```").unwrap(), ["a"]);
    }

    #[test]
    fn a_missing_or_bad_block_says_why() {
        assert_eq!(parse_subtasks("no block"), Err(SubtaskError::Missing));
        assert_eq!(parse_subtasks("```cap-subtasks\n[\"a\"]"), Err(SubtaskError::Unclosed));
        assert!(matches!(parse_subtasks("```cap-subtasks\n{\"a\": 1}\n```"), Err(SubtaskError::Invalid(_))));
        assert!(matches!(parse_subtasks("```cap-subtasks\n[1]\n```"), Err(SubtaskError::Invalid(_))));
        assert_eq!(parse_subtasks("```cap-subtasks\n[]\n```"), Err(SubtaskError::Blank));
        assert_eq!(parse_subtasks("```cap-subtasks\n[\" \"]\n```"), Err(SubtaskError::Blank));
        let many = serde_json::to_string(&vec!["x"; SUBTASKS_MAX + 1]).unwrap();
        assert_eq!(
            parse_subtasks(&format!("```cap-subtasks\n{many}\n```")),
            Err(SubtaskError::TooMany(SUBTASKS_MAX + 1))
        );
    }
}
