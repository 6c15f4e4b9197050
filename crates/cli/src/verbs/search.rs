//! `qd search`: finds text in all sessions and shows where it is and which command opens it.

use qd_protocol::Millis;
use qd_protocol::search::{IndexProgress, SearchPage};
use serde_json::json;

use super::VerbContext;
use crate::args::SearchArgs;
use crate::client::percent_encode;
use crate::failure::{CliExitCode, Result};
use crate::render::search::render_hits;

pub(crate) async fn search(context: &VerbContext, args: SearchArgs) -> Result<CliExitCode> {
    let client = context.client().await?;
    if args.rebuild {
        let index: IndexProgress = client.post("/v1/search/rebuild", &json!({})).await?;
        return print_rebuilt(context, index);
    }
    let page: SearchPage = client.get(&search_path(&args)).await?;
    if context.out.json {
        context.out.print_json(&page)?;
        return Ok(CliExitCode::Success);
    }
    let (style, width) = (context.out.out_style(), context.out.width());
    context.out.print_data(&render_hits(&page.hits, style, width, Millis::now()))?;
    if page.hits.is_empty() {
        context.out.print_note("nothing was found");
    }
    if let Some(before) = &page.next_before {
        context.out.print_note(&format!("there is more: add `--before {before}`"));
    }
    if !page.complete {
        context.out.print_note(&describe_incomplete(page.index));
    }
    Ok(CliExitCode::Success)
}

/// Says that the index does not have everything yet.
pub(super) fn describe_incomplete(index: IndexProgress) -> String {
    format!(
        "the index is still being built: {} of {} events; try again in a moment",
        index.indexed_seq.0, index.journal_seq.0
    )
}

fn print_rebuilt(context: &VerbContext, index: IndexProgress) -> Result<CliExitCode> {
    if context.out.json {
        context.out.print_json(&index)?;
    } else if index.is_complete() {
        context.out.print_line(&format!("the index is rebuilt: {} events", index.indexed_seq.0))?;
    } else {
        let IndexProgress { indexed_seq, journal_seq } = index;
        context.out.print_line(&format!(
            "the index is being rebuilt: {} of {} events; searches say how far it is",
            indexed_seq.0, journal_seq.0
        ))?;
    }
    Ok(CliExitCode::Success)
}

fn search_path(args: &SearchArgs) -> String {
    let words: Vec<String> = args.words.iter().map(|word| quote_phrase(word)).collect();
    let mut path = format!("/v1/search?q={}&limit={}", percent_encode(&words.join(" ")), args.limit);
    let options = [
        ("before", args.before.clone()),
        ("agent", args.agent.clone()),
        ("since", args.since.map(|since| since.to_string())),
    ];
    for (name, value) in options {
        if let Some(value) = value {
            path.push_str(&format!("&{name}={}", percent_encode(&value)));
        }
    }
    path
}

/// An argument of several words was quoted in the shell, so it is meant as a phrase.
fn quote_phrase(argument: &str) -> String {
    let is_phrase = argument.trim().contains(char::is_whitespace) && !argument.contains('"');
    if is_phrase { format!("\"{argument}\"") } else { argument.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_filters_are_sent_and_an_argument_of_several_words_is_a_phrase() {
        let args = SearchArgs {
            words: ["fix", "two words", "\"a b\" c*"].map(str::to_owned).to_vec(),
            agent: Some("claude".to_owned()),
            since: Some(Millis(0)),
            before: None,
            limit: 20,
            rebuild: false,
        };
        assert_eq!(
            search_path(&args),
            "/v1/search?q=fix%20%22two%20words%22%20%22a%20b%22%20c%2A&limit=20&agent=claude\
             &since=1970-01-01T00%3A00%3A00.000Z"
        );
    }
}
