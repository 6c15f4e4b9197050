//! The mode of a session's agent, and its context: who changes them, and what is remembered.

use crate::harness::{SessionHarness, kinds};
use qd_core::session::{SessionCommand, SessionStep, SettingsUpdate};
use qd_protocol::RunId;
use qd_protocol::event::{ContextUsage, EventBody, ModeChangeSource};
use qd_protocol::link::{AgentUpdate, TurnStopReason, TurnUpdate};

fn report(harness: &mut SessionHarness, update: TurnUpdate) -> SessionStep {
    harness.receive(AgentUpdate::Turn { run: RunId::parse("r").unwrap(), update })
}

fn set_mode(harness: &mut SessionHarness, mode: &str) -> SessionStep {
    let update = SettingsUpdate { mode: Some(mode.to_owned()), ..SettingsUpdate::default() };
    harness.command(SessionCommand::UpdateSettings(update))
}

fn switch(mode: &str) -> TurnUpdate {
    TurnUpdate::Mode { mode: mode.to_owned() }
}

#[test]
fn the_mode_is_the_one_that_the_user_or_the_agent_chose_last() {
    let mut harness = SessionHarness::new();
    assert_eq!(kinds(&set_mode(&mut harness, "plan")), ["mode.changed"]);
    assert_eq!(kinds(&set_mode(&mut harness, "plan")), [""; 0], "it is in that mode");
    harness.prompt("r");
    assert_eq!(kinds(&report(&mut harness, switch("plan"))), [""; 0]);
    let switched = report(&mut harness, switch("default"));
    let EventBody::ModeChanged(changed) = &switched.events[0].body else { panic!("{switched:?}") };
    assert_eq!((changed.mode.as_str(), changed.by), ("default", ModeChangeSource::Agent));
    assert!(switched.events[0].run.is_some() && changed.after_run.is_none());
    assert_eq!(harness.state.settings.mode.as_deref(), Some("default"));
    harness.end("r", TurnStopReason::EndTurn);
    let late = report(&mut harness, switch("plan"));
    let EventBody::ModeChanged(changed) = &late.events[0].body else { panic!("{late:?}") };
    assert!(late.events[0].run.is_none() && changed.after_run.is_some(), "its run has ended");
}

#[test]
fn a_mode_beside_other_settings_is_an_event_of_its_own() {
    let mut harness = SessionHarness::new();
    let update = SettingsUpdate {
        mode: Some("plan".to_owned()),
        title: Some("t".to_owned()),
        ..SettingsUpdate::default()
    };
    let step = harness.command(SessionCommand::UpdateSettings(update));
    assert_eq!(kinds(&step), ["session.updated", "mode.changed"]);
}

#[test]
fn the_context_is_remembered_and_only_a_change_is_an_event() {
    let mut harness = SessionHarness::new();
    harness.prompt("r");
    let context = |used| TurnUpdate::Context(ContextUsage { used, size: 1000 });
    assert_eq!(kinds(&report(&mut harness, context(10))), ["context.updated"]);
    assert_eq!(kinds(&report(&mut harness, context(10))), [""; 0]);
    assert_eq!(
        kinds(&report(&mut harness, TurnUpdate::Compacted { used_before: Some(10) })),
        ["context.compacted"]
    );
    harness.end("r", TurnStopReason::EndTurn);
    let late = report(&mut harness, context(4));
    assert!(late.events[0].run.is_none(), "its run has ended");
    assert_eq!(harness.state.agent_context, Some(ContextUsage { used: 4, size: 1000 }));
}
