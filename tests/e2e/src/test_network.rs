//! A private host and internet for a test: net namespaces that no other process sees.
//!
//! ```text
//!  the test's thread, its servers          another thread
//!   host: up0 203.0.113.2 ──── link ──── world: w0 203.0.113.1 and many others
//! ```
//!
//! [`TestNetwork::create`] moves the calling thread into the host's namespace, so everything it starts from then on
//! is there too: servers, their launchers, clients. The real host's links and filters stay untouched. The
//! world answers on TCP port 80 with the peer address, repeats lines on port 7, answers every name on port
//! 53, and records the packets to UDP port 9.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use linux::namespaces::{self, NamespaceSet};
use linux::netlink::route::{RoutingSocket, VethEnd};

/// The machine behind the link, which is the host's gateway and name server as well.
pub const GATEWAY: &str = "203.0.113.1";
pub const GATEWAY_V6: &str = "2001:db8::1";
/// The host as the world sees it.
pub const HOST_ADDRESS: &str = "203.0.113.2";
pub const HOST_ADDRESS_V6: &str = "2001:db8::2";
/// Other addresses at which the world answers: typical neighbours in clouds and companies.
pub const OTHER_ADDRESSES: [&str; 9] = [
    "10.1.2.3",
    "172.16.5.5",
    "192.168.77.1",
    "100.64.0.9",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "fd00:ec2::254",
    "fd12::1",
];

/// A port on which the host listens on every address.
pub const HOST_PORT: u16 = 8099;

pub struct TestNetwork {
    /// The packets that arrived at UDP port 9.
    udp_packets: Arc<Mutex<Vec<String>>>,
    /// The number of connections to port 7.
    echo_connections: Arc<AtomicUsize>,
    _running: Sender<()>,
}

impl TestNetwork {
    /// Makes both namespaces, with a host that forwards packets.
    pub fn create() -> Self {
        let (running, ended) = channel::<()>();
        let (sender, receiver) = channel();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let lasting = Arc::new(AtomicUsize::new(0));
        let (sink, count) = (Arc::clone(&heard), Arc::clone(&lasting));
        std::thread::spawn(move || {
            let namespace = enter_new_net_namespace();
            // The namespace exists as long as its servers, and they run as long as the test.
            start_services(sink, count);
            sender.send(namespace).expect("the test thread receives it");
            ended.recv().ok();
        });
        let world = receiver.recv().expect("the thread runs");
        enter_new_net_namespace();
        connect_namespaces(&world);
        set_forwarding(true);
        listen_on_host();
        Self { udp_packets: heard, echo_connections: lasting, _running: running }
    }

    pub fn received_packets(&self) -> Vec<String> {
        self.udp_packets.lock().expect("no thread panics while holding the lock").clone()
    }

    pub fn count_echo_connections(&self) -> usize {
        self.echo_connections.load(Ordering::SeqCst)
    }
}

/// Sets whether the host of this thread forwards packets.
pub fn set_forwarding(on: bool) {
    let value = if on { "1" } else { "0" };
    for setting in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{setting}"), value).expect("the namespace is our own");
    }
}

/// The names of links that our servers made, in the namespace of this thread.
pub fn sandbox_links() -> Vec<String> {
    let all = RoutingSocket::open().and_then(|mut routing| routing.list_links()).unwrap_or_default();
    all.into_iter().map(|(_, name)| name).filter(|name| name.starts_with("cora")).collect()
}

/// Gives this thread, and everything it starts from now on, a view of a host on which ordinary users may
/// open a tun device and the world resolves names.
pub fn allow_unprivileged_networking() {
    use linux::mounts::{self, MountAttrs};
    namespaces::unshare_namespaces(NamespaceSet::MOUNT).expect("tests of the network run as root");
    mounts::make_private().expect("the mounts are ours");
    let place = tempfile::tempdir().expect("a directory can be made");
    let (tun, conf) = (place.path().join("tun"), place.path().join("resolv.conf"));
    // A separate filesystem, since device nodes may not work on others.
    mounts::mount_filesystem("tmpfs", place.path(), MountAttrs::default(), "mode=0755")
        .expect("a tmpfs can be mounted");
    let kind = rustix::fs::FileType::CharacterDevice;
    let mode = rustix::fs::Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(rustix::fs::CWD, &tun, kind, mode, rustix::fs::makedev(10, 200))
        .expect("root has the permission");
    rustix::fs::chmod(&tun, mode).expect("it is ours");
    fs::write(&conf, format!("nameserver {GATEWAY}\n")).expect("it is ours");
    mounts::bind_mount(&tun, std::path::Path::new("/dev/net/tun")).expect("there is a device");
    mounts::bind_mount(&conf, std::path::Path::new("/etc/resolv.conf")).expect("there is a file");
    // The mounts disappear with this thread's namespace; only the empty directory is left to remove.
    mounts::detach_mount(place.path()).expect("the directory itself is unused");
}

/// Moves this thread into its own net namespace.
fn enter_new_net_namespace() -> OwnedFd {
    namespaces::unshare_namespaces(NamespaceSet::NET).expect("tests of the network run as root");
    namespaces::set_loopback_up().expect("the namespace is our own");
    // The namespace of this thread, not of the process.
    fs::File::open("/proc/thread-self/ns/net").expect("there is a /proc").into()
}

/// Connects this namespace and the world's.
fn connect_namespaces(world: &OwnedFd) {
    let home = fs::File::open("/proc/thread-self/ns/net").expect("there is a /proc");
    let mut here = RoutingSocket::open().expect("a socket");
    namespaces::enter_namespace(world.as_fd(), NamespaceSet::NET).expect("it is ours");
    let mut there = RoutingSocket::open().expect("a socket");
    namespaces::enter_namespace(home.as_fd(), NamespaceSet::NET).expect("it is ours");
    let (own, other) =
        (VethEnd { name: "up0", mac: [2, 0, 0, 0, 0, 1] }, VethEnd { name: "w0", mac: [2, 0, 0, 0, 0, 2] });
    here.create_veth_pair(own, other, world.as_fd()).expect("a link can be made");
    let up0 = here.find_link("up0").expect("it can be looked for").expect("it was made").index;
    let w0 = there.find_link("w0").expect("it can be looked for").expect("it was made").index;
    here.set_link_up(up0).expect("it is ours");
    there.set_link_up(w0).expect("it is ours");
    for (host, world) in [(HOST_ADDRESS, GATEWAY), (HOST_ADDRESS_V6, GATEWAY_V6)] {
        here.add_address(up0, parse_address(host)).expect("an address");
        there.add_address(w0, parse_address(world)).expect("an address");
        here.add_route(up0, parse_address(world)).expect("a route");
        there.add_route(w0, parse_address(host)).expect("a route");
        here.add_default_route(up0, parse_address(world)).expect("a route");
    }
    for other in OTHER_ADDRESSES {
        there.add_address(w0, parse_address(other)).expect("an address");
    }
}

fn parse_address(text: &str) -> IpAddr {
    text.parse().expect("it was written here")
}

fn start_services(heard: Arc<Mutex<Vec<String>>>, lasting: Arc<AtomicUsize>) {
    serve_connections(80, |mut stream, peer| {
        writeln!(stream, "seen {peer}").ok();
    });
    serve_connections(7, move |stream, _| {
        lasting.fetch_add(1, Ordering::SeqCst);
        echo_lines(&stream);
    });
    serve_connections(53, |stream, _| answer_dns_stream(stream));
    let names = UdpSocket::bind("[::]:53").expect("the port is free in a new namespace");
    std::thread::spawn(move || {
        let mut packet = [0; 512];
        while let Ok((length, peer)) = names.recv_from(&mut packet) {
            names.send_to(&answer_dns_query(&packet[..length]), peer).ok();
        }
    });
    let sink = UdpSocket::bind("[::]:9").expect("the port is free in a new namespace");
    std::thread::spawn(move || {
        let mut packet = [0; 512];
        while let Ok((length, _)) = sink.recv_from(&mut packet) {
            let text = String::from_utf8_lossy(&packet[..length]).into_owned();
            heard.lock().expect("no thread panics while holding the lock").push(text);
        }
    });
}

/// Serves every connection to a port in its own thread.
fn serve_connections(port: u16, work: impl Fn(TcpStream, IpAddr) + Clone + Send + 'static) {
    let listener = TcpListener::bind(("::", port)).expect("the port is free in a new namespace");
    std::thread::spawn(move || {
        while let Ok((stream, peer)) = listener.accept() {
            let work = work.clone();
            std::thread::spawn(move || work(stream, peer.ip().to_canonical()));
        }
    });
}

fn listen_on_host() {
    serve_connections(HOST_PORT, |mut stream, peer| {
        writeln!(stream, "seen {peer} by the host").ok();
    });
}

fn echo_lines(stream: &TcpStream) {
    let mut lines = BufReader::new(stream).lines();
    while let Some(Ok(line)) = lines.next() {
        let mut answer: &TcpStream = stream;
        if writeln!(answer, "{line}").is_err() {
            return;
        }
    }
}

fn answer_dns_stream(mut stream: TcpStream) {
    let mut length = [0; 2];
    while stream.read_exact(&mut length).is_ok() {
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        if stream.read_exact(&mut query).is_err() {
            return;
        }
        let answer = answer_dns_query(&query);
        let length = u16::try_from(answer.len()).expect("it is short").to_be_bytes();
        if stream.write_all(&[&length[..], &answer].concat()).is_err() {
            return;
        }
    }
}

/// Answers a DNS query: every name resolves to the world's address.
fn answer_dns_query(query: &[u8]) -> Vec<u8> {
    const HEADER: usize = 12;
    let name = query[HEADER..].iter().position(|byte| *byte == 0).unwrap_or(0);
    let question = &query[HEADER..(HEADER + name + 5).min(query.len())];
    let octets = match question.get(name + 2) {
        Some(1) => match parse_address(GATEWAY) {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(_) => Vec::new(),
        },
        Some(28) => match parse_address(GATEWAY_V6) {
            IpAddr::V6(v6) => v6.octets().to_vec(),
            IpAddr::V4(_) => Vec::new(),
        },
        _ => Vec::new(),
    };
    let count = u8::from(!octets.is_empty());
    let mut answer = query[..2].to_vec();
    answer.extend_from_slice(&[0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0]);
    answer.extend_from_slice(question);
    if count == 1 {
        answer.extend_from_slice(&[0xc0, 0x0c, 0, question[name + 2], 0, 1, 0, 0, 0, 60, 0]);
        answer.push(u8::try_from(octets.len()).expect("an address is short"));
        answer.extend_from_slice(&octets);
    }
    answer
}
