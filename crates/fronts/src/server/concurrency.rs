//! Limits how many requests are in progress at once, and how many long streams are open.
//!
//! A request takes a slot of its owner once its caller is authenticated, so peers without a key take none.
//! It gives the slot back when its response was sent; a response that is complete in memory and short
//! counts as sent, since only the client's reading remains. A request that may last as long as the client
//! likes (events, followed output, running commands, WebSockets, forwarded ports) exchanges the slot for
//! one of a stream.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use domain::Owner;
use http::{Extensions, StatusCode};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use service::Service;

use crate::kit::error_format::ErrorFormat;
use crate::server::connection_state::{ConnectionState, StreamSlot};
use crate::server::owner_slots::{OwnerSlot, OwnerSlots, SlotRefusal, SoleOwner};
use crate::settings::HttpSettings;

/// A longer response keeps its slot until it was sent.
const MAX_SHORT_RESPONSE: u64 = 64 << 10;
/// After how many seconds a refused client may retry.
const RETRY_SECONDS: u64 = 1;

/// The slots of one server.
#[derive(Clone)]
pub(crate) struct ConcurrencyLimits {
    requests: Arc<OwnerSlots>,
    streams: Arc<OwnerSlots>,
    connections: Arc<OwnerSlots>,
}

impl ConcurrencyLimits {
    pub(crate) fn new(settings: &HttpSettings) -> Self {
        Self {
            requests: OwnerSlots::new(settings.concurrent_requests, slot_gauge("requests")),
            streams: OwnerSlots::new(settings.concurrent_streams, slot_gauge("streams")),
            connections: OwnerSlots::new(settings.connections, slot_gauge("connections")),
        }
    }
}

/// The gauge of `/metrics` that shows how many slots of a kind are taken.
fn slot_gauge(kind: &'static str) -> metrics::Gauge {
    metrics::gauge!("coracle_http_in_progress", "kind" => kind)
}

/// The kind of slot that was missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotKind {
    Requests,
    Streams,
    Connections,
}

/// A request was refused because too many others are in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConcurrencyError {
    kind: SlotKind,
    refusal: SlotRefusal,
}

impl ConcurrencyError {
    pub(crate) const STATUS: StatusCode = StatusCode::TOO_MANY_REQUESTS;
    pub(crate) const CODE: &str = "TOO_MANY_REQUESTS";
    pub(crate) const RETRY_AFTER: u64 = RETRY_SECONDS;

    fn new(kind: SlotKind, refusal: SlotRefusal) -> Self {
        let limit = match (kind, refusal) {
            (SlotKind::Requests, SlotRefusal::Server) => "requests",
            (SlotKind::Requests, SlotRefusal::Owner { .. }) => "owner_requests",
            (SlotKind::Streams, SlotRefusal::Server) => "streams",
            (SlotKind::Streams, SlotRefusal::Owner { .. }) => "owner_streams",
            (SlotKind::Connections, SlotRefusal::Server) => "connections",
            (SlotKind::Connections, SlotRefusal::Owner { .. }) => "owner_connections",
        };
        metrics::counter!("coracle_http_refused_total", "limit" => limit).increment(1);
        Self { kind, refusal }
    }

    pub(crate) fn message(self) -> String {
        let things = match self.kind {
            SlotKind::Requests => "concurrent requests",
            SlotKind::Streams => "open streams",
            SlotKind::Connections => "connections",
        };
        match self.refusal {
            SlotRefusal::Server => format!("limit of {things} reached"),
            SlotRefusal::Owner { limit } => format!("limit of {things} of one owner reached ({limit})"),
        }
    }

    /// The response in the format of a front.
    pub(crate) fn build_response(self, format: &ErrorFormat) -> Response {
        format.build_retry_error(Self::STATUS, Self::CODE, &self.message(), Self::RETRY_AFTER)
    }
}

/// Whether the caller presented a key, a token or a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallerProof {
    Presented,
    /// The port is open to everyone.
    NotNeeded,
}

/// The slot of one request, in the request's extensions.
#[derive(Clone)]
pub(crate) struct RequestAdmission(Arc<AdmissionFields>);

struct AdmissionFields {
    limits: ConcurrencyLimits,
    connection: ConnectionState,
    held: Mutex<HeldSlot>,
}

#[derive(Default)]
enum HeldSlot {
    #[default]
    None,
    Request(OwnerSlot, SoleOwner),
    Stream(StreamSlot),
}

/// Takes a slot for a request of an authenticated caller, once per request. Requests that come without
/// [`limit_concurrency`], as those of the operators' socket, are not limited.
pub(crate) fn admit_request(
    service: &Service,
    extensions: &Extensions,
    owner: &Owner,
    proof: CallerProof,
) -> Result<(), ConcurrencyError> {
    let sole = if service.has_no_keys() { SoleOwner::Yes } else { SoleOwner::No };
    match extensions.get::<RequestAdmission>() {
        Some(admission) => admission.admit(owner, sole, proof),
        None => Ok(()),
    }
}

/// Exchanges the slot of an admitted request for that of a long stream.
pub(crate) fn begin_stream(extensions: &Extensions) -> Result<(), ConcurrencyError> {
    extensions.get::<RequestAdmission>().map_or(Ok(()), RequestAdmission::begin_stream)
}

impl RequestAdmission {
    fn new(limits: ConcurrencyLimits, connection: ConnectionState) -> Self {
        Self(Arc::new(AdmissionFields { limits, connection, held: Mutex::default() }))
    }

    pub(crate) fn admit(
        &self,
        owner: &Owner,
        sole: SoleOwner,
        proof: CallerProof,
    ) -> Result<(), ConcurrencyError> {
        let AdmissionFields { limits, connection, .. } = &*self.0;
        if proof == CallerProof::Presented {
            let counted = connection.authenticate(&limits.connections, owner, sole);
            counted.map_err(|refusal| ConcurrencyError::new(SlotKind::Connections, refusal))?;
        }
        let mut held = self.held();
        if matches!(*held, HeldSlot::None) {
            let slot = limits.requests.try_take(owner, sole);
            let slot = slot.map_err(|refusal| ConcurrencyError::new(SlotKind::Requests, refusal))?;
            *held = HeldSlot::Request(slot, sole);
        }
        Ok(())
    }

    /// As the function [`begin_stream`].
    pub(crate) fn begin_stream(&self) -> Result<(), ConcurrencyError> {
        let AdmissionFields { limits, connection, .. } = &*self.0;
        let mut held = self.held();
        if let HeldSlot::Request(slot, sole) = &*held {
            let taken = limits.streams.try_take(slot.owner(), *sole);
            let taken = taken.map_err(|refusal| ConcurrencyError::new(SlotKind::Streams, refusal))?;
            *held = HeldSlot::Stream(connection.begin_stream(taken));
        }
        Ok(())
    }

    /// Ties the slot to the response: until its body was sent, until the connection ends if it is
    /// upgraded, or not at all if only the sending of a short body remains.
    fn attach_to(&self, response: Response) -> Response {
        let is_short = response.body().size_hint().exact().is_some_and(|size| size <= MAX_SHORT_RESPONSE);
        let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let held = std::mem::take(&mut *self.held());
        match held {
            HeldSlot::Stream(slot) if is_upgrade => self.0.connection.keep_upgraded(slot),
            HeldSlot::None => {}
            HeldSlot::Request(..) if is_short => {}
            held => return response.map(|body| attach_guard(body, held)),
        }
        response
    }

    fn held(&self) -> std::sync::MutexGuard<'_, HeldSlot> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets the handlers of a request take a slot, and holds it until the response was sent.
pub(crate) async fn limit_concurrency(
    State(limits): State<ConcurrencyLimits>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some(connection) = request.extensions().get::<ConnectionState>().cloned() else {
        return next.run(request).await;
    };
    let admission = RequestAdmission::new(limits, connection);
    request.extensions_mut().insert(admission.clone());
    let response = next.run(request).await;
    admission.attach_to(response)
}

/// A body that owns a guard value until it has been sent.
struct GuardedBody<T> {
    body: Body,
    _guard: T,
}

/// Wraps a body so that `kept` is dropped together with it.
pub(crate) fn attach_guard<T: Send + Unpin + 'static>(body: Body, kept: T) -> Body {
    Body::new(GuardedBody { body, _guard: kept })
}

impl<T: Unpin> HttpBody for GuardedBody<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
