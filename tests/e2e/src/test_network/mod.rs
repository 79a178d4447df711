//! The test internet, `e2e::test_network`: a private host and a world behind it, in net namespaces that no other process
//! sees.
//!
//! ```text
//!  the test's thread, its servers          another thread
//!   host: up0 203.0.113.2 ──── link ──── world: w0 203.0.113.1, the hosts of `hosts.rs` and many other addresses
//! ```
//!
//! [`TestNetwork::create`] moves the calling thread into the host's namespace, so everything it starts from then on
//! is there too: servers, their launchers, clients. The real host's links and filters stay untouched. `services.rs`
//! lists what the world answers on which port, `hosts.rs` its names. It records every connection, datagram and query, so
//! that tests can check what did not arrive.

mod authority;
pub mod hosts;
mod packages;
mod resolver;
mod services;
mod socks;
mod web;

use std::fs;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};

use linux::namespaces::{self, NamespaceSet};
use linux::netlink::route::{RoutingSocket, VethEnd};

pub use self::packages::{PACKAGE_GREETING, PACKAGE_NAME};
pub use self::resolver::SeenQuery;
pub use self::services::Contact;
use self::services::WorldRecords;

/// The machine behind the link, which is the host's gateway and name server as well.
pub const GATEWAY: &str = "203.0.113.1";
pub const GATEWAY_V6: &str = "2001:db8::1";
/// The host as the world sees it.
pub const HOST_ADDRESS: &str = "203.0.113.2";
pub const HOST_ADDRESS_V6: &str = "2001:db8::2";
/// Other addresses at which the world answers: typical neighbours in clouds and companies.
pub const OTHER_ADDRESSES: [&str; 10] = [
    "10.1.2.3",
    "172.16.5.5",
    "192.168.77.1",
    "100.64.0.9",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "fd00:ec2::254",
    "fd12::1",
    // What a translator of addresses (NAT64) would carry to 169.254.169.254.
    "64:ff9b::a9fe:a9fe",
];

/// A port on which the host listens on every address, as it does on 80 and 443.
pub const HOST_PORT: u16 = 8099;

pub struct TestNetwork {
    records: WorldRecords,
    _running: Sender<()>,
}

impl TestNetwork {
    /// Makes both namespaces, with a host that forwards packets.
    pub fn create() -> Self {
        let (running, ended) = channel::<()>();
        let (sender, receiver) = channel();
        let records = WorldRecords::default();
        let shared = records.clone();
        std::thread::spawn(move || {
            let namespace = enter_new_net_namespace();
            services::add_host_addresses();
            // The namespace exists as long as its servers, and they run as long as the test.
            services::start_services(&shared);
            sender.send(namespace).expect("the test thread receives it");
            ended.recv().ok();
        });
        let world = receiver.recv().expect("the thread runs");
        enter_new_net_namespace();
        connect_namespaces(&world);
        set_forwarding(true);
        services::listen_on_host(&records);
        Self { records, _running: running }
    }

    /// The packets that arrived at UDP port 9.
    pub fn received_packets(&self) -> Vec<String> {
        self.records.udp_packets.lock().expect("no thread panics while holding the lock").clone()
    }

    pub fn count_echo_connections(&self) -> usize {
        self.records.echo_connections.load(Ordering::SeqCst)
    }

    /// Every connection and datagram that arrived at a service of the world, or at the host's own port.
    pub fn contacts(&self) -> Vec<Contact> {
        self.records.contacts()
    }

    /// How many connections and datagrams arrived at this address.
    pub fn count_contacts(&self, address: &str) -> usize {
        let address = parse_address(address);
        self.contacts().iter().filter(|contact| contact.address == address).count()
    }

    /// Every question that a name server of the world received.
    pub fn queries(&self) -> Vec<SeenQuery> {
        self.records.resolver.seen()
    }

    /// Whether a question for this name arrived in the world.
    pub fn was_asked_for(&self, name: &str) -> bool {
        self.queries().iter().any(|query| query.name == name)
    }
}

/// The certificate of the authority that all TLS servers of the world have theirs from, as PEM.
pub fn authority_certificate() -> &'static str {
    authority::TestAuthority::shared().certificate()
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

/// Gives this thread, and everything it starts from now on, a view of a host whose name server is the world's.
pub fn use_world_resolver() {
    namespaces::unshare_namespaces(NamespaceSet::MOUNT).expect("tests of the network run as root");
    linux::mounts::make_private().expect("the mounts are ours");
    let place = tempfile::tempdir().expect("a directory can be made");
    let conf = place.path().join("resolv.conf");
    fs::write(&conf, format!("nameserver {GATEWAY}\n")).expect("it is ours");
    linux::mounts::bind_mount(&conf, Path::new("/etc/resolv.conf")).expect("there is a file");
}

/// Sets whether the host of this thread has IPv6.
pub fn set_ipv6(on: bool) {
    let value = if on { "0" } else { "1" };
    fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", value).expect("the namespace is our own");
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
