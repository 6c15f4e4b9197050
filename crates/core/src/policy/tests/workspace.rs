//! Path rules in a known workspace: a file is the same file however it is named.

use super::*;

use PolicyVerdict::{Allow, Ask, Deny};

fn judge_edit_in(policy: &Policy, workspace: Option<&str>, path: &str) -> PolicyVerdict {
    let input = json!({ "file_path": path });
    verdict_of(&judge(
        policy,
        false,
        &ProposedToolCall { tool: "Edit", input: &input, risk: Risk::Medium, workspace },
    ))
}

#[test]
fn a_rule_for_a_path_in_the_workspace_is_also_about_its_absolute_form() {
    let policy = rules(&[("Edit", "src/secret/*", Deny), ("Edit", "src/*", Allow)]);
    for (path, expected) in [
        ("/srv/app/src/lib.rs", Allow),
        ("/srv/app/./src//lib.rs", Allow),
        ("/srv/app/src/../src/lib.rs", Allow),
        ("/srv/app/src/secret/x", Deny),
        ("/srv/app/src/../x", Ask),
        ("/srv/apple/src/lib.rs", Ask),
        ("/src/lib.rs", Ask),
        ("src/lib.rs", Allow),
    ] {
        assert_eq!(judge_edit_in(&policy, Some("/srv/app"), path), expected, "{path}");
    }
    assert_eq!(judge_edit_in(&policy, None, "/srv/app/src/lib.rs"), Ask, "the workspace is not known");
}

#[test]
fn a_deny_rule_with_an_absolute_path_sees_the_relative_one_and_an_allow_rule_does_not() {
    let deny = rules(&[("Edit", "/srv/app/secret/*", Deny), ("Edit", "*", Allow)]);
    for path in ["secret/x", "./src/../secret/x", "/srv/app/secret/x"] {
        assert_eq!(judge_edit_in(&deny, Some("/srv/app"), path), Deny, "{path}");
    }
    // The directory that a tool resolves a relative path against is up to the tool.
    let allow = rules(&[("Edit", "/srv/app/src/*", Allow)]);
    assert_eq!(judge_edit_in(&allow, Some("/srv/app"), "/srv/app/src/x"), Allow);
    assert_eq!(judge_edit_in(&allow, Some("/srv/app"), "src/x"), Ask);
}
