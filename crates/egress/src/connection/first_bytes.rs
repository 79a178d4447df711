//! Checks the first bytes of a connection that was dialled before they arrived: if they are a ClientHello, its name must be
//! allowed too. Otherwise a client could reach another host behind an address that was given out for an allowed one.

use std::io;

use domain::DomainName;

use super::peek::{FirstBytes, examine_first_bytes};
use super::{AcceptedConnection, FIRST_BYTES_TIMEOUT};
use crate::dns::resolve_addresses;
use crate::policy::DecisionBasis;
use crate::sandbox::OpenConnection;

/// Waits for the client's first bytes, however long that takes, and returns an error if they must not be passed on. The
/// reason is written to `problem`.
pub(super) async fn check_first_bytes(
    accepted: &AcceptedConnection,
    open: &mut OpenConnection,
    problem: &mut Option<String>,
) -> io::Result<()> {
    accepted.near.readable().await?;
    let refused = match examine_first_bytes(&accepted.near, FIRST_BYTES_TIMEOUT).await? {
        FirstBytes::Hello { name: Some(name) } if open.target().name.as_ref() != Some(&name) => {
            check_name(accepted, open, name).await
        }
        FirstBytes::InvalidHello | FirstBytes::Late { started: true } => {
            Some("not a valid ClientHello".to_owned())
        }
        FirstBytes::Hello { .. } | FirstBytes::Other(_) | FirstBytes::Late { .. } | FirstBytes::Closed => {
            None
        }
    };
    match refused {
        Some(reason) => {
            *problem = Some(reason);
            Err(io::Error::other("the first bytes are refused"))
        }
        None => Ok(()),
    }
}

/// Returns why the name is refused. A rule by name covers the connection only if our resolver gives this address for it.
async fn check_name(
    accepted: &AcceptedConnection,
    open: &mut OpenConnection,
    name: DomainName,
) -> Option<String> {
    let target = open.target().address;
    let (address, port) = (target.ip(), target.port());
    let view = accepted.sandbox.view()?;
    let needs_address = view.judge(Some(&name), address, port).basis == DecisionBasis::Name;
    if needs_address && !accepted.sandbox.given().was_given(address, &name) {
        let found = resolve_addresses(&accepted.egress, &accepted.sandbox, &view, &name, address).await;
        if !found.is_ok_and(|found| found.contains(&address)) {
            return Some(format!("{name} does not have this address"));
        }
    }
    let shown = name.to_string();
    let judgement = open.rename(name.clone(), |view| view.judge(Some(&name), address, port));
    (!judgement.is_allowed()).then(|| format!("{shown}: {}", judgement.reason))
}
