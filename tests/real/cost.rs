//! Money: what was used is told, and a budget holds.

use qd_testkit::RealAgent;
use serde_json::json;

use super::{RealAgentTest, assert_ended, say};

/// A hundred tokens cost a dollar, for agents that tell only how many they used; and what Claude's model costs by its own
/// account, which it gives when its turn is over.
const PRICES: &str = r#"prices = { "*" = { input = 10000.0, output = 10000.0 }, "claude-opus-5-5" = { input = 4.0, output = 20.0 } }"#;

pub(super) async fn scene(cli: RealAgent) {
    let stage = RealAgentTest::with(cli, PRICES).await;
    // Less than one call of any model costs.
    let session = stage.session(json!({ "budget_usd": 0.0001 })).await;
    let file = stage.daemon.home.project_dir().join("two.txt");
    session.patch(json!({ "policy": "allow" })).await;
    let first = say(&session, &format!("TOOL:two:{}", file.display())).await;
    let usage = session.show().await["usage"].clone();
    assert!(usage["input_tokens"].as_u64().unwrap() >= 100, "{usage}");
    assert!(usage["cost_usd"].as_f64().unwrap() > 0.0001, "{usage}: {first:#}");
    // Those that tell what each call of the model used are stopped before the last one; the others have ended by then.
    match cli {
        RealAgent::Claude | RealAgent::Codex | RealAgent::Qwen => assert_ended(&first, "budget_exceeded"),
        _ => assert!(
            ["end_turn", "budget_exceeded"].iter().any(|it| first["finish_reason"] == *it),
            "{first:#}"
        ),
    }
    let asked = stage.model.turn_count();
    assert_ended(&say(&session, "more").await, "budget_exceeded");
    assert_eq!(stage.model.turn_count(), asked, "the model was not asked again");
    session.patch(json!({ "budget_usd": 1000.0 })).await;
    assert_ended(&say(&session, "with more money").await, "end_turn");
}
