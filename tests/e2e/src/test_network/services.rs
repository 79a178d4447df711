//! The services of the test internet, each on all of its addresses.
//!
//! ```text
//! TCP   7 repeats lines      19 sends without end    22 begins with a banner    53 DNS     80 HTTP    443, 8443 HTTPS
//!     853 DNS over TLS     1080 SOCKS5             3128 HTTP with CONNECT
//! UDP   7 repeats             9 records              53 DNS                    443 repeats, as a QUIC server answers
//! ```
//!
//! A connection to port 80 of an address without a name gets the peer's address at once.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use linux::netlink::route::RoutingSocket;
use rustix::event::{PollFd, PollFlags, poll};
use rustls::{ServerConnection, StreamOwned};

use super::authority::TestAuthority;
use super::hosts::{WORLD_HOSTS, WorldHost};
use super::resolver::WorldResolver;
use super::web::{self, Reached};
use super::{GATEWAY, GATEWAY_V6, HOST_PORT, parse_address, socks};

/// A connection or a datagram that arrived somewhere: a test can check that nothing did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contact {
    pub address: IpAddr,
    pub port: u16,
    pub over_udp: bool,
}

/// What the test internet has seen.
#[derive(Clone, Default)]
pub(super) struct WorldRecords {
    /// The packets that arrived at UDP port 9.
    pub(super) udp_packets: Arc<Mutex<Vec<String>>>,
    /// The number of connections to port 7.
    pub(super) echo_connections: Arc<AtomicUsize>,
    contacts: Arc<Mutex<Vec<Contact>>>,
    pub(super) resolver: WorldResolver,
}

impl WorldRecords {
    pub(super) fn contacts(&self) -> Vec<Contact> {
        self.contacts.lock().expect("no thread panics while holding the lock").clone()
    }

    fn add_contact(&self, local: SocketAddr, over_udp: bool) {
        let contact = Contact { address: local.ip(), port: local.port(), over_udp };
        self.contacts.lock().expect("no thread panics while holding the lock").push(contact);
    }
}

/// Gives this namespace, the world's, the addresses of all hosts.
pub(super) fn add_host_addresses() {
    const LOOPBACK: u32 = 1;
    let mut routing = RoutingSocket::open().expect("a socket");
    for address in served_addresses() {
        routing.add_address(LOOPBACK, address).expect("the namespace is our own");
    }
}

/// The gateway's addresses and those of all hosts with names.
fn served_addresses() -> Vec<IpAddr> {
    let hosts = WORLD_HOSTS.iter().flat_map(|host: &&WorldHost| [host.v4, host.v6]);
    [GATEWAY, GATEWAY_V6].into_iter().chain(hosts).map(parse_address).collect()
}

/// Starts everything in the namespace of this thread.
pub(super) fn start_services(records: &WorldRecords) {
    let resolver = &records.resolver;
    for port in [80, 3128] {
        let resolver = resolver.clone();
        serve_connections(port, records, move |stream, reached| {
            serve_plain_http(stream, &reached, &resolver)
        });
    }
    for port in [443, 8443] {
        let resolver = resolver.clone();
        serve_connections(port, records, move |stream, mut reached| {
            let mut stream = accept_tls(stream, reached.local.ip());
            if stream.conn.complete_io(&mut stream.sock).is_ok() {
                reached.server_name = stream.conn.server_name().map(str::to_owned);
                web::serve_http(stream, &reached, &resolver);
            }
        });
    }
    let names = resolver.clone();
    serve_connections(53, records, move |stream, _| names.answer_stream(stream));
    let names = resolver.clone();
    serve_connections(853, records, move |stream, reached| {
        names.answer_stream(accept_tls(stream, reached.local.ip()));
    });
    let lasting = Arc::clone(&records.echo_connections);
    serve_connections(7, records, move |stream, _| {
        lasting.fetch_add(1, Ordering::SeqCst);
        repeat_lines(&stream, "");
    });
    serve_connections(19, records, |mut stream, _| while stream.write_all(&[b'x'; 64 << 10]).is_ok() {});
    serve_connections(22, records, |mut stream, reached| {
        let banner = format!("SSH-2.0-test at {}\r\n", reached.local.ip());
        if stream.write_all(banner.as_bytes()).is_ok() {
            repeat_lines(&stream, "heard ");
        }
    });
    serve_connections(1080, records, |stream, _| {
        socks::serve_socks(stream).ok();
    });
    start_datagram_services(records);
}

fn start_datagram_services(records: &WorldRecords) {
    let names = records.resolver.clone();
    serve_datagrams(53, records, move |packet| names.answer_datagram(packet));
    for port in [7, 443] {
        serve_datagrams(port, records, |packet| Some(packet.to_vec()));
    }
    let heard = Arc::clone(&records.udp_packets);
    serve_datagrams(9, records, move |packet| {
        let text = String::from_utf8_lossy(packet).into_owned();
        heard.lock().expect("no thread panics while holding the lock").push(text);
        None
    });
}

/// Ports of the host, on every address.
pub(super) fn listen_on_host(records: &WorldRecords) {
    for port in [80, 443, HOST_PORT] {
        serve_connections(port, records, |mut stream, reached| {
            writeln!(stream, "seen {} by the host", reached.peer.ip()).ok();
        });
    }
}

fn serve_plain_http(mut stream: TcpStream, reached: &Reached, resolver: &WorldResolver) {
    let local = reached.local.ip();
    let has_name =
        WORLD_HOSTS.iter().any(|host| [host.v4, host.v6].iter().any(|own| own.parse() == Ok(local)));
    if has_name {
        web::serve_http(stream, reached, resolver);
    } else {
        writeln!(stream, "seen {}", reached.peer.ip()).ok();
    }
}

/// Begins TLS as the host with this address.
fn accept_tls(stream: TcpStream, local: IpAddr) -> StreamOwned<ServerConnection, TcpStream> {
    let settings = TestAuthority::shared().settings_of(local);
    StreamOwned::new(ServerConnection::new(settings).expect("the settings are complete"), stream)
}

/// Serves every connection to a port in its own thread.
fn serve_connections(
    port: u16,
    records: &WorldRecords,
    work: impl Fn(TcpStream, Reached) + Clone + Send + 'static,
) {
    let listener = TcpListener::bind(("::", port)).expect("the port is free in a new namespace");
    // The queue of 128 that std asks for overflows under a thousand connections at once.
    rustix::net::listen(&listener, 4096).expect("it is a listener");
    let records = records.clone();
    std::thread::spawn(move || {
        while let Ok((stream, peer)) = listener.accept() {
            let Ok(local) = stream.local_addr().map(canonical) else { continue };
            records.add_contact(local, false);
            let work = work.clone();
            let reached = Reached { local, peer: canonical(peer), server_name: None };
            std::thread::spawn(move || work(stream, reached));
        }
    });
}

/// IPv4 addresses of a socket for both families, as such.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Serves the datagrams to a port. There is a socket for each address, because an answer must come from the address that
/// was asked.
fn serve_datagrams(
    port: u16,
    records: &WorldRecords,
    mut answer: impl FnMut(&[u8]) -> Option<Vec<u8>> + Send + 'static,
) {
    let bind = |address| UdpSocket::bind((address, port)).expect("the namespace has this address");
    let mut sockets: Vec<UdpSocket> = served_addresses().into_iter().map(bind).collect();
    sockets.push(bind(Ipv4Addr::LOCALHOST.into()));
    let records = records.clone();
    std::thread::spawn(move || {
        let mut packet = [0; 2048];
        loop {
            let ready = wait_for_any(&sockets);
            for socket in ready.into_iter().map(|index| &sockets[index]) {
                let Ok((length, peer)) = socket.recv_from(&mut packet) else { continue };
                records.add_contact(socket.local_addr().expect("it is bound"), true);
                if let Some(answer) = answer(&packet[..length]) {
                    socket.send_to(&answer, peer).ok();
                }
            }
        }
    });
}

/// The indexes of sockets with a datagram.
fn wait_for_any(sockets: &[UdpSocket]) -> Vec<usize> {
    let mut waiting: Vec<PollFd<'_>> =
        sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    poll(&mut waiting, None).ok();
    let ready = |one: &(usize, &PollFd<'_>)| one.1.revents().contains(PollFlags::IN);
    waiting.iter().enumerate().filter(ready).map(|(index, _)| index).collect()
}

fn repeat_lines(stream: &TcpStream, before: &str) {
    let mut lines = BufReader::new(stream).lines();
    while let Some(Ok(line)) = lines.next() {
        let mut answer: &TcpStream = stream;
        if writeln!(answer, "{before}{line}").is_err() {
            return;
        }
    }
}
