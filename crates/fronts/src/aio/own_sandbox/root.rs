//! The API of one sandbox at the root of a server.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use domain::SandboxKey;
use service::Service;

use crate::aio::access;
use crate::aio::address::AddressedSandbox;
use crate::aio::problem::AioProblem;
use crate::aio::target::{self, SandboxRouter};
use crate::aio::{AioState, routes};
use crate::front_sandboxes::{RootAccess, RootRoutes};
use crate::settings::HttpSettings;

#[derive(Clone)]
struct RootState {
    sandboxes: SandboxRouter,
    key: Arc<SandboxKey>,
}

pub(super) fn build_root(service: Service, settings: Arc<HttpSettings>, key: SandboxKey) -> RootRoutes {
    let state = AioState::new(service, settings);
    let access = if state.access.is_required() { RootAccess::Credential } else { RootAccess::Open };
    let sandboxes = SandboxRouter { router: routes::build_router(state.clone()), state };
    let router = Router::new().fallback(answer_root);
    RootRoutes { router: router.with_state(RootState { sandboxes, key: Arc::new(key) }), access }
}

/// Answers every request of a server of one sandbox. This is the only place where its credentials are checked.
async fn answer_root(State(root): State<RootState>, mut request: Request) -> Response {
    let RootState { sandboxes, key } = root;
    let proof = match access::check_request(&sandboxes.state, &mut request) {
        Ok(proof) => proof,
        Err(problem) => return target::refusal_response(problem),
    };
    match sandboxes.state.service.sandbox_of_key(&key) {
        Some(sandbox) => {
            let addressed = AddressedSandbox { sandbox, key: SandboxKey::clone(&key) };
            sandboxes.answer_at_root(addressed, proof, request).await
        }
        // It was removed through the operators' socket.
        None => target::refusal_response(AioProblem::not_found()),
    }
}
