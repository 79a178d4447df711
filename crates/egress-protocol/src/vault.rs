//! The messages about secrets.
//!
//! ```text
//! server ── SealSecret(value) ──────────► egress    the only time that a value is sent in the open
//!        ◄─ Sealed ──────────────────────           what the server stores
//!        ── CreateAuthority ────────────►           once for each sandbox with a vault
//!        ◄─ certificate, sealed key ─────
//!        ── SetVault(sealed values) ────►           for each change, and again on each new connection
//! ```
//!
//! Only egress has the key. A sealed value can be opened for the scope alone for which it was sealed.

use std::fmt;

use domain::{
    Binding, BindingAuth, BindingError, HeaderCredential, RequestMatch, Substitution, SubstitutionSurface,
};
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VaultRequest {
    /// Encrypts a value.
    SealSecret { scope: SecretScope, value: SecretValue },
    /// Makes a certificate authority for a sandbox. Its private key leaves egress only sealed.
    CreateAuthority { sandbox: String },
    /// Sets or replaces the vault of a sandbox. It applies to the next request, also on open connections.
    SetVault { sandbox: String, vault: VaultMessage },
    /// Forgets the vault of a sandbox; succeeds without one.
    RemoveVault { sandbox: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VaultReply {
    Sealed(SealedSecret),
    Authority {
        /// What programs in the sandbox are to trust, in PEM.
        certificate: String,
        sealed_key: SealedSecret,
    },
    Done,
}

/// What a sealed value belongs to. It is authenticated: a value that is stored elsewhere cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecretScope {
    Sandbox(String),
    /// A secret of an owner, for use in any of their sandboxes.
    Owner(String),
}

/// A secret in the open. It is not printed, and overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretValue(String);

/// An encrypted secret, as text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SealedSecret(String);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VaultMessage {
    pub revision: u64,
    /// The key of the sandbox's certificate authority, as `CreateAuthority` returned it.
    pub authority: SealedSecret,
    pub credentials: Vec<CredentialMessage>,
    pub bindings: Vec<BindingMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CredentialMessage {
    pub name: String,
    pub revision: u64,
    pub fits_header: bool,
    pub scope: SecretScope,
    pub sealed: SealedSecret,
}

/// A binding as text that `domain` parses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingMessage {
    pub name: String,
    pub hosts: Vec<String>,
    pub schemes: Vec<String>,
    pub methods: Vec<String>,
    pub paths: Vec<String>,
    pub auth: AuthMessage,
    pub substitutions: Vec<SubstitutionMessage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuthMessage {
    Bearer { credential: String },
    Basic { credential: String },
    ApiKey(HeaderMessage),
    CustomHeaders(Vec<HeaderMessage>),
    Passthrough,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderMessage {
    pub header: String,
    pub credential: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubstitutionMessage {
    pub credential: String,
    pub placeholder: String,
    pub surfaces: Vec<SurfaceMessage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SurfaceMessage {
    Path,
    Query,
    Header,
    Body,
}

impl SecretValue {
    pub fn new(value: String) -> Self {
        Self(value)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the value can be part of a header: visible ASCII characters, spaces and tabs, neither at its ends.
    pub fn fits_header(&self) -> bool {
        let visible = self.0.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ' || byte == b'\t');
        visible && self.0.trim() == self.0
    }
}

impl Drop for SecretValue {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl SealedSecret {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue(***)")
    }
}

impl fmt::Debug for SealedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealedSecret(***)")
    }
}

impl From<&Binding> for BindingMessage {
    fn from(binding: &Binding) -> Self {
        let request = &binding.request;
        Self {
            name: binding.name.clone(),
            hosts: request.hosts().iter().map(ToString::to_string).collect(),
            schemes: request.schemes().iter().map(ToString::to_string).collect(),
            methods: request.methods().to_vec(),
            paths: request.paths().iter().map(ToString::to_string).collect(),
            auth: (&binding.auth).into(),
            substitutions: binding.substitutions.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<BindingMessage> for Binding {
    type Error = BindingError;

    fn try_from(message: BindingMessage) -> Result<Self, BindingError> {
        let BindingMessage { name, hosts, schemes, methods, paths, auth, substitutions } = message;
        let request = RequestMatch::new(&hosts, &schemes, &methods, &paths, &[])?;
        Self::new(name, request, auth.into(), substitutions.into_iter().map(Into::into).collect())
    }
}

impl From<&BindingAuth> for AuthMessage {
    fn from(auth: &BindingAuth) -> Self {
        let header = |one: &HeaderCredential| HeaderMessage {
            header: one.header.clone(),
            credential: one.credential.clone(),
        };
        match auth {
            BindingAuth::Bearer { credential } => Self::Bearer { credential: credential.clone() },
            BindingAuth::Basic { credential } => Self::Basic { credential: credential.clone() },
            BindingAuth::ApiKey(one) => Self::ApiKey(header(one)),
            BindingAuth::CustomHeaders(all) => Self::CustomHeaders(all.iter().map(header).collect()),
            BindingAuth::Passthrough => Self::Passthrough,
        }
    }
}

impl From<AuthMessage> for BindingAuth {
    fn from(message: AuthMessage) -> Self {
        let header = |one: HeaderMessage| HeaderCredential { header: one.header, credential: one.credential };
        match message {
            AuthMessage::Bearer { credential } => Self::Bearer { credential },
            AuthMessage::Basic { credential } => Self::Basic { credential },
            AuthMessage::ApiKey(one) => Self::ApiKey(header(one)),
            AuthMessage::CustomHeaders(all) => Self::CustomHeaders(all.into_iter().map(header).collect()),
            AuthMessage::Passthrough => Self::Passthrough,
        }
    }
}

impl From<&Substitution> for SubstitutionMessage {
    fn from(substitution: &Substitution) -> Self {
        Self {
            credential: substitution.credential.clone(),
            placeholder: substitution.placeholder.clone(),
            surfaces: substitution.surfaces.iter().map(|surface| (*surface).into()).collect(),
        }
    }
}

impl From<SubstitutionMessage> for Substitution {
    fn from(message: SubstitutionMessage) -> Self {
        Self {
            credential: message.credential,
            placeholder: message.placeholder,
            surfaces: message.surfaces.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<SubstitutionSurface> for SurfaceMessage {
    fn from(surface: SubstitutionSurface) -> Self {
        match surface {
            SubstitutionSurface::Path => Self::Path,
            SubstitutionSurface::Query => Self::Query,
            SubstitutionSurface::Header => Self::Header,
            SubstitutionSurface::Body => Self::Body,
        }
    }
}

impl From<SurfaceMessage> for SubstitutionSurface {
    fn from(message: SurfaceMessage) -> Self {
        match message {
            SurfaceMessage::Path => Self::Path,
            SurfaceMessage::Query => Self::Query,
            SurfaceMessage::Header => Self::Header,
            SurfaceMessage::Body => Self::Body,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_printed() {
        let secret = SecretValue::new("canary".to_owned());
        let scope = SecretScope::Sandbox("sb".to_owned());
        let request = VaultRequest::SealSecret { scope, value: secret };
        assert!(!format!("{request:?}").contains("canary"));
        assert!(!format!("{:?}", SealedSecret::new("canary".to_owned())).contains("canary"));
    }

    #[test]
    fn values_fit_a_header_without_control_characters() {
        let fits = |text: &str| SecretValue::new(text.to_owned()).fits_header();
        assert!(fits("dXNlcjpwYXNz"));
        assert!(fits("a b\tc"));
        for text in ["a\r\nb", "a\0", " a", "a\n", "ü"] {
            assert!(!fits(text), "{text:?}");
        }
    }

    #[test]
    fn binding_survives_its_message() {
        let strings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let request = RequestMatch::new(
            &strings(&["api.example.org", "*.example.net"]),
            &strings(&["http", "https"]),
            &strings(&["GET"]),
            &strings(&["/v1/*", "/status"]),
            &[],
        );
        let header = HeaderCredential { header: "X-Key".to_owned(), credential: "key".to_owned() };
        let substitution = Substitution {
            credential: "key".to_owned(),
            placeholder: "__KEY__".to_owned(),
            surfaces: vec![SubstitutionSurface::Path, SubstitutionSurface::Body],
        };
        for auth in [
            BindingAuth::Bearer { credential: "key".to_owned() },
            BindingAuth::Basic { credential: "key".to_owned() },
            BindingAuth::ApiKey(header.clone()),
            BindingAuth::CustomHeaders(vec![header.clone()]),
            BindingAuth::Passthrough,
        ] {
            let request = request.clone().expect("a valid match");
            let binding =
                Binding::new("b".to_owned(), request, auth, vec![substitution.clone()]).expect("valid");
            assert_eq!(Binding::try_from(BindingMessage::from(&binding)), Ok(binding));
        }
    }
}
