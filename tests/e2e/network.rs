//! Network `on`: what a sandbox reaches, what it never reaches, and what is left of it. Every test makes
//! its own host and internet.

use std::net::{TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use e2e::host;
use e2e::run::{RunCommand, TestUser};
use e2e::sandbox::{CommandRun, RemoteSandbox};
use e2e::server::{ServerBuilder, TestServer};
use e2e::test_network::{
    self, GATEWAY, GATEWAY_V6, HOST_ADDRESS, HOST_ADDRESS_V6, HOST_PORT, OTHER_ADDRESSES, TestNetwork,
};
use linux::namespaces::{self, NamespaceSet};
use linux::netlink::nftables;
use linux::netlink::route::RoutingSocket;
use serde_json::{Value, json};

fn start() -> ServerBuilder {
    ServerBuilder::new().env("CORACLE_NETWORK_DEFAULT", "auto").env("CORACLE_NETWORK_RESOLVERS", GATEWAY)
}

fn with_network(network: &str) -> Value {
    json!({"extensions": {"coracle.network": network}})
}

/// Connects from inside and returns the response, or the shell's error.
fn dial(sandbox: &mut RemoteSandbox, address: &str, port: u16) -> CommandRun {
    sandbox.run(&format!("exec timeout 5 bash -c 'exec 3<>/dev/tcp/{address}/{port} && head -n 1 <&3'"))
}

fn assert_reached(sandbox: &mut RemoteSandbox, address: &str, port: u16) -> String {
    let ran = dial(sandbox, address, port);
    assert!(ran.stdout.contains("seen"), "{address}:{port} is not reached: {ran:?}");
    ran.stdout
}

/// Checks that the connection is refused at once, without a timeout.
fn assert_refused(sandbox: &mut RemoteSandbox, address: &str, port: u16) {
    let ran = dial(sandbox, address, port);
    assert!(!ran.stdout.contains("seen"), "{address}:{port} is reached: {ran:?}");
    let reported = ran.stderr.contains("No route to host")
        || ran.stderr.contains("Permission denied")
        || ran.stderr.contains("Network is unreachable");
    assert!(reported, "{address}:{port} was not refused at once: {ran:?}");
}

fn in_force(server: &TestServer, id: &str) -> String {
    let answer = server.client().get(&format!("/coracle/v1/sandboxes/{id}")).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.text()
}

fn policy(server: &TestServer, id: &str) -> String {
    let path = format!("/v1/sandboxes/{id}/proxy/18080/policy");
    let answer = server.client().get(&path).expect("the server answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["mode"].as_str().unwrap_or_default().to_owned()
}

/// The net namespace of a sandbox, with this thread in it while `work` runs.
fn in_net_namespace<T>(id: &str, work: impl FnOnce() -> T) -> T {
    let home = std::fs::File::open("/proc/thread-self/ns/net").expect("there is a /proc");
    let agent = host::agent_pid(id).expect("its process runs");
    let place = std::fs::File::open(format!("/proc/{agent}/ns/net")).expect("its process runs");
    namespaces::enter_namespace(place.as_fd(), NamespaceSet::NET).expect("root has the permission");
    let done = work();
    namespaces::enter_namespace(home.as_fd(), NamespaceSet::NET).expect("root has the permission");
    done
}

#[test]
fn a_sandbox_reaches_the_world_and_resolves_names() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start().start();
    let mut sandbox = server.create_sandbox();
    let seen = assert_reached(&mut sandbox, GATEWAY, 80);
    assert_eq!(seen.trim(), format!("seen {HOST_ADDRESS}"), "the world sees the host");
    let seen = assert_reached(&mut sandbox, GATEWAY_V6, 80);
    assert_eq!(seen.trim(), format!("seen {HOST_ADDRESS_V6}"), "the world sees the host");
    for options in ["", "RES_OPTIONS=use-vc "] {
        let ran = sandbox.run(&format!("{options}timeout 5 getent ahosts anything.example"));
        assert!(ran.stdout.contains(GATEWAY) && ran.stdout.contains(GATEWAY_V6), "`{options}`: {ran:?}");
    }
    assert_eq!(policy(&server, &sandbox.id), "allow_all");
    let held = in_force(&server, &sandbox.id);
    assert!(held.contains("on, by NAT of IPv4 and IPv6"), "{held}");
    sandbox.delete();
}

#[test]
fn networks_near_the_host_are_unreachable() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for address in OTHER_ADDRESSES.iter().chain([&HOST_ADDRESS, &HOST_ADDRESS_V6]) {
        let port = if OTHER_ADDRESSES.contains(address) { 80 } else { HOST_PORT };
        let socket = std::net::SocketAddr::new(address.parse().expect("it was written here"), port);
        TcpStream::connect_timeout(&socket, Duration::from_secs(5)).expect("the host itself reaches it");
    }
    let server = start().start();
    let mut sandbox = server.create_sandbox();
    for address in OTHER_ADDRESSES {
        assert_refused(&mut sandbox, address, 80);
    }
    // No host answers at the gateway's address; the host has none of these ports for a sandbox.
    for address in [HOST_ADDRESS, HOST_ADDRESS_V6, "198.19.0.1", "198.19.0.2", "fd63:6f72:6163:6c65::1"] {
        assert_refused(&mut sandbox, address, HOST_PORT);
        assert_refused(&mut sandbox, address, server.port().parse().expect("a port is a number"));
    }
    for address in ["0.1.2.3", "192.0.0.8", "240.0.0.1", "fec0::1", "2002:a9fe:a9fe::1"] {
        assert_refused(&mut sandbox, address, 80);
    }
    // No refusal comes back for this one: the link has no address to which it could be sent.
    let ran = dial(&mut sandbox, "fe80::1%eth0", HOST_PORT);
    assert!(ran.code != Some(0) && ran.stdout.is_empty(), "a neighbour on the link: {ran:?}");
    // The sandbox has its own loopback only.
    let ran = dial(&mut sandbox, "127.0.0.1", HOST_PORT);
    assert!(ran.stderr.contains("Connection refused"), "{ran:?}");
    // The resolver alone answers names, and answers nothing else.
    assert_refused(&mut sandbox, "198.19.0.1", 80);
    sandbox.delete();
}

#[test]
fn sandboxes_do_not_reach_each_other() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start().start();
    let [mut one, mut other] = [server.create_sandbox(), server.create_sandbox()];
    other.start_background("cd /tmp && exec python3 -m http.server --bind :: 8000");
    e2e::eventually("it listens", || other.run("exec 3<>/dev/tcp/127.0.0.1/8000").code == Some(0));
    let addresses = in_net_namespace(&other.id, || {
        RoutingSocket::open().and_then(|mut routing| routing.list_addresses())
    })
    .expect("they can be listed");
    let own: Vec<String> =
        addresses.iter().filter(|one| !one.is_loopback()).map(ToString::to_string).collect();
    assert_eq!(own.len(), 2, "{addresses:?}");
    for address in own {
        assert_refused(&mut one, &address, 8000);
        // The host itself cannot connect either; it uses the agent.
        let socket = std::net::SocketAddr::new(address.parse().expect("an address"), 8000);
        assert!(TcpStream::connect_timeout(&socket, Duration::from_millis(300)).is_err(), "{address}");
    }
    // Clients use the proxy.
    let answer = server.client().get(&format!("/v1/sandboxes/{}/proxy/8000/", other.id)).expect("it answers");
    assert_eq!(answer.status, 200, "{}", answer.text());
    one.delete();
    other.delete();
}

#[test]
fn packet_with_a_foreign_source_is_dropped() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let server = start().start();
    let sandbox = server.create_sandbox();
    let foreign = ["198.19.77.77", "203.0.113.99", "fd63:6f72:6163:6c65::7777"];
    in_net_namespace(&sandbox.id, || {
        let mut routing = RoutingSocket::open().expect("a socket");
        let link = routing.find_link("eth0").expect("it can be looked for").expect("it has a link").index;
        let own = routing.list_addresses().expect("they can be listed");
        for address in foreign {
            routing.add_address(link, address.parse().expect("an address")).expect("root of the host may");
            send_from(address, &format!("from {address}"));
        }
        let own = own.iter().filter(|address| !address.is_loopback());
        own.for_each(|address| send_from(&address.to_string(), "from its own"));
    });
    e2e::eventually("both families arrive", || world.received_packets().len() >= 2);
    assert_eq!(world.received_packets(), ["from its own", "from its own"]);
}

fn send_from(address: &str, text: &str) {
    let address: std::net::IpAddr = address.parse().expect("an address");
    let socket = UdpSocket::bind((address, 0)).expect("the link has it");
    let to = if address.is_ipv4() { GATEWAY } else { GATEWAY_V6 };
    socket.send_to(text.as_bytes(), (to, 9)).expect("it can be sent");
}

#[test]
fn the_operator_opens_one_port_and_no_other() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let allow = format!("10.1.2.3:80, 169.254.169.254, [fd12::1]:80, {HOST_ADDRESS}:{HOST_PORT}");
    let server = start().env("CORACLE_NETWORK_ALLOW", &allow).start();
    let mut sandbox = server.create_sandbox();
    for address in ["10.1.2.3", "169.254.169.254", "fd12::1"] {
        assert_reached(&mut sandbox, address, 80);
    }
    assert_reached(&mut sandbox, HOST_ADDRESS, HOST_PORT);
    for (address, port) in
        [("10.1.2.3", 7), ("192.168.77.1", 80), (HOST_ADDRESS_V6, HOST_PORT), ("fd12::1", 7)]
    {
        assert_refused(&mut sandbox, address, port);
    }
    sandbox.delete();
    drop(server);
    let server = start().env("CORACLE_NETWORK_DENY", "203.0.113.0/24").start();
    let mut sandbox = server.create_sandbox();
    assert_reached(&mut sandbox, "192.168.77.1", 80);
    assert_refused(&mut sandbox, GATEWAY, 80);
    assert_refused(&mut sandbox, "169.254.169.254", 80);
    let ran = sandbox.run("timeout 5 getent ahosts anything.example");
    assert!(ran.stdout.contains(GATEWAY), "the resolver is reached all the same: {ran:?}");
    sandbox.delete();
}

const LASTING_CONNECTION: &str = "exec 3<>/dev/tcp/203.0.113.1/7 && while echo line >&3 && read -r line <&3; \
    do echo \"$line\"; sleep 0.02; done";

#[test]
fn a_connection_survives_the_death_of_server_and_launcher() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    let how = start().env("CORACLE_INSTANCE", "net-survival");
    let mut server = how.start();
    let mut sandbox = server.create_sandbox();
    let command = sandbox.start_background(&format!("exec bash -c '{LASTING_CONNECTION}'"));
    let lines = |sandbox: &mut RemoteSandbox| sandbox.logs(&command).matches("line").count();
    e2e::eventually("the process continues", || lines(&mut sandbox) > 3);
    for role in ["__launcher", "__server"] {
        let former = server.part_pid(role);
        kill(former);
        e2e::eventually("it is started again", || server.part_pid(role) != former);
    }
    e2e::eventually("the server answers", || server.client().get("/health").is_ok());
    let mut sandbox = RemoteSandbox::existing(server.client(), &sandbox.id);
    let before = lines(&mut sandbox);
    e2e::eventually("the process continues", || lines(&mut sandbox) > before + 3);
    server.kill();
    let again = start().env("CORACLE_INSTANCE", "net-survival").listen(server.address());
    server.restart(&again);
    let mut sandbox = RemoteSandbox::existing(server.client(), &sandbox.id);
    let before = lines(&mut sandbox);
    e2e::eventually("the process continues", || lines(&mut sandbox) > before + 3);
    assert_eq!(world.count_echo_connections(), 1, "it was one connection all the time");
    // New connections and the packet filter work too.
    assert_reached(&mut sandbox, GATEWAY, 80);
    assert_refused(&mut sandbox, "169.254.169.254", 80);
    sandbox.delete();
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("its process runs");
}

/// The name of a server's packet filter.
fn table_of(server: &TestServer) -> String {
    let identity = std::fs::read(server.state_directory().join("identity")).expect("it has started");
    let identity: serde_json::Value = serde_json::from_slice(&identity).expect("it is JSON");
    format!("coracle-{}", identity["instance"].as_str().expect("a name"))
}

#[test]
fn unused_links_and_tables_are_removed() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let mut server = start().env("CORACLE_INSTANCE", "net-remains").start();
    let name = table_of(&server);
    let table = || nftables::table_exists(&name).expect("it can be looked for");
    let prepared = {
        e2e::eventually("some links are prepared", || test_network::sandbox_links().len() >= 16);
        test_network::sandbox_links().len()
    };
    let sandboxes: Vec<RemoteSandbox> = (0..3).map(|_| server.create_sandbox()).collect();
    assert!(table());
    // Links of sandboxes stay when the server ends, and so does the table.
    assert!(server.terminate().success());
    e2e::eventually("only those of sandboxes are left", || test_network::sandbox_links().len() == 3);
    assert!(table(), "the filter exists as long as sandboxes");
    server.restart(&start().env("CORACLE_INSTANCE", "net-remains").listen(server.address()));
    for sandbox in sandboxes {
        RemoteSandbox::existing(server.client(), &sandbox.id).delete();
    }
    e2e::eventually("only prepared ones are left", || test_network::sandbox_links().len() <= prepared);
    assert!(server.terminate().success());
    e2e::eventually("no link is left", || test_network::sandbox_links().is_empty());
    assert!(!table(), "no sandbox needs it");
}

#[test]
fn table_of_a_dead_server_is_removed_by_the_next() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let how = || {
        ServerBuilder::new().env("CORACLE_INSTANCE", "net-stale").env("CORACLE_NETWORK_RESOLVERS", GATEWAY)
    };
    let mut server = how().env("CORACLE_NETWORK_DEFAULT", "on").start();
    server.create_sandbox().delete();
    let name = table_of(&server);
    let table = || nftables::table_exists(&name).expect("it can be looked for");
    assert!(table());
    server.kill();
    e2e::eventually("prepared links die with their launcher", || test_network::sandbox_links().is_empty());
    assert!(table(), "a killed server cannot clean up");
    // A server that needs no network finds no sandbox that does.
    server.restart(&how().env("CORACLE_NETWORK_DEFAULT", "off").listen(server.address()));
    assert!(!table());
    let mut sandbox = server.create_sandbox();
    assert!(test_network::sandbox_links().is_empty() && !table(), "nothing is made without a request");
    assert_eq!(policy(&server, &sandbox.id), "deny_all");
    sandbox.delete();
}

#[test]
fn a_host_that_does_not_forward_has_a_network_without_links_and_says_so() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    test_network::set_forwarding(false);
    let server = start().start();
    let mut sandbox = server.create_sandbox();
    let held = in_force(&server, &sandbox.id);
    assert!(held.contains("on, by egress: TCP and DNS"), "{held}");
    assert_eq!(policy(&server, &sandbox.id), "allow_all");
    assert_reached(&mut sandbox, GATEWAY, 80);
    assert_refused_somehow(&mut sandbox, "169.254.169.254", 80);
    sandbox.delete();
    assert!(test_network::sandbox_links().is_empty(), "no link was made");
    let forwarding = std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").expect("it can be read");
    assert_eq!(forwarding.trim(), "0", "the host's settings are the operator's");
    // Only the operator changes that, and then there are links without a restart.
    test_network::set_forwarding(true);
    let mut sandbox = server.create_sandbox_with(&with_network("on"));
    assert_reached(&mut sandbox, GATEWAY, 80);
    let held = in_force(&server, &sandbox.id);
    assert!(held.contains("on, by NAT of IPv4 and IPv6"), "{held}");
    sandbox.delete();
    let mut sandbox = server.create_sandbox_with(&with_network("off"));
    assert_eq!(policy(&server, &sandbox.id), "deny_all");
    sandbox.delete();
}

/// As [`assert_refused`], where egress accepts a connection before it refuses it.
fn assert_refused_somehow(sandbox: &mut RemoteSandbox, address: &str, port: u16) {
    let ran = dial(sandbox, address, port);
    assert!(!ran.stdout.contains("seen") && ran.took < Duration::from_secs(4), "{address}:{port}: {ran:?}");
}

const NETWORK_ATTACKS: &str = "
import socket, struct
def attempt(name, work):
    try:
        work()
        print(name, 'DONE')
    except OSError as error:
        print(name, error.errno)
def change(kind, body, flags=0x605):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    s.send(struct.pack('IHHII', 16 + len(body), kind, flags, 1, 0) + body)
    errno = struct.unpack('i', s.recv(4096)[16:20])[0]
    if errno:
        raise OSError(-errno, 'netlink')
index = socket.if_nametoindex('eth0')
ip = socket.inet_aton('198.19.99.99')
attempt('address', lambda: change(20, struct.pack('BBBBi', 2, 32, 0, 0, index) + struct.pack('HH', 8, 2) + ip))
attempt('route', lambda: change(24, struct.pack('BBBBBBBBI', 2, 32, 0, 0, 254, 3, 0, 1, 0)
    + struct.pack('HH', 8, 1) + ip + struct.pack('HHi', 8, 4, index)))
attempt('link', lambda: change(16, struct.pack('BBHiII', 0, 0, 0, index, 0, 1), 5))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300))
attempt('filter', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).send(
    struct.pack('IHHII', 20, 0xa00, 0x405, 1, 0) + b'\\1\\0\\0\\0'))
attempt('transparent', lambda: socket.socket().setsockopt(socket.SOL_IP, 19, 1))
";

#[test]
fn root_inside_has_no_power_over_its_network() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start().start();
    let mut sandbox = server.create_sandbox();
    let ran = sandbox.run_argv(&["python3", "-c", NETWORK_ATTACKS]);
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert_eq!(lines.len(), 7, "{ran:?}");
    for line in lines {
        // EPERM or EACCES; the filter's socket may also not exist for it (EPROTONOSUPPORT).
        let refused = [" 1", " 13", " 93", " 97"].iter().any(|end| line.ends_with(end));
        assert!(refused, "{line}: {ran:?}");
    }
    assert_refused(&mut sandbox, "169.254.169.254", 80);
    sandbox.delete();
}

#[test]
fn one_command_has_a_network_if_it_asks_for_one() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let run = |network: &str| {
        let state = tempfile::tempdir().expect("a directory can be made");
        let ended = RunCommand::new(TestUser::Same)
            .state(state.path())
            .flag("--network", network)
            .run_shell("timeout 5 bash -c 'exec 3<>/dev/tcp/203.0.113.1/80 && cat <&3'");
        (ended, state)
    };
    for network in ["on", "auto"] {
        let (ended, _) = run(network);
        assert!(ended.stdout.contains("seen"), "{network}: {ended:?}");
        e2e::eventually("its link is removed with it", || test_network::sandbox_links().is_empty());
    }
    test_network::set_forwarding(false);
    for network in ["on", "auto"] {
        let (ended, _) = run(network);
        assert!(ended.stdout.contains("seen"), "{network}: {ended:?}");
        assert!(test_network::sandbox_links().is_empty(), "no link was made");
    }
}

const FLOOD: &str = "
import socket
for number in range(30000):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b'x', ('203.0.113.1', 1024 + number))
    s.close()
";

#[test]
fn one_sandbox_cannot_use_up_the_hosts_table_of_connections() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    let server = start().start();
    let [mut one, mut other] = [server.create_sandbox(), server.create_sandbox()];
    let ran = one.run_argv(&["python3", "-c", FLOOD]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let count = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    let count: u32 = count.expect("the host tracks connections").trim().parse().expect("a number");
    assert!((1000..5000).contains(&count), "{count} connections are tracked");
    assert_reached(&mut other, GATEWAY, 80);
    one.delete();
    other.delete();
}
