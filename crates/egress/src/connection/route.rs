//! Decides where a connection leads, from the name that its client uses and the address that it connected to.
//!
//! ```text
//! rule by name    → the client's address if our resolver gives it for that name, else one that it gives
//! rule by address → that address
//! neither         → the default; if it allows, the client's address
//! ```

use std::net::{IpAddr, SocketAddr};

use domain::DomainName;

use crate::dns::{LookupFailure, resolve_addresses};
use crate::policy::{DecisionBasis, Judgement, PolicyView};
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

/// How many addresses of one name are tried.
const MAX_TRIED_ADDRESSES: usize = 4;

/// Where an allowed connection leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub(crate) name: Option<DomainName>,
    /// To be tried in this order, at the port that the client used.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) port: u16,
    pub(crate) reason: String,
}

/// Why a connection is refused: the text of a rule, or the name of a list or limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denial {
    pub(crate) name: Option<DomainName>,
    pub(crate) reason: String,
}

impl Denial {
    pub(crate) fn new(name: Option<&DomainName>, reason: impl Into<String>) -> Self {
        Self { name: name.cloned(), reason: reason.into() }
    }
}

/// Decides by the name that the client sent itself.
pub(crate) async fn route_by_name(
    egress: &EgressState,
    sandbox: &Sandbox,
    view: &PolicyView,
    name: &DomainName,
    destination: SocketAddr,
) -> Result<Route, Denial> {
    let (address, port) = (destination.ip().to_canonical(), destination.port());
    let judgement = view.judge(Some(name), address, port);
    if !judgement.is_allowed() {
        return Err(Denial::new(Some(name), judgement.reason));
    }
    if judgement.basis != DecisionBasis::Name {
        let reason = judgement.reason;
        return Ok(Route { name: Some(name.clone()), addresses: vec![address], port, reason });
    }
    route_by_own_resolution(egress, sandbox, view, name, destination, judgement).await
}

/// Returns the way to a name that `judgement` allows, by addresses that our resolver gives for it and nothing else. A
/// connection to a host with a secret must take it, whatever rule allows it.
pub(crate) async fn route_by_own_resolution(
    egress: &EgressState,
    sandbox: &Sandbox,
    view: &PolicyView,
    name: &DomainName,
    destination: SocketAddr,
    judgement: Judgement,
) -> Result<Route, Denial> {
    let (address, port) = (destination.ip().to_canonical(), destination.port());
    let to = |addresses| Route { name: Some(name.clone()), addresses, port, reason: judgement.reason };
    let was_given = sandbox.given().was_given(address, name);
    if was_given {
        return Ok(to(vec![address]));
    }
    let found = resolve_addresses(egress, sandbox, view, name, address).await.map_err(|failure| {
        let reason = match failure {
            LookupFailure::NoAddress => "the name has no address that may be reached",
            LookupFailure::Unavailable => "name servers do not answer",
        };
        Denial::new(Some(name), reason)
    })?;
    if found.contains(&address) {
        return Ok(to(vec![address]));
    }
    // A rule by address may precede the one by name.
    let is_allowed = |address: &IpAddr| view.judge(Some(name), *address, port).is_allowed();
    let addresses: Vec<IpAddr> = found.into_iter().filter(is_allowed).take(MAX_TRIED_ADDRESSES).collect();
    if addresses.is_empty() {
        return Err(Denial::new(Some(name), "no address of the name is allowed"));
    }
    Ok(to(addresses))
}

/// Decides for a client that sent no name where it could have.
pub(crate) fn route_without_name(view: &PolicyView, destination: SocketAddr) -> Result<Route, Denial> {
    let (address, port) = (destination.ip().to_canonical(), destination.port());
    let judgement = view.judge(None, address, port);
    if judgement.is_allowed() {
        Ok(Route { name: None, addresses: vec![address], port, reason: judgement.reason })
    } else {
        Err(Denial::new(None, judgement.reason))
    }
}

/// Decides by the names for which the address was given out: the most recent of those that are allowed.
pub(crate) fn route_by_given_names(
    sandbox: &Sandbox,
    view: &PolicyView,
    destination: SocketAddr,
) -> Result<Route, Denial> {
    let (address, port) = (destination.ip().to_canonical(), destination.port());
    let names = sandbox.given().names_of(address);
    for name in &names {
        let judgement = view.judge(Some(name), address, port);
        if judgement.is_allowed() {
            let name = Some(name.clone());
            return Ok(Route { name, addresses: vec![address], port, reason: judgement.reason });
        }
    }
    match names.first() {
        Some(name) => Err(Denial::new(Some(name), view.judge(Some(name), address, port).reason)),
        None => route_without_name(view, destination),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::tests::filtered;
    use std::time::Duration;

    fn destination(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn name(text: &str) -> DomainName {
        text.parse().expect("a name")
    }

    #[tokio::test]
    async fn addresses_without_a_name_need_a_rule_by_address() {
        let sandbox = filtered("allow a.org, allow 192.0.2.0/24:22");
        let view = sandbox.view().expect("it is served");
        let route = |text| route_without_name(&view, destination(text)).map(|route| route.reason);
        assert_eq!(route("192.0.2.1:22"), Ok("192.0.2.0/24:22".into()));
        assert_eq!(route("[::ffff:192.0.2.1]:22"), Ok("192.0.2.0/24:22".into()));
        assert_eq!(route("192.0.2.1:443").map_err(|denial| denial.reason), Err("default".into()));
    }

    #[tokio::test]
    async fn given_names_decide_where_clients_send_none() {
        let sandbox = filtered("allow ssh.org:22, deny bad.org");
        let view = sandbox.view().expect("it is served");
        let to = destination("192.0.2.1:22");
        assert!(route_by_given_names(&sandbox, &view, to).is_err());
        let address = to.ip();
        sandbox.given().remember(address, &name("ssh.org"), Duration::ZERO);
        sandbox.given().remember(address, &name("bad.org"), Duration::ZERO);
        let route = route_by_given_names(&sandbox, &view, to).expect("allowed");
        assert_eq!((route.name, route.reason.as_str()), (Some(name("ssh.org")), "ssh.org:22"));
        let denial = route_by_given_names(&sandbox, &view, destination("192.0.2.1:23")).expect_err("denied");
        assert_eq!((denial.name, denial.reason.as_str()), (Some(name("bad.org")), "bad.org"));
    }

    #[tokio::test]
    async fn clients_choice_is_kept_only_if_it_was_given_for_that_name() {
        let egress = EgressState::open(crate::vault::VaultStore::ephemeral().expect("random numbers"))
            .expect("a netlink socket");
        let sandbox = filtered("allow a.org, allow 198.51.100.0/24");
        let view = sandbox.view().expect("it is served");
        sandbox.given().remember(destination("192.0.2.1:1").ip(), &name("a.org"), Duration::ZERO);
        let route = async |who: &str, to: &str| {
            let found = route_by_name(&egress, &sandbox, &view, &name(who), destination(to)).await;
            found.map(|route| route.addresses).map_err(|denial| denial.reason)
        };
        assert_eq!(route("a.org", "192.0.2.1:443").await, Ok(vec![destination("192.0.2.1:1").ip()]));
        // No resolver is configured, so the true address is unknown.
        assert_eq!(route("a.org", "192.0.2.2:443").await, Err("name servers do not answer".into()));
        assert_eq!(route("b.org", "192.0.2.1:443").await, Err("default".into()));
        assert_eq!(route("b.org", "198.51.100.9:443").await, Ok(vec![destination("198.51.100.9:1").ip()]));
    }
}
