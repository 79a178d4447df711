//! The sockets of one sandbox: a task accepts its connections and a task answers its queries. Both sleep while there are
//! none.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use crate::connection::dial::set_keepalive;
use crate::connection::{AcceptedConnection, ConnectionSlots, serve_connection};
use crate::dns;
use crate::relay::reset;
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

/// How long accepting pauses when the kernel has no memory for a connection.
pub(crate) const RETRY_DELAY: Duration = Duration::from_millis(50);

/// The sockets inside a sandbox's namespace.
pub(crate) struct SandboxSockets {
    pub(crate) listener: OwnedFd,
    pub(crate) queries: OwnedFd,
}

/// Serves both sockets until `stop` is cancelled.
pub(crate) fn start_serving(
    egress: &Arc<EgressState>,
    sandbox: &Arc<Sandbox>,
    sockets: SandboxSockets,
    stop: &CancellationToken,
) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&sockets.listener, true)?;
    let listener = TcpListener::from_std(sockets.listener.into())?;
    tokio::spawn(accept_connections(Arc::clone(egress), Arc::clone(sandbox), listener, stop.clone()));
    let queries =
        dns::udp::serve_queries(Arc::clone(egress), Arc::clone(sandbox), sockets.queries, stop.clone());
    let id = sandbox.id.clone();
    tokio::spawn(async move {
        if let Err(error) = queries.await {
            tracing::error!(sandbox = id, %error, "resolver of a sandbox failed; it answers no more queries");
        }
    });
    Ok(())
}

async fn accept_connections(
    egress: Arc<EgressState>,
    sandbox: Arc<Sandbox>,
    listener: TcpListener,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((near, _)) => admit(&egress, &sandbox, near),
            Err(error) => recover(&egress, &sandbox, &listener, &error).await,
        }
    }
}

/// Starts a connection if the limits leave room for it.
fn admit(egress: &Arc<EgressState>, sandbox: &Arc<Sandbox>, near: TcpStream) {
    let destination = match near.local_addr() {
        Ok(address) => SocketAddr::new(address.ip().to_canonical(), address.port()),
        Err(error) => {
            tracing::debug!(sandbox = sandbox.id, %error, "connection without a destination is refused");
            return reset(&near);
        }
    };
    start_connection(egress, sandbox, near, destination);
}

/// Starts a connection that its client made to `destination`.
pub(crate) fn start_connection(
    egress: &Arc<EgressState>,
    sandbox: &Arc<Sandbox>,
    near: TcpStream,
    destination: SocketAddr,
) {
    match take_slots(egress, sandbox, destination) {
        Ok(slots) => {
            if let Err(error) = near.set_nodelay(true).and_then(|()| set_keepalive(&near)) {
                tracing::debug!(sandbox = sandbox.id, %error, "connection keeps its default options");
            }
            tokio::spawn(serve_connection(AcceptedConnection {
                egress: Arc::clone(egress),
                sandbox: Arc::clone(sandbox),
                near: Arc::new(near),
                destination,
                slots: Arc::new(slots),
            }));
        }
        Err(reason) => {
            sandbox.log_denied(None, destination, reason);
            reset(&near);
        }
    }
}

/// The part of all connections that one sandbox may have when three quarters of them are taken.
const NEARLY_FULL_SHARE: u32 = 64;

fn take_slots(
    egress: &EgressState,
    sandbox: &Sandbox,
    destination: SocketAddr,
) -> Result<ConnectionSlots, &'static str> {
    let view = sandbox.view().ok_or("no settings")?;
    let address = destination.ip().to_canonical();
    if address.is_loopback() || view.own.iter().any(|own| own.to_canonical() == address) {
        return Err("own address");
    }
    let limits = view.settings.limits;
    let is_nearly_full = egress.open.open() >= limits.connections_in_total / 4 * 3;
    if is_nearly_full && sandbox.open.open() >= limits.connections_in_total / NEARLY_FULL_SHARE {
        return Err("limit of open connections while all sandboxes have many");
    }
    if !sandbox.new_connections.try_use(limits.new_connections_per_second) {
        return Err("limit of new connections per second");
    }
    let of_sandbox =
        sandbox.open.try_open(limits.connections_per_sandbox).ok_or("limit of open connections")?;
    let of_all = egress
        .open
        .try_open(limits.connections_in_total)
        .ok_or("limit of open connections of all sandboxes")?;
    Ok(ConnectionSlots { of_sandbox, _of_all: of_all })
}

/// Handles an error of accepting. Without descriptors the connection is accepted with the one that is kept for that, and
/// refused; otherwise it would wait in the listener, and its client with it.
async fn recover(egress: &EgressState, sandbox: &Sandbox, listener: &TcpListener, error: &io::Error) {
    let number = error.raw_os_error().map(Errno::from_raw_os_error);
    if !matches!(number, Some(Errno::MFILE | Errno::NFILE)) {
        tracing::warn!(sandbox = sandbox.id, %error, "connection could not be accepted; trying again");
        return tokio::time::sleep(RETRY_DELAY).await;
    }
    match egress.take_spare_descriptor() {
        Some(spare) => {
            drop(spare);
            if let Ok(Ok((near, _))) = tokio::time::timeout(RETRY_DELAY, listener.accept()).await {
                if let Ok(destination) = near.local_addr() {
                    sandbox.log_denied(None, destination, "no descriptors");
                }
                reset(&near);
            }
            egress.keep_spare_descriptor();
        }
        None => {
            tokio::time::sleep(RETRY_DELAY).await;
            egress.keep_spare_descriptor();
        }
    }
}
