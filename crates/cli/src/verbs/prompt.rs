//! What goes into a request of a new run: its text, its policy and its name.

use std::io::Read;

use anyhow::Context as _;
use qd_protocol::RunId;
use qd_protocol::api::{NewRun, Receipt};
use qd_protocol::policy::Policy;

use crate::client::{Client, random};
use crate::failure::{Failure, Result};
use crate::refs::SessionRef;

/// The words of a prompt; `-` stands for all of stdin.
pub(crate) fn words(given: &str) -> Result<String> {
    if given.trim().is_empty() {
        return Err(Failure::Usage("the prompt is empty; say something".to_owned()));
    }
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("the prompt on stdin is not text")?;
    if text.trim().is_empty() {
        return Err(Failure::Usage("stdin held no prompt".to_owned()));
    }
    Ok(text)
}

/// One word, rules in JSON, or the name of a file that holds either.
pub(crate) fn policy(given: &str) -> Result<Policy> {
    let word = given.trim();
    if matches!(word, "ask" | "allow" | "deny") {
        return parse_policy(&format!("\"{word}\""));
    }
    if word.starts_with('[') {
        return parse_policy(word);
    }
    match std::fs::read_to_string(given) {
        Ok(text) => parse_policy(&text),
        Err(error) => Err(Failure::Usage(format!(
            "a policy is ask, allow, deny, rules in JSON or a file of them; {given} is no such file: {error}"
        ))),
    }
}

/// Gives a session one more prompt. The run is named here, so that a repeat after a broken connection is harmless.
pub(crate) async fn post(client: &Client, session: &SessionRef, prompt: String) -> Result<Receipt> {
    let run_id = RunId::parse(&random(RunId::PREFIX)?).map_err(anyhow::Error::from)?;
    let request =
        NewRun { session_id: session.id.clone(), prompt, run_id: Some(run_id), attachments: Vec::new() };
    client.post(&format!("/v1/workspaces/{}/agent", session.workspace), &request).await
}

fn parse_policy(json: &str) -> Result<Policy> {
    serde_json::from_str(json).map_err(|error| Failure::Usage(format!("this is no policy: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Exit;
    use qd_protocol::policy::Verdict;

    #[test]
    fn a_policy_is_a_word_rules_or_a_file_of_them() {
        assert_eq!(policy("allow").unwrap(), Policy::Always(Verdict::Allow));
        let rules = r#"[{"tool":"Bash","match":"git status*","decision":"allow"}]"#;
        let Policy::Rules(inline) = policy(rules).unwrap() else { panic!("rules") };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        assert_eq!(policy(file.path().to_str().unwrap()).unwrap(), Policy::Rules(inline));
    }

    #[test]
    fn what_is_no_policy_is_wrong_usage() {
        for bad in ["perhaps", "[{\"tool\":1}]", "/does/not/exist.json"] {
            assert_eq!(policy(bad).unwrap_err().exit(), Exit::Usage, "{bad}");
        }
    }
}
