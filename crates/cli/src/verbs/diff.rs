//! `qd diff`: the changes in a session's worktree.

use qd_protocol::worktree::{DiffFile, WorktreeDiff};

use super::VerbContext;
use crate::failure::{CliExitCode, Result};
use crate::refs;
use crate::render::style::TextStyle;
use crate::render::table::TextTable;
use crate::render::visible_text::show_content;

/// Shows the changes, or with `stat` only the files. If stdout is not a terminal, the patch is printed exactly as git
/// made it.
pub(crate) async fn diff(context: &VerbContext, id: &str, stat: bool) -> Result<CliExitCode> {
    let client = context.client().await?;
    let session = refs::resolve_session(&client, id).await?;
    let query = if stat { "?stat=true" } else { "" };
    let diff: WorktreeDiff = client.get(&format!("{}/diff{query}", session.path())).await?;
    if context.out.json {
        context.out.print_json(&diff)?;
        return Ok(CliExitCode::Success);
    }
    let style = context.out.out_style();
    match (&diff.patch, context.out.out_tty) {
        (Some(patch), true) => context.out.print_data(&colour_patch(&show_content(patch), style))?,
        (Some(patch), false) => context.out.print_exact(patch)?,
        (None, _) => context.out.print_data(&table(&diff.files).render(style, context.out.width()))?,
    }
    if diff.truncated {
        context.out.print_note(&format!(
            "the diff is too long to show in full; run `git diff {}` in the worktree",
            diff.base
        ));
    }
    Ok(CliExitCode::Success)
}

fn table(files: &[DiffFile]) -> TextTable {
    let mut table = TextTable::new(&["ADDED", "REMOVED", "FILE"]);
    table.keep_ends(2);
    let number = |lines: Option<u64>| lines.map_or_else(|| "-".to_owned(), |lines| lines.to_string());
    for file in files {
        table.add_row([number(file.added), number(file.removed), file.path.clone()]);
    }
    table
}

/// Colours a patch as git does.
pub(super) fn colour_patch(patch: &str, style: TextStyle) -> String {
    let mut out = String::with_capacity(patch.len());
    for line in patch.lines() {
        let shown = match line.as_bytes().first() {
            _ if line.starts_with("+++") || line.starts_with("---") || line.starts_with("diff ") => {
                style.bold(line)
            }
            Some(b'+') => style.green(line),
            Some(b'-') => style.red(line),
            Some(b'@') => style.cyan(line),
            _ => line.to_owned(),
        };
        out.push_str(&shown);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::view_snapshot::assert_view;

    #[test]
    fn a_patch_without_colour_is_the_patch() {
        let patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n";
        assert_eq!(colour_patch(patch, TextStyle::new(false)), patch);
        assert!(colour_patch(patch, TextStyle::new(true)).contains("\x1b["));
    }

    #[test]
    fn a_file_that_is_not_text_has_no_lines() {
        let file = DiffFile { path: "logo.png".to_owned(), added: None, removed: None };
        let shown = table(&[file]).render(TextStyle::new(false), None);
        assert_eq!(
            shown.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(),
            ["-", "-", "logo.png"]
        );
    }

    #[test]
    fn changes_read_well() {
        let file = |path: &str, added, removed| DiffFile { path: path.to_owned(), added, removed };
        let files = [
            file(
                "crates/parser/src/a_module_with_a_long_name/tokenizer/lookahead_of_the_second_kind.rs",
                Some(120),
                Some(7),
            ),
            file("logo.png", None, None),
        ];
        assert_view("diff_stat", |style, width| table(&files).render(style, width));
        let patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n";
        assert_view("diff_patch", |style, _| colour_patch(patch, style));
    }
}
