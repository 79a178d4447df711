//! The attacks again, by the user `gem` of a sandbox that the provisioner made. That they work at all is shown by the
//! other modules; here all of them run in one sandbox.

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use e2e::aio::{self, AioSandbox};
use e2e::binary::ProgramCopies;
use e2e::server::ServerBuilder;
use serde_json::json;

use super::Secret;

/// Attacks with their arguments behind colons, and the errors that refuse them.
const ATTACKS: &[(&[&str], &[&str])] = &[
    (
        &["mount-tmpfs", "mount-proc", "mount-cgroup-release-agent", "pivot-root", "uncover:/proc/sys"],
        &["EPERM"],
    ),
    (&["mount-by-descriptor", "remount-writable:/usr"], &["EPERM", "ENOSYS"]),
    (&["join-namespaces:1"], &["EPERM", "EACCES"]),
    (
        &[
            "unshare:user",
            "unshare:mount",
            "unshare:net",
            "unshare:pid",
            "unshare:cgroup",
            "unshare:all",
            "clone-user-namespace",
            "user-namespace-then-mount",
        ],
        &["EPERM", "ENOSPC", "EUSERS", "ENOSYS"],
    ),
    (&["trace:1", "read-memory:1", "steal-descriptor:1", "signal:1"], &["EPERM", "EACCES"]),
    (&["overwrite-binary:1"], &["EACCES", "EPERM", "ENOENT", "EROFS"]),
    (&["become-root", "raise-priority", "raise-limit"], &["EPERM", "EACCES"]),
    (
        &[
            "init-module",
            "bpf",
            "add-key",
            "userfaultfd",
            "io-uring",
            "perf",
            "kernel-log",
            "port-io",
            "set-clock",
            "load-filter:seccomp",
            "load-filter:prctl",
            "see-page-cache:/usr/bin/env",
        ],
        &["EPERM", "EACCES", "ENOSYS", "EINVAL"],
    ),
    (
        &["socket:raw", "socket:packet", "socket:vsock", "socket:crypto", "socket:netfilter"],
        &["EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT"],
    ),
    (&["socketpair:netfilter", "socketpair:udp-lite", "socketpair:tcp"], &["EAFNOSUPPORT"]),
    (&["connect-any-unix"], &["no way was found", "ENOENT", "ECONNREFUSED"]),
    (
        &[
            "make-device:character",
            "make-device:block",
            "type-into-terminal",
            "type-into-terminal-wide",
            "console-selection",
            "line-discipline",
        ],
        &["EPERM", "EACCES"],
    ),
    (
        &[
            "open:r:/proc/kcore",
            "open:r:/proc/kmsg",
            "open:r:/proc/keys",
            "open:r:/proc/timer_list",
            "open:r:/dev/mem",
            "open:r:/dev/kmsg",
            "open:r:/dev/fuse",
            "open:r:/dev/kvm",
            "open:r:/dev/loop-control",
            "open:r:/etc/shadow",
            "open:w:/proc/sys/kernel/core_pattern",
            "open:w:/proc/sys/vm/drop_caches",
            "open:w:/proc/sysrq-trigger",
            "open:w:/proc/irq/default_smp_affinity",
            "open:w:/sys/kernel/uevent_helper",
            "open:w:/usr/bin/env",
        ],
        &["EACCES", "EPERM", "EROFS", "ENOENT", "entity not found"],
    ),
];

/// Ways to read a file of the host, which everyone there may read.
const READINGS: [&str; 7] = [
    "read",
    "read-through-proc",
    "read-through-descriptors",
    "read-through-dots",
    "read-through-symlink",
    "read-after-chroot",
    "read-by-handle",
];
const READING_REFUSALS: &[&str] = &["ENOENT", "EACCES", "EPERM", "ENOTDIR"];

/// The attacks that the filter may answer with a signal; the attacker then prints nothing.
const KILLED_ATTACKS: [&str; 2] = ["i386-unshare", "x32-unshare"];

#[test]
fn attacks_by_gem_in_a_provisioned_sandbox_are_refused() {
    if !testkit::needs_root() {
        return;
    }
    let server =
        ServerBuilder::new().env("CORACLE_API_KEY", aio::KEY).env("CORACLE_ON_STOP", "remove").start();
    let mut sandbox = AioSandbox::create(&server, "attacker");
    assert_eq!(sandbox.run("id -un; id -Gn"), "gem\ngem");
    let program = std::fs::read(ProgramCopies::shared().attacks_path()).expect("our own copy");
    assert_eq!(sandbox.try_upload("/home/gem/attacks", &program).expect("it answers").status, 200);
    sandbox.run("chmod +x attacks");

    let secret = Secret::new();
    let abstract_name = format!("coracle-gem-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&abstract_name).expect("a short name");
    let _listener = UnixListener::bind_addr(&address).expect("the name is unused");
    let mut expected: BTreeMap<String, &[&str]> = BTreeMap::new();
    for (attacks, refusals) in ATTACKS {
        expected.extend(attacks.iter().map(|attack| ((*attack).to_owned(), *refusals)));
    }
    expected
        .extend(READINGS.map(|way| (format!("{way}:{}:{}", secret.path(), secret.token), READING_REFUSALS)));
    expected.extend(KILLED_ATTACKS.map(|attack| (attack.to_owned(), ["EPERM", "ENOSYS"].as_slice())));
    expected.insert(format!("connect-unix:@{abstract_name}"), &["ECONNREFUSED"]);
    expected.insert(format!("connect-tcp:{}", server.port()), &["ECONNREFUSED", "ENETUNREACH"]);
    expected.insert(format!("signal:{}", server.pid()), &["ESRCH"]);

    let words: Vec<String> = expected.keys().map(|attack| format!("'{attack}'")).collect();
    let command = format!("./attacks each /home/gem/report {}", words.join(" "));
    // The shell of AIO has a terminal, and the commands of bash have pipes: an attacker has both.
    sandbox.run(&command);
    check_verdicts(&sandbox.run("cat report"), &expected, "from a terminal");
    sandbox.run("rm report");
    let ran = sandbox.post("/v1/bash/exec", &json!({"command": command, "exec_dir": "/home/gem"}));
    assert_eq!(ran["exit_code"], 0, "{ran}");
    check_verdicts(&sandbox.run("cat report"), &expected, "from a pipe");
    // The command line of `each` would be found.
    let state = server.state_directory().display().to_string();
    sandbox.post("/v1/file/write", &json!({"file": "/home/gem/mark", "content": state}));
    let found = sandbox.run("./attacks find-process \"$(cat mark)\"");
    assert!(
        found.starts_with("stopped: ") && found.contains("ESRCH"),
        "the host's processes are seen: {found}"
    );
    assert_eq!(sandbox.run("echo alive"), "alive");
}

fn check_verdicts(report: &str, expected: &BTreeMap<String, &[&str]>, circumstance: &str) {
    assert!(report.trim_end().ends_with("done"), "the attacks {circumstance} were cut off: {report}");
    let verdicts: BTreeMap<&str, &str> =
        report.lines().map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
    let mut troubles = Vec::new();
    for (attack, refusals) in expected {
        let verdict = verdicts.get(attack.as_str()).copied().unwrap_or("was not tried");
        let was_killed = verdict.is_empty() && KILLED_ATTACKS.contains(&attack.as_str());
        let was_refused =
            verdict.starts_with("stopped: ") && refusals.iter().any(|one| verdict.contains(one));
        if !was_killed && !was_refused {
            troubles.push(format!("{attack} {circumstance}: {verdict}"));
        }
    }
    assert!(troubles.is_empty(), "gem was not stopped:\n{}", troubles.join("\n"));
}
