//! The reverse proxy of the execution API: `/proxy/{port}/…` below it forwards to that port.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use http::Uri;

use super::Scope;
use crate::opensandbox::proxy::{Reached, Target};
use crate::opensandbox::{Front, address, forward};

/// `/proxy/{port}[/…]`
pub(super) async fn forward(
    State(front): State<Front>,
    scope: Scope,
    reached: Reached,
    uri: Uri,
    request: Request,
) -> Response {
    let below = uri.path().strip_prefix("/proxy/").unwrap_or_default();
    let (port, path) = below.split_at(below.find('/').unwrap_or(below.len()));
    let number = match address::port(port) {
        Ok(number) => number,
        Err(problem) => return problem.into_response(),
    };
    let target = Target {
        id: scope.id,
        port: number,
        mount: format!("{}/proxy/{port}", reached.mount),
        path: path.to_owned(),
        form: reached.form,
        signed: reached.signed,
    };
    forward::forward(&front, &scope.owner, &target, request).await
}
