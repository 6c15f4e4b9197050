//! Reads prompts and policies from the command line, and sends prompts.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use qd_protocol::RunId;
use qd_protocol::api::{NewAttachment, NewRun, PromptReceipt};
use qd_protocol::policy::Policy;

use crate::client::{DaemonClient, random_id};
use crate::failure::{CliFailure, Result};
use crate::refs::ResolvedSession;

/// The text of a prompt; `-` reads all of stdin.
pub(crate) fn read_prompt(given: &str) -> Result<String> {
    if given.trim().is_empty() {
        return Err(CliFailure::Usage("the prompt is empty".to_owned()));
    }
    if given != "-" {
        return Ok(given.to_owned());
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
    if text.trim().is_empty() {
        return Err(CliFailure::Usage("the prompt on stdin is empty".to_owned()));
    }
    Ok(text)
}

/// The files of `--file`, as attachments of a prompt.
pub(crate) fn read_attachments(paths: &[PathBuf]) -> Result<Vec<NewAttachment>> {
    let read = |path: &PathBuf| {
        let content = std::fs::read(path)
            .map_err(|error| CliFailure::Usage(format!("cannot read {}: {error}", path.display())))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(NewAttachment {
            mime: mime_type(path, &content).to_owned(),
            name,
            data: BASE64_STANDARD.encode(content),
        })
    };
    paths.iter().map(read).collect()
}

/// The MIME type of a file. Agents show images and documents to their model by it; anything else is text or bytes.
fn mime_type(path: &Path, content: &[u8]) -> &'static str {
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default().to_ascii_lowercase();
    match extension.as_str() {
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "svg" => "image/svg+xml",
        "pdf" => "application/pdf",
        "json" => "application/json",
        _ if std::str::from_utf8(content).is_ok() => "text/plain",
        _ => "application/octet-stream",
    }
}

/// Parses a policy: a single word, rules in JSON, or a file that contains either.
pub(crate) fn read_policy(given: &str) -> Result<Policy> {
    let word = given.trim();
    if matches!(word, "ask" | "allow" | "deny") {
        return parse_policy(&format!("\"{word}\""));
    }
    if word.starts_with('[') {
        return parse_policy(word);
    }
    match std::fs::read_to_string(given) {
        Ok(text) => parse_policy(&text),
        Err(error) => Err(CliFailure::Usage(format!(
            "a policy is ask, allow, deny, rules in JSON or a file with rules; cannot read {given}: {error}"
        ))),
    }
}

/// Sends a prompt to a session. The client chooses the run id, so a request repeated after a broken connection starts
/// one run.
pub(crate) async fn post_prompt(
    client: &DaemonClient,
    session: &ResolvedSession,
    prompt: String,
    attachments: Vec<NewAttachment>,
) -> Result<PromptReceipt> {
    let run_id = RunId::parse(&random_id(RunId::PREFIX)?).map_err(anyhow::Error::from)?;
    let request = NewRun { session_id: session.id.clone(), prompt, run_id: Some(run_id), attachments };
    client.post(&format!("/v1/workspaces/{}/agent", session.workspace), &request).await
}

fn parse_policy(json: &str) -> Result<Policy> {
    serde_json::from_str(json).map_err(|error| CliFailure::Usage(format!("not a valid policy: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::CliExitCode;
    use qd_protocol::policy::PolicyVerdict;

    #[test]
    fn a_policy_is_a_word_rules_or_a_file_with_rules() {
        assert_eq!(read_policy("allow").unwrap(), Policy::Always(PolicyVerdict::Allow));
        let rules = r#"[{"tool":"Bash","match":"git status*","decision":"allow"}]"#;
        let Policy::Rules(inline) = read_policy(rules).unwrap() else { panic!("rules") };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), rules).unwrap();
        assert_eq!(read_policy(file.path().to_str().unwrap()).unwrap(), Policy::Rules(inline));
    }

    #[test]
    fn a_file_is_attached_with_its_name_and_type() {
        let folder = tempfile::tempdir().unwrap();
        let (image, log) = (folder.path().join("screen.PNG"), folder.path().join("build.log"));
        std::fs::write(&image, [0x89, b'P']).unwrap();
        std::fs::write(&log, "error: ✗").unwrap();
        let files = read_attachments(&[image, log]).unwrap();
        assert_eq!((files[0].name.as_str(), files[0].mime.as_str()), ("screen.PNG", "image/png"));
        assert_eq!((files[1].name.as_str(), files[1].mime.as_str()), ("build.log", "text/plain"));
        assert_eq!(files[0].data, "iVA=");
        let missing = read_attachments(&[folder.path().join("missing")]).unwrap_err();
        assert_eq!(missing.exit_code(), CliExitCode::Usage);
    }

    #[test]
    fn an_invalid_policy_is_a_usage_error() {
        for bad in ["perhaps", "[{\"tool\":1}]", "/does/not/exist.json"] {
            assert_eq!(read_policy(bad).unwrap_err().exit_code(), CliExitCode::Usage, "{bad}");
        }
    }
}
