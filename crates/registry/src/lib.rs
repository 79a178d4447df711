//! A client of image registries: it fetches an image as an OCI layout into a directory.
//!
//! ```text
//! RegistrySettings ── the request ──► serve_pull      a process of its own, without privileges, files or secrets;
//!   (server, CLI)  ◄─ blobs ─────────                 it alone speaks TLS and HTTP and parses a registry's documents
//! ```
//!
//! The registry is not trusted: every response is limited in size and time, and every configuration and
//! layer is compared with its expected digest and size. The code that unpacks the layout compares them
//! again. A registry cannot send the puller to private addresses, see `destinations`.

mod challenge;
mod client;
mod destinations;
mod documents;
mod download;
mod messages;
mod receive;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use backend::{BackendError, ImagePull, LocalLayers};
use oci_spec::distribution::Reference;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::Mutex;

use self::client::RegistryClient;
use self::destinations::RefusedDestination;
use self::download::ImageDownload;
use self::messages::{PullCredentials, PullMessage, PullRequest};

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
    Certificates(#[source] reqwest::Error),
    #[error("could not read this host's name servers")]
    Resolver(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("could not resolve the registry `{0}`")]
    UnknownHost(String, #[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("could not connect to the registry `{0}`")]
    Unreachable(String, #[source] reqwest::Error),
    #[error("request to the registry failed")]
    Request(#[source] reqwest::Error),
    #[error("request to the registry is refused")]
    Destination(#[source] RefusedDestination),
    #[error("registry refused access to the image")]
    Unauthorized,
    #[error("registry has no such image")]
    NotFound,
    #[error("registry answered with status {0}")]
    Status(u16),
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
    #[error("could not send the image to the process that wants it")]
    Receiver(#[source] std::io::Error),
    #[error("the process that fetches the image ended early")]
    Puller(#[source] std::io::Error),
    #[error("the process that fetches the image is broken: {0}")]
    Protocol(&'static str),
    /// What the puller reports.
    #[error("{message}")]
    Failed { message: String, hint: Option<String> },
}

impl PullError {
    fn hint(&self) -> Option<&str> {
        match self {
            Self::UnknownHost(..) | Self::Resolver(_) => {
                Some("check the name of the registry and this host's name servers (/etc/resolv.conf)")
            }
            Self::Unreachable(..) => Some(
                "check that the registry runs and that this host may reach it; see images.plain_http for one without TLS",
            ),
            Self::Certificates(_) => Some("install the package `ca-certificates`"),
            Self::Unauthorized => {
                Some("name a user who may read the image: `--username`, and the password on standard input")
            }
            Self::NotFound => Some("there is no such image or tag in the registry"),
            Self::Mismatch(_) | Self::Destination(_) => Some("do not trust this registry"),
            Self::NoRoom => Some("remove images with `coracle image rm`, then `coracle image gc`"),
            Self::Failed { hint, .. } => hint.as_deref(),
            Self::InvalidName(_)
            | Self::Request(_)
            | Self::Status(_)
            | Self::Malformed(_)
            | Self::TooLarge(_)
            | Self::Write(_)
            | Self::ResponseTimeout
            | Self::PullTimeout
            | Self::Receiver(_)
            | Self::Puller(_)
            | Self::Protocol(_) => None,
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
        puller: OwnedFd,
    ) -> Result<String, BackendError> {
        let fetched = tokio::time::timeout(PULL_TIMEOUT, self.receive_layout(pull, here, into, puller)).await;
        fetched.unwrap_or(Err(PullError::PullTimeout)).map_err(|failure| BackendError::Pull {
            image: pull.name.to_owned(),
            message: format_error_chain(&failure),
            hint: failure.hint().map(str::to_owned),
        })
    }
}

impl RegistrySettings {
    async fn receive_layout(
        &self,
        pull: ImagePull<'_>,
        here: &LocalLayers,
        into: &Path,
        puller: OwnedFd,
    ) -> Result<String, PullError> {
        let mut puller = connect_stream(puller).map_err(PullError::Puller)?;
        let credentials = pull.credentials.map(|given| PullCredentials {
            username: given.username.clone(),
            password: given.password.clone(),
        });
        let request = PullRequest {
            name: pull.name.to_owned(),
            credentials,
            plain: self.plain.clone(),
            stored_layers: here.layers.clone(),
        };
        messages::write_message(&mut puller, &request).await.map_err(PullError::Puller)?;
        receive::receive_image(&mut puller, here, into, pull.progress).await
    }
}

fn connect_stream(descriptor: OwnedFd) -> std::io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(descriptor);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Serves one pull to the other end of `connection`. This is the process that talks to the registry; it
/// ends when the receiver hangs up.
pub async fn serve_pull(connection: OwnedFd) -> std::io::Result<()> {
    let mut stream = connect_stream(connection)?;
    let request: PullRequest = messages::read_message(&mut stream).await?;
    let (mut receiver, sender) = stream.into_split();
    let sender = Mutex::new(sender);
    let outcome = tokio::select! {
        outcome = fetch_layout(request, &sender) => outcome,
        // A receiver sends nothing more; the read ends with its end.
        _ = receiver.read_u8() => return Ok(()),
    };
    let message = match outcome {
        Ok(digest) => PullMessage::Done { digest },
        Err(failure) => PullMessage::Failed {
            message: format_error_chain(&failure),
            hint: failure.hint().map(str::to_owned),
        },
    };
    messages::write_message(&mut *sender.lock().await, &message).await
}

async fn fetch_layout<W: tokio::io::AsyncWrite + Unpin + Send>(
    request: PullRequest,
    receiver: &Mutex<W>,
) -> Result<String, PullError> {
    let reference = parse_image_name(&request.name)?;
    let mut client = RegistryClient::open(&reference, &request.plain).await?;
    // Authenticates first, because the image may be private.
    client.authorize(request.credentials).await?;
    let download =
        ImageDownload { client: &client, reference: &reference, receiver, next_blob: AtomicU32::new(0) };
    download.fetch_image(&request.stored_layers).await
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
        let (receiver, puller) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let serving = tokio::spawn(serve_pull(puller.into()));
        let failed = backend::ImageRegistry::fetch_image(
            &RegistrySettings::default(),
            pull,
            &LocalLayers::default(),
            into.path(),
            receiver.into(),
        )
        .await;
        serving.await.expect("the puller does not panic").expect("the puller answers");
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
