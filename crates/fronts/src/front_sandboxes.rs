//! Sandboxes that are made for the clients of one front without its own API: `coracle create --guest` makes them, and so
//! does a server that serves a single sandbox. The rows of `registry.rs` say how.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use domain::{Bytes, MilliCpus, NetworkAccess, Owner, ResourceLimits, SandboxKey};
use http::request::Parts;
use serde::{Deserialize, Serialize};
use service::{
    AcquiredSandbox, CreateSandboxRequest, NAME_KEY_SPACE, Sandbox, SandboxRef, Service, ServiceError,
};

use crate::front_settings::SettingValues;
use crate::registry::{FRONTS, Front};
use crate::settings::HttpSettings;

/// A sandbox for the clients of a front. What is left out is decided by the front or by the server.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct FrontSandboxRequest {
    pub image: Option<String>,
    pub network: Option<RequestedNetwork>,
    pub memory_bytes: Option<u64>,
    pub cpu_millis: Option<u32>,
    pub pids: Option<u32>,
    pub disk_bytes: Option<u64>,
    pub env: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// Zero means never.
    pub timeout_seconds: Option<u64>,
    /// Zero means never.
    pub idle_timeout_seconds: Option<u64>,
}

/// The network that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestedNetwork {
    Off,
    On,
    Auto,
    /// With the operator's policy.
    Filtered,
}

impl From<RequestedNetwork> for NetworkAccess {
    fn from(network: RequestedNetwork) -> Self {
        match network {
            RequestedNetwork::Off => Self::Off,
            RequestedNetwork::On => Self::On,
            RequestedNetwork::Auto => Self::Auto,
            RequestedNetwork::Filtered => Self::Filtered,
        }
    }
}

/// Without the values of variables, which may be secrets.
impl fmt::Debug for FrontSandboxRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { image, network, env, .. } = self;
        let names: Vec<_> = env.keys().collect();
        f.debug_struct("FrontSandboxRequest")
            .field("image", image)
            .field("network", network)
            .field("env", &names)
            .finish_non_exhaustive()
    }
}

impl FrontSandboxRequest {
    pub(crate) fn limits(&self) -> ResourceLimits {
        ResourceLimits {
            memory: self.memory_bytes.map(Bytes),
            cpus: self.cpu_millis.map(MilliCpus),
            pids: self.pids,
            disk: self.disk_bytes.map(Bytes),
        }
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout_seconds.map(Duration::from_secs)
    }

    pub(crate) fn idle_timeout(&self) -> Option<Duration> {
        self.idle_timeout_seconds.map(Duration::from_secs)
    }
}

/// A request or a variable that a front does not accept. The message contains no value that may be a secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FrontSandboxError {
    pub message: String,
    /// How to resolve it.
    pub hint: Option<&'static str>,
}

/// How a front makes and addresses such sandboxes.
pub(crate) struct FrontSandboxes {
    /// Turns a request into one of the core.
    pub(crate) plan_sandbox: PlanSandbox,
    /// The address of the API of a sandbox, as the client of a request reaches it.
    pub(crate) sandbox_url: fn(&Service, &HttpSettings, &Parts, &SandboxRef) -> Option<String>,
    /// Serves the sandbox of a key, and nothing else.
    pub(crate) root_routes: fn(Service, Arc<HttpSettings>, SandboxKey) -> RootRoutes,
    /// The variables of the environment that configure a server of one sandbox.
    pub(crate) variable_names: &'static [&'static str],
    /// Decides what such variables mean: those of the environment, and those that were given by name.
    pub(crate) read_variables: ReadVariables,
}

pub(crate) type PlanSandbox =
    fn(&Service, &HttpSettings, &FrontSandboxRequest) -> Result<CreateSandboxRequest, FrontSandboxError>;

type ReadVariables =
    fn(BTreeMap<String, String>, BTreeMap<String, String>) -> Result<RootVariables, FrontSandboxError>;

/// The routes of a server of one sandbox.
pub(crate) struct RootRoutes {
    pub(crate) router: Router,
    pub(crate) access: RootAccess,
}

/// Who may use a server of one sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootAccess {
    /// Everyone who can connect, so only this machine may.
    Open,
    /// Callers with a credential, which the front checks.
    Credential,
}

/// What the variables of a server of one sandbox mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootVariables {
    /// Settings in the section of the front.
    pub settings: SettingValues,
    /// Variables of the sandbox.
    pub env: BTreeMap<String, String>,
    /// Variables that have no effect, and why.
    pub ignored: Vec<(String, &'static str)>,
    pub access: Option<RootAccess>,
}

/// The one sandbox that a server serves at its root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootSandbox {
    /// The name of the front whose API is served.
    pub front: String,
}

impl RootSandbox {
    /// The key of the sandbox. Its successor after a crash has the same.
    pub(crate) fn key(&self) -> SandboxKey {
        SandboxKey::new(&Owner::operator(), NAME_KEY_SPACE, &self.front).expect("names of fronts are short")
    }

    pub(crate) fn registry_row(&self) -> &'static Front {
        let row = FRONTS.iter().find(|front| front.name == self.front);
        row.expect("the command that starts the server names a front that exists")
    }

    pub(crate) fn front(&self) -> &'static FrontSandboxes {
        self.registry_row().sandboxes.expect("the command that starts the server names such a front")
    }
}

/// Makes the sandbox that a server serves at its root, or finds it after a restart of the server.
pub async fn open_root_sandbox(
    service: &Service,
    settings: &HttpSettings,
    root: &RootSandbox,
    request: &FrontSandboxRequest,
) -> Result<Sandbox, RootSandboxError> {
    let create = (root.front().plan_sandbox)(service, settings, request)?;
    let AcquiredSandbox { sandbox, .. } = service.acquire(&root.key(), create).await?;
    Ok(sandbox)
}

/// Why a server of one sandbox could not make it.
#[derive(Debug, thiserror::Error)]
pub enum RootSandboxError {
    #[error(transparent)]
    Request(#[from] FrontSandboxError),
    #[error(transparent)]
    Service(#[from] ServiceError),
}

impl RootSandboxError {
    /// How to resolve it.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Request(error) => error.hint,
            Self::Service(error) => error.hint(),
        }
    }
}

/// The fronts that can make sandboxes for their clients.
pub(crate) fn fronts_with_sandboxes() -> impl Iterator<Item = (&'static str, &'static FrontSandboxes)> {
    FRONTS.iter().filter_map(|front| Some((front.name, front.sandboxes?)))
}

/// The names that `coracle create --guest NAME` accepts. Only fronts that can make a sandbox are listed, because the others
/// have no user and no directories to prepare one for.
pub fn sandbox_guests() -> impl Iterator<Item = &'static str> {
    fronts_with_sandboxes().map(|(name, _)| name)
}

pub(crate) fn find_front_sandboxes(name: &str) -> Option<&'static FrontSandboxes> {
    fronts_with_sandboxes().find(|(front, _)| *front == name).map(|(_, sandboxes)| sandboxes)
}

/// Reads the variables that configure a server of one sandbox. `environment` is that of the caller, of which only the
/// variables of the front are read; `given` are those that the caller named, and they override the environment.
pub fn read_root_variables(
    front: &str,
    environment: impl Iterator<Item = (OsString, OsString)>,
    given: BTreeMap<String, String>,
) -> Result<RootVariables, FrontSandboxError> {
    let sandboxes = find_front_sandboxes(front).ok_or_else(|| FrontSandboxError {
        message: format!("`{front}` is not a front that serves one sandbox"),
        hint: None,
    })?;
    let mut known = BTreeMap::new();
    for (name, value) in environment {
        let Ok(name) = name.into_string() else { continue };
        if !sandboxes.variable_names.contains(&name.as_str()) || given.contains_key(&name) {
            continue;
        }
        // Without it the server might be open to more callers than the user wants, so it is not left out.
        let value = value.into_string().map_err(|_secret| FrontSandboxError {
            message: format!("the value of `{name}` in the environment is not UTF-8"),
            hint: Some("unset the variable, or give it another value"),
        })?;
        known.insert(name, value);
    }
    (sandboxes.read_variables)(known, given)
}

#[cfg(all(test, feature = "aio"))]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn read(
        environment: &[(&str, &[u8])],
        given: &[(&str, &str)],
    ) -> Result<RootVariables, FrontSandboxError> {
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let environment = environment.iter().map(|(name, value)| (text(name.as_bytes()), text(value)));
        let given = given.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        read_root_variables("aio", environment, given)
    }

    #[test]
    fn credential_that_is_empty_or_not_text_is_refused_without_its_value() {
        for name in ["SANDBOX_API_KEY", "JWT_PUBLIC_KEY"] {
            for value in [&b""[..], b"s3cret\xff"] {
                let error = read(&[(name, value)], &[]).unwrap_err();
                assert!(error.message.contains(name) && error.hint.is_some(), "{error}");
                assert!(!error.message.contains("s3cret"), "{error}");
                let replaced = read(&[(name, value)], &[(name, "given")]).unwrap();
                assert_eq!(replaced.access, Some(RootAccess::Credential));
                let error = read(&[], &[(name, "")]).unwrap_err();
                assert!(error.message.contains(name), "{error}");
            }
        }
    }

    #[test]
    fn other_variables_may_be_empty_and_foreign_ones_anything() {
        let read = read(&[("WORKSPACE", b""), ("EDITOR", b"\xff"), ("TZ", b"UTC")], &[]).unwrap();
        assert_eq!(read.env, BTreeMap::from([("TZ".to_owned(), "UTC".to_owned())]));
        assert_eq!(read.access, Some(RootAccess::Open));
    }
}
