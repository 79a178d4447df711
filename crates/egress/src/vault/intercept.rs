//! One intercepted connection: TLS on both sides, and HTTP of the same version on both.
//!
//! The ClientHello is read first, then the upstream is asked for the protocols that the client offers, and the client
//! gets the one that the upstream chose. So nothing is translated, and what a server cannot do is not offered.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use domain::{DomainName, RequestFacts, UrlScheme};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1 as client_http1, http2 as client_http2};
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, TlsConnector};

use super::authority::LeafError;
use super::body::ProxyBody;
use super::forward::{ForwardError, Forwarder, UpgradePair, Upstream};
use super::host_plan::{HostPlan, Injection};
use super::upstream_tls::{HTTP1, HTTP2};
use super::{SandboxVault, VaultStore};

/// The wait for a whole handshake with the client.
const CLIENT_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The wait for a whole handshake with the server.
const UPSTREAM_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// The wait for both sides to agree that the connection leaves HTTP.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_HEADER_BYTES: usize = 128 << 10;
const MAX_HEADER_LIST_BYTES: u32 = 128 << 10;
const MAX_STREAMS: u32 = 100;
/// What each side may send ahead, for a stream and for all of them.
const STREAM_WINDOW: u32 = 512 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
const MAX_SEND_BUFFER: usize = 128 << 10;
const UPGRADED_BUFFER: usize = 16 << 10;

/// A host to which connections of a sandbox are intercepted.
pub struct InterceptTarget {
    store: Arc<VaultStore>,
    sandbox: String,
    scheme: UrlScheme,
    host: DomainName,
    planned: Mutex<PlannedVault>,
}

/// The vault that a plan was made of.
struct PlannedVault {
    vault: Arc<SandboxVault>,
    plan: Arc<HostPlan>,
}

/// Why an intercepted connection ended early. No variant contains anything of a request.
#[derive(Debug, thiserror::Error)]
pub enum InterceptError {
    #[error("the TLS handshake of the client failed")]
    ClientHandshake(#[source] io::Error),
    #[error("the client named another host in its handshake than `{0}`")]
    OtherName(DomainName),
    #[error("no certificate for `{host}` could be issued")]
    Certificate { host: DomainName, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the connection with the client failed")]
    Client(#[source] hyper::Error),
    #[error("the connection failed after its upgrade")]
    Upgraded(#[source] io::Error),
}

/// Streams of bytes that can be intercepted.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for T {}

impl fmt::Debug for InterceptTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterceptTarget").field("host", &self.host).finish_non_exhaustive()
    }
}

type Connection = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

impl InterceptTarget {
    pub(super) fn new(
        store: Arc<VaultStore>,
        sandbox: String,
        scheme: UrlScheme,
        host: DomainName,
        vault: &Arc<SandboxVault>,
    ) -> Self {
        let planned = PlannedVault { vault: Arc::clone(vault), plan: Arc::new(vault.plan(scheme, &host)) };
        Self { store, sandbox, scheme, host, planned: Mutex::new(planned) }
    }

    /// Carries a connection until it ends. `client` is at its first byte, and `upstream` is connected to the host by
    /// this process' own resolution. Dropping the future resets both.
    pub async fn intercept<C, U>(self, client: C, upstream: U) -> Result<(), InterceptError>
    where
        C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        U: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        match self.scheme {
            UrlScheme::Https => self.intercept_tls(client, upstream).await,
            UrlScheme::Http => {
                let (sender, connection) = connect_http1(upstream).await;
                self.serve_http1(client, sender, connection).await
            }
        }
    }

    pub(super) fn sandbox(&self) -> &str {
        &self.sandbox
    }

    pub(super) fn scheme(&self) -> UrlScheme {
        self.scheme
    }

    pub(super) fn host(&self) -> &DomainName {
        &self.host
    }

    /// The plan in force, and what it does with a request. If the vault is gone, nothing is injected any more, but what
    /// was is still removed from responses.
    pub(super) fn plan_for(&self, facts: &RequestFacts<'_>) -> (Arc<HostPlan>, Option<Arc<Injection>>) {
        let current = self.store.current(&self.sandbox);
        let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(current) = current else { return (Arc::clone(&planned.plan), None) };
        if !Arc::ptr_eq(&planned.vault, &current) {
            let plan = Arc::new(current.plan(self.scheme, &self.host));
            *planned = PlannedVault { vault: current, plan };
        }
        let injection =
            planned.vault.vault.match_request(facts).and_then(|binding| planned.plan.injection(binding));
        (Arc::clone(&planned.plan), injection)
    }

    async fn intercept_tls<C: Stream, U: Stream>(self, client: C, upstream: U) -> Result<(), InterceptError> {
        let start = read_client_hello(client).await?;
        let hello = start.client_hello();
        let named = hello.server_name().and_then(|name| name.parse::<DomainName>().ok());
        if named.as_ref() != Some(&self.host) {
            return Err(InterceptError::OtherName(self.host));
        }
        let offered: Vec<Vec<u8>> = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
        let connected = self.connect_tls(upstream, &offered).await;
        let offers = |protocol: &[u8]| offered.iter().any(|one| one == protocol);
        let chosen = match &connected {
            Ok(stream) => stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec),
            Err(_) => None,
        };
        let protocol = match chosen {
            Some(chosen) => Some(chosen),
            None if offers(HTTP1) => Some(HTTP1.to_vec()),
            // Without an upstream, the client is told so by the protocol that it speaks.
            None if offers(HTTP2) && connected.is_err() => Some(HTTP2.to_vec()),
            None => None,
        };
        let authority = {
            let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(&planned.vault.authority)
        };
        let config =
            authority.server_config(&self.host, protocol.as_deref()).map_err(|source: LeafError| {
                InterceptError::Certificate { host: self.host.clone(), source: source.into() }
            })?;
        let handshake = timeout(CLIENT_HANDSHAKE_TIMEOUT, start.into_stream(config)).await;
        let client = handshake.map_err(io::Error::from).flatten().map_err(InterceptError::ClientHandshake)?;
        let is_http2 = protocol.as_deref() == Some(HTTP2);
        let tasks = TaskGroup::default();
        let (sender, connection) = match connected {
            Ok(stream) if is_http2 => connect_http2(stream, &tasks).await,
            Ok(stream) => connect_http1(stream).await,
            Err(message) => (Upstream::Unavailable(message), None),
        };
        if is_http2 {
            self.serve_http2(client, sender, connection, &tasks).await
        } else {
            self.serve_http1(client, sender, connection).await
        }
    }

    /// Opens TLS to the host and checks its certificate. A failure becomes the message that the client gets.
    async fn connect_tls<U: Stream>(
        &self,
        upstream: U,
        offered: &[Vec<u8>],
    ) -> Result<tokio_rustls::client::TlsStream<U>, String> {
        let config = self.store.upstream.offering(offered.iter().map(Vec::as_slice));
        let name = ServerName::try_from(self.host.as_str().to_owned())
            .map_err(|error| format!("`{}` cannot be a server: {error}", self.host))?;
        let handshake = TlsConnector::from(config).connect(name, upstream);
        let connected =
            timeout(UPSTREAM_HANDSHAKE_TIMEOUT, handshake).await.map_err(io::Error::from).flatten();
        connected.map_err(|error| {
            tracing::info!(
                sandbox = self.sandbox,
                host = self.host.as_str(),
                "TLS handshake with the server failed; requests get 502: {error}"
            );
            format!("could not establish TLS with `{}`: {error}", self.host)
        })
    }

    async fn serve_http1<C: Stream>(
        self,
        client: C,
        upstream: Upstream,
        mut connection: Option<Connection>,
    ) -> Result<(), InterceptError> {
        let forwarder = Arc::new(Forwarder::new(self, upstream));
        let service = ForwardService(Arc::clone(&forwarder));
        let mut builder = http1::Builder::new();
        builder.preserve_header_case(true).max_buf_size(MAX_HEADER_BYTES).half_close(true);
        let mut serving = pin!(builder.serve_connection(TokioIo::new(client), service).with_upgrades());
        loop {
            tokio::select! {
                // Neither branch loses anything when the other one is first: both futures live on.
                served = serving.as_mut() => break served.map_err(InterceptError::Client)?,
                _ended = wait_for(&mut connection), if connection.is_some() => {
                    connection = None;
                    if !forwarder.is_upgrading() {
                        serving.as_mut().graceful_shutdown();
                    }
                }
            }
        }
        match forwarder.take_upgrade() {
            Some(pair) => carry_upgraded(pair, connection).await,
            None => Ok(()),
        }
    }

    async fn serve_http2<C: Stream>(
        self,
        client: C,
        upstream: Upstream,
        mut connection: Option<Connection>,
        tasks: &TaskGroup,
    ) -> Result<(), InterceptError> {
        let service = ForwardService(Arc::new(Forwarder::new(self, upstream)));
        let mut builder = http2::Builder::new(tasks.clone());
        builder
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADER_LIST_BYTES)
            .max_send_buf_size(MAX_SEND_BUFFER);
        let mut serving = pin!(builder.serve_connection(TokioIo::new(client), service));
        loop {
            tokio::select! {
                // As for HTTP/1.1, both futures live on.
                served = serving.as_mut() => return served.map_err(InterceptError::Client),
                _ended = wait_for(&mut connection), if connection.is_some() => {
                    connection = None;
                    serving.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

/// The forwarder of a connection, as hyper calls it.
struct ForwardService(Arc<Forwarder>);

impl Service<Request<Incoming>> for ForwardService {
    type Response = Response<ProxyBody>;
    type Error = ForwardError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ProxyBody>, ForwardError>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let forwarder = Arc::clone(&self.0);
        Box::pin(async move { forwarder.forward(request).await })
    }
}

/// Reads the first message of a client. What follows depends on it.
async fn read_client_hello<C: Stream>(client: C) -> Result<StartHandshake<C>, InterceptError> {
    let accepted =
        timeout(CLIENT_HANDSHAKE_TIMEOUT, LazyConfigAcceptor::new(Acceptor::default(), client)).await;
    accepted.map_err(io::Error::from).flatten().map_err(InterceptError::ClientHandshake)
}

async fn wait_for(connection: &mut Option<Connection>) -> hyper::Result<()> {
    match connection {
        Some(connection) => connection.await,
        None => std::future::pending().await,
    }
}

async fn connect_http1<U: Stream>(stream: U) -> (Upstream, Option<Connection>) {
    let mut builder = client_http1::Builder::new();
    builder.preserve_header_case(true).max_buf_size(MAX_HEADER_BYTES);
    match builder.handshake(TokioIo::new(stream)).await {
        Ok((sender, connection)) => {
            let connection: Connection = Box::pin(connection.with_upgrades());
            (Upstream::Http1(tokio::sync::Mutex::new(sender)), Some(connection))
        }
        Err(error) => (Upstream::Unavailable(format!("the server does not speak HTTP/1.1: {error}")), None),
    }
}

async fn connect_http2<U: Stream>(stream: U, tasks: &TaskGroup) -> (Upstream, Option<Connection>) {
    let mut builder = client_http2::Builder::new(tasks.clone());
    builder
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADER_LIST_BYTES)
        .max_send_buf_size(MAX_SEND_BUFFER);
    match builder.handshake(TokioIo::new(stream)).await {
        Ok((sender, connection)) => (Upstream::Http2(sender), Some(Box::pin(connection))),
        Err(error) => (Upstream::Unavailable(format!("the server does not speak HTTP/2: {error}")), None),
    }
}

/// Copies bytes after both sides have left HTTP.
async fn carry_upgraded(pair: UpgradePair, mut connection: Option<Connection>) -> Result<(), InterceptError> {
    let failed = |error: hyper::Error| InterceptError::Upgraded(io::Error::other(error));
    let upgraded = async {
        let mut both = pin!(async { tokio::try_join!(pair.client, pair.upstream) });
        loop {
            tokio::select! {
                // The upstream connection has to be driven until it hands over its stream.
                both = both.as_mut() => break both,
                _ended = wait_for(&mut connection), if connection.is_some() => connection = None,
            }
        }
    };
    let upgraded = timeout(UPGRADE_TIMEOUT, upgraded).await;
    let (client, upstream) =
        upgraded.map_err(|error| InterceptError::Upgraded(error.into()))?.map_err(failed)?;
    let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
    let copied =
        copy_bidirectional_with_sizes(&mut client, &mut upstream, UPGRADED_BUFFER, UPGRADED_BUFFER).await;
    copied.map(|_bytes| ()).map_err(InterceptError::Upgraded)
}

/// The tasks of one connection. They end with it.
#[derive(Clone, Default)]
struct TaskGroup(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for TaskGroup {
    fn execute(&self, task: F) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}
