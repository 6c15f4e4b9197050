//! Money: usage is reported, and a budget is enforced.

use qd_testkit::RealAgent;
use serde_json::json;

use super::shown::Behaviour;
use super::{RealAgentTest, assert_ended, say};

/// For agents that report only tokens, a hundred tokens cost a dollar. Claude's model has the price that Claude itself
/// uses for the cost that it reports at the end of a turn.
const PRICES: &str = r#"prices = { "*" = { input = 10000.0, output = 10000.0 }, "claude-opus-5-5" = { input = 4.0, output = 20.0 } }"#;

pub(super) async fn scene(cli: RealAgent) {
    let test = RealAgentTest::with(cli, PRICES).await;
    // Less than the cost of a single model call.
    let session = test.session(json!({ "budget_usd": 0.0001 })).await;
    let file = test.daemon.home.project_dir().join("two.txt");
    session.patch(json!({ "policy": "allow" })).await;
    let first = say(&session, &format!("TOOL:two:{}", file.display())).await;
    let usage = session.show().await["usage"].clone();
    assert!(usage["input_tokens"].as_u64().unwrap() >= 100, "{usage}");
    assert!(usage["cost_usd"].as_f64().unwrap() > 0.0001, "{usage}: {first:#}");
    // Agents that report the usage of each model call are stopped before the last call. The others have ended by then.
    match cli {
        RealAgent::Claude | RealAgent::Codex | RealAgent::Opencode | RealAgent::Qwen => {
            assert_ended(&first, "budget_exceeded");
        }
        _ => assert!(
            ["end_turn", "budget_exceeded"].iter().any(|it| first["finish_reason"] == *it),
            "{first:#}"
        ),
    }
    let asked = test.model.turn_count();
    assert_ended(&say(&session, "more").await, "budget_exceeded");
    assert_eq!(test.model.turn_count(), asked, "the model was not asked again");
    session.patch(json!({ "budget_usd": 1000.0 })).await;
    assert_ended(&say(&session, "with more money").await, "end_turn");
    test.shows(Behaviour::Budget);
}
