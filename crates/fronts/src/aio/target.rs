//! From an address to the API of its sandbox.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::response::{IntoResponse, Response};
use domain::Phase;
use http::request::Parts;
use http::{StatusCode, header};
use service::SandboxRef;

use super::access::{self, AccessProof};
use super::address::{AddressLabel, AddressedSandbox, SandboxAddress};
use super::notes::AioNotes;
use super::problem::AioProblem;
use super::{AioState, ports, provisioner};
use crate::hosts;
use crate::kit::headers::request_host;
use crate::kit::nested::{self, InvalidPath};
use crate::ports::target::AddressForm;
use crate::server::concurrency::{self, CallerProof, RequestAdmission};
use crate::server::request_log::RouteLabel;

/// The route label of requests that are answered before a route is known.
const UNROUTED_LABEL: &str = "aio";
/// The route label of requests whose host or header names a port.
const NAMED_PORT_LABEL: &str = "aio port";

/// Serves the APIs of sandboxes.
#[derive(Clone)]
pub(super) struct SandboxRouter {
    pub(super) state: AioState,
    /// The API of one sandbox, which is in the extensions of the request.
    pub(super) router: Router,
}

/// The parts of a request that its address leaves to the API of its sandbox.
struct RequestPlace<'a> {
    mount: &'a str,
    path: &'a str,
    form: AddressForm,
    /// The port that the host names; the whole path belongs to it.
    port: Option<u16>,
}

/// The sandbox that a request is for. It was found by its address.
#[derive(Clone)]
pub(super) struct AioTarget {
    pub(super) sandbox: SandboxRef,
    pub(super) notes: Arc<AioNotes>,
    /// The part of the path that stands before the API's own paths; empty if the host names the sandbox.
    pub(super) mount: String,
    pub(super) form: AddressForm,
    /// What admitted the request.
    pub(super) access: AccessProof,
    /// The slot of the request; `None` if requests are not limited.
    admission: Option<RequestAdmission>,
}

impl AioTarget {
    /// A time that a variable of the sandbox sets, in seconds.
    pub(super) fn variable_seconds(&self, name: &str) -> Option<Duration> {
        let seconds = self.sandbox.read_state(|state| state.spec.env.get(name)?.trim().parse().ok());
        seconds.filter(|seconds| *seconds > 0).map(|seconds: u32| Duration::from_secs(u64::from(seconds)))
    }

    /// Counts the request as a long stream from now on. Must be called before anything is started.
    pub(super) fn begin_stream(&self) -> Result<(), AioProblem> {
        Ok(self.admission.as_ref().map_or(Ok(()), RequestAdmission::begin_stream)?)
    }
}

impl FromRequestParts<AioState> for AioTarget {
    type Rejection = AioProblem;

    async fn from_request_parts(parts: &mut Parts, _: &AioState) -> Result<Self, AioProblem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(AioProblem::not_found)
    }
}

/// Answers `/aio/{address}/…`.
pub(super) async fn answer_path(State(sandboxes): State<SandboxRouter>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let below = path.strip_prefix("/aio/").unwrap_or_default();
    let (address, _) = below.split_once('/').unwrap_or((below, ""));
    let mount = &path[..path.len() - below.len() + address.len()];
    match SandboxAddress::parse(address) {
        Some(parsed) => {
            let rest = &path[mount.len()..];
            let place = RequestPlace { mount, path: rest, form: AddressForm::Path, port: None };
            sandboxes.answer_request(&parsed, place, request).await
        }
        None => refusal_response(AioProblem::not_found()),
    }
}

impl SandboxRouter {
    /// Answers a request whose host names a sandbox, or a port of one.
    pub(super) async fn answer_label(&self, label: &str, request: Request) -> Response {
        let Some(AddressLabel { address, port }) = AddressLabel::parse(label) else {
            return refusal_response(AioProblem::not_found());
        };
        let path = request.uri().path().to_owned();
        let place = RequestPlace { mount: "", path: &path, form: AddressForm::Gateway, port };
        self.answer_request(&address, place, request).await
    }

    async fn answer_request(
        &self,
        address: &SandboxAddress,
        place: RequestPlace<'_>,
        request: Request,
    ) -> Response {
        match address.resolve(&self.state.service) {
            // The code in the address is proof enough.
            Some(addressed) => self.answer_for(addressed, place, AccessProof::NotNeeded, request).await,
            None => refusal_response(AioProblem::not_found()),
        }
    }

    /// Answers a request to the root of a server that serves this sandbox alone.
    pub(super) async fn answer_at_root(
        &self,
        sandbox: AddressedSandbox,
        access: AccessProof,
        request: Request,
    ) -> Response {
        let path = request.uri().path().to_owned();
        let place = RequestPlace { mount: "", path: &path, form: AddressForm::Path, port: None };
        self.answer_for(sandbox, place, access, request).await
    }

    /// Answers a request that may use the sandbox.
    async fn answer_for(
        &self,
        addressed: AddressedSandbox,
        place: RequestPlace<'_>,
        access: AccessProof,
        request: Request,
    ) -> Response {
        let (state, RequestPlace { mount, path, form, port }) = (&self.state, place);
        let proof = CallerProof::Presented;
        let owner = addressed.sandbox.owner().clone();
        if let Err(error) = concurrency::admit_request(&state.service, request.extensions(), &owner, proof) {
            return refusal_response(error.into());
        }
        let port_of_header = ports::port_of_header(state.own_settings.port_header, request.headers());
        let port = match port.map_or(port_of_header, |port| Ok(Some(port))) {
            Ok(port) => port,
            Err(problem) => return refusal_response(problem),
        };
        if port.is_none() && !ports::is_port_path(path) && comes_from_another_sandbox_page(state, &request) {
            let message = "pages that sandboxes serve cannot use this API";
            return refusal_response(AioProblem::new(StatusCode::FORBIDDEN, message));
        }
        let sandbox = match living_sandbox(state, addressed).await {
            Ok(sandbox) => sandbox,
            Err(problem) => return refusal_response(problem),
        };
        let target = AioTarget {
            notes: AioNotes::of_sandbox(&sandbox),
            sandbox: sandbox.clone(),
            mount: mount.to_owned(),
            form,
            access,
            admission: request.extensions().get::<RequestAdmission>().cloned(),
        };
        if let Some(port) = port {
            let mut response = ports::forward_named_port(state, &target, port, path, request).await;
            response.extensions_mut().insert(RouteLabel(NAMED_PORT_LABEL.to_owned()));
            return response;
        }
        let called = nested::call_router(self.router.clone(), path, request, |extensions| {
            extensions.insert(target);
        });
        let invalid = |_: InvalidPath| AioProblem::bad_request("invalid path").into_response();
        let mut response = called.await.unwrap_or_else(invalid);
        access::hide_address(&mut response);
        if response.status() == StatusCode::INTERNAL_SERVER_ERROR
            && let Err(error) = sandbox.check_usable()
        {
            // The sandbox was removed or died meanwhile, which is what the client can act on.
            return AioProblem::from(error).into_response();
        }
        response
    }
}

/// Returns the sandbox, or its successor if it has crashed and is to be replaced.
async fn living_sandbox(state: &AioState, addressed: AddressedSandbox) -> Result<SandboxRef, AioProblem> {
    let AddressedSandbox { sandbox, key } = addressed;
    let crashed = sandbox.read_state(|state| matches!(state.phase, Phase::Failed(_)));
    match crashed {
        true => provisioner::replace_crashed(state, &key, &sandbox).await,
        false => Ok(sandbox),
    }
}

/// Whether a page of a host of some sandbox, or one that hides where it is from, sent a request to an API on another
/// host. The page of a port knows the address of its sandbox, which is in its own, but must not reach its API.
fn comes_from_another_sandbox_page(state: &AioState, request: &Request) -> bool {
    let Some(origin) = request.headers().get(header::ORIGIN) else { return false };
    let Some((_, authority)) = origin.to_str().ok().and_then(|origin| origin.split_once("://")) else {
        return true;
    };
    let own_host = request_host(request.uri(), request.headers());
    let is_own = own_host.is_some_and(|host| host.eq_ignore_ascii_case(authority));
    !is_own && hosts::port_label_of_host(&state.settings, authority).is_some()
}

pub(super) fn refusal_response(problem: AioProblem) -> Response {
    let mut response = problem.into_response();
    response.extensions_mut().insert(RouteLabel(UNROUTED_LABEL.to_owned()));
    response
}
