//! Packets of one control connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use egress_protocol::{ConnectionRole, EgressReply, EgressReplyBody};
use linux::packet::{receive_with_descriptors, send_with_descriptors};
use rustix::net::SocketFlags;
use serde::Deserialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::requests::{RequestOutcome, apply_request};
use crate::descriptor::watch_descriptor;
use crate::shared::EgressState;

/// How many requests of one connection may wait for a record of a log: more than a server has streams.
const MAX_WAITING_READERS: usize = 4096;
/// How many servers may be connected: the present one, and its predecessors that are ending.
const MAX_SERVERS: usize = 16;

/// A request whose body is parsed later, so that a request that is not known gets a reply.
#[derive(Deserialize)]
struct RawRequest {
    number: u64,
    body: serde_json::Value,
}

struct ControlSocket(AsyncFd<OwnedFd>);

/// Serves the requests of one connection until it is closed.
pub(crate) async fn serve_control(
    egress: Arc<EgressState>,
    fd: OwnedFd,
    role: ConnectionRole,
) -> io::Result<()> {
    let socket = Arc::new(ControlSocket(watch_descriptor(fd, Interest::READABLE | Interest::WRITABLE)?));
    let readers = Arc::new(Semaphore::new(MAX_WAITING_READERS));
    // Requests that wait end with the connection.
    let ended = CancellationToken::new();
    let _end = ended.clone().drop_guard();
    while let Some((request, descriptors)) = socket.receive().await? {
        let number = request.number;
        let body = match apply_request(&egress, role, request.body, descriptors) {
            RequestOutcome::Reply(body) => body,
            RequestOutcome::Wait(wait) => {
                tokio::spawn(reply_later(Arc::clone(&socket), number, wait, None, ended.clone()));
                continue;
            }
            // Readers of logs have a limit of their own, so that they never keep a change from being answered.
            RequestOutcome::WaitForRecord(wait) => match Arc::clone(&readers).try_acquire_owned() {
                Ok(permit) => {
                    let later = reply_later(Arc::clone(&socket), number, wait, Some(permit), ended.clone());
                    tokio::spawn(later);
                    continue;
                }
                Err(_) => EgressReplyBody::Refused { message: "too many readers of logs wait".to_owned() },
            },
        };
        socket.send(&EgressReply { number, body }).await?;
    }
    Ok(())
}

async fn reply_later(
    socket: Arc<ControlSocket>,
    number: u64,
    wait: impl Future<Output = EgressReplyBody>,
    permit: Option<OwnedSemaphorePermit>,
    ended: CancellationToken,
) {
    tokio::select! {
        () = ended.cancelled() => {}
        body = wait => {
            if let Err(error) = socket.send(&EgressReply { number, body }).await {
                tracing::debug!(%error, "reply could not be sent; the connection ends");
            }
        }
    }
    drop(permit);
}

/// Accepts servers until there is an error of the listener itself.
pub(crate) async fn accept_servers(egress: Arc<EgressState>, listener: OwnedFd) -> io::Result<()> {
    let listener = watch_descriptor(listener, Interest::READABLE)?;
    let slots = Arc::new(Semaphore::new(MAX_SERVERS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return Ok(()) };
        let accept =
            |fd: &OwnedFd| Ok(rustix::net::accept_with(fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?);
        let fd = match listener.async_io(Interest::READABLE, accept).await {
            Ok(fd) => fd,
            Err(error) => {
                tracing::warn!(%error, "server could not be accepted; trying again");
                tokio::time::sleep(crate::serve::RETRY_DELAY).await;
                continue;
            }
        };
        let egress = Arc::clone(&egress);
        tokio::spawn(async move {
            if let Err(error) = serve_control(egress, fd, ConnectionRole::Server).await {
                tracing::warn!(%error, "connection of a server ended; it can connect again");
            }
            drop(slot);
        });
    }
}

impl ControlSocket {
    /// Receives one request; `None` when the connection is closed.
    async fn receive(&self) -> io::Result<Option<(RawRequest, Vec<OwnedFd>)>> {
        let receive = |fd: &OwnedFd| receive_with_descriptors(fd.as_fd());
        self.0.async_io(Interest::READABLE, receive).await
    }

    async fn send(&self, reply: &EgressReply) -> io::Result<()> {
        let none: &[BorrowedFd<'_>] = &[];
        let send = |fd: &OwnedFd| send_with_descriptors(fd.as_fd(), reply, none);
        self.0.async_io(Interest::WRITABLE, send).await
    }
}
