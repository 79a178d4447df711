//! The credential vault of a sandbox, on its egress API.
//!
//! Values only come in: no response contains one, and the buffers in which a request brought them are overwritten. Bodies
//! with unknown fields are refused whole, since a misspelt condition would send a secret to more requests than was meant.

use axum::Json;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use domain::{
    Binding, BindingAuth, BindingError, ChangeSet, Credential, HeaderCredential, NewCredential, RequestMatch,
    SealedSecret, SecretText, Substitution, SubstitutionSurface, Vault, VaultChanges, VaultError,
};
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Method, Request, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use service::{SandboxRef, VaultAccessError};
use zeroize::Zeroize;

use super::problem::Problem;
use crate::kit::body::read_body;

const ROOT: &str = "/credential-vault";
const MAX_BODY_BYTES: usize = 1 << 20;
/// The only kind of source: the value is in the request.
const INLINE: &str = "inline";

/// Whether a path of the egress API belongs to the vault.
pub(super) fn is_vault_path(path: &str) -> bool {
    path.strip_prefix(ROOT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Answers a request for the vault of a sandbox.
pub(super) async fn answer_vault(
    sandbox: &SandboxRef,
    path: &str,
    request: Request<axum::body::Body>,
) -> Response {
    let rest = path.strip_prefix(ROOT).unwrap_or_default();
    let answered = match (request.method().clone(), rest) {
        (Method::GET | Method::HEAD, "") => read_part(sandbox, StateBody::new).await,
        (Method::POST, "") => create_vault(sandbox, request).await,
        (Method::PATCH, "") => change_vault(sandbox, request).await,
        (Method::DELETE, "") => delete_vault(sandbox).await,
        (_, "") => Ok(method_not_allowed("GET, POST, PATCH, DELETE")),
        (Method::GET | Method::HEAD, rest) => read_entries(sandbox, rest).await,
        (_, rest) if EntryPath::parse(rest).is_some() => Ok(method_not_allowed("GET")),
        _ => Err(VaultRefusal::new(StatusCode::NOT_FOUND, "path not found")),
    };
    answered.unwrap_or_else(VaultRefusal::into_response)
}

async fn create_vault(
    sandbox: &SandboxRef,
    request: Request<axum::body::Body>,
) -> Result<Response, VaultRefusal> {
    check_proxy(sandbox)?;
    let body: CreateBody = parse_body(request).await?;
    let credentials =
        body.credentials.into_iter().map(|one| one.into_domain().map(|new| (new.name, new.value)));
    let credentials = credentials.collect::<Result<_, _>>()?;
    let bindings = body.bindings.into_iter().map(BindingBody::into_domain).collect::<Result<_, _>>()?;
    let vault = sandbox.vault().create(credentials, bindings).await?;
    Ok((StatusCode::CREATED, Json(StateBody::new(&vault))).into_response())
}

async fn change_vault(
    sandbox: &SandboxRef,
    request: Request<axum::body::Body>,
) -> Result<Response, VaultRefusal> {
    check_proxy(sandbox)?;
    let body: ChangeBody = parse_body(request).await?;
    let changes = VaultChanges {
        expected_revision: body.expected_revision,
        credentials: body.credentials.unwrap_or_default().into_domain(CredentialBody::into_domain)?,
        bindings: body.bindings.unwrap_or_default().into_domain(BindingBody::into_domain)?,
    };
    let vault = sandbox.vault().change(changes).await?;
    Ok(Json(StateBody::new(&vault)).into_response())
}

async fn delete_vault(sandbox: &SandboxRef) -> Result<Response, VaultRefusal> {
    check_proxy(sandbox)?;
    sandbox.vault().delete().await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn read_part<T: Serialize>(
    sandbox: &SandboxRef,
    part: impl FnOnce(&Vault<SealedSecret>) -> T,
) -> Result<Response, VaultRefusal> {
    Ok(Json(part(&sandbox.vault().current().await?)).into_response())
}

/// The path of a list, or of one of its entries.
enum EntryPath<'a> {
    Credentials,
    Credential(&'a str),
    Bindings,
    Binding(&'a str),
}

impl<'a> EntryPath<'a> {
    fn parse(rest: &'a str) -> Option<Self> {
        match rest.strip_prefix('/')?.split_once('/') {
            None if rest == "/credentials" => Some(Self::Credentials),
            None if rest == "/bindings" => Some(Self::Bindings),
            Some(("credentials", name)) => Some(Self::Credential(name)),
            Some(("bindings", name)) => Some(Self::Binding(name)),
            None | Some(_) => None,
        }
    }
}

async fn read_entries(sandbox: &SandboxRef, rest: &str) -> Result<Response, VaultRefusal> {
    let no_entry = |what: &str| VaultRefusal::new(StatusCode::NOT_FOUND, &format!("{what} not found"));
    let path = EntryPath::parse(rest).ok_or_else(|| no_entry("path"))?;
    let vault = sandbox.vault().current().await?;
    let decode = |name: &str| percent_encoding::percent_decode_str(name).decode_utf8_lossy().into_owned();
    let revision = vault.revision();
    Ok(match path {
        EntryPath::Credentials => {
            let credentials = vault.credentials().map(CredentialState::new).collect();
            Json(CredentialList { revision, credentials }).into_response()
        }
        EntryPath::Bindings => {
            let bindings = vault.bindings().map(|binding| BindingState::new(revision, binding)).collect();
            Json(BindingList { revision, bindings }).into_response()
        }
        EntryPath::Credential(name) => {
            let credential = vault.credential(&decode(name)).ok_or_else(|| no_entry("credential"))?;
            Json(CredentialState::new(credential)).into_response()
        }
        EntryPath::Binding(name) => {
            let binding = vault.binding(&decode(name)).ok_or_else(|| no_entry("binding"))?;
            Json(BindingState::new(revision, binding)).into_response()
        }
    })
}

fn check_proxy(sandbox: &SandboxRef) -> Result<(), VaultRefusal> {
    match sandbox.vault().has_proxy() {
        true => Ok(()),
        false => Err(VaultAccessError::NoProxy(sandbox.id().clone()).into()),
    }
}

/// Reads a body and overwrites it.
async fn parse_body<T: DeserializeOwned>(request: Request<axum::body::Body>) -> Result<T, VaultRefusal> {
    let invalid = |message: String| VaultRefusal::new(StatusCode::BAD_REQUEST, &message);
    let read = read_body(request.into_body(), MAX_BODY_BYTES).await;
    let bytes = read.map_err(|error| match error {
        crate::kit::body::BodyError::TooLong(_) => {
            VaultRefusal::new(StatusCode::PAYLOAD_TOO_LARGE, &error.to_string())
        }
        other => invalid(other.to_string()),
    })?;
    let parsed = serde_json::from_slice(&bytes);
    overwrite(bytes);
    // The message names fields and positions; serde_json repeats strings only where it expected something else.
    parsed.map_err(|error: serde_json::Error| {
        invalid(format!("invalid credential vault request: {}", describe_json_error(&error)))
    })
}

/// Describes an error without text of the body, which may be a secret.
fn describe_json_error(error: &serde_json::Error) -> String {
    let place = format!("at line {} column {}", error.line(), error.column());
    let message = error.to_string();
    match message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next()) {
        Some(field) => format!("unknown field `{field}` {place}"),
        None if message.starts_with("missing field") => message,
        None => format!("a value of the wrong kind, or no JSON, {place}"),
    }
}

fn overwrite(bytes: Bytes) {
    // The buffer is shared only if the body came in one piece that hyper still holds; it is reused for the next request.
    if let Ok(mut own) = bytes.try_into_mut() {
        own.as_mut().zeroize();
    }
}

/// An error as text, which is how this API reports them.
struct VaultRefusal {
    status: StatusCode,
    message: String,
}

impl VaultRefusal {
    fn new(status: StatusCode, message: &str) -> Self {
        Self { status, message: message.to_owned() }
    }

    fn into_response(self) -> Response {
        (self.status, self.message).into_response()
    }
}

impl From<VaultAccessError> for VaultRefusal {
    fn from(error: VaultAccessError) -> Self {
        let status = match &error {
            VaultAccessError::NoProxy(_) => StatusCode::PRECONDITION_FAILED,
            VaultAccessError::NoVault(_) => StatusCode::NOT_FOUND,
            VaultAccessError::Exists(_) | VaultAccessError::Invalid(VaultError::Revision { .. }) => {
                StatusCode::CONFLICT
            }
            VaultAccessError::Invalid(_) => StatusCode::BAD_REQUEST,
            VaultAccessError::Service(_) => {
                let VaultAccessError::Service(error) = error else { unreachable!("it was matched") };
                let problem = Problem::from(error);
                return Self { status: problem.status, message: problem.message };
            }
        };
        Self { status, message: error.to_string() }
    }
}

impl From<VaultError> for VaultRefusal {
    fn from(error: VaultError) -> Self {
        VaultAccessError::Invalid(error).into()
    }
}

fn method_not_allowed(allowed: &'static str) -> Response {
    let mut response = (StatusCode::METHOD_NOT_ALLOWED, "method not allowed").into_response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateBody {
    #[serde(default, deserialize_with = "null_is_empty")]
    credentials: Vec<CredentialBody>,
    #[serde(default, deserialize_with = "null_is_empty")]
    bindings: Vec<BindingBody>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ChangeBody {
    expected_revision: Option<u64>,
    credentials: Option<ChangesBody<CredentialBody>>,
    bindings: Option<ChangesBody<BindingBody>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, bound = "T: Deserialize<'de>")]
struct ChangesBody<T> {
    #[serde(default, deserialize_with = "null_is_empty")]
    add: Vec<T>,
    #[serde(default, deserialize_with = "null_is_empty")]
    replace: Vec<T>,
    #[serde(default, deserialize_with = "null_is_empty")]
    delete: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CredentialBody {
    name: String,
    source: SourceBody,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceBody {
    #[serde(rename = "type")]
    kind: Option<String>,
    value: SecretField,
}

/// A string that goes into a type that is overwritten, without a copy.
struct SecretField(SecretText);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BindingBody {
    name: String,
    #[serde(rename = "match")]
    request: MatchBody,
    auth: AuthBody,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MatchBody {
    #[serde(default, deserialize_with = "null_is_empty")]
    hosts: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    schemes: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    methods: Vec<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    paths: Vec<String>,
    /// Follows from the scheme; only checked.
    #[serde(default, deserialize_with = "null_is_empty")]
    ports: Vec<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AuthBody {
    #[serde(rename = "type")]
    kind: String,
    credential: Option<String>,
    name: Option<String>,
    #[serde(default, deserialize_with = "null_is_empty")]
    headers: Vec<HeaderBody>,
    #[serde(default, deserialize_with = "null_is_empty")]
    substitutions: Vec<SubstitutionBody>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderBody {
    name: String,
    credential: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SubstitutionBody {
    credential: String,
    placeholder: String,
    #[serde(rename = "in")]
    surfaces: Vec<SurfaceBody>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SurfaceBody {
    Path,
    Query,
    Header,
    Body,
}

/// Clients send `null` for lists that are not set.
fn null_is_empty<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Vec<T>>::deserialize(deserializer)?.unwrap_or_default())
}

impl<'de> Deserialize<'de> for SecretField {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(|value| Self(SecretText::new(value)))
    }
}

impl<T> Default for ChangesBody<T> {
    fn default() -> Self {
        Self { add: Vec::new(), replace: Vec::new(), delete: Vec::new() }
    }
}

impl<T> ChangesBody<T> {
    fn into_domain<U>(
        self,
        convert: impl Fn(T) -> Result<U, VaultRefusal> + Copy,
    ) -> Result<ChangeSet<U>, VaultRefusal> {
        Ok(ChangeSet {
            add: self.add.into_iter().map(convert).collect::<Result<_, _>>()?,
            replace: self.replace.into_iter().map(convert).collect::<Result<_, _>>()?,
            delete: self.delete,
        })
    }
}

impl CredentialBody {
    fn into_domain(self) -> Result<NewCredential<SecretText>, VaultRefusal> {
        let SecretField(value) = self.source.value;
        if self.source.kind.is_some_and(|kind| kind != INLINE) {
            let message = format!("the source of credential `{}` must have the type `{INLINE}`", self.name);
            return Err(VaultRefusal::new(StatusCode::BAD_REQUEST, &message));
        }
        Ok(NewCredential { name: self.name, fits_header: value.fits_header(), value })
    }
}

impl BindingBody {
    fn into_domain(self) -> Result<Binding, VaultRefusal> {
        let Self { name, request: MatchBody { hosts, schemes, methods, paths, ports }, auth } = self;
        let named = |reason: BindingError| VaultError::Binding { name: name.clone(), reason };
        let request = RequestMatch::new(&hosts, &schemes, &methods, &paths, &ports).map_err(named)?;
        let invalid = |message: String| {
            VaultRefusal::new(StatusCode::BAD_REQUEST, &format!("binding `{name}` is not valid: {message}"))
        };
        let (auth, substitutions) = auth.into_domain().map_err(invalid)?;
        Ok(Binding::new(name.clone(), request, auth, substitutions).map_err(named)?)
    }
}

impl AuthBody {
    fn into_domain(self) -> Result<(BindingAuth, Vec<Substitution>), String> {
        let kind = self.kind;
        let needs = |value: Option<String>, field: &str| {
            value.ok_or_else(|| format!("authentication of type `{kind}` needs `{field}`"))
        };
        let header = |one: HeaderBody| HeaderCredential { header: one.name, credential: one.credential };
        let auth = match kind.as_str() {
            "bearer" => BindingAuth::Bearer { credential: needs(self.credential, "credential")? },
            "basic" => BindingAuth::Basic { credential: needs(self.credential, "credential")? },
            "apiKey" => BindingAuth::ApiKey(HeaderCredential {
                header: needs(self.name, "name")?,
                credential: needs(self.credential, "credential")?,
            }),
            "customHeaders" => BindingAuth::CustomHeaders(self.headers.into_iter().map(header).collect()),
            "passthrough" => BindingAuth::Passthrough,
            other => return Err(format!("there is no authentication of type `{other}`")),
        };
        Ok((auth, self.substitutions.into_iter().map(SubstitutionBody::into_domain).collect()))
    }
}

impl SubstitutionBody {
    fn into_domain(self) -> Substitution {
        let surface = |surface| match surface {
            SurfaceBody::Path => SubstitutionSurface::Path,
            SurfaceBody::Query => SubstitutionSurface::Query,
            SurfaceBody::Header => SubstitutionSurface::Header,
            SurfaceBody::Body => SubstitutionSurface::Body,
        };
        Substitution {
            credential: self.credential,
            placeholder: self.placeholder,
            surfaces: self.surfaces.into_iter().map(surface).collect(),
        }
    }
}

#[derive(Serialize)]
struct StateBody {
    revision: u64,
    credentials: Vec<CredentialState>,
    bindings: Vec<BindingState>,
}

#[derive(Serialize)]
struct CredentialList {
    revision: u64,
    credentials: Vec<CredentialState>,
}

#[derive(Serialize)]
struct BindingList {
    revision: u64,
    bindings: Vec<BindingState>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CredentialState {
    name: String,
    source_type: &'static str,
    revision: u64,
}

#[derive(Serialize)]
struct BindingState {
    name: String,
    /// The revision of the vault, as clients of this API expect it.
    revision: u64,
    #[serde(rename = "match")]
    request: MatchState,
    auth: AuthState,
}

#[derive(Serialize)]
struct MatchState {
    schemes: Vec<String>,
    hosts: Vec<String>,
    methods: Vec<String>,
    paths: Vec<String>,
}

#[derive(Serialize)]
struct AuthState {
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl StateBody {
    fn new(vault: &Vault<SealedSecret>) -> Self {
        let revision = vault.revision();
        Self {
            revision,
            credentials: vault.credentials().map(CredentialState::new).collect(),
            bindings: vault.bindings().map(|binding| BindingState::new(revision, binding)).collect(),
        }
    }
}

impl CredentialState {
    fn new(credential: &Credential<SealedSecret>) -> Self {
        Self { name: credential.name.clone(), source_type: INLINE, revision: credential.revision }
    }
}

impl BindingState {
    fn new(revision: u64, binding: &Binding) -> Self {
        let request = &binding.request;
        let (kind, name) = match &binding.auth {
            BindingAuth::Bearer { .. } => ("bearer", None),
            BindingAuth::Basic { .. } => ("basic", None),
            BindingAuth::ApiKey(one) => ("apiKey", Some(one.header.clone())),
            BindingAuth::CustomHeaders(_) => ("customHeaders", None),
            BindingAuth::Passthrough => ("passthrough", None),
        };
        Self {
            name: binding.name.clone(),
            revision,
            request: MatchState {
                schemes: request.schemes().iter().map(ToString::to_string).collect(),
                hosts: request.hosts().iter().map(ToString::to_string).collect(),
                methods: request.methods().to_vec(),
                paths: request.paths().iter().map(ToString::to_string).collect(),
            },
            auth: AuthState { kind, name },
        }
    }
}
