//! Encryption of secrets at rest, with a key that only egress has.
//!
//! A sealed value is `1.` and hexadecimal digits of a random nonce, the text and its tag (ChaCha20-Poly1305). What the
//! value is for is authenticated with it, so that a value that was stored for one sandbox cannot be used for another.

use std::fmt;
use std::fmt::Write as _;

use egress_protocol::{SealedSecret, SecretScope, SecretValue};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use zeroize::{Zeroize, Zeroizing};

const VERSION: &str = "1.";
const KEY_BYTES: usize = 32;

/// The key of all sealed values of a state directory.
pub struct SealingKey(LessSafeKey);

/// What a sealed value is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum SealPurpose<'a> {
    Secret(&'a SecretScope),
    /// The private key of a sandbox's certificate authority.
    Authority(&'a str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    #[error("the system's random numbers are not available")]
    Random,
    #[error("encryption failed")]
    Encrypt,
    #[error("it is not a sealed value of this version")]
    Malformed,
    #[error("it was sealed with another key or for another purpose, or has been changed")]
    WrongKeyOrScope,
    #[error("it does not contain text")]
    NotText,
}

impl SealingKey {
    /// Takes the key and overwrites the given copy.
    pub fn new(mut bytes: [u8; KEY_BYTES]) -> Self {
        let key =
            UnboundKey::new(&CHACHA20_POLY1305, &bytes).expect("the key has the length of the algorithm");
        bytes.zeroize();
        Self(LessSafeKey::new(key))
    }

    /// A key that dies with the process, for runs without a state directory.
    pub fn ephemeral() -> Result<Self, SealError> {
        let mut bytes = [0; KEY_BYTES];
        fill_random(&mut bytes)?;
        Ok(Self::new(bytes))
    }

    pub(super) fn seal(&self, purpose: SealPurpose<'_>, value: &[u8]) -> Result<SealedSecret, SealError> {
        let mut nonce = [0; NONCE_LEN];
        fill_random(&mut nonce)?;
        // The buffer never grows, so no copy of the value is left behind.
        let mut buffer = Zeroizing::new(Vec::with_capacity(value.len() + CHACHA20_POLY1305.tag_len()));
        buffer.extend_from_slice(value);
        let context = Aad::from(purpose.context());
        self.0
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), context, &mut *buffer)
            .map_err(|ring::error::Unspecified| SealError::Encrypt)?;
        let mut text = String::from(VERSION);
        for byte in nonce.iter().chain(buffer.iter()) {
            write!(text, "{byte:02x}").expect("a String takes everything");
        }
        Ok(SealedSecret::new(text))
    }

    pub(super) fn open(
        &self,
        purpose: SealPurpose<'_>,
        sealed: &SealedSecret,
    ) -> Result<Zeroizing<Vec<u8>>, SealError> {
        let digits = sealed.as_str().strip_prefix(VERSION).ok_or(SealError::Malformed)?;
        let mut bytes = Zeroizing::new(parse_hexadecimal(digits).ok_or(SealError::Malformed)?);
        if bytes.len() < NONCE_LEN {
            return Err(SealError::Malformed);
        }
        let nonce = Nonce::try_assume_unique_for_key(&bytes[..NONCE_LEN])
            .map_err(|ring::error::Unspecified| SealError::Malformed)?;
        let length = self
            .0
            .open_within(nonce, Aad::from(purpose.context()), &mut bytes, NONCE_LEN..)
            .map_err(|ring::error::Unspecified| SealError::WrongKeyOrScope)?
            .len();
        bytes.truncate(length);
        Ok(bytes)
    }

    pub(super) fn open_text(
        &self,
        purpose: SealPurpose<'_>,
        sealed: &SealedSecret,
    ) -> Result<SecretValue, SealError> {
        let bytes = self.open(purpose, sealed)?;
        let text = std::str::from_utf8(&bytes).map_err(|_error| SealError::NotText)?;
        Ok(SecretValue::new(text.to_owned()))
    }
}

impl SealPurpose<'_> {
    fn context(&self) -> String {
        match self {
            Self::Secret(SecretScope::Sandbox(id)) => format!("secret of sandbox {id}"),
            Self::Secret(SecretScope::Owner(name)) => format!("secret of owner {name}"),
            Self::Authority(id) => format!("authority of sandbox {id}"),
        }
    }
}

pub(super) fn fill_random(bytes: &mut [u8]) -> Result<(), SealError> {
    SystemRandom::new().fill(bytes).map_err(|ring::error::Unspecified| SealError::Random)
}

fn parse_hexadecimal(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8; 2]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealingKey(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_value_opens_only_with_its_key_and_purpose() {
        let key = SealingKey::new([7; KEY_BYTES]);
        let mine = SecretScope::Sandbox("mine".to_owned());
        let other = SecretScope::Sandbox("other".to_owned());
        let owner = SecretScope::Owner("mine".to_owned());
        let sealed = key.seal(SealPurpose::Secret(&mine), b"canary").expect("sealed");
        assert!(!sealed.as_str().contains("canary"));
        let open = |key: &SealingKey, purpose: SealPurpose<'_>, sealed: &SealedSecret| {
            key.open_text(purpose, sealed).map(|value| value.expose().to_owned())
        };
        assert_eq!(open(&key, SealPurpose::Secret(&mine), &sealed), Ok("canary".to_owned()));
        for purpose in
            [SealPurpose::Secret(&other), SealPurpose::Secret(&owner), SealPurpose::Authority("mine")]
        {
            assert_eq!(open(&key, purpose, &sealed), Err(SealError::WrongKeyOrScope), "{purpose:?}");
        }
        let other_key = SealingKey::ephemeral().expect("random numbers");
        assert_eq!(open(&other_key, SealPurpose::Secret(&mine), &sealed), Err(SealError::WrongKeyOrScope));
        let mut changed = sealed.as_str().to_owned();
        let last = if changed.pop() == Some('0') { '1' } else { '0' };
        changed.push(last);
        assert_eq!(
            open(&key, SealPurpose::Secret(&mine), &SealedSecret::new(changed)),
            Err(SealError::WrongKeyOrScope)
        );
        for text in ["", "1.", "1.0g", "1.000", "2.00"] {
            let result = open(&key, SealPurpose::Secret(&mine), &SealedSecret::new(text.to_owned()));
            assert_eq!(result, Err(SealError::Malformed), "{text}");
        }
    }

    #[test]
    fn same_value_is_sealed_differently_each_time() {
        let key = SealingKey::new([7; KEY_BYTES]);
        let seal = || key.seal(SealPurpose::Authority("a"), b"same").expect("sealed");
        assert_ne!(seal(), seal());
    }
}
