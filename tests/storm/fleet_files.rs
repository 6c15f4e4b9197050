//! Fleet files: loops, joins, both fan-outs, failures that are routed on, a person at the end, worktrees.

use qd_testkit::SeededRandom;

use super::StormFeatures;

const LOOP_AND_JOIN: &str = r#"
fleet:
  task: "build TASK"
  sessions:
    lead: { agent: echo }
    a: { agent: script, prompt: '[{"say": "made"}, {"sleep_ms": 200}]' }
    b: { agent: echo }
    review:
      agent: script
      prompt: '[{"say": "again:\n```cap-subtasks\n[\"one\", \"two\", \"three\"]\n```\n"}]'
    c: { agent: echo }
    d: { agent: script, prompt: '[{"say": "{{subtask}}"}]' }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [a, b] } }
    - { when: [a.done, b.done], route_to: review }
    - { when: review.done, match: again, route_to: lead, max: 1 }
    - { when: review.done, fan_out: { to: [c, d], split: by_subtask } }
"#;

const COLLECTED: &str = r#"
fleet:
  task: "ask TASK"
  sessions:
    lead: { agent: echo }
    dev: { agent: script, prompt: '[{"say": "x "}, {"sleep_ms": 300}, {"say": "y"}]' }
  start: [lead, dev]
  routes:
    - { when: [lead.done, dev.done], collect: human }
"#;

const FAILING: &str = r#"
fleet:
  task: "fail TASK"
  sessions:
    lead: { agent: script, prompt: '[{"fail": "round {{round}}"}]' }
    fix: { agent: echo }
  start: lead
  routes:
    - { when: lead.failed, route_to: fix, max: 2 }
    - { when: fix.done, route_to: lead, max: 2 }
"#;

const WORKTREES: &str = r#"
fleet:
  task: "branch TASK"
  base_branch: main
  sessions:
    a: { agent: script, prompt: '[{"write": {"path": "fleet-a.txt", "content": "a"}}, {"say": "a"}]' }
    b: { agent: script, prompt: '[{"write": {"path": "fleet-b.txt", "content": "b"}}, {"say": "b"}]' }
    end: { agent: echo }
  start: [a, b]
  routes:
    - { when: [a.done, b.done], route_to: end }
"#;

/// A random file. `true` if it needs a repository.
pub(crate) fn random_fleet(
    number: u64,
    random: &mut SeededRandom,
    features: &StormFeatures,
) -> (String, bool) {
    let (file, needs_git) = match random.below(4) {
        0 => (COLLECTED, false),
        1 => (FAILING, false),
        2 if features.worktrees => (WORKTREES, true),
        _ => (LOOP_AND_JOIN, false),
    };
    (file.replace("TASK", &number.to_string()), needs_git)
}
