//! A binding: which requests get a credential, and where in them it goes.

use crate::network_policy::{DomainNameError, NetworkPolicy};
use crate::vault::VaultError;
use crate::vault::request_match::RequestMatch;

/// The largest number of hosts, methods, paths, headers or substitutions of a binding.
pub(super) const MAX_BINDING_PARTS: usize = 64;
/// Shorter placeholders would be found by chance.
const MIN_PLACEHOLDER_BYTES: usize = 4;
const MAX_PLACEHOLDER_BYTES: usize = 256;
/// Headers that frame the message or name its target, and those that claim where it comes from.
const RESERVED_HEADERS: [&str; 17] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub name: String,
    pub request: RequestMatch,
    pub auth: BindingAuth,
    pub substitutions: Vec<Substitution>,
}

/// The headers that a matching request gets. They replace what the client sent under the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindingAuth {
    /// `Authorization: Bearer SECRET`.
    Bearer { credential: String },
    /// `Authorization: Basic SECRET`; the secret is `user:password` in base64.
    Basic { credential: String },
    /// One header with the secret as its value.
    ApiKey(HeaderCredential),
    /// Some such headers.
    CustomHeaders(Vec<HeaderCredential>),
    /// No header; the binding has substitutions, or excepts requests from a wider binding.
    Passthrough,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderCredential {
    pub header: String,
    pub credential: String,
}

/// A text in a request that is replaced by a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Substitution {
    pub credential: String,
    pub placeholder: String,
    pub surfaces: Vec<SubstitutionSurface>,
}

/// The part of a request in which a placeholder is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubstitutionSurface {
    Path,
    Query,
    Header,
    Body,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindingError {
    #[error("it has no host")]
    NoHost,
    #[error("host `{host}` is not a domain name such as `api.example.org` or `*.example.org`: {reason}")]
    Host { host: String, reason: DomainNameError },
    #[error("host `{0}` has only one part")]
    SingleLabel(String),
    #[error("scheme `{0}` is neither `https` nor `http`")]
    Scheme(String),
    #[error("port {0} is neither 80 nor 443")]
    Port(u32),
    #[error("`{0}` is not a method")]
    Method(String),
    #[error("path `{0}` must begin with `/` and may have `*` only at its end")]
    Path(String),
    #[error("it has more than {MAX_BINDING_PARTS} {0}")]
    TooMany(&'static str),
    #[error("authentication by headers has no header")]
    NoHeader,
    #[error("`{0}` is not the name of a header")]
    HeaderName(String),
    #[error("header `{0}` cannot be set by a binding")]
    ReservedHeader(String),
    #[error("header `{0}` is named twice")]
    DuplicateHeader(String),
    #[error(
        "placeholder `{0}` must have {MIN_PLACEHOLDER_BYTES} to {MAX_PLACEHOLDER_BYTES} printable ASCII characters without spaces"
    )]
    Placeholder(String),
    #[error("placeholder `{0}` contains or is contained in another placeholder of the binding")]
    OverlappingPlaceholders(String),
    #[error("the substitution of placeholder `{0}` names no part of a request")]
    NoSurface(String),
}

impl Binding {
    /// Checks everything but what refers to other entries of the vault.
    pub fn new(
        name: String,
        request: RequestMatch,
        auth: BindingAuth,
        substitutions: Vec<Substitution>,
    ) -> Result<Self, BindingError> {
        check_auth(&auth)?;
        check_substitutions(&substitutions)?;
        Ok(Self { name, request, auth, substitutions })
    }

    /// The credentials that this binding uses, each with whether its value becomes part of a header.
    pub fn references(&self) -> impl Iterator<Item = (&str, bool)> {
        let headers: Vec<&str> = match &self.auth {
            BindingAuth::Bearer { credential } | BindingAuth::Basic { credential } => vec![credential],
            BindingAuth::ApiKey(header) => vec![&header.credential],
            BindingAuth::CustomHeaders(headers) => {
                headers.iter().map(|one| one.credential.as_str()).collect()
            }
            BindingAuth::Passthrough => Vec::new(),
        };
        let substituted = self.substitutions.iter().map(|substitution| {
            (substitution.credential.as_str(), substitution.covers(SubstitutionSurface::Header))
        });
        headers.into_iter().map(|name| (name, true)).chain(substituted)
    }

    pub(super) fn check_policy(&self, policy: &NetworkPolicy) -> Result<(), VaultError> {
        match self.request.host_not_allowed(policy) {
            Some(host) => {
                Err(VaultError::HostNotAllowed { binding: self.name.clone(), host: host.to_string() })
            }
            None => Ok(()),
        }
    }
}

impl Substitution {
    pub fn covers(&self, surface: SubstitutionSurface) -> bool {
        self.surfaces.contains(&surface)
    }
}

fn check_auth(auth: &BindingAuth) -> Result<(), BindingError> {
    let headers = match auth {
        BindingAuth::Bearer { .. } | BindingAuth::Basic { .. } | BindingAuth::Passthrough => return Ok(()),
        BindingAuth::ApiKey(header) => std::slice::from_ref(header),
        BindingAuth::CustomHeaders(headers) if headers.is_empty() => return Err(BindingError::NoHeader),
        BindingAuth::CustomHeaders(headers) => headers,
    };
    check_count(headers, "headers")?;
    for (index, header) in headers.iter().enumerate() {
        check_header_name(&header.header)?;
        if headers[..index].iter().any(|other| other.header.eq_ignore_ascii_case(&header.header)) {
            return Err(BindingError::DuplicateHeader(header.header.clone()));
        }
    }
    Ok(())
}

/// Checks that a header exists and may be set by others than the client.
pub fn check_header_name(name: &str) -> Result<(), BindingError> {
    if name.is_empty() || !name.bytes().all(is_token_byte) {
        return Err(BindingError::HeaderName(name.to_owned()));
    }
    if RESERVED_HEADERS.iter().any(|reserved| name.eq_ignore_ascii_case(reserved)) {
        return Err(BindingError::ReservedHeader(name.to_owned()));
    }
    Ok(())
}

/// The characters of header names and methods. See RFC 9110, section 5.6.2.
pub(super) fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

pub(super) fn check_count<T>(parts: &[T], what: &'static str) -> Result<(), BindingError> {
    if parts.len() > MAX_BINDING_PARTS { Err(BindingError::TooMany(what)) } else { Ok(()) }
}

fn check_substitutions(substitutions: &[Substitution]) -> Result<(), BindingError> {
    check_count(substitutions, "substitutions")?;
    for (index, substitution) in substitutions.iter().enumerate() {
        let placeholder = &substitution.placeholder;
        let length = (MIN_PLACEHOLDER_BYTES..=MAX_PLACEHOLDER_BYTES).contains(&placeholder.len());
        if !length || !placeholder.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(BindingError::Placeholder(placeholder.clone()));
        }
        if substitution.surfaces.is_empty() {
            return Err(BindingError::NoSurface(placeholder.clone()));
        }
        // One that is part of another would make the result depend on the order.
        let overlaps = |other: &Substitution| {
            other.placeholder.contains(placeholder.as_str()) || placeholder.contains(&other.placeholder)
        };
        if substitutions[..index].iter().any(overlaps) {
            return Err(BindingError::OverlappingPlaceholders(placeholder.clone()));
        }
    }
    Ok(())
}
