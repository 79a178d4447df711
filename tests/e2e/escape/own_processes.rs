//! The filters and capabilities of our own processes outside sandboxes: supervisor, launcher and server.

use std::fs;

use e2e::run::attack_outside;
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
    let attacks: Vec<String> = attacks.iter().map(|attack| (*attack).to_owned()).collect();
    for attack in &attacks {
        check_outside(attack);
    }
    let verdicts = attack_from_part(server, role, &attacks);
    for attack in &attacks {
        let verdict = verdicts.get(attack).map_or("was not tried", String::as_str);
        let refused =
            verdict.starts_with("stopped: ") && (verdict.contains("EPERM") || verdict.contains("ENOSYS"));
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
