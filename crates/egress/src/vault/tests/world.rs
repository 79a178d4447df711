//! A server with a certificate of a test authority, an interceptor in front of it and clients that trust the sandbox's
//! authority, all on loopback.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use domain::{
    Binding, BindingAuth, DomainName, HeaderCredential, RequestMatch, Substitution, SubstitutionSurface,
    UrlScheme,
};
use egress_protocol::{
    BindingMessage, CredentialMessage, SealedSecret, SecretScope, SecretValue, VaultMessage, VaultReply,
    VaultRequest,
};
use futures_util::{SinkExt, StreamExt};
use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::{http1 as client_http1, http2 as client_http2};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use crate::vault::{InterceptError, SealingKey, TrustedRoots, VaultStore};

pub(super) const HOST: &str = "api.example.org";
pub(super) const SANDBOX: &str = "sb-1";
pub(super) const CANARY: &str = "canary-5d41402abc4b2a76";
const KEY: [u8; 32] = [9; 32];

pub(super) type TestBody = UnsyncBoxBody<Bytes, hyper::Error>;

/// Which protocol the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

pub(super) const BOTH: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

pub(super) struct World {
    pub(super) store: Arc<VaultStore>,
    pub(super) authority: (String, SealedSecret),
    pub(super) server: Arc<Server>,
    pub(super) interceptor: SocketAddr,
    pub(super) errors: Arc<Mutex<Vec<InterceptError>>>,
    tasks: JoinSet<()>,
}

/// What the server has seen.
#[derive(Default)]
pub(super) struct Server {
    pub(super) requests: AtomicUsize,
    address: Mutex<Option<SocketAddr>>,
}

/// How the server proves who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Certificate {
    Valid,
    OfAnotherHost,
    OfUnknownAuthority,
    /// There is no TLS.
    None,
}

pub(super) enum Client {
    Http1(client_http1::SendRequest<TestBody>),
    Http2(client_http2::SendRequest<TestBody>),
}

impl World {
    pub(super) async fn new(certificate: Certificate) -> Self {
        let (issuer, root) = test_authority();
        let other = test_authority().0;
        let mut roots = TrustedRoots::default();
        roots.add_pem(root.as_bytes()).expect("a root");
        let store = Arc::new(VaultStore::new(SealingKey::new(KEY), roots));
        let reply = store.handle(VaultRequest::CreateAuthority { sandbox: SANDBOX.to_owned() });
        let Ok(VaultReply::Authority { certificate: pem, sealed_key }) = reply else {
            panic!("no authority")
        };
        let server = Arc::new(Server::default());
        let mut tasks = JoinSet::new();
        let config = match certificate {
            Certificate::Valid => Some(server_config(&issuer, HOST)),
            Certificate::OfAnotherHost => Some(server_config(&issuer, "other.example.org")),
            Certificate::OfUnknownAuthority => Some(server_config(&other, HOST)),
            Certificate::None => None,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        *server.address.lock().expect("not poisoned") = listener.local_addr().ok();
        tasks.spawn(serve(listener, config, Arc::clone(&server)));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let interceptor = listener.local_addr().expect("an address");
        let errors = Arc::new(Mutex::new(Vec::new()));
        let scheme = if certificate == Certificate::None { UrlScheme::Http } else { UrlScheme::Https };
        tasks.spawn(intercept(
            listener,
            Arc::clone(&store),
            Arc::clone(&server),
            scheme,
            Arc::clone(&errors),
        ));
        Self { store, authority: (pem, sealed_key), server, interceptor, errors, tasks }
    }

    /// A world with one binding that adds the canary.
    pub(super) async fn with_bearer() -> Self {
        let world = Self::new(Certificate::Valid).await;
        world.set_vault(1, &[("token", CANARY)], vec![bearer("token")]);
        world
    }

    pub(super) fn seal(&self, value: &str) -> SealedSecret {
        let scope = SecretScope::Sandbox(SANDBOX.to_owned());
        let value = SecretValue::new(value.to_owned());
        match self.store.handle(VaultRequest::SealSecret { scope, value }) {
            Ok(VaultReply::Sealed(sealed)) => sealed,
            other => panic!("not sealed: {other:?}"),
        }
    }

    pub(super) fn set_vault(&self, revision: u64, secrets: &[(&str, &str)], bindings: Vec<Binding>) {
        let vault = self.message(revision, secrets, bindings);
        let request = VaultRequest::SetVault { sandbox: SANDBOX.to_owned(), vault };
        self.store.handle(request).expect("a valid vault");
    }

    pub(super) fn message(
        &self,
        revision: u64,
        secrets: &[(&str, &str)],
        bindings: Vec<Binding>,
    ) -> VaultMessage {
        let credential = |(name, value): &(&str, &str)| CredentialMessage {
            name: (*name).to_owned(),
            revision,
            fits_header: true,
            scope: SecretScope::Sandbox(SANDBOX.to_owned()),
            sealed: self.seal(value),
        };
        VaultMessage {
            revision,
            authority: self.authority.1.clone(),
            credentials: secrets.iter().map(credential).collect(),
            bindings: bindings.iter().map(BindingMessage::from).collect(),
        }
    }

    pub(super) async fn connect(&self, protocol: Protocol) -> Client {
        let alpn = match protocol {
            Protocol::Http1 => "http/1.1",
            Protocol::Http2 => "h2",
        };
        let stream = self.connect_tls(&[alpn]).await.expect("a trusted certificate");
        let stream = TokioIo::new(stream);
        match protocol {
            Protocol::Http1 => {
                let (sender, connection) = client_http1::handshake(stream).await.expect("HTTP/1.1");
                tokio::spawn(connection.with_upgrades());
                Client::Http1(sender)
            }
            Protocol::Http2 => {
                let (sender, connection) =
                    client_http2::handshake(TokioExecutor::new(), stream).await.expect("HTTP/2");
                tokio::spawn(connection);
                Client::Http2(sender)
            }
        }
    }

    pub(super) async fn connect_plain(&self) -> Client {
        let stream = TokioIo::new(TcpStream::connect(self.interceptor).await.expect("a connection"));
        let (sender, connection) = client_http1::handshake(stream).await.expect("HTTP/1.1");
        tokio::spawn(connection);
        Client::Http1(sender)
    }

    pub(super) async fn connect_tls(
        &self,
        alpn: &[&str],
    ) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        let root = CertificateDer::from_pem_slice(self.authority.0.as_bytes()).expect("a certificate");
        roots.add(root).expect("a root");
        let mut config = client_builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|one| one.as_bytes().to_vec()).collect();
        let name = ServerName::try_from(HOST).expect("a name");
        let stream = TcpStream::connect(self.interceptor).await?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    pub(super) async fn shut_down(mut self) {
        self.shut_down_tasks().await;
    }

    pub(super) async fn shut_down_tasks(&mut self) {
        self.tasks.shutdown().await;
    }
}

impl Client {
    pub(super) async fn send(&mut self, request: Request<TestBody>) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                let (mut parts, body) = request.into_parts();
                let host = parts.uri.authority().expect("an absolute address").to_string();
                parts.headers.entry("host").or_insert(HeaderValue::from_str(&host).expect("a name"));
                parts.uri = parts.uri.path_and_query().expect("a path").as_str().parse().expect("a path");
                sender.send_request(Request::from_parts(parts, body)).await
            }
            Self::Http2(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
        }
    }

    /// Sends a request and returns the status, the headers and the body as text.
    pub(super) async fn ask(&mut self, request: Request<TestBody>) -> (StatusCode, HeaderMap, String) {
        let response = self.send(request).await.expect("a response");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("a whole body").to_bytes();
        (parts.status, parts.headers, String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) async fn get(&mut self, path: &str) -> (StatusCode, HeaderMap, String) {
        self.ask(request("GET", path, full(""))).await
    }
}

pub(super) fn request(method: &str, path: &str, body: TestBody) -> Request<TestBody> {
    let uri = format!("https://{HOST}{path}");
    Request::builder().method(method).uri(uri).body(body).expect("a request")
}

pub(super) fn full(text: &str) -> TestBody {
    Full::new(Bytes::copy_from_slice(text.as_bytes())).map_err(|never| match never {}).boxed_unsync()
}

/// A body of some chunks, without a length.
pub(super) fn chunks(chunks: Vec<Bytes>, trailers: Option<HeaderMap>) -> TestBody {
    let data = chunks.into_iter().map(Frame::data).chain(trailers.map(Frame::trailers));
    StreamBody::new(futures_util::stream::iter(data.map(Ok))).boxed_unsync()
}

pub(super) fn match_all(paths: &[&str], schemes: &[&str]) -> RequestMatch {
    let strings = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    RequestMatch::new(&[HOST.to_owned()], &strings(schemes), &[], &strings(paths), &[]).expect("valid")
}

pub(super) fn bearer(credential: &str) -> Binding {
    let auth = BindingAuth::Bearer { credential: credential.to_owned() };
    Binding::new("bearer".to_owned(), match_all(&[], &[]), auth, Vec::new()).expect("valid")
}

pub(super) fn header(name: &str, credential: &str) -> HeaderCredential {
    HeaderCredential { header: name.to_owned(), credential: credential.to_owned() }
}

pub(super) fn substitution(placeholder: &str, surfaces: &[SubstitutionSurface]) -> Substitution {
    Substitution {
        credential: "token".to_owned(),
        placeholder: placeholder.to_owned(),
        surfaces: surfaces.to_vec(),
    }
}

fn test_authority() -> (Issuer<'static, KeyPair>, String) {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("no names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).expect("a certificate").pem();
    (Issuer::new(params, key), pem)
}

fn server_config(issuer: &Issuer<'static, KeyPair>, host: &str) -> Arc<ServerConfig> {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![host.to_owned()]).expect("a name");
    let certificate = params.signed_by(&key, issuer).expect("a certificate").der().clone();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("default versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("a key and its certificate");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(config)
}

fn client_builder() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("default versions")
}

async fn intercept(
    listener: TcpListener,
    store: Arc<VaultStore>,
    server: Arc<Server>,
    scheme: UrlScheme,
    errors: Arc<Mutex<Vec<InterceptError>>>,
) {
    let host: DomainName = HOST.parse().expect("a name");
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let address = server.address.lock().expect("not poisoned").expect("listening");
        let target = store.target(SANDBOX, scheme, &host).expect("a bound host");
        let errors = Arc::clone(&errors);
        connections.spawn(async move {
            let upstream = TcpStream::connect(address).await.expect("a connection");
            if let Err(error) = target.intercept(client, upstream).await {
                errors.lock().expect("not poisoned").push(error);
            }
        });
    }
}

async fn serve(listener: TcpListener, config: Option<Arc<ServerConfig>>, server: Arc<Server>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let (config, server) = (config.clone(), Arc::clone(&server));
        connections.spawn(async move {
            let service = service_fn(move |request| answer(request, Arc::clone(&server)));
            let Some(config) = config else {
                let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                return drop(serving.await);
            };
            let Ok(stream) = TlsAcceptor::from(config).accept(stream).await else { return };
            if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                let builder = http2::Builder::new(TokioExecutor::new());
                drop(builder.serve_connection(TokioIo::new(stream), service).await);
            } else {
                let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
                drop(serving.with_upgrades().await);
            }
        });
    }
}

/// `/echo` describes the request, `/mirror` sends its body and trailers back, `/leak` tells the token that it got,
/// `/gone` ends the connection, and `/socket` is a WebSocket that echoes.
async fn answer(request: Request<Incoming>, server: Arc<Server>) -> hyper::Result<Response<TestBody>> {
    server.requests.fetch_add(1, Ordering::SeqCst);
    match request.uri().path() {
        "/mirror" => Ok(Response::new(request.into_body().boxed_unsync())),
        "/leak" => Ok(leak(&request)),
        "/gone" => Ok(Response::builder().header(CONNECTION, "close").body(full("bye")).expect("valid")),
        "/socket" => Ok(accept_socket(request)),
        _ => {
            let mut lines = vec![format!("{} {}", request.method(), request.uri())];
            for (name, value) in request.headers() {
                lines.push(format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())));
            }
            let body = request.into_body().collect().await?.to_bytes();
            lines.push(String::from_utf8_lossy(&body).into_owned());
            // The description is reversed, so that no secret is found in it on the way back.
            let text: String = lines.join("\n").chars().rev().collect();
            Ok(Response::new(full(&text)))
        }
    }
}

/// What the server behind `/echo` has received.
pub(super) fn received(body: &str) -> String {
    body.chars().rev().collect()
}

fn leak(request: &Request<Incoming>) -> Response<TestBody> {
    let value = request.headers().get("authorization").map_or(&b"none"[..], HeaderValue::as_bytes).to_vec();
    let text = [b"you sent ".as_slice(), &value, b", ", &value, b"."].concat();
    let single_bytes = text.iter().map(|byte| Bytes::copy_from_slice(&[*byte])).collect();
    let mut trailers = HeaderMap::new();
    trailers.insert("x-trailer", HeaderValue::from_bytes(&value).expect("a value"));
    let mut response = Response::new(chunks(single_bytes, Some(trailers)));
    response.headers_mut().insert("trailer", HeaderValue::from_static("x-trailer"));
    response.headers_mut().insert("x-echo", HeaderValue::from_bytes(&value).expect("a value"));
    response
}

fn accept_socket(mut request: Request<Incoming>) -> Response<TestBody> {
    let key = request.headers()["sec-websocket-key"].clone();
    let has_token = request.headers().get("authorization").is_some();
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let upgraded = TokioIo::new(upgraded.await.expect("an upgrade"));
        let mut socket = WebSocketStream::from_raw_socket(upgraded, Role::Server, None).await;
        while let Some(Ok(message)) = socket.next().await {
            if !message.is_text() || socket.send(message).await.is_err() {
                break;
            }
        }
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header("sec-websocket-accept", derive_accept_key(key.as_bytes()))
        .header("x-authorized", has_token.to_string())
        .body(full(""))
        .expect("valid")
}
