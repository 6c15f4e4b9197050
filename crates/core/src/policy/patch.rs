//! Finds the files that a patch would change: in the format that Codex applies (`*** Update File: x`) and in unified
//! diffs. What the patch does to the files does not matter here.

/// A patch that names more files than this is treated as unreadable.
const FILES_MAX: usize = 1000;

/// Every file that a patch names. Empty if there are none, or more than [`FILES_MAX`].
pub(super) fn patched_files(patch: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for line in patch.lines() {
        let Some(file) = file_in_header(line.trim_end()) else { continue };
        if found.len() == FILES_MAX {
            return Vec::new();
        }
        if !found.contains(&file) {
            found.push(file);
        }
    }
    found
}

fn file_in_header(line: &str) -> Option<&str> {
    const HEADERS: &[&str] = &[
        "*** Add File: ",
        "*** Update File: ",
        "*** Delete File: ",
        "*** Move to: ",
        "rename from ",
        "rename to ",
    ];
    if let Some(file) = HEADERS.iter().find_map(|header| line.strip_prefix(header)) {
        return Some(file.trim());
    }
    // `--- a/x` and `+++ b/x`, possibly followed by a tab and a time.
    let side = line.strip_prefix("--- ").or_else(|| line.strip_prefix("+++ "))?;
    let file = side.split('\t').next().unwrap_or(side).trim();
    if file == "/dev/null" || file.is_empty() {
        return None;
    }
    Some(file.strip_prefix("a/").or_else(|| file.strip_prefix("b/")).unwrap_or(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_a_patch_is_found_once() {
        let codex = "*** Begin Patch\n*** Update File: src/a.rs\n*** Move to: src/b.rs\n@@\n-x\n+y\n\
                     *** Add File: c\n+z\n*** Delete File: ../d\n*** End Patch";
        assert_eq!(patched_files(codex), ["src/a.rs", "src/b.rs", "c", "../d"]);
        let unified =
            "diff --git a/x b/x\n--- a/x\n+++ b/x\t2026-01-01\n@@ -1 +1 @@\n--- /dev/null\n+++ b/y\n";
        assert_eq!(patched_files(unified), ["x", "y"]);
        assert_eq!(patched_files("no patch"), Vec::<&str>::new());
    }
}
