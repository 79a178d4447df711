//! The public key of JWTs: base64 of a PEM file, as AIO's image takes it in `JWT_PUBLIC_KEY`.
//!
//! Both forms of RSA keys are accepted. `BEGIN PUBLIC KEY` (RFC 5280) contains the one of `BEGIN RSA PUBLIC KEY`
//! (RFC 8017), which is what the verification needs:
//!
//! ```text
//! SEQUENCE { SEQUENCE { OID rsaEncryption, NULL }, BIT STRING { SEQUENCE { INTEGER n, INTEGER e } } }
//! ```

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The longest setting; a key of 8192 bits has 2 KiB.
const MAX_SETTING_BYTES: usize = 16 << 10;
/// The sizes of keys that the verification accepts, in bytes.
const KEY_SIZES: std::ops::RangeInclusive<usize> = 256..=1024;

const TAG_INTEGER: u8 = 0x02;
const TAG_BIT_STRING: u8 = 0x03;
const TAG_SEQUENCE: u8 = 0x30;
/// `SEQUENCE { OID 1.2.840.113549.1.1.1, NULL }` without its own tag and length.
const RSA_ALGORITHM: [u8; 13] =
    [0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01, 0x05, 0x00];

/// An RSA key in the form of RFC 8017, and the setting it was read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct JwtPublicKey {
    pub(super) setting: String,
    pub(super) der: Vec<u8>,
}

impl JwtPublicKey {
    pub(super) fn parse(setting: &str) -> Result<Self, &'static str> {
        if setting.len() > MAX_SETTING_BYTES {
            return Err("longer than 16 KiB");
        }
        let pem = decode_base64(setting).and_then(|bytes| String::from_utf8(bytes).ok());
        let pem = pem.ok_or("not the base64 of a PEM file")?;
        let der = match (pem_section(&pem, "PUBLIC KEY"), pem_section(&pem, "RSA PUBLIC KEY")) {
            (Some(spki), _) => key_of_spki(&spki).ok_or("not an RSA key")?.to_vec(),
            (None, Some(pkcs1)) => pkcs1,
            (None, None) => return Err("the base64 of a text without a PEM public key"),
        };
        let size = modulus_size(&der).ok_or("not an RSA key")?;
        if !KEY_SIZES.contains(&size) {
            return Err("an RSA key of less than 2048 or more than 8192 bits");
        }
        Ok(Self { setting: setting.to_owned(), der })
    }
}

/// Decodes base64 with line breaks in it.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let text: String = text.split_ascii_whitespace().collect();
    STANDARD.decode(text).ok()
}

/// The content of a section of a PEM file.
fn pem_section(pem: &str, label: &str) -> Option<Vec<u8>> {
    let (_, rest) = pem.split_once(&format!("-----BEGIN {label}-----"))?;
    let (content, _) = rest.split_once(&format!("-----END {label}-----"))?;
    decode_base64(content)
}

/// The key in the form of RFC 8017 that a key in the form of RFC 5280 contains.
fn key_of_spki(der: &[u8]) -> Option<&[u8]> {
    let content = only_element(der, TAG_SEQUENCE)?;
    let (algorithm, rest) = take_element(content, TAG_SEQUENCE)?;
    let bits = only_element(rest, TAG_BIT_STRING)?;
    // The first byte counts the unused bits at the end.
    let key = bits.strip_prefix(&[0])?;
    (algorithm == RSA_ALGORITHM).then_some(key)
}

/// The number of bytes of the modulus.
fn modulus_size(der: &[u8]) -> Option<usize> {
    let content = only_element(der, TAG_SEQUENCE)?;
    let (modulus, rest) = take_element(content, TAG_INTEGER)?;
    only_element(rest, TAG_INTEGER)?;
    // A zero byte stands before a number whose first bit is set.
    Some(modulus.strip_prefix(&[0]).unwrap_or(modulus).len())
}

/// The content of an element that nothing follows.
fn only_element(der: &[u8], tag: u8) -> Option<&[u8]> {
    take_element(der, tag).and_then(|(content, rest)| rest.is_empty().then_some(content))
}

/// Splits off the content of the first element, which must have this tag.
fn take_element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // The long form: the number of length bytes, of which two are enough for any key.
        0x81 | 0x82 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first - 0x80))?;
            (digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    (found == tag).then(|| rest.split_at_checked(length)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aio::access::json_web_token::tests::{PKCS1_KEY, PUBLIC_KEY};

    #[test]
    fn both_forms_of_a_key_are_the_same_key() {
        let spki = JwtPublicKey::parse(&STANDARD.encode(PUBLIC_KEY)).unwrap();
        let pkcs1 = JwtPublicKey::parse(&STANDARD.encode(PKCS1_KEY)).unwrap();
        assert_eq!(spki.der, pkcs1.der);
        assert_eq!(modulus_size(&spki.der), Some(256));
    }

    #[test]
    fn other_texts_are_refused() {
        let encode = |text: &str| STANDARD.encode(text);
        let short = "-----BEGIN RSA PUBLIC KEY-----\nMAYCAQUCAQM=\n-----END RSA PUBLIC KEY-----";
        for text in [
            "",
            "no base64",
            PUBLIC_KEY,
            &encode("text"),
            &encode("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"),
            &encode(&PUBLIC_KEY.replace("PUBLIC KEY", "PRIVATE KEY")),
            &encode(&PUBLIC_KEY[..PUBLIC_KEY.len() / 2]),
            &encode(short),
            &"A".repeat(MAX_SETTING_BYTES + 4),
        ] {
            assert!(JwtPublicKey::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cut_and_changed_keys_never_panic() {
        let der = JwtPublicKey::parse(&STANDARD.encode(PUBLIC_KEY)).unwrap().der;
        for end in 0..der.len() {
            assert_eq!(modulus_size(&der[..end]), None, "{end}");
            let mut changed = der.clone();
            changed[end] = !changed[end];
            modulus_size(&changed);
            key_of_spki(&changed);
        }
    }
}
