//! Examines the first bytes of a connection without taking them.

use std::io;
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::client_hello::{HelloBytes, MAX_HELLO_BYTES, parse_client_hello};

const FIRST_BUFFER_BYTES: usize = 2 << 10;

/// What a client sends first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FirstBytes {
    /// A whole ClientHello.
    Hello { name: Option<domain::DomainName> },
    /// TLS that no client sends, or a ClientHello that ended too early.
    InvalidHello,
    /// Something else; the first byte of it.
    Other(u8),
    /// Nothing, or only the beginning of a ClientHello, in the time that was given.
    Late { started: bool },
    /// The client closed its side without sending anything.
    Closed,
}

/// Waits until the first bytes show what they are. They stay in the socket.
pub(crate) async fn examine_first_bytes(stream: &TcpStream, limit: Duration) -> io::Result<FirstBytes> {
    let mut started = false;
    match tokio::time::timeout(limit, wait_for_hello(stream, &mut started)).await {
        Ok(found) => found,
        Err(_elapsed) => Ok(FirstBytes::Late { started }),
    }
}

async fn wait_for_hello(stream: &TcpStream, started: &mut bool) -> io::Result<FirstBytes> {
    let mut buffer = vec![0; FIRST_BUFFER_BYTES];
    let mut seen = 0;
    loop {
        let ready = stream.ready(Interest::READABLE).await?;
        let length = match peek_beyond(stream, &mut buffer, seen) {
            Ok(length) => length,
            // Nothing new comes after the end.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && ready.is_read_closed() => {
                return Ok(if seen == 0 { FirstBytes::Closed } else { FirstBytes::InvalidHello });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        if length == 0 {
            return Ok(FirstBytes::Closed);
        }
        (seen, *started) = (length, true);
        match parse_client_hello(&buffer[..length]) {
            HelloBytes::Complete { name } => return Ok(FirstBytes::Hello { name }),
            HelloBytes::Other => return Ok(FirstBytes::Other(buffer[0])),
            HelloBytes::Invalid => return Ok(FirstBytes::InvalidHello),
            HelloBytes::Incomplete if length < buffer.len() => {}
            HelloBytes::Incomplete => buffer.resize(MAX_HELLO_BYTES, 0),
        }
    }
}

/// Reads the bytes from the beginning again if there are more than `seen`. Otherwise it reports that it would wait, so that
/// the next wait is for the arrival of more.
fn peek_beyond(stream: &TcpStream, buffer: &mut [u8], seen: usize) -> io::Result<usize> {
    stream.try_io(Interest::READABLE, || {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (length, _) = rustix::io::retry_on_intr(|| rustix::net::recv(stream, &mut buffer[..], flags))?;
        if length <= seen && seen > 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(length) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::client_hello::tests::real_hello;
    use crate::relay::tests::connected_pair;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const TEST_TIMEOUT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn name_is_found_in_pieces_and_all_bytes_stay() {
        let (mut client, mut near) = connected_pair().await;
        client.set_nodelay(true).expect("an option of every TCP socket");
        let hello = real_hello("example.org", &[]);
        let sent = hello.clone();
        let sender = tokio::spawn(async move {
            for part in sent.chunks(7) {
                client.write_all(part).await.expect("sent");
                tokio::task::yield_now().await;
            }
            client
        });
        let found = examine_first_bytes(&near, TEST_TIMEOUT).await.expect("no error");
        assert_eq!(found, FirstBytes::Hello { name: Some("example.org".parse().expect("a name")) });
        drop(sender.await.expect("it does not panic"));
        let mut kept = Vec::new();
        near.read_to_end(&mut kept).await.expect("no reset");
        assert_eq!(kept, hello);
    }

    #[tokio::test]
    async fn silent_and_slow_clients_are_told_apart() {
        let (mut client, near) = connected_pair().await;
        let short = Duration::from_millis(20);
        let found = examine_first_bytes(&near, short).await.expect("no error");
        assert_eq!(found, FirstBytes::Late { started: false });
        client.write_all(&real_hello("example.org", &[])[..60]).await.expect("sent");
        near.readable().await.expect("it arrives");
        let found = examine_first_bytes(&near, short).await.expect("no error");
        assert_eq!(found, FirstBytes::Late { started: true });
        client.shutdown().await.expect("open");
        let found = examine_first_bytes(&near, TEST_TIMEOUT).await.expect("no error");
        assert_eq!(found, FirstBytes::InvalidHello);
    }

    #[tokio::test]
    async fn other_protocols_and_closed_connections_are_recognised() {
        let (mut client, near) = connected_pair().await;
        client.write_all(b"SSH-2.0-x\r\n").await.expect("sent");
        assert_eq!(
            examine_first_bytes(&near, TEST_TIMEOUT).await.expect("no error"),
            FirstBytes::Other(b'S')
        );
        let (client, near) = connected_pair().await;
        drop(client);
        assert_eq!(examine_first_bytes(&near, TEST_TIMEOUT).await.expect("no error"), FirstBytes::Closed);
    }
}
