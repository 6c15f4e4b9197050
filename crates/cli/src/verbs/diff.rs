//! `qd diff`: what a session changed in its worktree.

use qd_protocol::worktree::{Diff, DiffFile};

use super::Context;
use crate::failure::{Exit, Result};
use crate::refs;
use crate::render::style::Style;
use crate::render::table::Table;
use crate::render::text;

/// Shows the changes, or with `stat` the files alone. Off a terminal the patch is as git gave it, for programs.
pub(crate) async fn diff(context: &Context, id: &str, stat: bool) -> Result<Exit> {
    let client = context.client().await?;
    let session = refs::session(&client, id).await?;
    let query = if stat { "?stat=true" } else { "" };
    let diff: Diff = client.get(&format!("{}/diff{query}", session.path())).await?;
    if context.out.json {
        context.out.value(&diff)?;
        return Ok(Exit::Well);
    }
    let style = context.out.out_style();
    match (&diff.patch, context.out.out_tty) {
        (Some(patch), true) => context.out.data(&coloured(&text::clean(patch), style))?,
        (Some(patch), false) => context.out.data(patch)?,
        (None, _) => context.out.data(&table(&diff.files).render(style, context.out.width()))?,
    }
    if diff.truncated {
        context.out.note(&format!("there is more; in the worktree: git diff {}", diff.base));
    }
    Ok(Exit::Well)
}

fn table(files: &[DiffFile]) -> Table {
    let mut table = Table::new(&["ADDED", "REMOVED", "FILE"]);
    let number = |lines: Option<u64>| lines.map_or_else(|| "-".to_owned(), |lines| lines.to_string());
    for file in files {
        table.row([number(file.added), number(file.removed), file.path.clone()]);
    }
    table
}

/// A patch in the colours that everybody knows.
pub(super) fn coloured(patch: &str, style: Style) -> String {
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

    #[test]
    fn a_patch_without_colour_is_the_patch() {
        let patch = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n";
        assert_eq!(coloured(patch, Style::new(false)), patch);
        assert!(coloured(patch, Style::new(true)).contains("\x1b["));
    }

    #[test]
    fn a_file_that_is_not_text_has_no_lines() {
        let file = DiffFile { path: "logo.png".to_owned(), added: None, removed: None };
        let shown = table(&[file]).render(Style::new(false), None);
        assert_eq!(
            shown.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>(),
            ["-", "-", "logo.png"]
        );
    }
}
