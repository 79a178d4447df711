//! TLS connections whose ClientHello names a host.
//!
//! The decision is made and nothing of the client's bytes is taken. This is where a connection to a host with a secret is
//! intercepted instead of relayed; its route then has to come from `route_by_own_resolution`.

use super::AcceptedConnection;
use super::dial::{DialError, dial};
use super::route::Route;
use crate::policy::PolicyView;

/// Dials the host and relays the bytes, which stay encrypted.
pub(super) async fn carry_tls(
    accepted: &AcceptedConnection,
    view: &PolicyView,
    route: &Route,
) -> Result<(), DialError> {
    let position = accepted.slots.of_sandbox.position;
    let dialled = dial(&accepted.egress, &accepted.sandbox, view, route, position).await?;
    accepted.relay_until_end(dialled, false).await;
    Ok(())
}
