//! Signed routes: addresses that open one port of one sandbox until they expire, without a header.
//!
//! ```text
//! {expires}    expiry in seconds since the epoch, in base 36
//! {signature}  26 base-32 digits: a 130-bit keyed hash with this server's own secret
//!              27: the same with a configured key, whose one-character name comes last
//!               9: 8 hexadecimal digits and such a name, as in the reference
//! ```
//! The last form has 32 bits, which can be guessed. It is accepted only if the operator enables it,
//! and then only a limited number of wrong ones is checked.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use domain::SandboxId;
use http::StatusCode;
use service::SandboxRef;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::problem::Problem;
use super::route_keys::{RouteKey, ShortSignatures};

/// The signature part of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RouteSignature {
    pub(super) expires: String,
    pub(super) signature: String,
}

/// 26 digits of 5 bits each; with the rest of the address they fit into a host name label.
const FULL_SIGNATURE_DIGITS: usize = 26;
const SHORT_SIGNATURE_DIGITS: usize = 8;
/// Longer numbers leave no room for a full signature, and mean times after the year 4000.
const MAX_EXPIRES_DIGITS: usize = 7;
/// How many wrong short signatures per sandbox are checked in each window. At that rate, guessing one
/// takes about four hundred years.
const MAX_GUESSES: u32 = 20;
const GUESS_WINDOW: Duration = Duration::from_secs(60);

/// Creates and verifies signatures.
pub(crate) struct RouteSigner {
    /// The first key signs, all are accepted.
    keys: Vec<RouteKey>,
    short: ShortSignatures,
    guesses: Mutex<HashMap<SandboxId, (Instant, u32)>>,
}

impl RouteSigner {
    pub(super) fn new(keys: Vec<RouteKey>, short: ShortSignatures) -> Self {
        Self { keys, short, guesses: Mutex::default() }
    }

    /// Signs an address that opens a port until `expires`.
    pub(super) fn sign(
        &self,
        sandbox: &SandboxRef,
        port: u16,
        expires: u64,
    ) -> Result<RouteSignature, Problem> {
        let (id, expires) = (sandbox.id(), to_base36(expires));
        if expires.len() > MAX_EXPIRES_DIGITS {
            return Err(Problem::invalid("`expires` is too far in the future"));
        }
        let signature = match (self.keys.first(), self.short) {
            (Some(key), ShortSignatures::Accepted) => {
                format!("{}{}", short_signature(key, id, port, &expires), key.name)
            }
            (Some(key), ShortSignatures::Refused) => {
                format!("{}{}", full_signature(&key.secret, id, port, &expires), key.name)
            }
            (None, _) => full_signature(server_route_key(sandbox).as_bytes(), id, port, &expires),
        };
        Ok(RouteSignature { expires, signature })
    }

    /// Refuses forged and expired signatures.
    pub(super) fn verify(
        &self,
        sandbox: &SandboxRef,
        port: u16,
        signed: &RouteSignature,
    ) -> Result<(), Problem> {
        let RouteSignature { expires, signature } = signed;
        if self.is_valid_signature(sandbox, port, expires, signature)?
            && !is_expired(expires, SystemTime::now())
        {
            return Ok(());
        }
        let message = "the signature of this address is invalid or has expired";
        Err(Problem::new(StatusCode::UNAUTHORIZED, "MISSING_OR_INVALID_SECURE_ACCESS", message))
    }

    fn is_valid_signature(
        &self,
        sandbox: &SandboxRef,
        port: u16,
        expires: &str,
        signature: &str,
    ) -> Result<bool, Problem> {
        let id = sandbox.id();
        // Non-ASCII text could not be split at byte positions below.
        if !signature.is_ascii() || !expires.is_ascii() {
            return Ok(false);
        }
        let same = |right: &str, given: &str| bool::from(right.as_bytes().ct_eq(given.as_bytes()));
        if signature.len() == FULL_SIGNATURE_DIGITS {
            return Ok(same(
                &full_signature(server_route_key(sandbox).as_bytes(), id, port, expires),
                signature,
            ));
        }
        let Some((given, name)) = signature.char_indices().last().map(|(at, name)| (&signature[..at], name))
        else {
            return Ok(false);
        };
        let Some(key) = self.keys.iter().find(|key| key.name == name) else { return Ok(false) };
        match given.len() {
            FULL_SIGNATURE_DIGITS => Ok(same(&full_signature(&key.secret, id, port, expires), given)),
            SHORT_SIGNATURE_DIGITS if self.short == ShortSignatures::Accepted => {
                self.count_guess(id)?;
                let right = same(&short_signature(key, id, port, expires), given);
                if right {
                    self.refund_guess(id);
                }
                Ok(right)
            }
            _ => Ok(false),
        }
    }

    /// Counts an attempt before verifying it. If a correct signature still worked after too many wrong
    /// ones, an attacker could search without limit; the price is that one client's guesses lock out
    /// others for a while.
    fn count_guess(&self, id: &SandboxId) -> Result<(), Problem> {
        let mut guesses = self.guesses.lock().unwrap_or_else(PoisonError::into_inner);
        guesses.retain(|_, (since, _)| since.elapsed() < GUESS_WINDOW);
        let (_, count) = guesses.entry(id.clone()).or_insert_with(|| (Instant::now(), 0));
        if *count >= MAX_GUESSES {
            let message = "too many invalid signatures for this sandbox; try again in a minute";
            let problem = Problem::new(StatusCode::TOO_MANY_REQUESTS, "TOO_MANY_REQUESTS", message);
            return Err(Problem { retry_after: Some(GUESS_WINDOW.as_secs()), ..problem });
        }
        *count += 1;
        Ok(())
    }

    /// Refunds a correct attempt: only wrong ones count.
    fn refund_guess(&self, id: &SandboxId) {
        let mut guesses = self.guesses.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, count)) = guesses.get_mut(id) {
            *count = count.saturating_sub(1);
        }
    }
}

/// Returns the server's own key for the routes of one sandbox.
fn server_route_key(sandbox: &SandboxRef) -> String {
    sandbox.ports().access_token("routes").expose().to_owned()
}

fn is_expired(expires: &str, now: SystemTime) -> bool {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    from_base36(expires).is_none_or(|expires| expires < now)
}

/// Returns the signed text, in an unambiguous form.
fn signed_text(kind: &str, id: &SandboxId, port: u16, expires: &str) -> String {
    format!("v1\n{kind}\n{id}\n{port}\n{expires}\n")
}

fn full_signature(secret: &[u8], id: &SandboxId, port: u16, expires: &str) -> String {
    const DIGITS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let key = blake3::derive_key("coracle signed routes v1", secret);
    let hash = blake3::keyed_hash(&key, signed_text("full", id, port, expires).as_bytes());
    let bit = |index: usize| usize::from(hash.as_bytes()[index / 8] >> (7 - index % 8) & 1);
    let digit = |at: usize| (0..5).fold(0, |sum, index| sum << 1 | bit(at * 5 + index));
    (0..FULL_SIGNATURE_DIGITS).map(|at| char::from(DIGITS[digit(at)])).collect()
}

/// The reference's signature: the first digits of a plain hash over the secret and the text, each
/// preceded by its length.
fn short_signature(key: &RouteKey, id: &SandboxId, port: u16, expires: &str) -> String {
    let text = signed_text("short", id, port, expires);
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_be_bytes();
    let mut hash = Sha256::new();
    hash.update(length(&key.secret));
    hash.update(&key.secret);
    hash.update(length(text.as_bytes()));
    hash.update(text.as_bytes());
    hash.finalize().iter().take(SHORT_SIGNATURE_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

fn to_base36(mut number: u64) -> String {
    let mut digits = Vec::new();
    loop {
        let digit = u32::try_from(number % 36).expect("the digit is below 36");
        digits.push(char::from_digit(digit, 36).expect("the digit is below 36"));
        number /= 36;
        if number == 0 {
            return digits.iter().rev().collect();
        }
    }
}

/// Parses the output of [`to_base36`]: lower case, no leading zero.
fn from_base36(text: &str) -> Option<u64> {
    let number = u64::from_str_radix(text, 36).ok()?;
    (to_base36(number) == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> SandboxId {
        SandboxId::parse("abcdefghij0123456789").unwrap()
    }

    fn key() -> RouteKey {
        RouteKey { name: 'k', secret: b"secret".to_vec() }
    }

    /// The expected value was computed by the reference's rule with another implementation of SHA-256.
    #[test]
    fn short_form_matches_the_reference() {
        assert_eq!(short_signature(&key(), &id(), 8080, "t2kabc"), "f67d3f49");
    }

    #[test]
    fn full_signature_depends_on_port_sandbox_expiry_and_key() {
        let right = full_signature(b"secret", &id(), 8080, "t2kabc");
        assert_eq!(right.len(), FULL_SIGNATURE_DIGITS);
        assert!(right.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()));
        let other = SandboxId::parse("bbcdefghij0123456789").unwrap();
        for wrong in [
            full_signature(b"other", &id(), 8080, "t2kabc"),
            full_signature(b"secret", &other, 8080, "t2kabc"),
            full_signature(b"secret", &id(), 8081, "t2kabc"),
            full_signature(b"secret", &id(), 8080, "t2kabd"),
        ] {
            assert_ne!(right, wrong);
        }
    }

    #[test]
    fn signed_label_fits_into_a_host_name() {
        let most =
            [id().as_str(), "65535", &"z".repeat(MAX_EXPIRES_DIGITS), &"a".repeat(FULL_SIGNATURE_DIGITS + 1)]
                .join("-");
        assert!(most.len() <= 63, "{}", most.len());
    }

    #[test]
    fn base_36_numbers_have_one_form() {
        for number in [0, 35, 36, 1_794_767_587, u64::MAX] {
            assert_eq!(from_base36(&to_base36(number)), Some(number));
        }
        for wrong in ["", "00", "01", "A", "-1", "+1", "zzzzzzzzzzzzzz", "a b"] {
            assert_eq!(from_base36(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn route_expires_after_the_second_it_names() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!is_expired(&to_base36(100), at(100)));
        assert!(is_expired(&to_base36(100), at(101)));
        assert!(is_expired("not a number", at(0)));
    }

    #[test]
    fn attempts_at_short_signatures_are_limited() {
        let routes = RouteSigner::new(vec![key()], ShortSignatures::Accepted);
        for _ in 0..MAX_GUESSES {
            assert!(routes.count_guess(&id()).is_ok());
        }
        assert_eq!(routes.count_guess(&id()).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        routes.refund_guess(&id());
        assert!(routes.count_guess(&id()).is_ok(), "a correct attempt was counted");
        assert!(
            routes.count_guess(&SandboxId::from_entropy([1; 20])).is_ok(),
            "attempts for another sandbox were counted"
        );
    }
}
