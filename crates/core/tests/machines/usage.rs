//! What an agent reports to have used: sums never overflow, and a report that nobody can mean is refused, visibly.

use proptest::prelude::*;
use qd_core::session::{SessionEffect, SessionStep};
use qd_protocol::RunId;
use qd_protocol::event::{EventBody, TokenUsage};
use qd_protocol::limits::{USAGE_COST_MAX_USD, USAGE_TOKENS_MAX};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};

use crate::harness::{SessionHarness, kinds};

fn report(harness: &mut SessionHarness, run: &str, usage: TokenUsage) -> SessionStep {
    let run = RunId::parse(run).unwrap();
    harness.receive(AgentUpdate::Turn { run, update: TurnUpdate::usage(usage) })
}

fn notice(step: &SessionStep) -> Option<&str> {
    step.events.iter().find_map(|event| match &event.body {
        EventBody::NoticeShown(notice) => Some(notice.text.as_str()),
        _ => None,
    })
}

fn usage(input_tokens: u64, output_tokens: u64, cost_usd: f64) -> TokenUsage {
    TokenUsage { input_tokens, output_tokens, cost_usd }
}

#[test]
fn a_report_that_nobody_can_mean_is_refused_and_the_notice_says_what_and_of_which_run() {
    let mut harness = SessionHarness::new();
    harness.prompt("the-run");
    let most = usage(USAGE_TOKENS_MAX, USAGE_TOKENS_MAX, f64::from(USAGE_COST_MAX_USD));
    assert_eq!(kinds(&report(&mut harness, "the-run", most)), ["usage.reported"]);
    for (absurd, told) in [
        (usage(u64::MAX, 0, 0.0), "18446744073709551615 input tokens"),
        (usage(0, USAGE_TOKENS_MAX + 1, 0.0), "1000000000001 output tokens"),
        (usage(0, 0, -0.01), "-0.01 US dollars"),
        (usage(0, 0, f64::from(USAGE_COST_MAX_USD) * 2.0), "2000000 US dollars"),
        (usage(0, 0, f64::NAN), "NaN US dollars"),
        (usage(0, 0, f64::INFINITY), "inf US dollars"),
    ] {
        let refused = report(&mut harness, "the-run", absurd);
        assert_eq!(kinds(&refused), ["notice.shown"], "{absurd:?}");
        let text = notice(&refused).unwrap();
        assert!(text.contains(told) && text.contains("run the-run"), "{text}");
        assert!(!refused.effects.iter().any(|effect| matches!(effect, SessionEffect::CheckBudget)));
        assert_eq!(harness.state.usage, most);
    }
    harness.end("the-run", TurnStopReason::EndTurn);
    let late = report(&mut harness, "the-run", usage(u64::MAX, 0, 0.0));
    assert_eq!(kinds(&late), ["notice.shown"]);
    assert!(late.events[0].run.is_none(), "its run has ended");
}

#[test]
fn the_last_total_of_a_conversation_is_remembered_until_another_begins() {
    let mut harness = SessionHarness::new();
    harness.prompt("a");
    let total = |harness: &mut SessionHarness, total: Option<f64>| {
        let update = TurnUpdate::Usage { usage: usage(1, 0, 0.1), conversation_cost_usd: total };
        let run = RunId::parse("a").unwrap();
        harness.receive(AgentUpdate::Turn { run, update });
        harness.state.conversation_cost_usd
    };
    assert_eq!(total(&mut harness, None), None);
    assert_eq!(total(&mut harness, Some(0.25)), Some(0.25));
    assert_eq!(total(&mut harness, Some(f64::NAN)), Some(0.25), "nobody can mean that");
    assert_eq!(total(&mut harness, None), Some(0.25));
    for (id, expected) in [("one", Some(0.25)), ("one", Some(0.25)), ("another", Some(0.0))] {
        let ready = AgentUpdate::Ready { agent_session_id: Some(id.to_owned()), steers: false };
        harness.receive(ready);
        assert_eq!(harness.state.conversation_cost_usd, expected, "{id}");
    }
}

fn any_usage() -> impl Strategy<Value = TokenUsage> {
    let tokens = || prop_oneof![0u64..1000, Just(USAGE_TOKENS_MAX), any::<u64>(), Just(u64::MAX)];
    let cost = prop_oneof![0.0..10.0f64, any::<f64>(), Just(f64::from(USAGE_COST_MAX_USD)), Just(f64::NAN)];
    (tokens(), tokens(), cost).prop_map(|(input, output, cost)| usage(input, output, cost))
}

proptest! {
    #[test]
    fn whatever_is_reported_each_report_counts_or_is_refused_and_sums_stay_numbers(
        reports in proptest::collection::vec(any_usage(), 1..40),
        before in any::<u64>(),
    ) {
        let mut harness = SessionHarness::new();
        harness.prompt("a");
        // As if the reports of a long life had been counted already.
        harness.state.usage.input_tokens = before;
        for reported in reports {
            let sum = harness.state.usage;
            let step = report(&mut harness, "a", reported);
            let now = harness.state.usage;
            prop_assert!(now.cost_usd.is_finite() && now.cost_usd >= sum.cost_usd);
            prop_assert!(now.input_tokens >= sum.input_tokens && now.output_tokens >= sum.output_tokens);
            match kinds(&step)[..] {
                ["usage.reported"] => {
                    prop_assert_eq!(now.input_tokens, sum.input_tokens.saturating_add(reported.input_tokens));
                    prop_assert!(reported.input_tokens.max(reported.output_tokens) <= USAGE_TOKENS_MAX);
                }
                ["notice.shown"] => prop_assert_eq!(now, sum),
                ref other => prop_assert!(false, "{other:?}"),
            }
        }
    }

    #[test]
    fn a_sum_of_usage_stops_at_the_highest_number(
        first in any::<u64>(), second in any::<u64>(), cost in 0.0..f64::MAX, more in 0.0..f64::MAX,
    ) {
        let mut sum = usage(first, second, cost);
        sum += usage(second, first, more);
        prop_assert_eq!(sum.input_tokens, first.saturating_add(second));
        prop_assert_eq!(sum.output_tokens, first.saturating_add(second));
        prop_assert!(sum.cost_usd.is_finite() && sum.cost_usd >= cost.max(more));
    }
}
