//! The command line as users type it: what is accepted, what is refused, and how its help reads.

use super::*;
use clap::CommandFactory;

fn parse(line: &[&str]) -> Result<CommandLine, clap::Error> {
    CommandLine::try_parse_from(std::iter::once(&"qd").chain(line))
}

#[test]
fn the_command_line_is_well_formed() {
    CommandLine::command().debug_assert();
}

#[test]
fn every_verb_of_the_contract_is_there() {
    let verbs: Vec<String> =
        CommandLine::command().get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    for verb in
        "serve run ps attach send logs wait cancel rm asks allow deny answer halt unhalt agents workers \
                 doctor completions man stop config gc"
            .split_whitespace()
    {
        assert!(verbs.iter().any(|known| known == verb), "{verb}");
    }
}

#[test]
fn a_prompt_may_be_a_dash_or_json() {
    for prompt in ["-", "[{\"say\":\"hi\"}]"] {
        let Ok(CommandLine { verb: CliVerb::Run(run), .. }) = parse(&["run", "--agent", "script", prompt])
        else {
            panic!("{prompt}")
        };
        assert_eq!(run.prompt, prompt);
    }
}

#[test]
fn an_unknown_flag_is_no_prompt_and_two_dashes_end_the_flags() {
    for line in [
        &["run", "-a", "echo", "--hlep"][..],
        &["run", "-v is a flag"],
        &["send", "nightly", "--seer"],
        &["answer", "ask_1", "--yes"],
    ] {
        let error = parse(line).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument, "{line:?}");
        assert_eq!(error.exit_code(), 2);
    }
    let CliVerb::Run(run) = parse(&["run", "-a", "echo", "--", "--hlep"]).unwrap().verb else { panic!() };
    assert_eq!(run.prompt, "--hlep");
    let CliVerb::Answer { value, .. } = parse(&["answer", "ask_1", "-3"]).unwrap().verb else { panic!() };
    assert_eq!(value, "-3");
}

#[test]
fn global_flags_stand_before_or_after_the_verb() {
    assert!(parse(&["--json", "ps"]).unwrap().global.json);
    assert!(parse(&["ps", "-a", "--json", "--host", "unix:/x"]).unwrap().global.json);
}

#[test]
fn nonsense_is_refused() {
    for line in [
        &["ps", "--host", "example.com"][..],
        &["run"],
        &["run", "--timeout", "0", "x"],
        &["run", "--timeout", "-1", "x"],
        &["run", "--timeout", "NaN", "x"],
        &["run", "--session", "s", "--agent", "a", "x"],
        &["run", "--on-ask", "shrug", "x"],
        &["policy", "test"],
        &["policy", "test", "allow", "--limit", "0"],
        &["policy", "test", "allow", "--limit", "1001"],
        &["serve", "--tls-cert", "a"],
        &["mail", "send", "s"],
        &["mail", "send", "s", "t", "--steer", "--hold"],
        &["mail", "--state", "lost"],
        &["worker"],
        &["worker", "--agent", "echo", "--listen", "nonsense"],
        &["worker", "--agent", "echo", "--listen", "unix:/run/x.sock"],
        &["worker", "--agent", "echo", "--listen", "127.0.0.1:99999"],
        &["serve", "--tls", "self", "--tls-cert", "a", "--tls-key", "b"],
        &["wait"],
        &["dance"],
    ] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line:?}");
    }
}

#[test]
fn a_time_limit_is_a_number_of_seconds_or_has_a_unit() {
    for (text, expected) in [("90", 90.0), ("0.5", 0.5), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)] {
        assert_eq!(seconds(text), Ok(expected));
    }
    for text in ["", "s", "-1m", "0", "10 minutes", "9999h"] {
        assert!(seconds(text).is_err(), "{text:?}");
    }
}

#[test]
fn help_is_a_verb_too_and_a_bare_worker_names_join() {
    for line in [&["help"][..], &["help", "run"], &["help", "workers", "token"]] {
        assert_eq!(parse(line).unwrap_err().kind(), clap::error::ErrorKind::DisplayHelp, "{line:?}");
    }
    assert!(parse(&["worker"]).unwrap_err().to_string().contains("qd worker join URL"));
}

#[test]
fn the_text_below_the_options_reads_well_on_a_narrow_terminal() {
    fn check(verb: &clap::Command) {
        let text = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
        for (line, next) in text.lines().zip(text.lines().skip(1).chain([""])) {
            // Prose is wrapped to the terminal. Columns cannot be, nor lines that were broken by hand.
            let is_prose = !line.starts_with(' ') && (next.is_empty() || next.starts_with(' '));
            assert!(is_prose || line.chars().count() <= 80, "qd {}: {line}", verb.get_name());
        }
        verb.get_subcommands().for_each(check);
    }
    check(&CommandLine::command());
}

#[test]
fn a_reason_needs_no_quotes() {
    let CliVerb::Deny { reason, .. } = parse(&["deny", "ask_1", "not", "now"]).unwrap().verb else {
        panic!()
    };
    assert_eq!(reason.join(" "), "not now");
}
