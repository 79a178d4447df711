//! Queries over UDP: one socket receives those to every address of port 53.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use linux::datagram::{receive_datagram, send_datagram};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use super::answer::{QueryOutcome, judge_query};
use super::message::Transport;
use crate::descriptor::watch_descriptor;
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

const MAX_QUERY_BYTES: usize = 2048;
/// How many queries are read before other tasks run.
const MAX_QUERIES_AT_ONCE: usize = 32;

/// Answers the queries that arrive at a socket until `stop` is cancelled.
pub(crate) async fn serve_queries(
    egress: Arc<EgressState>,
    sandbox: Arc<Sandbox>,
    socket: OwnedFd,
    stop: CancellationToken,
) -> io::Result<()> {
    let socket = Arc::new(watch_descriptor(socket, Interest::READABLE)?);
    loop {
        let mut ready = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            ready = socket.readable() => ready?,
        };
        for _ in 0..MAX_QUERIES_AT_ONCE {
            // The buffer exists only while there are queries, so idle sandboxes need none.
            let mut buffer = [0; MAX_QUERY_BYTES];
            let received = match receive_datagram(socket.get_ref().as_fd(), &mut buffer) {
                Ok(received) if received.is_truncated => continue,
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready.clear_ready();
                    break;
                }
                Err(error) => {
                    tracing::debug!(sandbox = sandbox.id, %error, "query could not be received");
                    break;
                }
            };
            let client = QueryClient { address: received.source, asked: received.destination };
            answer_query(&egress, &sandbox, &socket, &buffer[..received.length], client);
        }
        drop(ready);
        tokio::task::yield_now().await;
    }
}

/// Who asked, and which address.
#[derive(Clone, Copy)]
struct QueryClient {
    address: SocketAddrV6,
    asked: Ipv6Addr,
}

fn answer_query(
    egress: &Arc<EgressState>,
    sandbox: &Arc<Sandbox>,
    socket: &Arc<AsyncFd<OwnedFd>>,
    bytes: &[u8],
    client: QueryClient,
) {
    match judge_query(sandbox, bytes, Transport::Udp) {
        QueryOutcome::Ignored => {}
        QueryOutcome::Answer(answer) => send_answer(socket, answer, client),
        QueryOutcome::Lookup(lookup) => {
            let (egress, sandbox, socket) = (Arc::clone(egress), Arc::clone(sandbox), Arc::clone(socket));
            // Lookups end by their own time limit, and their number is bounded.
            tokio::spawn(async move {
                let answer = lookup.run(&egress, &sandbox).await;
                send_answer(&socket, answer, client);
            });
        }
    }
}

fn send_answer(socket: &AsyncFd<OwnedFd>, answer: Option<Vec<u8>>, client: QueryClient) {
    let Some(answer) = answer else { return };
    if let Err(error) = send_datagram(socket.get_ref().as_fd(), &answer, client.asked, client.address) {
        tracing::debug!(%error, "answer could not be sent; the client asks again");
    }
}
