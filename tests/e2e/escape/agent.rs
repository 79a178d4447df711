//! Attacks from a subverted agent.
//!
//! The agent of a living sandbox is made to execute the attacker's program (see
//! `attacks/subvert.rs`), so the attacks run with its capabilities, its filter, all its
//! descriptors and as pid 1.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Secret;
use e2e::host;
use e2e::run::attack_outside;
use e2e::server::TestServer;

/// Attacks that the agent itself must not be able to make. Permissions that its own duties need (files as
/// any user inside, processes, its command groups) are not among them.
pub(super) const REFUSED: [&str; 21] = [
    "mount-tmpfs",
    "mount-proc",
    "mount-by-descriptor",
    "mount-cgroup-release-agent",
    "unshare:user",
    "unshare:mount",
    "unshare:net",
    "clone-user-namespace",
    "user-namespace-then-mount",
    "socket:raw",
    "socket:packet",
    "socket:netfilter",
    "bpf",
    "add-key",
    "userfaultfd",
    "io-uring",
    "perf",
    "kernel-log",
    "i386-unshare",
    "make-device:block",
    "set-clock",
];

/// Subverts the agent of a new sandbox and returns the verdict of each attack.
fn attack_from_new_agent(attacks: &[String]) -> BTreeMap<String, String> {
    attack_from_agent(&TestServer::start(), attacks)
}

/// As [`attack_from_new_agent`], with a sandbox of this server.
pub(super) fn attack_from_agent(server: &TestServer, attacks: &[String]) -> BTreeMap<String, String> {
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    let agent = host::agent_pid(&sandbox.id).expect("its agent runs");
    attack_from_process(agent, agent, attacks)
}

/// Subverts a process of an agent's sandbox that contains the attacks, and returns the verdict of each.
pub(super) fn attack_from_process(agent: u32, victim: u32, attacks: &[String]) -> BTreeMap<String, String> {
    let victim = victim.to_string();
    let mut words = vec!["subvert", &victim, "/opt/attacks", "each", "/root/report"];
    words.extend(attacks.iter().map(String::as_str));
    let ended = attack_outside(&words);
    assert_eq!(ended.code, Some(0), "the agent could not be subverted: {ended:?}");
    // Root on the host sees the sandbox's files through the agent's own root.
    let report = format!("/proc/{agent}/root/root/report");
    let read = || std::fs::read_to_string(&report).unwrap_or_default();
    // Writing until a disk is full takes a while.
    let tried = e2e::happens_within(Duration::from_secs(120), || read().ends_with("done\n"));
    assert!(tried, "not all attacks were tried in time: {}", read());
    read()
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, verdict)| (name.into(), verdict.into()))
        .collect()
}

#[test]
fn a_subverted_agent_gains_nothing_from_the_kernel() {
    if !testkit::needs_root() {
        return;
    }
    let attacks: Vec<String> = REFUSED.map(str::to_owned).into();
    let verdicts = attack_from_new_agent(&attacks);
    for name in REFUSED {
        let verdict = verdicts.get(name).map_or("was not tried", String::as_str);
        // The filter may also kill the process, which prints nothing.
        assert!(verdict.starts_with("stopped: ") || verdict.is_empty(), "{name} from the agent: {verdict}");
    }
}

#[test]
fn a_subverted_agent_reads_no_file_of_the_host() {
    if !testkit::needs_root() {
        return;
    }
    let secret = Secret::new();
    let ways =
        ["read", "read-through-proc", "read-through-descriptors", "read-through-dots", "read-by-handle"];
    let attacks: Vec<String> = ways.map(|way| format!("{way}:{}:{}", secret.path(), secret.token)).into();
    let verdicts = attack_from_new_agent(&attacks);
    for attack in &attacks {
        let verdict = verdicts.get(attack).map_or("was not tried", String::as_str);
        assert!(verdict.starts_with("stopped: "), "{attack} from the agent: {verdict}");
    }
}

#[test]
fn a_subverted_agent_cannot_fill_the_hosts_disk() {
    if !testkit::needs_root() {
        return;
    }
    const FOUR_GIBIBYTES: u64 = 4 << 30;
    let attack = format!("eat:disk-through-descriptors:{FOUR_GIBIBYTES}");
    let verdicts = attack_from_new_agent(std::slice::from_ref(&attack));
    let verdict = verdicts.get(&attack).map_or("was not tried", String::as_str);
    assert!(verdict.starts_with("stopped: "), "its journal is not bounded by a quota: {verdict}");
}
