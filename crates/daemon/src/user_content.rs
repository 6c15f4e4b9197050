//! Texts and files of callers: their limits, the fingerprint of a prompt, and storing what is too large for an event
//! in a blob first. Knows no run and no session state.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use qd_journal::Journal;
use qd_protocol::api::NewAttachment;
use qd_protocol::event::Attachment;
use qd_protocol::limits::{ATTACHMENTS_MAX, HEAD_MAX, INLINE_MAX};
use qd_protocol::text::{escaped_head, escaped_len};
use qd_protocol::{ApiError, LongText, SessionId};
use sha2::{Digest, Sha256};

use crate::daemon::blob_failed;
use crate::invalid_value;

/// The most bytes, as JSON, of a reason or of an answer to a question: it shares its event with other data.
pub(crate) const REMARK_MAX: usize = 16 << 10;
/// The most bytes of a file's name or MIME type. All files of a prompt, without content, must fit beside its text.
const FILE_NAME_MAX: usize = 255;
/// The most bytes, in base64, of a prompt's files that are kept inside its event.
const ATTACHMENTS_INLINE_MAX: usize = 256 << 10;

/// Checks that a reason or an answer fits its event.
pub(crate) fn check_remark(name: &str, text: Option<&str>) -> Result<(), ApiError> {
    match text {
        Some(text) if escaped_len(text) > REMARK_MAX => {
            Err(invalid_value(format!("`{name}` must be at most {REMARK_MAX} bytes as JSON")))
        }
        _ => Ok(()),
    }
}

/// Validates a prompt's files, and decodes their content in order.
pub(crate) fn decode_attachments(files: &[NewAttachment]) -> Result<Vec<Vec<u8>>, ApiError> {
    if files.len() > ATTACHMENTS_MAX {
        return Err(invalid_value(format!("a prompt may have at most {ATTACHMENTS_MAX} attachments")));
    }
    files.iter().enumerate().map(|(at, file)| decode_attachment(at, file)).collect()
}

fn decode_attachment(at: usize, file: &NewAttachment) -> Result<Vec<u8>, ApiError> {
    let is_valid =
        |text: &str| (1..=FILE_NAME_MAX).contains(&text.len()) && !text.chars().any(char::is_control);
    if !is_valid(&file.name) || file.name.contains('/') {
        return Err(invalid_value(format!(
            "the name of attachment {at} must be 1 to {FILE_NAME_MAX} bytes without `/` or control characters"
        )));
    }
    if !is_valid(&file.mime) {
        return Err(invalid_value(format!(
            "the mime type of attachment {at} ({}) must be 1 to {FILE_NAME_MAX} bytes without control characters",
            file.name
        )));
    }
    BASE64_STANDARD.decode(&file.data).map_err(|error| {
        invalid_value(format!("the data of attachment {at} ({}) is not base64: {error}", file.name))
    })
}

/// Distinguishes prompts under the same run id.
pub(crate) fn prompt_fingerprint(session: &SessionId, prompt: &str, files: &[NewAttachment]) -> String {
    let mut hash = Sha256::new();
    let mut add = |part: &str| {
        // With the length, so that no two lists of parts have the same hash input.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(session.as_str());
    add(prompt);
    for file in files {
        add(&file.name);
        add(&file.mime);
        add(&file.data);
    }
    hex::encode(hash.finalize())
}

/// Prepares a text for an event. A text too long for one is stored in a blob, on disk when this returns.
pub(crate) async fn store_text(journal: &Journal, text: String) -> Result<LongText, ApiError> {
    if escaped_len(&text) <= INLINE_MAX {
        return Ok(text.into());
    }
    let head = escaped_head(&text, HEAD_MAX).to_owned();
    let blob = journal.blobs().put(text).await.map_err(blob_failed)?;
    Ok(LongText { head, blob: Some(blob) })
}

/// Prepares files for the event that contains `text`. `contents` is the result of [`decode_attachments`].
pub(crate) async fn store_attachments(
    journal: &Journal,
    text: &LongText,
    files: Vec<NewAttachment>,
    contents: Vec<Vec<u8>>,
) -> Result<Vec<Attachment>, ApiError> {
    let sizes: Vec<usize> = files.iter().map(|file| file.data.len()).collect();
    let inline = choose_inline(escaped_len(&text.head), &sizes);
    let mut stored = Vec::with_capacity(files.len());
    for ((file, content), inline) in files.into_iter().zip(contents).zip(inline) {
        let NewAttachment { name, mime, data } = file;
        let (data, blob) = match inline {
            true => (Some(data), None),
            false => (None, Some(journal.blobs().put(content).await.map_err(blob_failed)?)),
        };
        stored.push(Attachment { name, mime, data, blob });
    }
    Ok(stored)
}

/// Which files, by their sizes in base64, stay inside an event whose text takes `text` bytes.
fn choose_inline(text: usize, sizes: &[usize]) -> Vec<bool> {
    let mut remaining = INLINE_MAX.saturating_sub(text).min(ATTACHMENTS_INLINE_MAX);
    let fits = |size: &usize| {
        let left = remaining.checked_sub(*size);
        remaining = left.unwrap_or(remaining);
        left.is_some()
    };
    sizes.iter().map(fits).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qd_protocol::event::{MessageCreated, MessagePart, MessageRole};
    use qd_protocol::limits::EVENT_MAX;
    use qd_protocol::text::BlobRef;
    use qd_protocol::{ErrorCode, MessageId, RunId};

    use super::*;

    fn file(name: &str, data: &str) -> NewAttachment {
        NewAttachment { name: name.to_owned(), mime: "text/plain".to_owned(), data: data.to_owned() }
    }

    #[test]
    fn a_file_has_a_plain_name_and_content_in_base64() {
        assert_eq!(
            decode_attachments(&[file("a.txt", "YWJj"), file("b", "")]).unwrap(),
            [b"abc".to_vec(), Vec::new()]
        );
        for (bad, hint) in [
            (file("", "YWJj"), "the name of attachment 1"),
            (file("../a", "YWJj"), "the name of attachment 1"),
            (file("a\0b", "YWJj"), "the name of attachment 1"),
            (file("a\nb", "YWJj"), "the name of attachment 1"),
            (file(&"x".repeat(256), "YWJj"), "the name of attachment 1"),
            (file("a", "no base64!"), "the data of attachment 1 (a) is not base64"),
            (file("a", "YWJ"), "the data of attachment 1 (a) is not base64"),
            (NewAttachment { mime: "\n".to_owned(), ..file("a", "") }, "the mime type of attachment 1 (a)"),
        ] {
            let error = decode_attachments(&[file("good", ""), bad]).unwrap_err();
            assert_eq!(error.code, ErrorCode::InvalidValue);
            assert!(error.message.starts_with(hint), "{error}");
        }
        let many = vec![file("a", ""); ATTACHMENTS_MAX + 1];
        assert!(decode_attachments(&many[1..]).is_ok());
        assert_eq!(decode_attachments(&many).unwrap_err().code, ErrorCode::InvalidValue);
    }

    #[test]
    fn no_two_prompts_have_the_same_fingerprint() {
        let ids = [SessionId::parse("ses_1").unwrap(), SessionId::parse("ses_2").unwrap()];
        let prints = [
            prompt_fingerprint(&ids[0], "ab", &[]),
            prompt_fingerprint(&ids[1], "ab", &[]),
            prompt_fingerprint(&ids[0], "a", &[]),
            prompt_fingerprint(&ids[0], "ab", &[file("", "")]),
            prompt_fingerprint(&ids[0], "ab", &[file("x", "y")]),
            prompt_fingerprint(&ids[0], "ab", &[file("xy", "")]),
            prompt_fingerprint(&ids[0], "ab", &[file("x", "y"), file("x", "y")]),
        ];
        for (at, print) in prints.iter().enumerate() {
            assert_eq!(print.len(), 64);
            assert!(!prints[..at].contains(print), "{at}");
        }
        assert_eq!(prompt_fingerprint(&ids[0], "ab", &[]), prints[0]);
    }

    #[test]
    fn small_files_stay_inside_until_there_is_no_room() {
        assert_eq!(choose_inline(0, &[ATTACHMENTS_INLINE_MAX, 1]), [true, false]);
        assert_eq!(
            choose_inline(0, &[ATTACHMENTS_INLINE_MAX + 4, 4]),
            [false, true],
            "a small one after a large one still fits"
        );
        assert_eq!(choose_inline(INLINE_MAX - 4, &[8, 4]), [false, true], "a long prompt leaves little room");
        assert_eq!(choose_inline(INLINE_MAX + 1, &[4]), [false]);
    }

    #[test]
    fn a_remark_must_fit_its_event() {
        assert!(check_remark("reason", None).is_ok());
        assert!(check_remark("reason", Some(&"x".repeat(REMARK_MAX))).is_ok());
        assert!(check_remark("reason", Some(&"\n".repeat(REMARK_MAX))).is_err());
    }

    proptest! {
        #[test]
        fn a_message_with_any_prompt_and_files_fits_an_event(
            prompt in 0..=INLINE_MAX,
            sizes in proptest::collection::vec(0_usize..400_000, 0..=ATTACHMENTS_MAX),
        ) {
            let run = RunId::parse(&"r".repeat(128)).unwrap();
            let blob = BlobRef { sha256: "0".repeat(64), size: u64::MAX };
            let mut parts = vec![MessagePart::Text { text: "x".repeat(prompt), blob: None }];
            for (size, inline) in sizes.iter().zip(choose_inline(prompt, &sizes)) {
                let (name, mime) = ("\"".repeat(FILE_NAME_MAX), "\\".repeat(FILE_NAME_MAX));
                let data = inline.then(|| "A".repeat(*size));
                let file = Attachment { name, mime, data, blob: (!inline).then(|| blob.clone()) };
                parts.push(MessagePart::File { file });
            }
            let message = MessageCreated { message_id: MessageId::user(&run), role: MessageRole::User, parts };
            prop_assert!(serde_json::to_vec(&message).unwrap().len() <= EVENT_MAX);
        }
    }
}
