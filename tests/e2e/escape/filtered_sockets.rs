//! The sockets and the table of a filtered sandbox: nothing inside changes them, takes them or goes around them.

use e2e::probe::{http, parse_results, probe, probe_argv};
use e2e::run::all_users;
use e2e::sandbox::RemoteSandbox;
use e2e::server::TestServer;
use e2e::test_network::TestNetwork;
use e2e::test_network::hosts::{OTHER, WEB};
use serde_json::{Value, json};

use crate::filtered::{create_filtered, server_builder, start_server};

/// Tries to change the network as root inside. Prints a line for each attempt.
const CHANGES: &str = "
import ctypes, os, socket, struct
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
index = socket.if_nametoindex('lo')
ip = socket.inet_aton('93.184.216.77')
attempt('address', lambda: change(20, struct.pack('BBBBi', 2, 32, 0, 0, index) + struct.pack('HH', 8, 2) + ip))
attempt('route', lambda: change(25, struct.pack('BBBBBBBBI', 2, 0, 0, 0, 255, 2, 254, 2, 0), 5))
attempt('link', lambda: change(16, struct.pack('BBHiII', 0, 0, 0, index, 0, 1), 5))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255))
attempt('raw6', lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 255))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300))
attempt('filter', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12).send(
    struct.pack('IHHII', 20, 0xa00, 0x405, 1, 0) + b'\\1\\0\\0\\0'))
attempt('transparent', lambda: socket.socket().setsockopt(socket.SOL_IP, 19, 1))
attempt('transparent6', lambda: socket.socket(socket.AF_INET6).setsockopt(socket.IPPROTO_IPV6, 75, 1))
attempt('mark', lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 36, 1))
libc = ctypes.CDLL(None, use_errno=True)
def unshare():
    if libc.unshare(0x50000000):
        raise OSError(ctypes.get_errno(), 'unshare')
attempt('namespace', unshare)
attempt('sctp', lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132))
";

#[test]
fn root_inside_has_no_power_over_its_filter() {
    if !testkit::needs_root() {
        return;
    }
    let world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = create_filtered(&server, &["web.example"]);
        let ran = sandbox.run_argv(&["/usr/bin/python3", "-c", CHANGES]);
        let lines: Vec<&str> = ran.stdout.lines().collect();
        assert_eq!(lines.len(), 12, "{ran:?}");
        for line in lines {
            // EPERM, EACCES, EPROTONOSUPPORT, EAFNOSUPPORT, ENOSYS, and ESOCKTNOSUPPORT.
            let refused = [" 1", " 13", " 93", " 97", " 38", " 94"].iter().any(|end| line.ends_with(end));
            assert!(refused, "as {user:?}: {line}: {ran:?}");
        }
        sandbox.delete();
    }
    assert_eq!(world.count_contacts(OTHER.v4), 0);
}

/// The ports of egress inside: of the TCP listener and of the UDP socket.
fn egress_ports(sandbox: &mut RemoteSandbox) -> (Vec<u64>, Vec<u64>) {
    let results = probe(sandbox, &[json!({"do": "ports_of_listeners"}), json!({"do": "udp_ports"})]);
    let numbers = |result: &Value| -> Vec<u64> {
        result["ports"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect()
    };
    (numbers(&results[0]), numbers(&results[1]))
}

#[test]
fn connections_to_the_listener_itself_are_refused() {
    if !testkit::needs_root() {
        return;
    }
    let _world = TestNetwork::create();
    for user in all_users() {
        let server = start_server(user);
        let mut sandbox = server.create_sandbox_with(&crate::filtered::with_policy(
            &crate::filtered::policy("allow", &["allow web.example"]),
        ));
        let (tcp, udp) = egress_ports(&mut sandbox);
        assert!(
            !tcp.is_empty() && !udp.is_empty(),
            "as {user:?}: the sockets are in the namespace: {tcp:?} {udp:?}"
        );
        let own: Vec<String> =
            probe(&mut sandbox, &[json!({"do": "own_address"}), json!({"do": "own_address", "family": 6})])
                .iter()
                .filter_map(|result| result["address"].as_str().map(str::to_owned))
                .collect();
        assert!(!own.is_empty(), "as {user:?}: it has an address");
        let local = ["127.0.0.1", "127.3.2.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"].map(str::to_owned);
        for port in tcp {
            let steps: Vec<Value> = own
                .iter()
                .chain(&local)
                .map(|address| json!({"do": "raw", "to": address, "port": port, "send": ["GET / HTTP/1.1\r\n\r\n"], "wait": 2}))
                .collect();
            for (step, result) in steps.iter().zip(probe(&mut sandbox, &steps)) {
                let ended = result["error"].is_string() || result["end"] != "open";
                assert!(
                    ended && result["length"].as_u64().unwrap_or(0) == 0,
                    "as {user:?}: {step}: {result}"
                );
            }
        }
        for port in udp {
            let steps = [
                json!({"do": "bind_udp", "port": port}),
                json!({"do": "bind_udp", "port": port, "reuse": false}),
            ];
            for result in probe(&mut sandbox, &steps) {
                assert_eq!(result["error"], "EADDRINUSE", "as {user:?}: questions could be taken: {result}");
            }
        }
        // Egress still works: it was not caught in a loop.
        assert_eq!(probe(&mut sandbox, &[http("web.example")])[0]["status"], 200, "as {user:?}");
        sandbox.delete();
    }
}

/// Takes the ports of egress as soon as they are free, and reports whoever connects or asks. Prints `took` for each.
const TAKER: &str = "
import socket, sys, threading, time
tcp, udp = [[int(port) for port in words.split(',') if port] for words in sys.argv[1:3]]
def listen(port, host, family):
    while True:
        try:
            taker = socket.socket(family)
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taker.bind((host, port))
            taker.listen(64)
        except OSError:
            time.sleep(0.002)
            continue
        print('bound', port, host, flush=True)
        while True:
            stream, peer = taker.accept()
            print('took', stream.getsockname(), 'from', peer, flush=True)
            stream.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\n\\r\\ntaken')
            stream.close()
def receive(port):
    while True:
        try:
            taker = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            taker.bind(('::', port))
        except OSError:
            time.sleep(0.002)
            continue
        print('bound', port, 'udp', flush=True)
        while True:
            print('took', taker.recvfrom(2048), flush=True)
def victim():
    while True:
        try:
            stream = socket.create_connection(('93.184.216.34', 80), 3)
            stream.sendall(b'GET / HTTP/1.1\\r\\nHost: web.example\\r\\n\\r\\n')
            seen = stream.recv(4096)
            if b'taken' in seen:
                print('took the victim', flush=True)
            stream.close()
        except OSError:
            pass
        try:
            asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            asker.settimeout(0.1)
            asker.sendto(b'\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\3web\\7example\\0\\0\\1\\0\\1', ('8.8.8.8', 53))
            asker.recv(2048)
        except OSError:
            pass
        time.sleep(0.005)
for port in tcp:
    for host, family in [('::', socket.AF_INET6), ('0.0.0.0', socket.AF_INET), ('93.184.216.34', socket.AF_INET)]:
        threading.Thread(target=listen, args=(port, host, family), daemon=True).start()
for port in udp:
    threading.Thread(target=receive, args=(port,), daemon=True).start()
print('started', flush=True)
victim()
";

/// Starts the attacker in the background. It uses no connection of its own, so whatever it takes is its victim's.
fn start_taker(sandbox: &mut RemoteSandbox) -> String {
    let (tcp, udp) = egress_ports(sandbox);
    let list = |ports: Vec<u64>| ports.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    sandbox.upload("/tmp/taker.py", TAKER.as_bytes());
    let command = format!("exec /usr/bin/python3 /tmp/taker.py '{}' '{}'", list(tcp), list(udp));
    let command = sandbox.start_background(&command);
    e2e::eventually("it has started", || sandbox.logs(&command).contains("started"));
    command
}

fn assert_nothing_taken(sandbox: &mut RemoteSandbox, command: &str, shown: &str) {
    let logs = sandbox.logs(command);
    let taken: Vec<&str> = logs.lines().filter(|line| line.starts_with("took")).collect();
    assert!(taken.is_empty(), "{shown}: a program inside takes connections: {taken:?}");
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a pid is not 0");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("its process runs");
}

fn still_filters(server: &TestServer, id: &str) -> bool {
    let mut sandbox = RemoteSandbox::existing(server.client(), id);
    let steps = [http("web.example"), json!({"do": "http", "to": OTHER.v4, "host": "other.example"})];
    let argv = probe_argv(&steps);
    let ran = sandbox.run_argv(&argv.each_ref().map(String::as_str));
    let results = parse_results(&ran.stdout, &steps, &ran);
    assert_ne!(results[1]["status"], 200, "{results:?}");
    results[0]["status"] == 200
}

#[test]
fn nothing_inside_takes_the_place_of_a_dead_egress() {
    if !testkit::needs_root() {
        return;
    }
    for user in all_users() {
        let world = TestNetwork::create();
        let start = || server_builder(user).env("CORACLE_INSTANCE", "filtered-taker");
        let mut server = start().start();
        let mut sandbox = create_filtered(&server, &["web.example"]);
        assert!(still_filters(&server, &sandbox.id));
        let taker = start_taker(&mut sandbox);
        for _ in 0..5 {
            let former = server.part_pid("__egress");
            kill(former);
            e2e::eventually("egress is started again", || server.part_pid("__egress") != former);
        }
        e2e::eventually("egress serves again", || still_filters(&server, &sandbox.id));
        assert_nothing_taken(&mut sandbox, &taker, &format!("as {user:?}, without egress"));
        let logs = sandbox.logs(&taker);
        assert!(!logs.contains("bound"), "as {user:?}: a port was free while its keeper lived: {logs}");
        // Without any process of ours but the agent, the ports are free and lead nowhere.
        server.kill();
        let before = world.count_contacts(WEB.v4);
        std::thread::park_timeout(std::time::Duration::from_millis(400));
        assert_eq!(world.count_contacts(WEB.v4), before, "as {user:?}: a connection without egress");
        let again = start().listen(server.address());
        server.restart(&again);
        let mut sandbox = RemoteSandbox::existing(server.client(), &sandbox.id);
        assert_nothing_taken(&mut sandbox, &taker, &format!("as {user:?}, without a supervisor"));
        // The new server serves the sandbox, whatever happened to its port.
        let stopped = sandbox.request_inside("DELETE", &format!("command?id={taker}"), &Value::Null);
        assert_eq!(stopped.status, 200, "{}", stopped.text());
        e2e::eventually("egress serves again", || still_filters(&server, &sandbox.id));
        assert_eq!(world.count_contacts(OTHER.v4), 0);
        sandbox.delete();
    }
}
