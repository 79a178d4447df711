//! Carries the bytes of a connection in both directions until both have ended.
//!
//! ```text
//! socket ─splice─► pipe ─splice─► socket      the end of one direction is passed on, the other continues
//! ```
//!
//! Bytes stay in the kernel. Where no pipe can be had they are copied. An error in one direction ends both.

use std::io;
use std::os::fd::AsFd;

use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::SpliceFlags;
use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::pipe_pool::{PIPE_BYTES, PipePool, SplicePipe};
use crate::sandbox::{ConnectionTraffic, Direction};

const COPY_BYTES: usize = 64 << 10;

/// Carries bytes between two sockets. `check` runs before anything of the near socket is read; bytes of the far socket do
/// not wait for it.
pub(crate) async fn relay(
    near: &TcpStream,
    far: &TcpStream,
    pipes: &PipePool,
    traffic: &ConnectionTraffic,
    check: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let sent = async {
        check.await?;
        carry(near, far, pipes, traffic, Direction::Sent).await
    };
    let received = carry(far, near, pipes, traffic, Direction::Received);
    tokio::try_join!(sent, received).map(|_| ())
}

/// Closes a connection with a reset.
pub(crate) fn reset(stream: &TcpStream) {
    // Whoever else still holds the socket has nothing of it either.
    if let Err(error) = rustix::net::connect_unspec(stream) {
        tracing::debug!(%error, "connection could not be reset");
    }
}

async fn carry(
    from: &TcpStream,
    to: &TcpStream,
    pipes: &PipePool,
    traffic: &ConnectionTraffic,
    direction: Direction,
) -> io::Result<()> {
    loop {
        from.readable().await?;
        let carried = match pipes.take() {
            Ok(pipe) => splice_once(from, to, pipe, pipes).await?,
            Err(_) => copy_once(from, to).await?,
        };
        match carried {
            Carried::Nothing => {}
            Carried::Bytes(count) => traffic.count(direction, count as u64).await,
            Carried::End => return pass_end(to),
        }
    }
}

/// What one turn has carried.
enum Carried {
    /// There was nothing to read yet.
    Nothing,
    Bytes(usize),
    /// The sender has closed its side.
    End,
}

async fn splice_once(
    from: &TcpStream,
    to: &TcpStream,
    pipe: SplicePipe,
    pipes: &PipePool,
) -> io::Result<Carried> {
    let carried = match try_splice(from, Interest::READABLE, from, &pipe.writer, PIPE_BYTES) {
        Ok(0) => Carried::End,
        Ok(count) => {
            let mut left = count;
            while left > 0 {
                to.writable().await?;
                match try_splice(to, Interest::WRITABLE, &pipe.reader, to, left) {
                    Ok(moved) => left -= moved,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
            }
            Carried::Bytes(count)
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Carried::Nothing,
        // Some kernels cannot splice from this socket.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => copy_once(from, to).await?,
        Err(error) => return Err(error),
    };
    pipes.put(pipe);
    Ok(carried)
}

/// Moves bytes if the socket is ready for it; a pipe always is, because it is either empty or holds what is moved.
fn try_splice(
    socket: &TcpStream,
    interest: Interest,
    from: impl AsFd,
    to: impl AsFd,
    most: usize,
) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK | SpliceFlags::MOVE;
    socket.try_io(interest, || {
        let moved = rustix::io::retry_on_intr(|| {
            rustix::pipe::splice(from.as_fd(), None, to.as_fd(), None, most, flags)
        });
        Ok(moved?)
    })
}

async fn copy_once(from: &TcpStream, to: &TcpStream) -> io::Result<Carried> {
    let mut buffer = vec![0; COPY_BYTES];
    let count = match from
        .try_io(Interest::READABLE, || Ok(rustix::net::recv(from, &mut buffer[..], RecvFlags::DONTWAIT)?.0))
    {
        Ok(0) => return Ok(Carried::End),
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Carried::Nothing),
        Err(error) => return Err(error),
    };
    let mut rest = &buffer[..count];
    while !rest.is_empty() {
        to.writable().await?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match to.try_io(Interest::WRITABLE, || Ok(rustix::net::send(to, rest, flags)?)) {
            Ok(sent) => rest = &rest[sent..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Carried::Bytes(count))
}

/// Passes on that a side will send nothing more.
fn pass_end(to: &TcpStream) -> io::Result<()> {
    match rustix::net::shutdown(to, Shutdown::Write) {
        // The other side is gone already; its direction reports how.
        Err(rustix::io::Errno::NOTCONN) => Ok(()),
        outcome => Ok(outcome?),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use crate::sandbox::tests::filtered;
    use crate::sandbox::{ConnectionTarget, OpenConnection};

    /// Both ends of a connection over loopback.
    pub(crate) async fn connected_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
        (one.expect("it connects"), other.expect("it accepts").0)
    }

    fn open_connection() -> OpenConnection {
        let sandbox = filtered("allow default");
        let view = sandbox.view().expect("it is served");
        let address = "192.0.2.1:443".parse().expect("an address");
        let target = ConnectionTarget { name: None, address, reason: "default".into() };
        sandbox.open_connection(&view, target).expect("allowed")
    }

    async fn send_pattern(stream: &mut (impl AsyncWriteExt + Unpin), bytes: usize, seed: u8) {
        let block: Vec<u8> = (0..=u8::MAX).cycle().skip(seed.into()).take(64 << 10).collect();
        let mut left = bytes;
        while left > 0 {
            let part = left.min(block.len());
            stream.write_all(&block[..part]).await.expect("the other side reads");
            left -= part;
        }
        stream.shutdown().await.expect("it is open");
    }

    async fn expect_pattern(stream: &mut (impl AsyncReadExt + Unpin), bytes: usize, seed: u8) {
        let mut buffer = vec![0; 64 << 10];
        let mut seen = 0;
        loop {
            let count = stream.read(&mut buffer).await.expect("no reset");
            if count == 0 {
                break;
            }
            for (offset, byte) in buffer[..count].iter().enumerate() {
                let expected = (seen + offset + usize::from(seed)) % 256;
                assert_eq!(usize::from(*byte), expected, "at {}", seen + offset);
            }
            seen += count;
        }
        assert_eq!(seen, bytes);
    }

    async fn carry_both_ways(pipes: Arc<PipePool>, bytes: usize) {
        let (client, near) = connected_pair().await;
        let (far, server) = connected_pair().await;
        let open = open_connection();
        let traffic = Arc::clone(&open.traffic);
        let relayed = tokio::spawn(async move {
            relay(&near, &far, &pipes, &traffic, async { Ok(()) }).await.expect("no error");
        });
        let (mut client_reads, mut client_writes) = client.into_split();
        let (mut server_reads, mut server_writes) = server.into_split();
        tokio::join!(
            send_pattern(&mut client_writes, bytes, 3),
            expect_pattern(&mut server_reads, bytes, 3),
            async {
                send_pattern(&mut server_writes, bytes, 7).await;
            },
            expect_pattern(&mut client_reads, bytes, 7),
        );
        relayed.await.expect("it does not panic");
        let counters = open.traffic.sandbox.read_counters();
        assert_eq!((counters.bytes_sent, counters.bytes_received), (bytes as u64, bytes as u64));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fifty_megabytes_pass_each_way_unchanged() {
        carry_both_ways(Arc::default(), 50_000_000).await;
    }

    #[tokio::test]
    async fn bytes_are_copied_where_splice_is_not_possible() {
        let (mut client, near) = connected_pair().await;
        let (far, mut server) = connected_pair().await;
        client.write_all(b"hello").await.expect("sent");
        near.readable().await.expect("ready");
        assert!(matches!(copy_once(&near, &far).await, Ok(Carried::Bytes(5))));
        let mut buffer = [0; 5];
        server.read_exact(&mut buffer).await.expect("passed on");
        assert_eq!(&buffer, b"hello");
        assert!(matches!(copy_once(&near, &far).await, Ok(Carried::Nothing)));
        drop(client);
        near.readable().await.expect("ready");
        assert!(matches!(copy_once(&near, &far).await, Ok(Carried::End)));
    }

    #[tokio::test]
    async fn answer_arrives_after_the_request_side_was_closed() {
        let (mut client, near) = connected_pair().await;
        let (far, mut server) = connected_pair().await;
        let open = open_connection();
        let traffic = Arc::clone(&open.traffic);
        let pipes = PipePool::default();
        let exchange = async {
            client.write_all(b"request").await.expect("sent");
            client.shutdown().await.expect("open");
            let mut request = Vec::new();
            server.read_to_end(&mut request).await.expect("the end is passed on");
            assert_eq!(request, b"request");
            server.write_all(b"answer").await.expect("sent");
            drop(server);
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.expect("the end is passed on");
            assert_eq!(answer, b"answer");
        };
        let (relayed, ()) = tokio::join!(relay(&near, &far, &pipes, &traffic, async { Ok(()) }), exchange);
        relayed.expect("no error");
    }

    #[tokio::test]
    async fn far_bytes_do_not_wait_for_the_check_and_near_bytes_do() {
        let (mut client, near) = connected_pair().await;
        let (far, mut server) = connected_pair().await;
        let open = open_connection();
        let traffic = Arc::clone(&open.traffic);
        let pipes = PipePool::default();
        client.write_all(b"early").await.expect("sent");
        let check = async {
            near.readable().await?;
            Err(io::Error::other("refused"))
        };
        let exchange = async {
            server.write_all(b"banner").await.expect("sent");
            let mut banner = [0; 6];
            client.read_exact(&mut banner).await.expect("passed on");
        };
        let (relayed, ()) = tokio::join!(
            relay(&near, &far, &pipes, &traffic, async {
                exchange.await;
                check.await
            }),
            async {}
        );
        assert!(relayed.is_err());
        reset(&far);
        let mut seen = Vec::new();
        assert!(server.read_to_end(&mut seen).await.is_err());
        assert!(seen.is_empty());
    }

    #[tokio::test]
    async fn reset_is_seen_at_once_by_the_other_side() {
        let (mut client, near) = connected_pair().await;
        reset(&near);
        let error = client.read(&mut [0; 1]).await.expect_err("a reset");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
}
