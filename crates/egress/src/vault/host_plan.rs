//! What a vault means for one host, prepared so that requests only apply it.

use std::collections::HashMap;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use domain::{Binding, BindingAuth, DomainName, HeaderCredential, SubstitutionSurface, UrlScheme, Vault};
use egress_protocol::SecretValue;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use zeroize::Zeroizing;

use super::redact::RedactionSet;
use super::replace::Replacements;

/// The password of a pair is common text more often than a token is.
const MIN_REDACTED_PASSWORD: usize = 8;

#[derive(Debug)]
pub(super) struct HostPlan {
    injections: HashMap<String, Arc<Injection>>,
    pub(super) redactions: Arc<RedactionSet>,
}

/// What a binding does with a request.
#[derive(Debug, Default)]
pub(super) struct Injection {
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) path: Replacements,
    pub(super) query: Replacements,
    pub(super) header: Replacements,
    pub(super) bodies: BodyReplacements,
}

/// Replacements in a body, by how text is written in it.
#[derive(Debug, Default)]
pub(super) struct BodyReplacements {
    pub(super) raw: Arc<Replacements>,
    pub(super) json: Arc<Replacements>,
    pub(super) form: Arc<Replacements>,
}

impl HostPlan {
    pub(super) fn new(vault: &Vault<SecretValue>, scheme: UrlScheme, host: &DomainName) -> Self {
        let mut redactions = RedactionSet::default();
        let mut injections = HashMap::new();
        for binding in vault.bindings().filter(|binding| binding.request.concerns(scheme, host)) {
            add_redactions(&mut redactions, vault, binding);
            injections.insert(binding.name.clone(), Arc::new(Injection::new(vault, binding)));
        }
        Self { injections, redactions: Arc::new(redactions) }
    }

    pub(super) fn injection(&self, binding: &Binding) -> Option<Arc<Injection>> {
        self.injections.get(&binding.name).cloned()
    }
}

impl Injection {
    fn new(vault: &Vault<SecretValue>, binding: &Binding) -> Self {
        let value = |credential: &String| vault.credential(credential).map(|one| &one.value);
        let custom = |one: &HeaderCredential| {
            let name = HeaderName::from_bytes(one.header.as_bytes()).ok()?;
            Some((name, header_value("", value(&one.credential)?)?))
        };
        let authorization = |prefix: &str, credential: &String| {
            Some((AUTHORIZATION, header_value(prefix, value(credential)?)?))
        };
        let headers = match &binding.auth {
            BindingAuth::Bearer { credential } => authorization("Bearer ", credential).into_iter().collect(),
            BindingAuth::Basic { credential } => authorization("Basic ", credential).into_iter().collect(),
            BindingAuth::ApiKey(header) => custom(header).into_iter().collect(),
            BindingAuth::CustomHeaders(headers) => headers.iter().filter_map(custom).collect(),
            BindingAuth::Passthrough => Vec::new(),
        };
        let mut injection = Self { headers, ..Self::default() };
        injection.add_substitutions(vault, binding);
        injection
    }

    fn add_substitutions(&mut self, vault: &Vault<SecretValue>, binding: &Binding) {
        let (mut raw, mut json, mut form) = <(Replacements, Replacements, Replacements)>::default();
        for substitution in &binding.substitutions {
            let Some(credential) = vault.credential(&substitution.credential) else { continue };
            let value = credential.value.expose();
            let placeholder = substitution.placeholder.as_str();
            for surface in &substitution.surfaces {
                match surface {
                    SubstitutionSurface::Path => self.path.add(placeholder, encode_percent(value)),
                    SubstitutionSurface::Query => self.query.add(placeholder, encode_percent(value)),
                    SubstitutionSurface::Header => self.header.add(placeholder, copy(value)),
                    SubstitutionSurface::Body => {
                        raw.add(placeholder, copy(value));
                        json.add(placeholder, escape_json(value));
                        form.add(placeholder, encode_percent(value));
                    }
                }
            }
        }
        self.bodies = BodyReplacements { raw: Arc::new(raw), json: Arc::new(json), form: Arc::new(form) };
    }
}

/// A header with a secret. It is not printed, and not kept in the compression tables of HTTP/2.
fn header_value(prefix: &str, secret: &SecretValue) -> Option<HeaderValue> {
    let text = Zeroizing::new(format!("{prefix}{}", secret.expose()));
    let mut value = HeaderValue::from_str(&text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Adds a binding's secrets in all the forms in which a request carries them.
fn add_redactions(redactions: &mut RedactionSet, vault: &Vault<SecretValue>, binding: &Binding) {
    for (name, _) in binding.references() {
        let Some(credential) = vault.credential(name) else { continue };
        let substitution = binding.substitutions.iter().find(|one| one.credential == name);
        let replacement = substitution.map_or("***", |one| one.placeholder.as_str());
        let value = credential.value.expose();
        redactions.add(value.as_bytes(), replacement);
        redactions.add(&escape_json(value), replacement);
        redactions.add(&encode_percent(value), replacement);
    }
    if let BindingAuth::Basic { credential } = &binding.auth {
        let value = vault.credential(credential).map(|one| one.value.expose());
        let Some(pair) = value.and_then(|value| BASE64_STANDARD.decode(value).ok().map(Zeroizing::new))
        else {
            return;
        };
        redactions.add(&pair, "***");
        let password = pair.iter().position(|byte| *byte == b':').map(|colon| &pair[colon + 1..]);
        if let Some(password) = password.filter(|password| password.len() >= MIN_REDACTED_PASSWORD) {
            redactions.add(password, "***");
        }
    }
}

fn copy(value: &str) -> Zeroizing<Vec<u8>> {
    Zeroizing::new(value.as_bytes().to_vec())
}

/// Writes a value for a path, a query or a form: everything but unreserved characters is encoded.
fn encode_percent(value: &str) -> Zeroizing<Vec<u8>> {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = Zeroizing::new(Vec::with_capacity(value.len() * 3));
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(byte);
        } else {
            encoded.extend([b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
    }
    encoded
}

/// Writes a value for the inside of a JSON string.
fn escape_json(value: &str) -> Zeroizing<Vec<u8>> {
    let mut escaped = Zeroizing::new(Vec::with_capacity(value.len() * 6));
    for byte in value.bytes() {
        match byte {
            b'"' | b'\\' => escaped.extend([b'\\', byte]),
            b'\n' => escaped.extend(b"\\n"),
            b'\r' => escaped.extend(b"\\r"),
            b'\t' => escaped.extend(b"\\t"),
            0..0x20 => escaped.extend(format!("\\u{byte:04x}").bytes()),
            _ => escaped.push(byte),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_their_surface_needs() {
        for (value, percent, json) in [
            ("plain-1.2_3~", "plain-1.2_3~", "plain-1.2_3~"),
            ("a b/c?d&e=f+g", "a%20b%2Fc%3Fd%26e%3Df%2Bg", "a b/c?d&e=f+g"),
            ("\"\\\n\t\u{1}", "%22%5C%0A%09%01", "\\\"\\\\\\n\\t\\u0001"),
            ("ü", "%C3%BC", "ü"),
        ] {
            assert_eq!(encode_percent(value).as_slice(), percent.as_bytes());
            assert_eq!(escape_json(value).as_slice(), json.as_bytes());
        }
    }
}
