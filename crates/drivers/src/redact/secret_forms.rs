//! The forms in which a secret may appear in a text: as it is or with any of its characters escaped, in base64 that may
//! be broken into lines, and as a dump of its bytes. A form says whether a text begins with it.

use std::sync::Arc;

use super::dumped_bytes::DumpNotation;
use super::{dumped_bytes, escaped_text, wrapped_base64};

/// One form of one secret.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SecretForm {
    /// Each character as it is, or escaped in any of the usual ways.
    Escaped(Arc<[u8]>),
    /// These characters of the standard alphabet of base64.
    Base64(Arc<[u8]>),
    /// The bytes as numbers or characters, such as a hex dump.
    Dump(DumpNotation, Arc<[u8]>),
}

/// How the beginning of a text compares with a form of a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FormMatch {
    /// The text begins with something else.
    Differs,
    /// The text ends before it can be said.
    Undecided,
    /// The text begins with the secret, which takes so many bytes of it.
    Found(usize),
}

impl SecretForm {
    /// Whether a text begins with this form. If the text `is_whole`, nothing follows it, and nothing is undecided.
    pub(super) fn match_start(&self, text: &[u8], is_whole: bool) -> FormMatch {
        let found = match self {
            Self::Escaped(secret) => escaped_text::match_start(secret, text, is_whole),
            Self::Base64(characters) => wrapped_base64::match_start(characters, text),
            Self::Dump(notation, secret) => dumped_bytes::match_start(*notation, secret, text, is_whole),
        };
        match found {
            FormMatch::Undecided if is_whole => FormMatch::Differs,
            found => found,
        }
    }

    /// Every pair of bytes that this form can begin with.
    pub(super) fn first_pairs(&self) -> Vec<[u8; 2]> {
        match self {
            Self::Escaped(secret) => escaped_text::first_pairs(secret),
            Self::Base64(characters) => wrapped_base64::first_pairs(characters),
            Self::Dump(notation, secret) => dumped_bytes::first_pairs(*notation, secret),
        }
    }
}
