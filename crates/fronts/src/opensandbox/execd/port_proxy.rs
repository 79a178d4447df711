//! The reverse proxy of the execution API: `/proxy/{port}/…` below it forwards to that port.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::Uri;

use super::ExecTarget;
use crate::opensandbox::proxy::ReachedVia;
use crate::opensandbox::{OpenSandboxState, forward, port_label};
use crate::ports::target::PortTarget;

/// `/proxy/{port}[/…]`
pub(super) async fn forward_to_port(
    State(state): State<OpenSandboxState>,
    scope: ExecTarget,
    reached: ReachedVia,
    uri: Uri,
    request: Request,
) -> Response {
    let below = uri.path().strip_prefix("/proxy/").unwrap_or_default();
    let (port, path) = below.split_at(below.find('/').unwrap_or(below.len()));
    let number = match port_label::parse_port(port) {
        Ok(number) => number,
        Err(problem) => return problem.into_response(),
    };
    let target = PortTarget {
        id: scope.sandbox.id().clone(),
        port: number,
        mount: format!("{}/proxy/{port}", reached.mount),
        path: path.to_owned(),
        form: reached.form,
        grant: reached.grant,
    };
    forward::forward_request(&state, &scope.sandbox, &target, request).await
}
