//! `docs/agents.md` matches the manifests.

use qd_catalog::programs::ProgramVersions;
use qd_catalog::{Catalog, agent_listing};
use qd_protocol::api::CostReport;

#[test]
fn every_agent_is_on_the_page_with_what_it_can_do() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/agents.md")).unwrap();
    let table = page.lines().skip_while(|line| !line.starts_with("| agent | driver |")).skip(2);
    let shown: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    let yes = |can: bool| if can { "yes" } else { "no" };
    let known: Vec<String> = Catalog::built_in()
        .entries()
        .map(|entry| {
            let about = agent_listing(&entry.manifest, "", &ProgramVersions::default());
            let cost = match about.cost {
                CostReport::Money => "money",
                CostReport::Tokens => "tokens",
                CostReport::Nothing => "nothing",
            };
            let settings = if about.settings.is_empty() { "-".to_owned() } else { about.settings.join(", ") };
            format!(
                "| `{}` | {} | {} | {} | {} | {} | {} | {cost} | {settings} |",
                about.name,
                about.driver,
                about.tested.as_deref().unwrap_or("-"),
                yes(about.steers),
                yes(about.approvals),
                yes(about.questions),
                yes(about.resumes),
            )
        })
        .collect();
    assert_eq!(shown, known, "docs/agents.md (left) is not manifests/ (right)");
}

#[test]
fn the_tested_versions_are_the_ones_that_the_suites_install() {
    let pinned = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/agents/package.json");
    let pinned: serde_json::Value = serde_json::from_slice(&std::fs::read(pinned).unwrap()).unwrap();
    for entry in Catalog::built_in().entries() {
        let (Some(tested), Some(install)) = (&entry.manifest.agent.tested, &entry.manifest.agent.install)
        else {
            continue;
        };
        let package = install.rsplit(' ').next().unwrap();
        // The npm package `opencode-ai` only downloads this one.
        let package = if package == "opencode-ai" { "opencode-linux-x64-baseline" } else { package };
        assert_eq!(pinned["dependencies"][package], tested.as_str(), "{package}");
    }
}
