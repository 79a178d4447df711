//! JSON Web Tokens, RS256 only.
//!
//! The algorithm is ours to choose, not the token's: a token that names another one is refused before its signature is
//! looked at. So neither `none` nor HS256 with the public key as its secret can pass.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use serde::Deserialize;
use serde_json::Value;

use super::public_key::JwtPublicKey;

/// Longer tokens are refused unread.
const MAX_TOKEN_BYTES: usize = 8 << 10;

#[derive(Deserialize)]
struct TokenHeader {
    alg: String,
    /// Extensions that a reader must understand; we understand none.
    crit: Option<Value>,
}

/// Times are numbers of seconds, possibly with a fraction.
#[derive(Deserialize)]
struct TokenClaims {
    exp: f64,
    nbf: Option<f64>,
}

impl JwtPublicKey {
    /// Whether a token was signed with our key and is valid now.
    pub(super) fn is_valid_token(&self, token: &str) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.is_valid_at(token, now.as_secs_f64())
    }

    /// Whether a token was signed with our key, whenever it is valid.
    pub(super) fn is_signed_token(&self, token: &str) -> bool {
        self.verified_claims(token).is_some()
    }

    fn is_valid_at(&self, token: &str, now: f64) -> bool {
        let claims = self.verified_claims(token).and_then(|claims| serde_json::from_slice(&claims).ok());
        let Some(TokenClaims { exp, nbf }) = claims else { return false };
        now < exp && nbf.is_none_or(|begin| begin <= now)
    }

    /// The claims as JSON, if the signature is right.
    fn verified_claims(&self, token: &str) -> Option<Vec<u8>> {
        if token.len() > MAX_TOKEN_BYTES {
            return None;
        }
        let (signed, signature) = token.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let header: TokenHeader = serde_json::from_slice(&decode(header)?).ok()?;
        if header.alg != "RS256" || header.crit.is_some() {
            return None;
        }
        let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &self.der);
        key.verify(signed.as_bytes(), &decode(signature)?).ok()?;
        decode(claims)
    }
}

fn decode(part: &str) -> Option<Vec<u8>> {
    URL_SAFE_NO_PAD.decode(part).ok()
}

#[cfg(test)]
pub(in crate::aio::access) mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    // Made for this test by `openssl genrsa 2048`; the tokens are signed with its private key, which was thrown away.
    pub(in crate::aio::access) const PUBLIC_KEY: &str = include_str!("testdata/public.pem");
    pub(in crate::aio::access) const PKCS1_KEY: &str = include_str!("testdata/public_pkcs1.pem");
    /// `{"sub":"test","nbf":1700000000,"exp":1700000060}`
    const SIGNED: &str = include_str!("testdata/signed.jwt");
    /// The same claims, signed by HS256 with the PEM file as secret.
    const HS256: &str = include_str!("testdata/hs256.jwt");
    /// The same claims, signed by RS256 with another key.
    const OTHER_KEY: &str = include_str!("testdata/other_key.jwt");
    /// Signed, without `exp`.
    const ENDLESS: &str = include_str!("testdata/endless.jwt");
    /// Signed, with `crit` in the header.
    const CRITICAL: &str = include_str!("testdata/critical.jwt");
    const NOW: f64 = 1_700_000_030.0;

    fn key() -> JwtPublicKey {
        JwtPublicKey::parse(&STANDARD.encode(PUBLIC_KEY)).unwrap()
    }

    #[test]
    fn token_is_valid_between_its_times() {
        for (now, expected) in [
            (NOW, true),
            (1_700_000_000.0, true),
            (1_699_999_999.0, false),
            (1_700_000_059.9, true),
            (1_700_000_060.0, false),
        ] {
            assert_eq!(key().is_valid_at(SIGNED, now), expected, "{now}");
        }
        assert!(key().is_signed_token(SIGNED) && !key().is_valid_token(SIGNED));
    }

    #[test]
    fn other_algorithms_keys_and_claims_are_refused() {
        let (signed, signature) = SIGNED.rsplit_once('.').unwrap();
        let (header, claims) = signed.split_once('.').unwrap();
        let none = URL_SAFE_NO_PAD.encode(r#"{"alg":"none"}"#);
        let later = URL_SAFE_NO_PAD.encode(r#"{"exp":99999999999}"#);
        for token in [
            HS256,
            OTHER_KEY,
            ENDLESS,
            CRITICAL,
            &format!("{none}.{claims}."),
            &format!("{none}.{claims}.{signature}"),
            &format!("{header}.{later}.{signature}"),
            &format!("{header}.{claims}."),
            &format!("{header}.{claims}"),
            &format!("{SIGNED}."),
            &format!("{SIGNED}="),
            "",
            "..",
            &"a".repeat(MAX_TOKEN_BYTES + 1),
        ] {
            assert!(!key().is_valid_at(token, NOW), "{token}");
        }
    }
}
