//! Any secret, in any encoding, cut anywhere: nothing of it is left.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use proptest::prelude::*;

use super::secrets::SecretMatcher;

const MARK: &str = "[KEY redacted]";

fn matcher(secret: &str) -> SecretMatcher {
    SecretMatcher::new(&[("KEY".to_owned(), secret.to_owned())].into())
}

/// Redacts a text that arrives in pieces.
fn redact_pieces<'a>(secrets: &SecretMatcher, pieces: impl IntoIterator<Item = &'a str>) -> String {
    let (mut out, mut held, mut mark) = (String::new(), String::new(), None);
    for piece in pieces {
        held.push_str(piece);
        let start = secrets.redact_start(&held, mark.take());
        out.push_str(&start.text);
        mark = start.mark;
        held.drain(..start.undecided_from);
    }
    out + &secrets.redact_end(&held, mark)
}

fn pieces_of<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut borders: Vec<usize> =
        cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
    borders.extend([0, text.len()]);
    borders.sort_unstable();
    borders.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Escapes every character of a text.
fn escape_all(text: &str, escape: impl Fn(char) -> String) -> String {
    text.chars().map(escape).collect()
}

/// Escapes every byte of a text.
fn escape_bytes(text: &str, escape: impl Fn(u8) -> String) -> String {
    text.bytes().map(escape).collect()
}

fn join_bytes(text: &str, separator: &str, write: impl Fn(u8) -> String) -> String {
    text.bytes().map(write).collect::<Vec<_>>().join(separator)
}

fn utf16_escapes(text: &str) -> String {
    text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect()
}

/// Encodings that stand for the secret alone, so that exactly they are replaced.
fn exact_encodings(secret: &str) -> Vec<(&'static str, String)> {
    let json = serde_json::Value::from(secret).to_string();
    vec![
        ("itself", secret.to_owned()),
        ("base64", STANDARD.encode(secret)),
        ("base64 without padding", STANDARD_NO_PAD.encode(secret)),
        ("base64 for addresses", URL_SAFE.encode(secret)),
        ("base64 for addresses without padding", URL_SAFE_NO_PAD.encode(secret)),
        ("base64 in lines", wrap(&STANDARD.encode(secret), 7, "\n")),
        ("base64 in indented lines", wrap(&STANDARD.encode(secret), 10, "\r\n    ")),
        ("base64 in escaped lines", wrap(&STANDARD.encode(secret), 10, "\\n")),
        ("hex", hex::encode(secret)),
        ("upper hex", hex::encode_upper(secret)),
        ("hex in lines", wrap(&hex::encode(secret), 8, "\n")),
        ("hex with colons", join_bytes(secret, ":", |byte| format!("{byte:02X}"))),
        ("hex with spaces", join_bytes(secret, " ", |byte| format!("{byte:02x}"))),
        ("hex array", join_bytes(secret, ", ", |byte| format!("0x{byte:02x}")).replacen("0x", "", 1)),
        ("decimal array", join_bytes(secret, ", ", |byte| byte.to_string())),
        ("percent", escape_bytes(secret, |byte| format!("%{byte:02x}"))),
        ("upper percent", escape_bytes(secret, |byte| format!("%{byte:02X}"))),
        ("x escapes", escape_bytes(secret, |byte| format!("\\x{byte:02x}"))),
        ("octal escapes", escape_bytes(secret, |byte| format!("\\{byte:03o}"))),
        ("unicode escapes", utf16_escapes(secret)),
        ("unicode escapes in JSON in JSON", utf16_escapes(secret).replace('\\', "\\\\")),
        ("braced unicode escapes", escape_all(secret, |c| format!("\\u{{{:x}}}", u32::from(c)))),
        ("long unicode escapes", escape_all(secret, |c| format!("\\U{:08x}", u32::from(c)))),
        ("decimal entities", escape_all(secret, |c| format!("&#{};", u32::from(c)))),
        ("hex entities", escape_all(secret, |c| format!("&#x{:x};", u32::from(c)))),
        ("JSON", json[1..json.len() - 1].to_owned()),
        ("every second character as percent", alternate_percent(secret)),
    ]
}

fn alternate_percent(secret: &str) -> String {
    let mut odd = false;
    escape_all(secret, |c| c.to_string())
        .chars()
        .map(|c| {
            odd = !odd;
            if odd && c != '%' {
                c.to_string()
            } else {
                escape_bytes(&c.to_string(), |byte| format!("%{byte:02X}"))
            }
        })
        .collect()
}

fn wrap(text: &str, columns: usize, line_break: &str) -> String {
    let lines: Vec<&str> =
        text.as_bytes().chunks(columns).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    lines.join(line_break)
}

/// Dumps of `bytes` as tools print them: lines with an offset, and perhaps the text beside the numbers.
fn dumps(bytes: &[u8]) -> Vec<(&'static str, String)> {
    let printable = |line: &[u8]| -> String {
        line.iter().map(|byte| if (b' '..=b'~').contains(byte) { char::from(*byte) } else { '.' }).collect()
    };
    let lines = |format: &dyn Fn(usize, &[u8]) -> String| -> String {
        bytes.chunks(16).enumerate().map(|(i, line)| format(16 * i, line) + "\n").collect()
    };
    let hex = |line: &[u8], per_group: usize, between: &str| -> String {
        line.chunks(per_group).map(hex::encode).collect::<Vec<_>>().join(between)
    };
    let words = |line: &[u8], write: &dyn Fn(u16) -> String| -> String {
        let word = |pair: &[u8]| u16::from_le_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
        line.chunks(2).map(|pair| format!(" {}", write(word(pair)))).collect()
    };
    let character = |byte: &u8| match byte {
        b' '..=b'~' => format!("{:>4}", char::from(*byte)),
        byte => format!("{:>4}", format!("{byte:03o}")),
    };
    vec![
        ("xxd", lines(&|at, line| format!("{at:08x}: {:<39}  {}", hex(line, 2, " "), printable(line)))),
        ("xxd -p", lines(&|_, line| hex(line, 16, ""))),
        (
            "hexdump -C",
            lines(&|at, line| {
                let halves: Vec<String> = line.chunks(8).map(|half| hex(half, 1, " ")).collect();
                format!("{at:08x}  {:<48}  |{}|", halves.join("  "), printable(line))
            }),
        ),
        ("od -x", lines(&|at, line| format!("{at:07o}{}", words(line, &|word| format!("{word:04x}"))))),
        ("od", lines(&|at, line| format!("{at:07o}{}", words(line, &|word| format!("{word:06o}"))))),
        ("od -tx1", lines(&|at, line| format!("{at:07o} {}", hex(line, 1, " ")))),
        ("od -c", lines(&|at, line| format!("{at:07o}{}", line.iter().map(character).collect::<String>()))),
    ]
}

/// Whether four or more bytes of the secret can still be read in a dump.
fn is_readable(secret: &str, shown: &str) -> Option<String> {
    let dense: String = shown.chars().filter(|c| !c.is_whitespace() && !":|".contains(*c)).collect();
    let plain = |part: &[u8]| String::from_utf8_lossy(part).into_owned();
    let swapped = |part: &[u8]| hex::encode([part[1], part[0], part[3], part[2]]);
    let octal = |part: &[u8]| {
        part.chunks(2).map(|pair| format!("{:06o}", u16::from_le_bytes([pair[0], pair[1]]))).collect()
    };
    let parts = secret
        .as_bytes()
        .windows(4)
        .flat_map(|part| [hex::encode(part), plain(part), swapped(part), octal(part)]);
    parts.into_iter().find(|part| dense.contains(part))
}

proptest! {
    #[test]
    fn a_secret_in_any_encoding_is_replaced_however_it_is_cut(
        secret in "[a-zA-Z0-9äß€😀/+=\"\\\\%& _-]{6,40}",
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        prop_assume!(secret.trim() == secret && secret.len() >= 6);
        let secrets = matcher(&secret);
        for (name, encoded) in exact_encodings(&secret) {
            let text = format!("<{encoded}>\n");
            let shown = redact_pieces(&secrets, pieces_of(&text, &cuts));
            prop_assert_eq!(&shown, &format!("<{MARK}>\n"), "{}: {}", name, encoded);
            prop_assert_eq!(secrets.redact_whole(&text), Some(shown), "{}", name);
        }
    }

    #[test]
    fn a_secret_in_a_dump_cannot_be_read_however_it_is_cut(
        secret in "[g-zG-Z]{8,60}",
        (before, after) in (0..40usize, 0..40usize),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let secrets = matcher(&secret);
        let bytes = ["#".repeat(before), secret.clone(), "#".repeat(after)].concat();
        for (name, dump) in dumps(bytes.as_bytes()) {
            let text = format!("a dump:\n{dump}end\n");
            let shown = redact_pieces(&secrets, pieces_of(&text, &cuts));
            prop_assert!(shown.starts_with("a dump:\n") && shown.ends_with("end\n"), "{}: {}", name, shown);
            prop_assert!(shown.contains(MARK), "{}:\n{}\n{}", name, text, shown);
            prop_assert_eq!(is_readable(&secret, &shown), None, "{}:\n{}\n{}", name, text, shown);
            prop_assert_eq!(secrets.redact_whole(&text), Some(shown), "{}", name);
        }
    }

    #[test]
    fn a_secret_inside_a_longer_base64_text_in_lines_is_replaced(
        secret in "[a-zA-Z0-9_-]{9,40}",
        before in 0..100usize,
        after in 0..100usize,
        (columns, line_break) in prop_oneof![Just((76, "\n")), Just((64, "\r\n")), Just((76, "\r\n")), Just((64, "\n"))],
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let secrets = matcher(&secret);
        let plain = ["\x01".repeat(before), secret.clone(), "\x01".repeat(after)].concat();
        for encoded in [STANDARD.encode(&plain), URL_SAFE_NO_PAD.encode(&plain)] {
            let text = wrap(&encoded, columns, line_break);
            let shown = redact_pieces(&secrets, pieces_of(&text, &cuts));
            prop_assert!(shown.contains(MARK), "{}\n{}", text, shown);
            prop_assert!(shown.len() + secret.len() < text.len() + MARK.len() + 4, "{}\n{}", text, shown);
        }
    }

    #[test]
    fn ordinary_text_is_left_as_it_is(
        text in "([a-z]{1,8}|[0-9]{1,6}|[0-9a-f]{2}[ :]|%[0-9A-F]{2}|\\\\u[0-9a-f]{4}|\\\\n|&amp;|[ \n.,|]){0,60}",
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let secrets = matcher("sk-live-Zq9XvT7wKpLm");
        prop_assert_eq!(secrets.redact_whole(&text), None);
        prop_assert_eq!(redact_pieces(&secrets, pieces_of(&text, &cuts)), text);
    }
}

#[test]
fn what_is_held_back_is_bounded() {
    let secret = "k".repeat(3000);
    let secrets = matcher(&secret);
    // A dump of the beginning of the secret that never comes to an end, with as much beside each byte as is skipped.
    let endless = format!("6b{}\n", " ".repeat(100)).repeat(3000);
    let start = secrets.redact_start(&endless, None);
    assert!(endless.len() - start.undecided_from < 128 << 10, "{}", endless.len() - start.undecided_from);
}

#[test]
fn numbers_in_ordinary_text_are_shown_at_once() {
    // `73`, `115` and `163` are the first byte of the secret in hexadecimal, decimal and octal.
    let secrets = matcher("sk-live-Zq9XvT7wKpLm");
    for text in
        ["pid 25731 so far", "73 of them", "line 115: x", "0x73, then", "163. Then", "a 73 b", "at 73:12"]
    {
        let shown = secrets.redact_start(text, None);
        assert_eq!((shown.text.as_str(), shown.undecided_from), (text, text.len()));
    }
    assert_eq!(secrets.redact_start("00000010  73", None).text, "00000010  ");
    assert_eq!(secrets.redact_start("00000010  73  |s", None).text, "00000010  ");
}
