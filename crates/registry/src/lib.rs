//! A client of image registries: it fetches an image as an OCI layout into a directory.
//!
//! The registry is not trusted: every configuration and layer is limited in size, and compared with
//! its expected digest and size while it is written. The code that unpacks the layout compares them
//! again.
//!
//! Tokens, manifests and the text of errors are the exception: `oci-client` reads these responses
//! into memory completely and gives no access to their length before. They are limited only by time,
//! and manifests also by their length afterwards. So a malicious registry can make this process use
//! much memory; that is one reason why sandboxes can only pull from registries that the operator
//! lists.

mod documents;
mod download;

use std::path::Path;
use std::time::Duration;

use backend::{BackendError, ImagePull, LocalLayers};
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};

use self::download::ImageDownload;

/// Time limits for connecting to a registry, and between two pieces of a response.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a response that is read as a whole: a token or a manifest.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a whole pull.
const PULL_TIMEOUT: Duration = Duration::from_secs(3600);

/// The registry settings of this server.
#[derive(Clone, Debug, Default)]
pub struct RegistrySettings {
    /// Registries from which an image may be pulled when a sandbox needs it, as `host[:port]`.
    pub allowed: Vec<String>,
    /// Registries that are contacted without TLS, in addition to those on this host.
    pub plain: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
enum PullError {
    #[error("`{0}` is not a valid image name")]
    InvalidName(String),
    #[error("could not load the certificates of this host")]
    Certificates(#[source] oci_client::errors::OciDistributionError),
    #[error("could not resolve the registry `{0}`")]
    UnknownHost(String, #[source] Box<oci_client::errors::OciDistributionError>),
    #[error("could not connect to the registry `{0}`")]
    Unreachable(String, #[source] Box<oci_client::errors::OciDistributionError>),
    #[error("registry rejected the request")]
    Registry(#[source] Box<oci_client::errors::OciDistributionError>),
    #[error("content does not match digest `{0}`")]
    Mismatch(String),
    #[error("image is malformed: {0}")]
    Malformed(String),
    #[error("image is larger than {0}")]
    TooLarge(&'static str),
    #[error("not enough disk space for the image")]
    NoRoom,
    #[error("could not write the downloaded image")]
    Write(#[source] std::io::Error),
    #[error("registry took more than a minute for one response")]
    ResponseTimeout,
    #[error("pull took more than an hour")]
    PullTimeout,
}

impl PullError {
    /// Converts a registry error into a connection error if the registry was never reached.
    fn into_connection_error(self, registry: &str) -> Self {
        use oci_client::errors::OciDistributionError as Error;
        match self {
            Self::Registry(error) => match &*error {
                Error::RequestError(request) if request.is_connect() && is_name_resolution_error(request) => {
                    Self::UnknownHost(registry.to_owned(), error)
                }
                Error::RequestError(request) if request.is_connect() => {
                    Self::Unreachable(registry.to_owned(), error)
                }
                _ => Self::Registry(error),
            },
            other => other,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        use oci_client::errors::OciDistributionError as Error;
        match self {
            Self::UnknownHost(..) => {
                Some("check the name of the registry and this host's name servers (/etc/resolv.conf)")
            }
            Self::Unreachable(..) => Some(
                "check that the registry runs and that this host may reach it; see images.plain_http for one without TLS",
            ),
            Self::Certificates(_) => Some("install the package `ca-certificates`"),
            Self::Registry(error) => match **error {
                Error::AuthenticationFailure(_) | Error::UnauthorizedError { .. } => Some(
                    "name a user who may read the image: `--username`, and the password on standard input",
                ),
                Error::ImageManifestNotFoundError(_) => Some("there is no such image or tag in the registry"),
                _ => None,
            },
            Self::Mismatch(_) => Some("do not trust this registry"),
            Self::NoRoom => Some("remove images with `coracle image rm`, then `coracle image gc`"),
            _ => None,
        }
    }
}

#[async_trait::async_trait]
impl backend::ImageRegistry for RegistrySettings {
    fn allows_pull(&self, name: &str) -> bool {
        parse_image_name(name)
            .is_ok_and(|reference| self.allowed.iter().any(|host| host == reference.registry()))
    }

    async fn fetch_image(
        &self,
        pull: ImagePull<'_>,
        here: &LocalLayers,
        into: &Path,
    ) -> Result<String, BackendError> {
        let fetched = tokio::time::timeout(PULL_TIMEOUT, self.fetch_layout(pull, here, into)).await;
        fetched.unwrap_or(Err(PullError::PullTimeout)).map_err(|failure| BackendError::Pull {
            image: pull.name.to_owned(),
            message: format_error_chain(&failure),
            hint: failure.hint().map(str::to_owned),
        })
    }
}

impl RegistrySettings {
    async fn fetch_layout(
        &self,
        pull: ImagePull<'_>,
        here: &LocalLayers,
        into: &Path,
    ) -> Result<String, PullError> {
        let reference = parse_image_name(pull.name)?;
        let auth = match pull.credentials {
            Some(given) => RegistryAuth::Basic(given.username.clone(), given.password.clone()),
            None => RegistryAuth::Anonymous,
        };
        let client = self.build_client(&reference)?;
        let download = ImageDownload { client: &client, reference: &reference, auth: &auth, into };
        // Authenticates first, because the image may be private.
        let asked = with_response_timeout(client.auth(&reference, &auth, RegistryOperation::Pull)).await;
        let fetched = match asked {
            Ok(_token) => download.fetch_image(here, pull.progress).await,
            Err(failure) => Err(failure),
        };
        fetched.map_err(|failure| failure.into_connection_error(reference.resolve_registry()))
    }

    fn build_client(&self, reference: &Reference) -> Result<Client, PullError> {
        // Another part of this process may have installed a provider already, which works as well.
        rustls::crypto::ring::default_provider().install_default().unwrap_or_default();
        let host = reference.resolve_registry().to_owned();
        let plain = is_loopback(&host) || self.plain.contains(&host);
        let protocol = if plain { ClientProtocol::HttpsExcept(vec![host]) } else { ClientProtocol::Https };
        let config = ClientConfig {
            protocol,
            connect_timeout: Some(CONNECT_TIMEOUT),
            read_timeout: Some(READ_TIMEOUT),
            user_agent: concat!("coracle/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        Client::try_from(config).map_err(PullError::Certificates)
    }
}

/// Waits for a response that the client reads as a whole, with a time limit.
async fn with_response_timeout<T>(
    answer: impl Future<Output = Result<T, oci_client::errors::OciDistributionError>>,
) -> Result<T, PullError> {
    match tokio::time::timeout(RESPONSE_TIMEOUT, answer).await {
        Ok(answer) => answer.map_err(|error| PullError::Registry(Box::new(error))),
        Err(_elapsed) => Err(PullError::ResponseTimeout),
    }
}

/// Whether a connection failed because the host name did not resolve. The client has no error type
/// for it.
fn is_name_resolution_error(error: &dyn std::error::Error) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.to_string().contains("dns error") {
            return true;
        }
        cause = error.source();
    }
    false
}

fn parse_image_name(name: &str) -> Result<Reference, PullError> {
    name.parse().map_err(|_unparsed| PullError::InvalidName(name.chars().take(200).collect()))
}

/// Whether a registry is on this host, so that its traffic cannot be intercepted.
fn is_loopback(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Formats an error and its causes in one line of limited length. Parts of the text come from the
/// registry.
fn format_error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text.chars().take(1000).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn failed_pull(name: &str) -> (String, Option<String>) {
        let into = tempfile::tempdir().expect("the temporary directory can be written");
        let progress = |_: backend::PullProgress| {};
        let pull = ImagePull { name, credentials: None, progress: &progress };
        let failed = backend::ImageRegistry::fetch_image(
            &RegistrySettings::default(),
            pull,
            &LocalLayers::default(),
            into.path(),
        )
        .await;
        match failed.expect_err("there is no such registry") {
            BackendError::Pull { message, hint, .. } => (message, hint),
            other => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn unreachable_registry_is_not_reported_as_a_rejection() {
        // Nothing listens on the port that was just released.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
        let address = listener.local_addr().expect("the listener is bound");
        drop(listener);
        let (message, hint) = failed_pull(&format!("{address}/library/x:1")).await;
        assert!(message.starts_with(&format!("could not connect to the registry `{address}`")), "{message}");
        assert!(!message.contains("registry rejected") && hint.is_some(), "{message}");
        // The name is reserved for names that do not exist (RFC 6761).
        let (message, hint) = failed_pull("registry.invalid/library/x:1").await;
        assert!(message.starts_with("could not resolve the registry `registry.invalid`"), "{message}");
        assert!(!message.contains("rejected") && hint.is_some(), "{message}");
    }

    #[test]
    fn loopback_registries_are_contacted_without_tls() {
        for (registry, plain) in [
            ("localhost:5000", true),
            ("127.0.0.1", true),
            ("127.8.9.1:80", true),
            ("[::1]:5000", true),
            ("localhost.example.com", false),
            ("127.0.0.1.example.com:5000", false),
            ("10.0.0.1:5000", false),
        ] {
            assert_eq!(is_loopback(registry), plain, "{registry}");
        }
    }

    #[test]
    fn only_listed_registries_are_allowed() {
        use backend::ImageRegistry;
        let registries = RegistrySettings { allowed: vec!["docker.io".to_owned()], plain: Vec::new() };
        for (name, allowed) in [
            ("python:3.12", true),
            ("docker.io/library/python", true),
            ("evil.example.com/docker.io/python", false),
            ("169.254.169.254/latest", false),
            ("not an image", false),
        ] {
            assert_eq!(registries.allows_pull(name), allowed, "{name}");
        }
    }
}
