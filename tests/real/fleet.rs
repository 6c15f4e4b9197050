//! A fleet of real agents: one plans, two work on a part each in their own worktrees, and one reviews.

use qd_testkit::real_agents::isolated_environment;
use qd_testkit::{FakeModel, RealAgent, TestDaemon, TestFleet, TestHome};
use serde_json::json;

use super::conditions::SceneConditions;

/// The developers' prompts make the model write a file; the prompts of the others are repeated by the model.
const FILE: &str = r#"
fleet:
  task: Two files.
  base_branch: main
  sessions:
    lead:
      agent: claude
      worktree: false
      prompt: "Plan.\n```cap-subtasks\n[\"one.txt\", \"two.txt\"]\n```\nThat is all."
    dev1: { agent: codex, permissions: allow, prompt: "TOOL:write:{{subtask}}" }
    dev2: { agent: claude, permissions: allow, prompt: "TOOL:write:{{subtask}}" }
    review: { agent: codex, worktree: false, prompt: "Both are there." }
  start: lead
  routes:
    - { when: lead.done, fan_out: { to: [dev1, dev2], split: by_subtask } }
    - { when: [dev1.done, dev2.done], route_to: review }
"#;

pub(super) async fn scene() {
    let model = FakeModel::start();
    let home = TestHome::new();
    let conditions = SceneConditions::from_environment();
    conditions.configure(&home, "");
    let agents = home.sibling_path("agent");
    let mut env = isolated_environment(RealAgent::Claude, &agents, &model);
    env.extend(isolated_environment(RealAgent::Codex, &agents, &model));
    let daemon = TestDaemon::start_in(home, |options| {
        for (name, value) in &env {
            options.env(name, value);
        }
    })
    .await;
    let commit = "git init -q -b main . && git config user.name t && git config user.email t@localhost && \
                  git commit -q --allow-empty -m first";
    daemon.home.shell(commit).await.ok();

    let workspace = daemon.workspace().await;
    let body = json!({ "spec": FILE, "env": env });
    let made = workspace.client.post(&workspace.path("/fleets"), &body).await.expect(201);
    let id = made["id"].as_str().unwrap().to_owned();
    let fleet = TestFleet { client: workspace.client.clone(), workspace: workspace.id.clone(), id };
    let ended = fleet.wait_for_end().await;
    assert_eq!(ended["state"], "done", "{ended:#}");
    assert!(
        ended["result"].as_str().unwrap().contains("Both are there."),
        "the reviewer's answer: {ended:#}"
    );
    for (name, file) in [("dev1", "one.txt"), ("dev2", "two.txt")] {
        let session = fleet.session(name).await;
        assert_eq!(fleet.prompts_of(name).await, [format!("TOOL:write:{file}")]);
        assert!(!daemon.home.project_dir().join(file).exists(), "the user's checkout is unchanged");
        let diff = daemon.qd(&["diff", &session.id]).await.ok();
        assert!(diff.contains(file) && diff.contains("+hi"), "{diff}");
        daemon.qd(&["merge", &session.id]).await.ok();
        let merged = std::fs::read_to_string(daemon.home.project_dir().join(file)).unwrap();
        assert_eq!(merged.trim(), "hi");
    }
}
