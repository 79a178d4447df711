//! The HTTP side of a registry: a token, documents and blobs. See the OCI distribution specification.
//!
//! Every response is bounded in length and time, and no content of a response becomes part of an error.

use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::LookupIpStrategy;
use oci_spec::distribution::Reference;
use reqwest::header::{ACCEPT, WWW_AUTHENTICATE};
use reqwest::{RequestBuilder, Response, StatusCode, Url};
use serde::Deserialize;

use crate::challenge::AuthChallenge;
use crate::destinations::{self, DestinationRule, GuardedResolver, PrivateAddresses, ReferenceKind};
use crate::messages::PullCredentials;
use crate::{PullError, is_loopback};

/// Time limits for connecting to a registry, and between two pieces of a response.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a response that is read as a whole: a token or a manifest.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_TOKEN_BYTES: usize = 1 << 20;

const ACCEPTED_MEDIA_TYPES: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";

/// The variables that name a proxy. With one, the proxy resolves names and decides what can be reached.
const PROXY_VARIABLES: [&str; 3] = ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];

/// A registry and one repository in it.
pub(crate) struct RegistryClient {
    http: reqwest::Client,
    base: Url,
    repository: String,
    rule: DestinationRule,
    authorization: Authorization,
}

enum Authorization {
    None,
    Token(String),
    Password(PullCredentials),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
struct TokenResponse {
    token: Option<String>,
    access_token: Option<String>,
}

impl RegistryClient {
    /// Prepares a client. `plain` lists registries without TLS, in addition to those on this host.
    pub(crate) async fn open(reference: &Reference, plain: &[String]) -> Result<Self, PullError> {
        // Another part of this process may have installed a provider already, which works as well.
        rustls::crypto::ring::default_provider().install_default().unwrap_or_default();
        let host = reference.resolve_registry();
        let scheme = if is_loopback(host) || plain.iter().any(|one| one == host) { "http" } else { "https" };
        let invalid = |_unparsed| PullError::InvalidName(host.to_owned());
        let base: Url = format!("{scheme}://{host}/v2/").parse().map_err(invalid)?;
        let mut resolver =
            TokioResolver::builder_tokio().map_err(|error| PullError::Resolver(error.into()))?;
        resolver.options_mut().ip_strategy = LookupIpStrategy::Ipv6AndIpv4;
        let resolver = Arc::new(resolver.build().map_err(|error| PullError::Resolver(error.into()))?);
        let private = find_private_addresses(&base, host, &resolver).await?;
        let rule = DestinationRule::new(base.clone(), private);
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .user_agent(concat!("coracle/", env!("CARGO_PKG_VERSION")))
            .redirect(rule.clone().redirect_policy())
            .dns_resolver(GuardedResolver { resolver, rule: rule.clone() })
            .build()
            .map_err(PullError::Certificates)?;
        let repository = reference.repository().to_owned();
        Ok(Self { http, base, repository, rule, authorization: Authorization::None })
    }

    /// Asks how the registry wants to be convinced, and gets a token if it wants one.
    pub(crate) async fn authorize(&mut self, credentials: Option<PullCredentials>) -> Result<(), PullError> {
        let response = self.send(self.http.get(self.base.clone())).await?;
        let headers = response.headers().get_all(WWW_AUTHENTICATE).into_iter();
        let challenge = headers.filter_map(|header| header.to_str().ok()).find_map(AuthChallenge::parse);
        self.authorization = match (challenge, credentials) {
            (Some(AuthChallenge::Bearer { realm, service }), credentials) => {
                Authorization::Token(self.fetch_token(&realm, service.as_deref(), credentials).await?)
            }
            (Some(AuthChallenge::Basic), Some(credentials)) => Authorization::Password(credentials),
            (Some(AuthChallenge::Basic) | None, _) => Authorization::None,
        };
        Ok(())
    }

    async fn fetch_token(
        &self,
        realm: &str,
        service: Option<&str>,
        credentials: Option<PullCredentials>,
    ) -> Result<String, PullError> {
        let malformed = || PullError::Malformed("the registry names no address for a token".to_owned());
        let mut url: Url = realm.parse().map_err(|_unparsed| malformed())?;
        self.rule.check(&url, ReferenceKind::Token).map_err(PullError::Destination)?;
        let scope = format!("repository:{}:pull", self.repository);
        url.query_pairs_mut()
            .append_pair("scope", &scope)
            .extend_pairs(service.map(|name| ("service", name)));
        let mut request = self.http.get(url);
        if let Some(PullCredentials { username, password }) = credentials {
            request = request.basic_auth(username, Some(password));
        }
        let response = check_status(self.send(request).await?)?;
        let text = with_response_timeout(read_whole(response, MAX_TOKEN_BYTES, "1 MiB of token")).await?;
        let answer: TokenResponse = serde_json::from_slice(&text)
            .map_err(|_unparsed| PullError::Malformed("the registry sent no token".to_owned()))?;
        let none = || PullError::Malformed("the registry sent no token".to_owned());
        answer.token.or(answer.access_token).ok_or_else(none)
    }

    /// Fetches a manifest or an index by tag or digest.
    pub(crate) async fn fetch_document(&self, reference: &str, most: usize) -> Result<Vec<u8>, PullError> {
        let request = self.http.get(self.url("manifests", reference)?).header(ACCEPT, ACCEPTED_MEDIA_TYPES);
        let response = check_status(self.send(self.authorized(request)).await?)?;
        with_response_timeout(read_whole(response, most, "8 MiB of manifest")).await
    }

    /// Opens a blob, whose content follows.
    pub(crate) async fn open_blob(&self, digest: &str) -> Result<Response, PullError> {
        let request = self.http.get(self.url("blobs", digest)?);
        check_status(self.send(self.authorized(request)).await?)
    }

    fn url(&self, kind: &str, name: &str) -> Result<Url, PullError> {
        let path = format!("{}/{kind}/{name}", self.repository);
        self.base.join(&path).map_err(|_unparsed| PullError::InvalidName(path))
    }

    fn authorized(&self, request: RequestBuilder) -> RequestBuilder {
        match &self.authorization {
            Authorization::None => request,
            Authorization::Token(token) => request.bearer_auth(token),
            Authorization::Password(PullCredentials { username, password }) => {
                request.basic_auth(username, Some(password))
            }
        }
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, PullError> {
        let host = self.base.host_str().unwrap_or_default();
        let host = self.base.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        with_response_timeout(async {
            request.send().await.map_err(|error| {
                // The address may contain a token.
                let error = error.without_url();
                if error.is_connect() {
                    PullError::Unreachable(host, error)
                } else {
                    PullError::Request(error)
                }
            })
        })
        .await
    }
}

/// Whether the registry has a private address itself. A name that does not resolve is an error here.
async fn find_private_addresses(
    base: &Url,
    host: &str,
    resolver: &TokioResolver,
) -> Result<PrivateAddresses, PullError> {
    let proxied = |name: &str| {
        [name.to_owned(), name.to_ascii_lowercase()].iter().any(|name| std::env::var_os(name).is_some())
    };
    let private = if is_loopback(host) || PROXY_VARIABLES.into_iter().any(proxied) {
        true
    } else if let Some(address) = destinations::host_address(base) {
        destinations::is_private(address)
    } else {
        let found = resolver.lookup_ip(base.host_str().unwrap_or_default()).await;
        let found = found.map_err(|error| PullError::UnknownHost(host.to_owned(), error.into()))?;
        found.iter().any(destinations::is_private)
    };
    Ok(if private { PrivateAddresses::Allowed } else { PrivateAddresses::Refused })
}

fn check_status(response: Response) -> Result<Response, PullError> {
    match response.status() {
        status if status.is_success() => Ok(response),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(PullError::Unauthorized),
        StatusCode::NOT_FOUND => Err(PullError::NotFound),
        status => Err(PullError::Status(status.as_u16())),
    }
}

/// Reads a response of a bounded length.
async fn read_whole(
    mut response: Response,
    most: usize,
    too_large: &'static str,
) -> Result<Vec<u8>, PullError> {
    let mut content = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(|error| PullError::Request(error.without_url()))? {
        if content.len() + piece.len() > most {
            return Err(PullError::TooLarge(too_large));
        }
        content.extend_from_slice(&piece);
    }
    Ok(content)
}

/// Waits for a response with a time limit.
async fn with_response_timeout<T>(
    answer: impl Future<Output = Result<T, PullError>>,
) -> Result<T, PullError> {
    tokio::time::timeout(RESPONSE_TIMEOUT, answer).await.unwrap_or(Err(PullError::ResponseTimeout))
}
