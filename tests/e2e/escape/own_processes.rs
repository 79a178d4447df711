//! The filters and capabilities of our own processes outside sandboxes: supervisor, launcher and server.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Command, Stdio};

use e2e::binary::ProgramCopies;
use e2e::run::{CommandOutput, attack_outside};
use e2e::server::TestServer;

use super::server::attack_from_part;

/// Numbers of capabilities that the launcher gives up, though it is root.
const GIVEN_UP: [(u32, &str); 6] = [
    (13, "CAP_NET_RAW"),
    (16, "CAP_SYS_MODULE"),
    (17, "CAP_SYS_RAWIO"),
    (22, "CAP_SYS_BOOT"),
    (25, "CAP_SYS_TIME"),
    (39, "CAP_BPF"),
];

/// Parts of the kernel with a history of holes. None of our processes uses them.
const KERNEL_ATTACKS: [&str; 7] =
    ["bpf", "perf", "add-key", "userfaultfd", "io-uring", "init-module", "kernel-log"];

/// One field of `/proc/PID/status`.
fn status_field(path: &str, field: &str) -> String {
    let status = fs::read_to_string(path).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap_or_else(|| panic!("{path} has no {field}")).trim().to_owned()
}

#[test]
fn every_process_of_a_server_has_a_filter() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    assert_eq!(sandbox.run("true").code, Some(0));
    let parts = [
        ("supervisor", server.pid(), 1),
        // They inherit the supervisor's.
        ("launcher", server.part_pid("__launcher"), 2),
        ("server", server.part_pid("__server"), 2),
    ];
    for (name, pid, filters) in parts {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
        for task in tasks.flatten() {
            let path = format!("{}/status", task.path().display());
            assert_eq!(status_field(&path, "NoNewPrivs"), "1", "{name} {path}");
            assert_eq!(status_field(&path, "Seccomp"), "2", "{name} {path}");
            let loaded: u32 = status_field(&path, "Seccomp_filters").parse().expect("it is a number");
            assert!(loaded >= filters, "{loaded} filters: {name} {path}");
        }
    }
}

#[test]
fn privileged_processes_of_a_server_give_up_capabilities() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    for (name, pid) in [("supervisor", server.pid()), ("launcher", server.part_pid("__launcher"))] {
        for field in ["CapBnd", "CapPrm", "CapEff"] {
            let mask = status_field(&format!("/proc/{pid}/status"), field);
            let mask = u64::from_str_radix(&mask, 16).expect("it is a mask");
            for (number, capability) in GIVEN_UP {
                assert_eq!(mask & (1 << number), 0, "{capability} is in {field} of the {name}");
            }
        }
    }
    let status = format!("/proc/{}/status", server.part_pid("__server"));
    for field in ["CapBnd", "CapPrm", "CapEff"] {
        assert_eq!(status_field(&status, field), "0000000000000000", "{field} of the server");
    }
}

/// Checks that an attack works as root outside, if this kernel offers what it attacks.
fn check_outside(attack: &str) {
    let words: Vec<&str> = attack.split(':').collect();
    let ended = attack_outside(&words);
    if ended.code == Some(1) && ended.stdout.contains("ENOSYS") {
        testkit::skip_test("this kernel does not offer what the attack uses; it was tried inside only");
        return;
    }
    assert_eq!(ended.code, Some(0), "{attack} does not work outside: {ended:?}");
}

fn check_refused(server: &TestServer, role: &str, attacks: &[&str]) {
    for attack in attacks {
        check_outside(attack);
    }
    check_refused_with(server, role, attacks, &["EPERM", "ENOSYS"]);
}

/// Checks that attacks from the process of that role fail with one of the errors.
fn check_refused_with(server: &TestServer, role: &str, attacks: &[&str], errors: &[&str]) {
    let attacks: Vec<String> = attacks.iter().map(|attack| (*attack).to_owned()).collect();
    let verdicts = attack_from_part(server, role, &attacks);
    for attack in &attacks {
        let verdict = verdicts.get(attack).map_or("was not tried", String::as_str);
        let refused = verdict.starts_with("stopped: ") && errors.iter().any(|error| verdict.contains(error));
        assert!(refused, "{attack} from {role}: {verdict}");
    }
}

#[test]
fn subverted_server_makes_no_namespace() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    // Any user may do these where the kernel lets users make namespaces.
    check_refused(
        &server,
        "__server",
        &["unshare:user", "unshare:all", "unshare:net", "clone-user-namespace", "x32-unshare"],
    );
}

#[test]
fn subverted_server_reaches_no_dangerous_part_of_the_kernel() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    check_refused(&server, "__server", &KERNEL_ATTACKS);
    check_refused(&server, "__server", &["load-filter:seccomp", "load-filter:prctl", "set-clock"]);
}

#[test]
fn subverted_launcher_reaches_no_dangerous_part_of_the_kernel() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    check_refused(&server, "__launcher", &KERNEL_ATTACKS);
    check_refused(&server, "__launcher", &["set-clock", "port-io"]);
}

/// Runs an attack outside with a TCP connection as its standard input.
fn attack_with_connection(attack: &[&str], connection: TcpStream) -> CommandOutput {
    let mut command = Command::new(ProgramCopies::shared().attacks_path());
    command.args(attack).stdin(Stdio::from(OwnedFd::from(connection)));
    command.output().expect("the attacker can be run").into()
}

#[test]
fn subverted_server_reaches_no_tcp_service_of_the_host() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let service = TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let address = service.local_addr().expect("it is bound");
    let connect = format!("connect-tcp:{}", address.port());
    check_outside(&connect);
    // The filter makes no socket of that family.
    check_refused_with(&server, "__server", &[&connect], &["EAFNOSUPPORT"]);

    if !linux::landlock::supported_confinement().is_some_and(|supported| supported.tcp) {
        return testkit::skip_test("this kernel's Landlock does not know TCP");
    }
    // A client's connection is a socket of that family, so the filter does not help; Landlock does.
    let own = TcpStream::connect(address).expect("it listens");
    let outside = attack_with_connection(&["reconnect-tcp", &address.port().to_string()], own);
    assert_eq!(outside.code, Some(0), "the attack does not work outside: {outside:?}");
    let mut client = server.client();
    assert_eq!(client.get("/health").expect("an answer").status, 200);
    let reconnect = format!("reconnect-tcp:{}", address.port());
    check_refused_with(&server, "__server", &[&reconnect], &["EACCES"]);
}

#[test]
fn subverted_server_reaches_no_abstract_socket_of_the_host() {
    if !testkit::needs_root() {
        return;
    }
    if !linux::landlock::supported_confinement().is_some_and(|supported| supported.scopes) {
        return testkit::skip_test("this kernel's Landlock does not know abstract sockets");
    }
    let server = TestServer::start();
    let name = format!("coracle-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("the name is short");
    let _service = UnixListener::bind_addr(&address).expect("the name is free");
    let attack = format!("connect-unix:@{name}");
    check_outside(&attack);
    check_refused_with(&server, "__server", &[&attack], &["EPERM"]);
}
