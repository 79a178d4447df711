//! Dials the address of a route. The exact address is judged as the last step before, and once more by the connection.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpSocket, TcpStream};

use super::route::Route;
use crate::address_check::leads_to_this_host;
use crate::policy::PolicyView;
use crate::sandbox::{ConnectionTarget, OpenConnection, PolicyChanged, Sandbox};
use crate::shared::EgressState;

/// How long the only address of a route may take, and each of several.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
const DIAL_ONE_OF_SEVERAL_TIMEOUT: Duration = Duration::from_secs(6);
/// How many connections of a sandbox may have receive buffers that grow; a client that reads nothing otherwise holds
/// megabytes of kernel memory with each.
const MAX_GROWING_BUFFERS: u32 = 32;
const FAR_RECEIVE_BYTES: u32 = 128 << 10;
const UNSENT_BYTES: u32 = 128 << 10;
/// After this time without bytes the kernel asks whether the other side still exists.
const KEEPALIVE_DELAY: Duration = Duration::from_secs(300);

/// A connection to the outside.
#[derive(Debug)]
pub(crate) struct Dialled {
    pub(crate) far: Arc<TcpStream>,
    pub(crate) open: OpenConnection,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DialError {
    /// The decision is outdated; it has to be made again.
    PolicyChanged,
    /// The address must not be dialled.
    Refused(String),
    /// There was no answer.
    Failed(String),
}

/// Dials the addresses of a route in their order, until one answers. `position` says how many connections the sandbox had
/// before this one.
pub(crate) async fn dial(
    egress: &EgressState,
    sandbox: &Arc<Sandbox>,
    view: &PolicyView,
    route: &Route,
    position: u32,
) -> Result<Dialled, DialError> {
    let limit = if route.addresses.len() > 1 { DIAL_ONE_OF_SEVERAL_TIMEOUT } else { DIAL_TIMEOUT };
    let mut last = DialError::Refused("no address".to_owned());
    for address in &route.addresses {
        let address = SocketAddr::new(address.to_canonical(), route.port);
        let reason = route.reason.clone();
        let target = ConnectionTarget { name: route.name.clone(), address, reason };
        last = match dial_address(egress, sandbox, view, target, (limit, position)).await {
            Err(error @ (DialError::Refused(_) | DialError::Failed(_))) => error,
            outcome => return outcome,
        };
    }
    Err(last)
}

async fn dial_address(
    egress: &EgressState,
    sandbox: &Arc<Sandbox>,
    view: &PolicyView,
    target: ConnectionTarget,
    (limit, position): (Duration, u32),
) -> Result<Dialled, DialError> {
    let address = target.address;
    // Before the connection is opened, so that what is never dialled is not in the log as allowed.
    egress
        .judge_address(view, address.ip(), Some(address.port()))
        .map_err(|refusal| DialError::Refused(refusal.to_string()))?;
    let mut open = sandbox.open_connection(view, target).map_err(|PolicyChanged| DialError::PolicyChanged)?;
    let connected = tokio::select! {
        () = open.cancel.cancelled() => return Err(DialError::PolicyChanged),
        connected = tokio::time::timeout(limit, connect(egress, view, address, position)) => connected,
    };
    let problem = match connected {
        Ok(Ok(far)) => return Ok(Dialled { far: Arc::new(far), open }),
        Ok(Err(error)) => format!("could not connect: {error}"),
        Err(_elapsed) => "could not connect: no answer".to_owned(),
    };
    open.end_reason = Some(problem.clone());
    Err(DialError::Failed(problem))
}

async fn connect(
    egress: &EgressState,
    view: &PolicyView,
    address: SocketAddr,
    position: u32,
) -> io::Result<TcpStream> {
    if let Some(proxy) = &view.settings.proxy {
        return proxy.connect(&egress.resolver, address, position).await;
    }
    let far = connect_directly(address, position).await?;
    let may_be_here = view.settings.allows(address.ip(), Some(address.port()));
    if !may_be_here && leads_to_this_host(far.local_addr()?, far.peer_addr()?) {
        crate::relay::reset(&far);
        return Err(io::Error::other("the address leads to this host"));
    }
    Ok(far)
}

/// Connects without any judgement.
pub(super) async fn connect_directly(address: SocketAddr, position: u32) -> io::Result<TcpStream> {
    let socket = match address.ip() {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_nodelay(true)?;
    if position >= MAX_GROWING_BUFFERS {
        socket.set_recv_buffer_size(FAR_RECEIVE_BYTES)?;
    }
    linux::tcp::set_unsent_limit(socket.as_fd(), UNSENT_BYTES)?;
    set_keepalive(&socket)?;
    socket.connect(address).await
}

/// Ends connections whose other side has vanished.
pub(crate) fn set_keepalive(socket: &impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(socket, true)?;
    Ok(sockopt::set_tcp_keepidle(socket, KEEPALIVE_DELAY)?)
}
