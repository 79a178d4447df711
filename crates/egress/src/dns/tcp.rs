//! Queries over TCP: each is preceded by its length.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::answer::{QueryOutcome, judge_query};
use super::message::Transport;
use crate::sandbox::Sandbox;
use crate::shared::EgressState;

const MAX_QUERY_BYTES: usize = 4096;
/// How long a connection may be idle, or take for one message.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers the queries of one connection until it is closed.
pub(crate) async fn serve_connection(
    egress: &EgressState,
    sandbox: &Arc<Sandbox>,
    mut stream: TcpStream,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        let length = usize::from(timeout(IDLE_TIMEOUT, stream.read_u16()).await??);
        if length > MAX_QUERY_BYTES {
            return Err(io::Error::other("a query is too long"));
        }
        buffer.resize(length, 0);
        timeout(IDLE_TIMEOUT, stream.read_exact(&mut buffer)).await??;
        let answer = match judge_query(sandbox, &buffer, Transport::Tcp) {
            QueryOutcome::Ignored => return Ok(()),
            QueryOutcome::Answer(answer) => answer,
            QueryOutcome::Lookup(lookup) => lookup.run(egress, sandbox).await,
        };
        let Some(answer) = answer else { return Ok(()) };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        let framed = [&length.to_be_bytes()[..], &answer].concat();
        timeout(IDLE_TIMEOUT, stream.write_all(&framed)).await??;
    }
}
