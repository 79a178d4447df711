//! TLS connections whose ClientHello names a host.
//!
//! The decision is made and nothing of the client's bytes is taken. This is where a connection to a host with a secret is
//! intercepted instead of relayed; its route then has to come from `route_by_own_resolution`.

use std::sync::Arc;

use domain::UrlScheme;

use super::AcceptedConnection;
use super::dial::{DialError, Dialled, dial};
use super::metered_stream::MeteredStream;
use super::route::Route;
use crate::policy::PolicyView;
use crate::relay::reset;
use crate::vault::InterceptTarget;

/// Dials the host and relays the bytes, which stay encrypted unless the sandbox's vault has a secret for this host.
pub(super) async fn carry_tls(
    accepted: &AcceptedConnection,
    view: &PolicyView,
    route: &Route,
) -> Result<(), DialError> {
    let position = accepted.slots.of_sandbox.position;
    let dialled = dial(&accepted.egress, &accepted.sandbox, view, route, position).await?;
    let target = route
        .name
        .as_ref()
        .and_then(|name| accepted.egress.vaults.target(&accepted.sandbox.id, UrlScheme::Https, name));
    match target {
        Some(target) => intercept(accepted, dialled, target).await,
        None => accepted.relay_until_end(dialled, false).await,
    }
    Ok(())
}

/// Carries a connection to a host with a secret until it ends or a new policy denies it.
async fn intercept(accepted: &AcceptedConnection, dialled: Dialled, target: InterceptTarget) {
    let Dialled { far, mut open } = dialled;
    let cancel = open.cancel.clone();
    let near_stream = MeteredStream::new(Arc::clone(&accepted.near), None);
    let far_stream = MeteredStream::new(Arc::clone(&far), Some(Arc::clone(&open.traffic)));
    let outcome = tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        outcome = target.intercept(near_stream, far_stream) => Some(outcome),
    };
    match outcome {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            tracing::debug!(sandbox = accepted.sandbox.id, %error, "intercepted connection ended early");
            open.end_reason = Some(error.to_string());
            reset(&accepted.near);
        }
        None => {
            reset(&accepted.near);
            reset(&far);
        }
    }
}
