//! What a fleet file may contain, and which errors a bad file gives.

use qd_fleetfile::{FleetFileProblem, parse_fleet_file};
use qd_protocol::fleet::{FanOutSplit, RouteAction};
use qd_protocol::mail::MailDelivery;
use qd_protocol::policy::{Policy, PolicyVerdict};
use qd_protocol::sandbox::{NetworkSetting, SandboxSetting};

/// The example in the contract.
const CONTRACT: &str = r#"
fleet:
  task: "default task; `qd up --task` replaces it"
  base_branch: main
  permissions: ask
  budget_usd: 5.0
  sessions:
    lead:   { driver: claude, model: m, system_prompt: s, role: r, max_turns: 20, permissions: allow, worktree: true }
    dev1:   { driver: codex }
    dev2:   { agent: script }
    review: { agent: echo }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [dev1, dev2], split: broadcast } }
    - { when: [dev1.done, dev2.done], route_to: review }
    - { when: review.done, match: "(?i)needs work", route_to: lead, max: 3 }
    - { when: review.failed, route_to: lead, max: 2 }
    - { when: review.done, collect: human }
"#;

fn refused(text: &str) -> FleetFileProblem {
    match parse_fleet_file(text, Some("t")) {
        Err(problem) => problem,
        Ok(spec) => panic!("{spec:?}"),
    }
}

/// A fleet file with these lines inserted from line 4 on.
fn with(lines: &str) -> String {
    format!("fleet:\n  task: t\n  sessions: {{ a: {{ agent: echo }}, lead: {{ agent: echo }} }}\n{lines}")
}

#[test]
fn sessions_are_confined_as_they_say_else_as_the_fleet_says() {
    let file = |fleet: &str, session: &str| {
        format!("fleet:\n  task: t\n{fleet}  sessions: {{ a: {{ agent: echo{session} }} }}\n  start: a\n")
    };
    let read = |fleet: &str, session: &str| {
        let member = parse_fleet_file(&file(fleet, session), None).unwrap().sessions["a"].clone();
        (member.sandbox, member.network)
    };
    assert_eq!(read("", ""), (None, None));
    let fleet = "  sandbox: workspace\n  network: off\n";
    assert_eq!(read(fleet, ""), (Some(SandboxSetting::Workspace), Some(NetworkSetting::Off)));
    let own = ", sandbox: deck, network: on";
    assert_eq!(read(fleet, own), (Some(SandboxSetting::Deck), Some(NetworkSetting::On)));
    assert_eq!(read("", ", network: false"), (None, Some(NetworkSetting::Off)), "YAML 1.1 reads off so");
    let problem = refused(&file("  sandbox: desk\n", ""));
    assert_eq!((problem.position.line, problem.position.column), (3, 12));
    assert_eq!(problem.suggestion.as_deref(), Some("deck"));
    assert!(problem.message.contains("auto, off, deck, workspace"), "{}", problem.message);
}

#[test]
fn the_shape_of_the_contract_is_read() {
    let spec = parse_fleet_file(CONTRACT, None).unwrap();
    assert_eq!(spec.task, "default task; `qd up --task` replaces it");
    assert_eq!(spec.start, ["lead"]);
    assert_eq!(spec.budget_usd, Some(5.0));
    let lead = &spec.sessions["lead"];
    assert_eq!(
        (lead.agent.as_str(), lead.model.as_deref(), lead.role.as_deref()),
        ("claude", Some("m"), Some("r"))
    );
    assert_eq!(lead.limits.max_turns, Some(20));
    assert_eq!(lead.policy, Policy::Always(PolicyVerdict::Allow));
    assert_eq!(spec.sessions["dev1"].policy, Policy::Always(PolicyVerdict::Ask));
    assert!(spec.sessions.values().all(|member| member.worktree), "true where a base branch is given");
    assert_eq!(spec.routes.len(), 5);
    assert_eq!(spec.routes[2].max, Some(3));
    assert_eq!(parse_fleet_file(CONTRACT, Some("another")).unwrap().task, "another");
}

#[test]
fn the_shapes_of_cap_are_read_unchanged() {
    let pipeline = "fleet:\n  base_branch: main\n  task: Build it.\n  sessions:\n    planner:\n      driver: claude\n      permissions: ask\n    coder:\n      driver: codex\n      permissions: bypass\n  start: planner\n  routes:\n    - when: planner.done\n      route_to: coder\n";
    let spec = parse_fleet_file(pipeline, None).unwrap();
    assert_eq!(spec.sessions["coder"].policy, Policy::Always(PolicyVerdict::Allow));
    let parallel = "fleet:\n  mode: static\n  base_branch: main\n  task: Solve it.\n  sessions:\n    one: { driver: claude, permissions: allow }\n    two: { driver: codex, permissions: allow }\n  start: [one, two]\n  routes:\n    - when: [one.done, two.done]\n      collect: human\n";
    assert_eq!(parse_fleet_file(parallel, None).unwrap().routes[0].then, RouteAction::CollectHuman);
    let subtasks = "fleet:\n  base_branch: main\n  task: Split it.\n  sessions:\n    lead: { driver: claude }\n    dev1: { driver: codex }\n    dev2: { driver: opencode }\n    tool: { manifest: ./tool.toml }\n  start: lead\n  routes:\n    - when: lead.done\n      fan_out:\n        to: [dev1, dev2]\n        split: by_subtask\n";
    let spec = parse_fleet_file(subtasks, None).unwrap();
    assert_eq!(spec.sessions["tool"].agent, "manifest:./tool.toml");
    let RouteAction::FanOut { to, split } = &spec.routes[0].then else { panic!() };
    assert_eq!((to.len(), *split), (2, FanOutSplit::BySubtask));
}

#[test]
fn what_we_add_to_it_is_read() {
    let text = "fleet:\n  timeout: 2h\n  sessions:\n    a:\n      agent: 'exec:make test'\n      retry: 2\n      timeout: 10m\n      budget_usd: 1\n      prompt: 'do {{task}} after {{from.b.text}}'\n      permissions:\n        - { tool: Bash, match: 'git *', decision: allow }\n    b: { agent: echo, timeout: 90 }\n  start: [a, b]\n";
    let spec = parse_fleet_file(text, Some("t")).unwrap();
    let a = &spec.sessions["a"];
    assert_eq!(spec.timeout_s, Some(7200.0));
    assert_eq!((a.retry, a.limits.run_timeout_s, a.limits.budget_usd), (2, Some(600.0), Some(1.0)));
    assert_eq!(spec.sessions["b"].limits.run_timeout_s, Some(90.0));
    assert!(!a.worktree);
    assert!(matches!(&a.policy, Policy::Rules(rules) if rules[0].pattern.as_deref() == Some("git *")));
}

#[test]
fn json_is_read_as_well() {
    let text = r#"{"fleet": {"task": "t\n\"quoted\"", "sessions": {"a": {"agent": "echo"}}, "start": "a"}}"#;
    assert_eq!(parse_fleet_file(text, None).unwrap().task, "t\n\"quoted\"");
}

#[test]
fn an_alias_stands_for_what_it_names() {
    let text = "fleet:\n  sessions:\n    a: &dev { agent: echo, role: developer }\n    b: *dev\n  start: a\n";
    assert_eq!(parse_fleet_file(text, Some("t")).unwrap().sessions["b"].role.as_deref(), Some("developer"));
}

#[test]
fn an_unknown_key_is_refused_where_it_stands_with_the_nearest() {
    let problem = refused("fleet:\n  task: t\n  sesions:\n    a: { agent: echo }\n  start: a\n");
    assert_eq!((problem.position.line, problem.position.column), (3, 3), "{problem}");
    assert_eq!(problem.suggestion.as_deref(), Some("sessions"));
    let problem = refused(&with("  start: a\n  rotues: []\n"));
    assert_eq!((problem.position.line, problem.position.column), (5, 3), "{problem}");
    assert_eq!((problem.key.as_deref(), problem.suggestion.as_deref()), (Some("rotues"), Some("routes")));
    let problem = refused("fleet:\n  sessions:\n    a: { agent: echo, modle: x }\n  start: a\n");
    assert_eq!((problem.position.line, problem.position.column), (3, 23), "{problem}");
    assert_eq!(problem.suggestion.as_deref(), Some("model"));
    let problem = refused("fleet: { sessions: { a: { agent: echo } }, start: a }\nextra: 1\n");
    assert_eq!(problem.position.line, 2, "{problem}");
}

#[test]
fn an_unknown_session_is_refused_with_the_nearest() {
    for (line, name) in [
        ("  start: leda\n", "leda"),
        ("  start: [a, leda]\n", "leda"),
        ("  start: a\n  routes: [{ when: leda.done, route_to: a }]\n", "leda"),
        ("  start: a\n  routes: [{ when: a.done, route_to: leda }]\n", "leda"),
        ("  start: a\n  routes: [{ when: a.done, fan_out: { to: [leda] } }]\n", "leda"),
    ] {
        let problem = refused(&with(line));
        assert_eq!(
            (problem.key.as_deref(), problem.suggestion.as_deref()),
            (Some(name), Some("lead")),
            "{problem}"
        );
        assert!(problem.position.line >= 4 && problem.position.column > 3, "{problem}");
    }
}

#[test]
fn unsupported_features_are_refused_by_name() {
    for (text, word) in [
        (with("  start: a\n  mode: llm\n"), "mode: llm"),
        (with("  start: a\n  mode: hybrid\n"), "mode: hybrid"),
        (with("  start: a\n  llm: { command: [claude] }\n"), "`llm`"),
        ("fleet:\n  sessions: { a: { driver: 'grpc:localhost:50051' } }\n  start: a\n".to_owned(), "`grpc:`"),
    ] {
        let problem = refused(&text);
        assert!(problem.message.contains(word) && problem.message.contains("not supported"), "{problem}");
        assert!(problem.key.is_some(), "{problem}");
    }
}

#[test]
fn a_cycle_needs_a_max() {
    let problem = refused(&with(
        "  start: a\n  routes:\n    - { when: a.done, route_to: lead }\n    - { when: lead.done, route_to: a }\n",
    ));
    assert!(problem.message.contains("a → lead → a"), "{problem}");
    assert_eq!(problem.position.line, 6, "{problem}");
    let problem = refused(&with("  start: a\n  routes: [{ when: a.failed, route_to: a }]\n"));
    assert!(problem.message.contains("a → a"), "{problem}");
    let bounded = with(
        "  start: a\n  routes:\n    - { when: a.done, route_to: lead }\n    - { when: lead.done, route_to: a, max: 1 }\n",
    );
    assert!(parse_fleet_file(&bounded, None).is_ok());
}

#[test]
fn bad_values_are_refused_with_a_hint() {
    for (lines, words) in [
        ("  start: []\n", "empty"),
        ("  start: [a, a]\n", "twice"),
        ("  start: a\n  budget_usd: lots\n", "dollars"),
        ("  start: a\n  budget_usd: -1\n", "dollars"),
        ("  start: a\n  timeout: soon\n", "not a duration"),
        ("  start: a\n  permissions: perhaps\n", "ask, allow, deny"),
        ("  start: a\n  base_branch: --force\n", "not a branch name"),
        ("  start: a\n  routes: [{ when: a.finished, route_to: a }]\n", "not a trigger"),
        ("  start: a\n  routes: [{ when: a.don, route_to: a }]\n", "did you mean `.done`?"),
        ("  start: a\n  routes: [{ when: a.done }]\n", "`route_to`, `fan_out` or `collect`"),
        ("  start: a\n  routes: [{ when: a.done, route_to: lead, collect: human }]\n", "does one thing"),
        ("  start: a\n  routes: [{ when: a.done, collect: robot }]\n", "`collect` must be human"),
        ("  start: a\n  routes: [{ when: a.done, match: '(', route_to: lead }]\n", "not a valid pattern"),
        ("  start: a\n  routes: [{ when: a.done, match: '(?=x)', route_to: lead }]\n", "not a valid pattern"),
        ("  start: a\n  routes: [{ when: a.done, route_to: lead, max: 0 }]\n", "at least 1"),
        (
            "  start: a\n  routes: [{ when: [a.done, lead.done], fan_out: { to: a, split: by_subtask } }]\n",
            "just one",
        ),
        (
            "  start: a\n  routes: [{ when: a.done, route_to: lead, prompt: '{{tsak}}' }]\n",
            "did you mean {{task}}?",
        ),
        (
            "  start: a\n  routes: [{ when: a.done, route_to: lead, prompt: '{{from.led.text}}' }]\n",
            "{{from.lead.text}}",
        ),
        ("  start: a\n  start: lead\n", "twice"),
    ] {
        let problem = refused(&with(lines));
        assert!(problem.message.contains(words), "{lines} {problem}");
        assert!(problem.position.line >= 4, "{problem}");
    }
    for (text, words) in [
        ("", "empty"),
        ("fleet: [\n", "not YAML"),
        ("fleet: 7\n", "a map"),
        ("sessions: {}\n", "needs `fleet`"),
        ("fleet: { sessions: {}, start: a }\n", "needs a session"),
        ("fleet: { sessions: { '-a': { agent: echo } }, start: a }\n", "cannot be the name"),
        ("fleet: { sessions: { 'a/b': { agent: echo } }, start: a }\n", "cannot be the name"),
        ("fleet: { sessions: { a: {} }, start: a }\n", "needs `agent`"),
        ("fleet: { sessions: { a: { agent: x, driver: y } }, start: a }\n", "both `agent` and `driver`"),
        ("fleet: { sessions: { a: { agent: x, worktree: 'yes' } }, start: a }\n", "`true` or `false`"),
        ("fleet: { sessions: { a: { agent: x } }, start: a }\n---\nfleet: {}\n", "second document"),
    ] {
        let problem = refused(text);
        assert!(problem.message.contains(words), "{text} {problem}");
    }
    let problem = parse_fleet_file("fleet: { sessions: { a: { agent: x } }, start: a }\n", None).unwrap_err();
    assert!(problem.message.contains("--task"), "{problem}");
}

#[test]
fn a_small_file_cannot_become_a_huge_tree() {
    let mut text = String::from("fleet:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..12 {
        let below = format!("*a{}", level - 1);
        let list = vec![below; 10].join(", ");
        text.push_str(&format!("  a{level}: &a{level} [{list}]\n"));
    }
    assert!(refused(&text).message.contains("more than 100000"));
    let deep = format!("fleet: {}{}", "[".repeat(200), "]".repeat(200));
    assert!(refused(&deep).message.contains("deep"));
}

#[test]
fn mentions_and_mail_are_read_and_bad_values_are_refused() {
    let spec = parse_fleet_file(&with("  mentions: true\n  start: a\n"), None).unwrap();
    assert!(spec.mentions);
    assert!(!parse_fleet_file(&with("  start: a\n"), None).unwrap().mentions);
    assert_eq!(refused(&with("  mentions: often\n  start: a\n")).position.line, 4);
    let file =
        |mail: &str| format!("fleet:\n  sessions: {{ a: {{ agent: echo, mail: {mail} }} }}\n  start: a\n");
    assert_eq!(parse_fleet_file(&file("steer"), Some("t")).unwrap().sessions["a"].mail, MailDelivery::Steer);
    let problem = refused(&file("stear"));
    assert_eq!((problem.key.as_deref(), problem.suggestion.as_deref()), (Some("mail"), Some("steer")));
}

#[test]
fn the_checked_in_schema_is_current() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/fleet.schema.json");
    let made = qd_fleetfile::schema::fleet_json_schema();
    if std::env::var_os("QD_UPDATE").is_some() {
        std::fs::write(file, format!("{}\n", serde_json::to_string_pretty(&made).unwrap())).unwrap();
    }
    // Compare values, not text: the order in which serde_json keeps keys depends on the features that other crates
    // enable.
    let kept: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(kept, made, "QD_UPDATE=1 rewrites docs/fleet.schema.json");
}
