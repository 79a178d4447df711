//! One sandbox exhausts everything it can get; the server and a neighbour must not be affected.

use std::io::Read;
use std::time::Duration;

use e2e::run::{RunCommand, TestUser, attack_outside};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{TestServer, resident_memory};
use serde_json::json;

/// The median time of `true` in a sandbox over several runs.
fn median_time(sandbox: &mut RemoteSandbox) -> Duration {
    e2e::median_time(15, || {
        let ran = sandbox.run("true");
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.took
    })
}

/// Checks that a neighbour's commands take about as long as before during `attack`.
fn check_neighbour(attack: impl FnOnce(&mut RemoteSandbox)) {
    let server = TestServer::start();
    // A small disk is full sooner; the outcome is the same.
    let mut attacker = server.create_sandbox_with(&json!({"extensions": {"coracle.disk": "128Mi"}}));
    let mut neighbour = server.create_sandbox();
    attacker.upload_attacks();
    let before = median_time(&mut neighbour);
    attack(&mut attacker);
    let during = median_time(&mut neighbour);
    let bound = before * 5 + Duration::from_millis(250) * e2e::slowness_factor();
    assert!(during <= bound, "a neighbour's `true` took {during:?} instead of {before:?}");
    assert!(neighbour.run("echo fine").stdout.contains("fine"));
}

/// Takes an amount outside, where none of our limits applies, and then inside, where one does.
///
/// The amount is more than the sandbox has and little for a host, so that nothing is harmed where the
/// attack succeeds.
fn check_limit(limit: (&str, &str), eat: &[&str], enough: &str, refusals: &[&str]) {
    if testkit::needs_root() {
        let place = tempfile::tempdir().expect("the temporary directory can be written");
        let directory = place.path().to_string_lossy();
        let words: Vec<&str> =
            eat.iter().map(|word| if *word == "/root" { &directory } else { *word }).collect();
        let ended = attack_outside(&[&["eat"], words.as_slice(), &[enough]].concat());
        assert_eq!(ended.code, Some(0), "exhausting {eat:?} does not work outside: {ended:?}");
        let run = RunCommand::new(TestUser::Same).with_attacks().flag(limit.0, limit.1);
        let ended = run.run_argv(&[&["/attacks/attacks", "eat"], eat, &[enough]].concat());
        let refused = refusals.iter().any(|name| ended.stdout.contains(name) || ended.stderr.contains(name));
        assert!(ended.code != Some(0) && refused, "{limit:?} does not stop {eat:?}: {ended:?}");
    }
}

#[test]
fn each_limit_stops_its_attack() {
    check_limit(("--pids", "64"), &["processes"], "100", &["fork: EAGAIN"]);
    check_limit(("--memory", "64m"), &["memory"], "128", &["memory limit"]);
    check_limit(("--disk", "64m"), &["disk", "/root"], "128", &["EDQUOT", "ENOSPC"]);
    check_limit(("--disk", "8m"), &["inodes", "/root"], "20000", &["EDQUOT", "ENOSPC"]);
}

/// The number of open files is the host's own limit, which even its root may not be able to raise. So the
/// test lowers it inside, and the same attack succeeds where it is not lowered.
#[test]
fn open_file_limit_stops_the_process_that_opens_files() {
    if !testkit::needs_root() {
        return;
    }
    let outside = attack_outside(&["eat", "descriptors", "800"]);
    assert_eq!(outside.code, Some(0), "the attack does not work outside: {outside:?}");
    let run = RunCommand::new(TestUser::Same).with_attacks();
    let ended = run.run_shell(
        "/attacks/attacks eat descriptors 800; ulimit -n 400; /attacks/attacks eat descriptors 800",
    );
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(
        matches!(lines[..], ["succeeded: 800 descriptors", stopped] if stopped.contains("EMFILE")),
        "{ended:?}"
    );
}

#[test]
fn a_fork_bomb_does_not_reach_a_neighbour() {
    check_neighbour(|attacker| {
        let bomb = attacker.start_background("/opt/attacks eat processes");
        e2e::eventually("the bomb is at its limit", || attacker.logs(&bomb).contains("stopped: fork"));
    });
}

#[test]
fn memory_exhaustion_ends_only_the_attacker() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat memory");
        assert_ne!(ran.code, Some(0), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn descriptors_run_out_only_for_the_attacker() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat descriptors");
        assert!(ran.stdout.contains("EMFILE"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn full_disk_affects_only_the_writer() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat disk /root");
        assert!(ran.stdout.contains("EDQUOT") || ran.stdout.contains("ENOSPC"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn inodes_run_out_only_for_the_attacker() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat inodes /root");
        assert!(ran.stdout.contains("EDQUOT") || ran.stdout.contains("ENOSPC"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn temporary_directories_are_limited() {
    check_neighbour(|attacker| {
        for place in ["/tmp", "/dev/shm"] {
            let ran = attacker.run(&format!("/opt/attacks eat disk {place}"));
            // Memory-backed files count against the memory limit, so either may end it.
            assert_ne!(ran.code, Some(0), "{place}: {ran:?}");
            assert_eq!(attacker.run("echo alive").stdout, "alive\n");
        }
    });
}

/// The growth of the server's memory that a flood may cause: buffers, not the flood itself.
const MAX_MEMORY_GROWTH: u64 = 48 << 20;

#[test]
fn a_flood_that_is_read_leaves_the_servers_memory_flat() {
    const FLOOD: u64 = 512 << 20;
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    assert_eq!(sandbox.run("true").code, Some(0));
    let before = resident_memory(server.pid());
    let request = json!({"argv": ["/opt/attacks", "flood", FLOOD.to_string()]});
    let mut stream = sandbox.request_streaming("POST", "command", &request);
    assert_eq!(stream.status, 200);
    let mut buffer = vec![0; 1 << 20];
    let (mut taken, mut highest) = (0, before);
    while let Ok(count @ 1..) = stream.body.read(&mut buffer) {
        taken += count as u64;
        highest = highest.max(resident_memory(server.pid()));
    }
    assert!(taken > 0, "nothing was streamed");
    assert!(highest < before + MAX_MEMORY_GROWTH, "memory rose from {before} to {highest} bytes");
}

#[test]
fn unread_flood_leaves_the_servers_memory_flat() {
    const FLOOD: u64 = 256 << 20;
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    let mut watcher = sandbox.with_client(server.client());
    let before = resident_memory(server.pid());
    let request = json!({"argv": ["/opt/attacks", "flood", FLOOD.to_string()]});
    let unread = sandbox.request_streaming("POST", "command", &request);
    assert_eq!(unread.status, 200);
    // The flood ends although its output is not read: a slow reader does not stall a command.
    e2e::eventually("the flood has ended", || {
        watcher.run_argv(&["/opt/attacks", "find-process", "attacks flood"]).code == Some(1)
    });
    let after = resident_memory(server.pid());
    assert!(after < before + MAX_MEMORY_GROWTH, "memory rose from {before} to {after} bytes");
    drop(unread);
}
