//! How lines are split, and which lines are not. Each case is a line as an agent might send it, in good faith or bad.

use super::super::command_line::{join, split};

fn texts_of_commands(line: &str) -> Option<Vec<String>> {
    split(line).map(|parts| parts.iter().map(|part| part.text()).collect())
}

#[test]
fn a_line_is_split_at_separators_and_nowhere_else() {
    let cases: &[(&str, &[&str])] = &[
        ("git status", &["git status"]),
        ("  git \t status  ", &["git status"]),
        ("git status; ls", &["git status", "ls"]),
        ("git status;ls;", &["git status", "ls"]),
        ("git status && ls", &["git status", "ls"]),
        ("git status&&ls", &["git status", "ls"]),
        ("git status || ls", &["git status", "ls"]),
        ("git log | head", &["git log", "head"]),
        ("git log |& head", &["git log", "head"]),
        ("sleep 1 & ls", &["sleep 1", "ls"]),
        ("sleep 1&ls", &["sleep 1", "ls"]),
        ("sleep 1 &", &["sleep 1"]),
        ("ls\nrm x", &["ls", "rm x"]),
        ("\n\nls\n\n", &["ls"]),
        ("ls &&\n\n rm x", &["ls", "rm x"]),
        ("ls |\nrm x", &["ls", "rm x"]),
        ("echo 'a; b && c | d & e'", &["echo 'a; b && c | d & e'"]),
        ("echo \"a; b\"; ls", &["echo \"a; b\"", "ls"]),
        ("echo a\\; b", &["echo a\\; b"]),
        ("echo a\\ b", &["echo a\\ b"]),
        ("echo 'it'\\''s'; ls", &["echo 'it'\\''s'", "ls"]),
        ("echo \"\\\"; rm x\"", &["echo \"\\\"; rm x\""]),
        ("echo '$(rm x)'", &["echo '$(rm x)'"]),
        ("echo '`rm x`'", &["echo '`rm x`'"]),
        ("echo \\$(true", &[]),
        ("echo '\\'; ls", &["echo '\\'", "ls"]),
        ("echo 'a\nb'", &["echo 'a\nb'"]),
        ("ls # ; rm x", &["ls"]),
        ("ls # it's fine\nrm x", &["ls", "rm x"]),
        ("# only words\nls", &["ls"]),
        ("ls a#b; rm x", &["ls a#b", "rm x"]),
        ("ls \\#; rm x", &["ls \\#", "rm x"]),
        ("ls '#'; rm x", &["ls '#'", "rm x"]),
        ("git \\\nstatus", &["git status"]),
        ("git sta\\\ntus", &["git status"]),
        ("ls \\\n; rm x", &["ls", "rm x"]),
        ("git status 2>&1", &["git status"]),
        ("git status >/dev/null 2>&1", &["git status"]),
        ("git status > /dev/null; rm x", &["git status", "rm x"]),
        ("git status 2>/dev/null | head", &["git status", "head"]),
        ("git status &>/dev/null", &["git status"]),
        ("git status &>> /dev/null && ls", &["git status", "ls"]),
        ("git status </dev/null", &["git status"]),
        ("echo x >&2", &["echo x"]),
        ("2>&1 ls x", &["ls x"]),
        ("git log $REF", &["git log $REF"]),
        ("git log ${REF}", &["git log ${REF}"]),
        ("git log \"$REF\"", &["git log \"$REF\""]),
        ("git show HEAD@{1}", &["git show HEAD@{1}"]),
        ("find . -name '*.o' -exec echo {} \\;", &["find . -name '*.o' -exec echo {} \\;"]),
        ("ls '{a,b}' \\{a,b}", &["ls '{a,b}' \\{a,b}"]),
        ("ls *.rs", &["ls *.rs"]),
        ("[ -f x ] && ls", &["[ -f x ]", "ls"]),
        ("command -v git", &["command -v git"]),
        ("echo if then", &["echo if then"]),
        ("echo A=1", &["echo A=1"]),
        ("echo \"\"", &["echo \"\""]),
        ("echo ä; ls", &["echo ä", "ls"]),
    ];
    for (line, expected) in cases {
        let expected =
            (!expected.is_empty()).then(|| expected.iter().map(|text| (*text).to_owned()).collect());
        assert_eq!(texts_of_commands(line), expected, "{line:?}");
    }
}

/// Lines that begin like `git status` but may do anything.
pub(super) const UNSPLITTABLE_LINES: &[&str] = &[
    "git status $(rm x)",
    "git status \"$(rm x)\"",
    "git status `rm x`",
    "git status \"`rm x`\"",
    "git status <(rm x)",
    "git status >(rm x)",
    "git status $((1 + 1))",
    "git status $[1 + 1]",
    "git status ${x:-$(rm x)}",
    "git status ${x@P}",
    "git status ${!x}",
    "git status $'\\x3b rm x'",
    "git status $\"x\"",
    "git status $\\\n(rm x)",
    "git status (rm x)",
    "(git status)",
    "(git status; rm x)",
    "{ git status; }",
    "git() { rm x; }; git status",
    "function git { rm x; }",
    "git status <<EOF\nEOF",
    "git status <<< x",
    "git status < input",
    "git status > file",
    "git status >> file",
    "git status >| file",
    "git status 2> file",
    "git status &> file",
    "git status >& file",
    "git status >&/dev/null",
    "git status )",
    "git status <> file",
    "git status >/dev/null/../sda",
    "git status >/dev/nullx",
    "git status >'/dev/null'x",
    "git status >&2x",
    "git status >$F",
    "git status >",
    "git status > > x",
    "git status 2>&1>x",
    "git status &>/dev/null rm x",
    "if git status; then rm x; fi",
    "for x in a; do git status; done",
    "while git status; do rm x; done",
    "until git status; do rm x; done",
    "case x in x) git status;; esac",
    "select x in a; do git status; done",
    "then git status",
    "do git status",
    "! git status",
    "[[ -f x ]] && git status",
    "coproc git status",
    "time $GIT status",
    "time A=1 git status",
    "git status 12>&1",
    "eval git status",
    "exec git status",
    "source git status",
    ". git status",
    "'eval' git status",
    "e\\val git status",
    "builtin eval git status",
    "command git status",
    "git status; eval rm x",
    "$GIT status",
    "${GIT} status",
    "\"$GIT\" status",
    "git$X status",
    "g?t status",
    "/bin/g* status",
    "{git,status}",
    "git status {push,--force}",
    "git status a{1..9}",
    "PATH=/tmp git status",
    "LD_PRELOAD=/tmp/x.so git status",
    "A+=1 git status",
    "A[0]=1 git status",
    "A=1",
    "git status; A=1 git status",
    "git status 'unbalanced",
    "git status \"unbalanced",
    "git status \\",
    "git status &&",
    "git status ||",
    "git status |",
    "&& git status",
    "; git status",
    "git status ;; rm x",
    "git status & & rm x",
    "git status | | rm x",
    "git status && && rm x",
    "git status\0; rm x",
    "git status\r\nrm x",
    "git status \u{1b}[A",
    "'' git status",
    "",
    "   ",
    "# git status",
];

#[test]
fn a_line_that_may_do_anything_is_not_split() {
    for line in UNSPLITTABLE_LINES {
        assert_eq!(texts_of_commands(line), None, "{line:?}");
    }
}

#[test]
fn quotes_are_taken_off_the_words_and_kept_in_the_text() {
    let parts = split(r#"r""m -r'f' "a b" c\ d"#).unwrap();
    let values: Vec<&str> = parts[0].words.iter().map(|word| word.value.as_str()).collect();
    assert_eq!(values, ["rm", "-rf", "a b", "c d"]);
    assert_eq!(parts[0].text(), r#"r""m -r'f' "a b" c\ d"#);
}

#[test]
fn only_the_command_after_a_pipe_is_piped() {
    let parts = split("a | b\nc || d |& e").unwrap();
    let piped: Vec<bool> = parts.iter().map(|part| part.piped).collect();
    assert_eq!(piped, [false, true, false, false, true]);
    assert!(split("a |\n b").unwrap()[1].piped);
}

#[test]
fn words_are_joined_so_that_a_shell_gives_them_back() {
    assert_eq!(join(&["git", "commit", "-m", "a b", "", "it's"]), r"git commit -m 'a b' '' 'it'\''s'");
}
