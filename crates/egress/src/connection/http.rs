//! Plain HTTP: every request is judged by its own host, also the second one of a connection.
//!
//! ```text
//! near ─► parser ─► check ─► decide ─► connection to that host, kept for the next request to it ─► server
//!                     │        └ denied: 403 that names the rule, and the connection ends
//!                     └ ambiguous: 400
//! ```
//!
//! Bodies stream through without being collected. After an upgrade, bytes are passed on between the same two ends.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use domain::UrlScheme;
use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1 as client;
use hyper::server::conn::http1 as server;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use super::dial::{DialError, Dialled, dial};
use super::http_request::{RequestHost, check_request, prepare_request, prepare_response};
use super::metered_stream::MeteredStream;
use super::route::{Denial, Route, route_by_name, route_by_own_resolution, route_without_name};
use super::{AcceptedConnection, ConnectionSlots, MAX_DECISIONS};
use crate::policy::PolicyView;
use crate::relay::reset;
use crate::sandbox::OpenConnection;
use crate::vault::{InterceptTarget, PlainRequest, ProxyBody, pass_body};

/// The largest head of a request or response.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// How long the first head may take.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a head may take. The time between requests counts too, and clients keep idle connections for a minute.
const HEAD_TIMEOUT: Duration = Duration::from_secs(120);
/// How long what a refused client still sends is read, so that it sees the reason instead of a reset.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_DRAINED_BYTES: usize = 256 << 10;
const DRAIN_BUFFER_BYTES: usize = 16 << 10;

type ResponseBody = ProxyBody;

/// The requests of one connection.
struct HttpConnection<'a> {
    accepted: &'a AcceptedConnection,
    upstream: Mutex<Option<UpstreamConnection>>,
    /// Cancelled when the near side is reset.
    ended: CancellationToken,
    /// Whether there was a request.
    has_request: AtomicBool,
    /// Whether a request was refused, which ends the connection while the client may still be sending.
    has_refused: AtomicBool,
}

/// The connection to the host of the last request.
struct UpstreamConnection {
    sender: client::SendRequest<ProxyBody>,
    host: RequestHost,
    link: Arc<UpstreamLink>,
}

/// What ends together with a connection to a server.
struct UpstreamLink {
    open: OpenConnection,
    near: Arc<TcpStream>,
    far: Arc<TcpStream>,
    _slots: Arc<ConnectionSlots>,
}

/// Serves the requests of a connection until it ends.
pub(super) async fn serve_requests(accepted: &AcceptedConnection) {
    let connection = HttpConnection {
        accepted,
        upstream: Mutex::new(None),
        ended: CancellationToken::new(),
        has_request: AtomicBool::new(false),
        has_refused: AtomicBool::new(false),
    };
    let near = TokioIo::new(MeteredStream::new(Arc::clone(&accepted.near), None));
    let service = service_fn(|request| async { Ok::<_, Infallible>(connection.respond(request).await) });
    let served = server::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD_BYTES)
        .half_close(true)
        .preserve_header_case(true)
        .auto_date_header(false)
        .serve_connection(near, service)
        .with_upgrades();
    tokio::select! {
        () = connection.ended.cancelled() => reset(&accepted.near),
        () = connection.lack_first_request() => {
            accepted.sandbox.log_denied(None, accepted.destination, "no request");
            reset(&accepted.near);
        }
        ended = served => {
            if let Err(error) = ended {
                tracing::debug!(sandbox = accepted.sandbox.id, %error, "HTTP connection ended");
            }
            // After an upgrade the bytes belong to somebody else.
            if connection.has_refused.load(Ordering::Relaxed) {
                drain_briefly(Arc::clone(&accepted.near)).await;
            }
        }
    }
}

impl HttpConnection<'_> {
    /// Returns when the client has sent no request in time: it would hold its place in the limits without using it.
    async fn lack_first_request(&self) {
        tokio::time::sleep(FIRST_REQUEST_TIMEOUT).await;
        if self.has_request.load(Ordering::Relaxed) {
            std::future::pending().await
        }
    }

    async fn respond(&self, mut request: Request<Incoming>) -> Response<ResponseBody> {
        self.has_request.store(true, Ordering::Relaxed);
        let host = match check_request(&request) {
            Ok(host) => host,
            Err(problem) => {
                let reason = Denial::new(None, format!("HTTP: {problem}"));
                self.log_denied(&reason);
                return self.refuse(HttpRefusal { status: problem.status(), message: problem.to_string() });
            }
        };
        let upgraded = hyper::upgrade::on(&mut request);
        prepare_request(&mut request);
        let (request, exchange) = match self.vault_target(&host) {
            None => (request.map(pass_body), None),
            Some(target) => match target.prepare_plain(request).await {
                PlainRequest::Prepared(request, exchange) => (request, Some(exchange)),
                PlainRequest::Refused(response) => return response,
            },
        };
        let (mut response, link) = match self.forward(request, &host).await {
            Ok(answered) => answered,
            Err(refusal) => return self.refuse(refusal),
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let far = hyper::upgrade::on(&mut response);
            tokio::spawn(carry_upgraded(upgraded, far, link));
        }
        prepare_response(&mut response);
        match exchange {
            Some(exchange) => exchange.finish(response),
            None => response.map(pass_body),
        }
    }

    /// The vault that may have a secret for this host.
    fn vault_target(&self, host: &RequestHost) -> Option<InterceptTarget> {
        let RequestHost::Name(name) = host else { return None };
        let accepted = self.accepted;
        accepted.egress.vaults.target(&accepted.sandbox.id, UrlScheme::Http, name)
    }

    /// Sends a request to its host. A kept connection may have been closed meanwhile; then the request is sent on a new one.
    async fn forward(
        &self,
        mut request: Request<ProxyBody>,
        host: &RequestHost,
    ) -> Result<(Response<Incoming>, Arc<UpstreamLink>), HttpRefusal> {
        let mut upstream = self.upstream.lock().await;
        for _ in 0..MAX_DECISIONS {
            let (view, route) = self.decide(host).await?;
            let kept = match upstream.take().filter(|kept| kept.leads_to(host, &route)) {
                Some(mut kept) => kept.sender.ready().await.is_ok().then_some(kept),
                None => None,
            };
            let is_kept = kept.is_some();
            let mut current = match kept {
                Some(kept) => kept,
                None => match self.connect(&view, &route, host).await? {
                    Some(connected) => connected,
                    None => continue,
                },
            };
            match current.sender.try_send_request(request).await {
                Ok(response) => {
                    let link = Arc::clone(&current.link);
                    *upstream = Some(current);
                    return Ok((response, link));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_kept => request = unsent,
                    _ => return Err(HttpRefusal::gateway("the host closed the connection")),
                },
            }
        }
        Err(HttpRefusal::gateway("the policy or the host changes too often"))
    }

    /// Judges the host of a request.
    async fn decide(&self, host: &RequestHost) -> Result<(PolicyView, Route), HttpRefusal> {
        let accepted = self.accepted;
        let Some(view) = accepted.sandbox.view() else {
            return Err(self.deny(&Denial::new(None, "no settings")));
        };
        let routed = match host {
            // A secret goes only to an address that our own resolver gives for the name.
            RequestHost::Name(name) if self.vault_target(host).is_some() => {
                let address = accepted.destination.ip().to_canonical();
                let judgement = view.judge(Some(name), address, accepted.destination.port());
                if !judgement.is_allowed() {
                    return Err(self.deny(&Denial::new(Some(name), judgement.reason)));
                }
                let (egress, sandbox) = (&accepted.egress, &accepted.sandbox);
                route_by_own_resolution(egress, sandbox, &view, name, accepted.destination, judgement).await
            }
            RequestHost::Name(name) => {
                route_by_name(&accepted.egress, &accepted.sandbox, &view, name, accepted.destination).await
            }
            RequestHost::Unnamed => route_without_name(&view, accepted.destination),
        };
        match routed {
            Ok(route) => Ok((view, route)),
            Err(denial) => Err(self.deny(&denial)),
        }
    }

    /// Connects to the host of a request; `None` if the policy has changed meanwhile.
    async fn connect(
        &self,
        view: &PolicyView,
        route: &Route,
        host: &RequestHost,
    ) -> Result<Option<UpstreamConnection>, HttpRefusal> {
        let accepted = self.accepted;
        let position = accepted.slots.of_sandbox.position;
        let dialled = match dial(&accepted.egress, &accepted.sandbox, view, route, position).await {
            Ok(dialled) => dialled,
            Err(DialError::PolicyChanged) => return Ok(None),
            Err(DialError::Refused(reason)) => {
                return Err(self.deny(&Denial::new(route.name.as_ref(), reason)));
            }
            Err(DialError::Failed(problem)) => return Err(HttpRefusal::gateway(&problem)),
        };
        let Dialled { far, open } = dialled;
        let link = Arc::new(UpstreamLink {
            open,
            near: Arc::clone(&accepted.near),
            far,
            _slots: Arc::clone(&accepted.slots),
        });
        let stream = MeteredStream::new(Arc::clone(&link.far), Some(Arc::clone(&link.open.traffic)));
        let started = client::Builder::new()
            .max_buf_size(MAX_HEAD_BYTES)
            .preserve_header_case(true)
            .handshake(TokioIo::new(stream))
            .await;
        let Ok((sender, driver)) = started else {
            return Err(HttpRefusal::gateway("the host closed the connection"));
        };
        tokio::spawn(drive_upstream(driver, Arc::clone(&link), self.ended.clone()));
        Ok(Some(UpstreamConnection { sender, host: host.clone(), link }))
    }

    fn refuse(&self, refusal: HttpRefusal) -> Response<ResponseBody> {
        self.has_refused.store(true, Ordering::Relaxed);
        refusal.into_response()
    }

    fn deny(&self, denial: &Denial) -> HttpRefusal {
        self.log_denied(denial);
        let message = match &denial.name {
            Some(name) => format!("network policy denies {name}: {}", denial.reason),
            None => format!("network policy denies this address: {}", denial.reason),
        };
        HttpRefusal { status: StatusCode::FORBIDDEN, message }
    }

    fn log_denied(&self, denial: &Denial) {
        let accepted = self.accepted;
        accepted.sandbox.log_denied(denial.name.as_ref(), accepted.destination, &denial.reason);
    }
}

/// Carries the bytes of a connection to a server until it ends or a new policy denies it, which ends both sides.
async fn drive_upstream(
    driver: client::Connection<TokioIo<MeteredStream>, ProxyBody>,
    link: Arc<UpstreamLink>,
    ended: CancellationToken,
) {
    tokio::select! {
        biased;
        () = link.open.cancel.cancelled() => {
            link.reset();
            ended.cancel();
        }
        outcome = driver.with_upgrades() => {
            if let Err(error) = outcome {
                tracing::debug!(%error, "HTTP connection to a host ended");
            }
        }
    }
}

/// Passes on the bytes of an upgraded connection.
async fn carry_upgraded(near: OnUpgrade, far: OnUpgrade, link: Arc<UpstreamLink>) {
    let carried = async {
        let (near, far) = tokio::try_join!(near, far)?;
        let (mut near, mut far) = (TokioIo::new(near), TokioIo::new(far));
        tokio::io::copy_bidirectional(&mut near, &mut far).await?;
        Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    };
    tokio::select! {
        biased;
        () = link.open.cancel.cancelled() => link.reset(),
        outcome = carried => {
            if let Err(error) = outcome {
                tracing::debug!(%error, "upgraded connection ended");
            }
        }
    }
}

impl UpstreamLink {
    fn reset(&self) {
        reset(&self.near);
        reset(&self.far);
    }
}

impl UpstreamConnection {
    fn leads_to(&self, host: &RequestHost, route: &Route) -> bool {
        let open = &self.link.open;
        self.host == *host
            && !open.cancel.is_cancelled()
            && route.addresses.contains(&open.target().address.ip())
    }
}

/// The answer to a request that is not passed on.
struct HttpRefusal {
    status: StatusCode,
    message: String,
}

impl HttpRefusal {
    fn gateway(message: &str) -> Self {
        Self { status: StatusCode::BAD_GATEWAY, message: message.to_owned() }
    }

    /// The connection ends with it: what follows may be the body of the refused request.
    fn into_response(self) -> Response<ResponseBody> {
        let body = Full::new(Bytes::from(self.message + "\n")).map_err(|never| match never {});
        let mut response = Response::new(body.boxed_unsync());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        response
    }
}

/// Reads what a client still sends for a short time.
async fn drain_briefly(near: Arc<TcpStream>) {
    let mut stream = MeteredStream::new(near, None);
    let drain = async {
        let mut buffer = vec![0; DRAIN_BUFFER_BYTES];
        let mut drained = 0;
        while drained < MAX_DRAINED_BYTES {
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(count) => drained += count,
            }
        }
    };
    // If the time is over, the client gets its reset.
    let _finished = tokio::time::timeout(DRAIN_TIMEOUT, drain).await;
}
