//! The net namespace of a sandbox without a link, as root and as an ordinary user.
//!
//! Each check runs in a child with two namespaces after each other: one that stands for the host, and one for the
//! sandbox. The test forks, so it has its own main function instead of the test harness with its threads.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use launcher::network::NetworkSettings;
use launcher::network::filtered::{FilteredLayout, FilteredNetwork, lift_error_limits, open_sockets};
use linux::caps::{CapSet, set_capabilities};
use linux::datagram::{receive_datagram, send_datagram};
use linux::namespaces::{
    IdMapExtent, NamespaceSet, SetgroupsPolicy, set_loopback_up, switch_ids, unshare_namespaces,
    write_id_maps,
};
use linux::netlink::route::{RoutingSocket, VethEnd};
use linux::spawn::{ForkResult, ProcessExit, SingleThread, exit_now, wait_for_child};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

const ORDINARY_UID: u32 = 61_234;
const OUTSIDE: [&str; 2] = ["203.0.113.1", "2001:db8::1"];
const TIMEOUT: Duration = Duration::from_secs(20);

/// The families that the host has routes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostRoutes {
    Both,
    V4,
    None,
}

/// What is checked, the routes of the host, and the check.
type NetworkCheck = (&'static str, HostRoutes, fn(TestNetwork));

/// A sandbox's namespace, which this process is in, and what egress would hold.
struct TestNetwork(FilteredNetwork);

fn main() {
    if !testkit::is_root() {
        testkit::skip_test("the test of filtered networks runs as root and as an ordinary user");
        return;
    }
    let checks: [NetworkCheck; 10] = [
        ("connections to any address arrive", HostRoutes::Both, connections_arrive_with_their_destination),
        ("queries are answered from any address", HostRoutes::Both, queries_are_answered_from_any_address),
        ("other datagrams are refused at once", HostRoutes::Both, other_datagrams_are_refused_at_once),
        ("denied addresses are refused", HostRoutes::Both, denied_addresses_are_refused),
        ("the sockets cannot be reached directly", HostRoutes::Both, sockets_cannot_be_reached_directly),
        ("no program takes the place of the sockets", HostRoutes::Both, no_program_takes_their_place),
        ("new sockets take over", HostRoutes::Both, new_sockets_take_over),
        ("services inside are untouched", HostRoutes::Both, services_inside_are_untouched),
        ("a family without routes fails at once", HostRoutes::V4, family_without_routes_fails_at_once),
        ("the resolver needs no route", HostRoutes::None, resolver_needs_no_route),
    ];
    for (name, routes, check) in checks {
        for rootless in [false, true] {
            run_check(name, routes, rootless, check);
        }
    }
}

fn run_check(name: &str, routes: HostRoutes, rootless: bool, check: fn(TestNetwork)) {
    match SingleThread::prove().unwrap().fork(NamespaceSet::NONE, None).unwrap() {
        ForkResult::Child => {
            if rootless {
                become_root_of_a_user_namespace();
            }
            check(set_up(routes));
            exit_now(0)
        }
        ForkResult::Parent { pidfd, .. } => {
            let ended = wait_for_child(pidfd.as_fd()).unwrap();
            assert_eq!(ended, ProcessExit::Code(0), "{name}, rootless: {rootless}");
        }
    }
}

fn become_root_of_a_user_namespace() {
    switch_ids(ORDINARY_UID, ORDINARY_UID, SetgroupsPolicy::Allow).unwrap();
    set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
    unshare_namespaces(NamespaceSet::USER).unwrap();
    let map = [IdMapExtent { inside: 0, outside: ORDINARY_UID, count: 1 }];
    write_id_maps(rustix::process::getpid(), &map, &map, SetgroupsPolicy::Deny).unwrap();
}

fn set_up(routes: HostRoutes) -> TestNetwork {
    unshare_namespaces(NamespaceSet::NET).unwrap();
    set_loopback_up().unwrap();
    if routes != HostRoutes::None {
        let place = OwnedFd::from(fs::File::open("/proc/thread-self/ns/net").unwrap());
        make_uplink(place.as_fd(), routes);
    }
    let settings = NetworkSettings::default();
    let layout = FilteredLayout::choose(&settings).unwrap();
    unshare_namespaces(NamespaceSet::NET).unwrap();
    set_loopback_up().unwrap();
    lift_error_limits().unwrap();
    TestNetwork(layout.set_up(&settings).unwrap())
}

/// Gives the namespace of the host a link to nowhere with routes.
fn make_uplink(place: BorrowedFd<'_>, routes: HostRoutes) {
    let mut routing = RoutingSocket::open().unwrap();
    let end = |name| VethEnd { name, mac: [2, 0, 0, 0, 0, 1] };
    routing.create_veth_pair(end("up0"), end("up1"), place).unwrap();
    let index = routing.find_link("up0").unwrap().unwrap().index;
    for name in ["up0", "up1"] {
        let link = routing.find_link(name).unwrap().unwrap().index;
        routing.disable_automatic_addresses(link).unwrap();
        routing.set_link_up(link).unwrap();
    }
    let gateways: &[&str] =
        if routes == HostRoutes::Both { &["192.0.2.1", "2001:db8:1::1"] } else { &["192.0.2.1"] };
    for gateway in gateways {
        let gateway: IpAddr = gateway.parse().unwrap();
        let own = match gateway {
            IpAddr::V4(_) => "192.0.2.2".parse().unwrap(),
            IpAddr::V6(_) => "2001:db8:1::2".parse().unwrap(),
        };
        routing.add_address(index, own).unwrap();
        routing.add_route(index, gateway).unwrap();
        routing.add_default_route(index, gateway).unwrap();
    }
}

impl TestNetwork {
    fn own(&self) -> &[IpAddr] {
        &self.0.layout.own
    }

    /// Accepts a connection as egress does, and returns it with the address that the client connected to.
    fn accept(&self) -> (TcpStream, SocketAddr) {
        wait_readable(self.0.sockets.tcp.as_fd());
        let accepted = rustix::net::accept(&self.0.sockets.tcp).unwrap();
        let stream = TcpStream::from(accepted);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        let local = stream.local_addr().unwrap();
        (stream, SocketAddr::new(local.ip().to_canonical(), local.port()))
    }

    fn accepts_nothing(&self) -> bool {
        rustix::net::accept(&self.0.sockets.tcp).is_err_and(|error| error == Errno::AGAIN)
    }

    /// Answers the next query with its own bytes in reverse, and returns the address that it was sent to.
    fn answer_query(&self) -> IpAddr {
        let socket = self.0.sockets.udp.as_fd();
        wait_readable(socket);
        let mut buffer = [0; 512];
        let query = receive_datagram(socket, &mut buffer).unwrap();
        buffer[..query.length].reverse();
        send_datagram(socket, &buffer[..query.length], query.destination, query.source).unwrap();
        IpAddr::from(query.destination).to_canonical()
    }
}

fn wait_readable(socket: BorrowedFd<'_>) {
    let timeout = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::from_borrowed_fd(socket, PollFlags::IN)], Some(&timeout)).unwrap(), 1);
}

fn target(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

fn connect(target: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&target, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Returns the error number of a connection attempt, which must fail.
fn connect_error(target: SocketAddr) -> Errno {
    Errno::from_io_error(&connect(target).expect_err(&target.to_string())).unwrap()
}

fn udp_socket(target: SocketAddr) -> UdpSocket {
    let any: IpAddr = if target.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.connect(target).unwrap();
    socket
}

/// Sends a datagram and returns the error that the sender gets for it.
fn send_error(target: SocketAddr) -> io::ErrorKind {
    let socket = udp_socket(target);
    socket.send(b"?").unwrap();
    socket.recv(&mut [0; 8]).expect_err(&target.to_string()).kind()
}

fn connections_arrive_with_their_destination(network: TestNetwork) {
    for (address, own) in OUTSIDE.iter().zip(network.own()) {
        for port in [443, 53, network.0.sockets.tcp_port, 65_000] {
            let mut client = connect(target(address, port)).unwrap();
            assert_eq!(client.local_addr().unwrap().ip(), *own);
            let (mut carried, destination) = network.accept();
            assert_eq!(destination, target(address, port));
            client.write_all(b"ping").unwrap();
            let mut received = [0; 4];
            carried.read_exact(&mut received).unwrap();
            carried.write_all(b"pong").unwrap();
            client.read_exact(&mut received).unwrap();
            assert_eq!(&received, b"pong");
        }
    }
    // A listener inside at that very address gets nothing.
    let inside = TcpListener::bind("0.0.0.0:8080").unwrap();
    inside.set_nonblocking(true).unwrap();
    let _client = connect(target(OUTSIDE[0], 8080)).unwrap();
    assert_eq!(network.accept().1, target(OUTSIDE[0], 8080));
    assert_eq!(inside.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

fn queries_are_answered_from_any_address(network: TestNetwork) {
    let resolver = network.0.layout.resolv_conf();
    let resolver = resolver.trim().strip_prefix("nameserver ").unwrap();
    // Private addresses and those of metadata services too: nobody but egress gets the query.
    for address in OUTSIDE.iter().chain(&[resolver, "10.0.0.1", "169.254.169.254"]) {
        let client = udp_socket(target(address, 53));
        client.send(b"query").unwrap();
        assert_eq!(network.answer_query(), target(address, 53).ip());
        let mut reply = [0; 16];
        // The socket is connected, so a reply from another address or port would not arrive.
        let length = client.recv(&mut reply).unwrap();
        assert_eq!(&reply[..length], b"yreuq");
    }
}

fn other_datagrams_are_refused_at_once(network: TestNetwork) {
    for address in OUTSIDE {
        for port in [123, 443, network.0.sockets.udp_port] {
            assert_eq!(send_error(target(address, port)), io::ErrorKind::ConnectionRefused);
        }
    }
}

fn denied_addresses_are_refused(network: TestNetwork) {
    let denied =
        ["10.0.0.1", "169.254.169.254", "192.168.1.1", "fd00::1", "fe80::1", "64:ff9b::a00:1", "::7f00:1"];
    for address in denied {
        let error = connect(target(address, 443)).expect_err(address);
        let number = Errno::from_io_error(&error).unwrap();
        assert!(matches!(number, Errno::HOSTUNREACH | Errno::ACCESS | Errno::INVAL), "{address}: {error}");
    }
    assert!(network.accepts_nothing());
    // TCP queries to any server are for egress.
    let _client = connect(target("10.0.0.1", 53)).unwrap();
    assert_eq!(network.accept().1, target("10.0.0.1", 53));
}

fn sockets_cannot_be_reached_directly(network: TestNetwork) {
    let loopback: [IpAddr; 3] = ["127.0.0.1", "127.9.9.9", "::1"].map(|address| address.parse().unwrap());
    for address in network.own().iter().chain(&loopback) {
        let at = |port| SocketAddr::new(*address, port);
        assert_eq!(connect_error(at(network.0.sockets.tcp_port)), Errno::CONNREFUSED);
        assert_eq!(send_error(at(network.0.sockets.udp_port)), io::ErrorKind::ConnectionRefused);
    }
    assert!(network.accepts_nothing());
    assert!(receive_datagram(network.0.sockets.udp.as_fd(), &mut [0; 8]).is_err());
    // Nor can they be shared.
    set_capabilities(CapSet::NONE).unwrap();
    for any in ["0.0.0.0", "[::]"] {
        assert!(UdpSocket::bind(format!("{any}:{}", network.0.sockets.udp_port)).is_err());
        assert!(TcpListener::bind(format!("{any}:{}", network.0.sockets.tcp_port)).is_err());
    }
}

fn no_program_takes_their_place(TestNetwork(network): TestNetwork) {
    let FilteredNetwork { sockets, .. } = network;
    let (tcp_port, udp_port) = (sockets.tcp_port, sockets.udp_port);
    drop(sockets);
    set_capabilities(CapSet::NONE).unwrap();
    let tcp = TcpListener::bind(("::", tcp_port)).unwrap();
    tcp.set_nonblocking(true).unwrap();
    let udp = UdpSocket::bind(("::", udp_port)).unwrap();
    udp.set_nonblocking(true).unwrap();
    for address in OUTSIDE {
        for port in [443, 53, tcp_port] {
            let error = connect_error(target(address, port));
            assert!(matches!(error, Errno::HOSTUNREACH | Errno::ACCESS), "{error}");
        }
        assert_eq!(send_error(target(address, 53)), io::ErrorKind::ConnectionRefused);
    }
    assert!(tcp.accept().is_err());
    assert!(udp.recv(&mut [0; 8]).is_err());
}

fn new_sockets_take_over(TestNetwork(network): TestNetwork) {
    let FilteredNetwork { layout, sockets } = network;
    let former = [sockets.tcp_port, sockets.udp_port];
    let sockets = open_sockets(&NetworkSettings::default(), &layout.own).unwrap();
    assert_ne!([sockets.tcp_port, sockets.udp_port], former);
    let network = TestNetwork(FilteredNetwork { layout, sockets });
    connections_arrive_with_their_destination(network);
}

fn services_inside_are_untouched(network: TestNetwork) {
    let own = network.own().to_vec();
    let service = TcpListener::bind("[::]:80").unwrap();
    for address in
        own.iter().copied().chain(["127.0.0.1", "127.9.9.9", "::1"].map(|text| text.parse().unwrap()))
    {
        let mut client = connect(SocketAddr::new(address, 80)).unwrap();
        let (mut served, _) = service.accept().unwrap();
        served.write_all(b"ok").unwrap();
        client.read_exact(&mut [0; 2]).unwrap();
        assert_eq!(connect_error(SocketAddr::new(address, 81)), Errno::CONNREFUSED);
    }
    // A name server inside is asked itself, over UDP.
    for address in ["127.0.0.1:53".to_owned(), format!("{}:53", own[0])] {
        let server = UdpSocket::bind(&address).unwrap();
        server.set_read_timeout(Some(TIMEOUT)).unwrap();
        let client = udp_socket(address.parse().unwrap());
        client.send(b"q").unwrap();
        let (_, asker) = server.recv_from(&mut [0; 8]).unwrap();
        server.send_to(b"a", asker).unwrap();
        client.recv(&mut [0; 8]).unwrap();
    }
    assert!(network.accepts_nothing());
}

fn family_without_routes_fails_at_once(network: TestNetwork) {
    assert_eq!(network.own().len(), 1);
    assert_eq!(connect_error(target(OUTSIDE[1], 443)), Errno::NETUNREACH);
    let _client = connect(target(OUTSIDE[0], 443)).unwrap();
    assert_eq!(network.accept().1, target(OUTSIDE[0], 443));
}

fn resolver_needs_no_route(network: TestNetwork) {
    assert_eq!(connect_error(target(OUTSIDE[0], 443)), Errno::NETUNREACH);
    let text = network.0.layout.resolv_conf();
    let resolver: IpAddr = text.trim().strip_prefix("nameserver ").unwrap().parse().unwrap();
    let client = udp_socket(SocketAddr::new(resolver, 53));
    client.send(b"query").unwrap();
    assert_eq!(network.answer_query(), resolver);
    client.recv(&mut [0; 16]).unwrap();
}
