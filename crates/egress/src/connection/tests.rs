//! Connections through the whole process, to servers in another namespace.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::client_hello::tests::real_hello;
use crate::policy::tests::parse_policy;
use crate::test_world::{TestWorld, in_world, read_to_end};

/// Accepts a connection and reads exactly so many bytes of it.
async fn accept_and_read(listener: &TcpListener, length: usize) -> (tokio::net::TcpStream, Vec<u8>) {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await.expect("bytes");
    (stream, bytes)
}

/// Whether a ClientHello for this name to this address is answered by a reset.
async fn is_reset(world: &TestWorld, hello: &[u8], destination: &str) -> bool {
    let mut client = world.connect(destination).await;
    // The reset may come before everything is written.
    let _written = client.write_all(hello).await;
    let (bytes, reset) = read_to_end(&mut client).await;
    bytes.is_empty() && reset
}

#[test]
fn name_of_a_hello_leads_to_its_true_address() {
    in_world("allow good.test", |world| async move {
        world.set_name("good.test", &["203.0.113.1"]);
        world.set_name("evil.test", &["203.0.113.2"]);
        let (good, evil) = (world.listen("203.0.113.1:443"), world.listen("203.0.113.2:443"));
        let hello = real_hello("good.test", &[b"h2"]);
        // The address is that of another host, as `/etc/hosts` or another resolver could say.
        for destination in ["203.0.113.1:443", "203.0.113.2:443", "192.0.2.77:443", "[2001:db8::9]:443"] {
            let mut client = world.connect(destination).await;
            client.write_all(&hello).await.expect("sent");
            let (mut server, seen) = accept_and_read(&good, hello.len()).await;
            assert_eq!(seen, hello, "{destination}");
            server.write_all(b"answer").await.expect("sent");
            drop(server);
            assert_eq!(read_to_end(&mut client).await, (b"answer".to_vec(), false));
        }
        assert!(is_reset(&world, &real_hello("evil.test", &[]), "203.0.113.2:443").await);
        assert!(is_reset(&world, &real_hello("evil.test", &[]), "203.0.113.1:443").await);
        assert!(is_reset(&world, &real_hello("192.0.2.1", &[]), "203.0.113.1:443").await);
        assert!(is_reset(&world, b"SSH-2.0-x\r\n", "203.0.113.1:443").await);
        assert!(is_reset(&world, &[22, 3, 1, 0, 4, 2, 0, 0, 0], "203.0.113.1:443").await);
        let log = world.log();
        assert!(log.contains(&"Connection Deny evil.test default".to_owned()), "{log:?}");
        assert!(log.contains(&"Connection Allow good.test good.test".to_owned()), "{log:?}");
        let accepted = tokio::time::timeout(std::time::Duration::ZERO, evil.accept()).await;
        assert!(accepted.is_err(), "a denied host was reached");
    });
}

#[test]
fn names_that_resolve_to_unreachable_addresses_lead_nowhere() {
    in_world(
        "allow rebound.test, allow 10.0.0.0/8, allow 127.0.0.0/8, allow 198.19.0.16",
        |world| async move {
            world.set_name("rebound.test", &["198.51.100.1", "127.0.0.1", "10.77.0.1"]);
            assert!(is_reset(&world, &real_hello("rebound.test", &[]), "203.0.113.1:443").await);
            for destination in ["10.77.0.1:22", "[::ffff:10.77.0.1]:22", "127.0.0.1:22", "198.19.0.16:22"] {
                assert!(is_reset(&world, b"", destination).await, "{destination}");
            }
            let log = world.log();
            assert!(log.contains(&"Connection Deny  never reachable: 10.0.0.0/8".to_owned()), "{log:?}");
            assert!(log.contains(&"Connection Deny  own address".to_owned()), "{log:?}");
        },
    );
}

#[test]
fn server_speaks_first_at_an_address_that_was_given_out() {
    in_world("allow ssh.test:22, allow tls.test:8443", |world| async move {
        let server = world.listen("203.0.113.1:22");
        assert!(is_reset(&world, b"", "203.0.113.1:22").await, "the address was not given out yet");
        world.sandbox.given().remember(
            "203.0.113.1".parse().expect("an address"),
            &"ssh.test".parse().expect("a name"),
            std::time::Duration::ZERO,
        );
        let mut client = world.connect("203.0.113.1:22").await;
        let (mut accepted, _) = server.accept().await.expect("a connection");
        accepted.write_all(b"SSH-2.0-server\r\n").await.expect("sent");
        let mut banner = [0; 16];
        client.read_exact(&mut banner).await.expect("it does not wait for the client");
        client.write_all(b"SSH-2.0-client\r\n").await.expect("sent");
        accepted.read_exact(&mut banner).await.expect("passed on");
        assert_eq!(&banner, b"SSH-2.0-client\r\n");
    });
}

#[test]
fn hello_on_another_port_is_checked_before_it_is_passed_on() {
    in_world("allow tls.test:8443", |world| async move {
        let server = world.listen("203.0.113.1:8443");
        world.set_name("tls.test", &["203.0.113.1"]);
        world.sandbox.given().remember(
            "203.0.113.1".parse().expect("an address"),
            &"tls.test".parse().expect("a name"),
            std::time::Duration::ZERO,
        );
        let hello = real_hello("tls.test", &[]);
        let mut client = world.connect("203.0.113.1:8443").await;
        client.write_all(&hello).await.expect("sent");
        let (_, seen) = accept_and_read(&server, hello.len()).await;
        assert_eq!(seen, hello);
        let mut client = world.connect("203.0.113.1:8443").await;
        client.write_all(&real_hello("evil.test", &[])).await.expect("sent");
        let (mut accepted, _) = server.accept().await.expect("it was dialled before");
        assert_eq!(read_to_end(&mut accepted).await.0, b"");
        assert_eq!(read_to_end(&mut client).await, (Vec::new(), true));
    });
}

#[test]
fn new_policy_resets_what_it_denies_before_it_is_acknowledged() {
    in_world("allow 203.0.113.1, allow 203.0.113.2", |world| async move {
        let servers = [world.listen("203.0.113.1:9"), world.listen("203.0.113.2:9")];
        let (mut kept, mut denied) =
            (world.connect("203.0.113.1:9").await, world.connect("203.0.113.2:9").await);
        let (mut kept_far, _) = servers[0].accept().await.expect("a connection");
        let (mut denied_far, _) = servers[1].accept().await.expect("a connection");
        denied_far.write_all(b"x").await.expect("sent");
        denied.read_exact(&mut [0; 1]).await.expect("passed on");
        let closing = world.sandbox.set_policy(parse_policy("allow 203.0.113.1"));
        world.sandbox.wait_closed(&closing).await;
        // The kernel has delivered it already, before the runtime notices.
        let flags = rustix::net::RecvFlags::DONTWAIT;
        let outcome = rustix::net::recv(&denied, &mut [0; 1][..], flags);
        assert_eq!(outcome.err(), Some(rustix::io::Errno::CONNRESET));
        assert!(read_to_end(&mut denied_far).await.1);
        kept.write_all(b"y").await.expect("it is open");
        kept_far.read_exact(&mut [0; 1]).await.expect("passed on");
    });
}

#[test]
fn requests_are_judged_one_by_one() {
    in_world("allow good.test:80, allow other.test", |world| async move {
        world.set_name("good.test", &["203.0.113.1"]);
        world.set_name("other.test", &["203.0.113.2"]);
        let (good, other) = (world.listen("203.0.113.1:80"), world.listen("203.0.113.2:80"));
        let mut client = world.connect("203.0.113.1:80").await;
        client
            .write_all(
                b"GET /a HTTP/1.1\r\nHost: good.test\r\n\r\nPOST http://other.test/b HTTP/1.1\r\nHost: other.test\r\n\
                  Content-Length: 4\r\n\r\nbodyGET /c HTTP/1.1\r\nHost: evil.test\r\n\r\n",
            )
            .await
            .expect("sent");
        let (mut first, _) = good.accept().await.expect("a connection");
        let request = read_head(&mut first).await;
        assert!(request.starts_with("GET /a HTTP/1.1\r\n"), "{request}");
        assert!(!request.contains("evil"), "{request}");
        first.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n1\n").await.expect("sent");
        let (mut second, _) = other.accept().await.expect("a connection");
        let request = read_head(&mut second).await;
        assert!(request.starts_with("POST /b HTTP/1.1\r\n"), "{request}");
        second.read_exact(&mut [0; 4]).await.expect("the body");
        second
            .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n2\n\r\n0\r\n\r\n")
            .await
            .expect("sent");
        let (answers, reset) = read_to_end(&mut client).await;
        let answers = String::from_utf8_lossy(&answers).into_owned();
        assert!(!reset);
        assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 2, "{answers}");
        assert!(answers.contains("HTTP/1.1 403 Forbidden"), "{answers}");
        assert!(answers.ends_with("network policy denies evil.test: default\n"), "{answers}");
        let log = world.log();
        assert!(log.contains(&"Connection Deny evil.test default".to_owned()), "{log:?}");
    });
}

#[test]
fn upgraded_connection_carries_bytes_and_ends_with_a_denying_policy() {
    in_world("allow good.test", |world| async move {
        world.set_name("good.test", &["203.0.113.1"]);
        let server = world.listen("203.0.113.1:80");
        let mut client = world.connect("203.0.113.1:80").await;
        client
            .write_all(
                b"GET /ws HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
            )
            .await
            .expect("sent");
        let (mut far, _) = server.accept().await.expect("a connection");
        assert!(read_head(&mut far).await.to_ascii_lowercase().contains("upgrade: websocket"));
        far.write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        )
        .await
        .expect("sent");
        assert!(read_head(&mut client).await.starts_with("HTTP/1.1 101"));
        client.write_all(b"ping").await.expect("sent");
        far.read_exact(&mut [0; 4]).await.expect("passed on");
        far.write_all(b"pong").await.expect("sent");
        client.read_exact(&mut [0; 4]).await.expect("passed on");
        let closing = world.sandbox.set_policy(parse_policy(""));
        world.sandbox.wait_closed(&closing).await;
        assert!(read_to_end(&mut client).await.1);
        assert!(read_to_end(&mut far).await.1);
    });
}

#[test]
fn refused_requests_reach_nobody() {
    in_world("allow good.test", |world| async move {
        world.set_name("good.test", &["203.0.113.1"]);
        let server = world.listen("203.0.113.1:80");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "400"),
            ("GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n", "400"),
            ("GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", "400"),
            ("CONNECT evil.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n", "403"),
            ("GET / HTTP/1.0\r\n\r\n", "403"),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
        ] {
            let mut client = world.connect("203.0.113.1:80").await;
            client.write_all(request.as_bytes()).await.expect("sent");
            let (answer, _) = read_to_end(&mut client).await;
            let answer = String::from_utf8_lossy(&answer).into_owned();
            assert!(answer.contains(status) || answer.is_empty() && status == "400", "{request}: {answer}");
        }
        assert!(tokio::time::timeout(std::time::Duration::ZERO, server.accept()).await.is_err());
    });
}

#[test]
fn full_tables_refuse_with_a_reason() {
    in_world("allow 203.0.113.1", |world| async move {
        let mut settings = crate::settings::tests::sample(|_| {});
        settings.limits.connections_per_sandbox = 2;
        let _closing = world.sandbox.set_settings(&std::sync::Arc::new(settings));
        let _server = world.listen("203.0.113.1:9");
        let _kept = [world.connect("203.0.113.1:9").await, world.connect("203.0.113.1:9").await];
        let mut third = world.connect("203.0.113.1:9").await;
        assert!(read_to_end(&mut third).await.1);
        let log = world.log();
        assert!(log.contains(&"Connection Deny  limit of open connections".to_owned()), "{log:?}");
    });
}

async fn read_head(stream: &mut tokio::net::TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    String::from_utf8(head).expect("text")
}
