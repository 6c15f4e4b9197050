//! Compares exhausted quotas with the journal: no run of an account starts between the report and the release.

use std::collections::BTreeMap;

use qd_testkit::TestEvent;

use super::deck::StormDeck;
use super::settle::list;

pub(crate) async fn check_quotas(deck: &StormDeck, journal: &[TestEvent]) {
    let rows = list(deck, "/v1/sessions").await.unwrap_or_default();
    let accounts: BTreeMap<&str, &str> =
        rows.iter().filter_map(|row| Some((row["id"].as_str()?, row["account"].as_str()?))).collect();
    // The event that reported each exhausted quota.
    let mut reached: BTreeMap<&str, &TestEvent> = BTreeMap::new();
    for event in journal {
        let account = event.data["account"].as_str().unwrap_or_default();
        match event.kind.as_str() {
            "quota.reached" => {
                deck.record(|record| record.count("exhausted quotas"));
                reached.insert(account, event);
            }
            "quota.released" => _ = reached.remove(account),
            "run.started" => {
                let report = event.session_id.as_deref().and_then(|id| reached.get(accounts.get(id)?));
                if let Some(report) = report {
                    let what = format!(
                        "{:?} starts at {} although the quota was reached at {}",
                        event.run_id, event.seq, report.seq
                    );
                    deck.violation(event.session_id.as_deref(), what);
                }
            }
            _ => {}
        }
    }
    // The session that reported it may be purged, and the report with it, but a release is never lost.
    for quota in list(deck, "/v1/quotas").await.unwrap_or_default() {
        let account = quota["account"].as_str().unwrap_or_default();
        let last = journal
            .iter()
            .rfind(|event| event.kind.starts_with("quota.") && event.data["account"] == account);
        let is_purged = deck.record(|record| !record.purged.is_empty());
        if !is_purged && last.is_some_and(|event| event.kind == "quota.released") {
            deck.violation(None, format!("{quota} is listed, and the journal says that it is released"));
        }
    }
}
