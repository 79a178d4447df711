//! One sandbox uses up all it can get; the server and a neighbour must not notice.

use std::io::Read;
use std::time::Duration;

use e2e::run::{Run, User, attack_outside};
use e2e::sandbox::Sandbox;
use e2e::server::{Server, resident};
use serde_json::json;

/// How long `true` takes in a sandbox: the middle of several runs.
fn usual_time(sandbox: &mut Sandbox) -> Duration {
    let mut times: Vec<Duration> = (0..15)
        .map(|_| {
            let ran = sandbox.run("true");
            assert_eq!(ran.code, Some(0), "{ran:?}");
            ran.took
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

/// Holds what `attack` does against a neighbour: its commands take about as long as before.
fn check_neighbour(attack: impl FnOnce(&mut Sandbox)) {
    let server = Server::start();
    // A small disk is full sooner; how it ends is the same.
    let mut attacker = server.create_with(&json!({"extensions": {"coracle.disk": "128Mi"}}));
    let mut neighbour = server.create();
    attacker.upload_attacks();
    let before = usual_time(&mut neighbour);
    attack(&mut attacker);
    let during = usual_time(&mut neighbour);
    let bound = before * 5 + Duration::from_millis(250) * e2e::slowness();
    assert!(during <= bound, "a neighbour's `true` took {during:?} instead of {before:?}");
    assert!(neighbour.run("echo fine").stdout.contains("fine"));
}

/// Takes an amount outside, where no limit of ours holds, and then inside, where one does.
///
/// The amount is more than the sandbox has and little for a host, so that nothing is harmed where
/// the attack succeeds.
fn check_limit(limit: (&str, &str), eat: &[&str], enough: &str, refusals: &[&str]) {
    if testkit::needs_root() {
        let place = tempfile::tempdir().expect("the temporary directory can be written");
        let directory = place.path().to_string_lossy();
        let words: Vec<&str> =
            eat.iter().map(|word| if *word == "/root" { &directory } else { *word }).collect();
        let ended = attack_outside(&[&["eat"], words.as_slice(), &[enough]].concat());
        assert_eq!(ended.code, Some(0), "eating {eat:?} does not bite outside: {ended:?}");
        let run = Run::new(User::Same).with_attacks().flag(limit.0, limit.1);
        let ended = run.argv(&[&["/attacks/attacks", "eat"], eat, &[enough]].concat());
        let refused = refusals.iter().any(|name| ended.stdout.contains(name) || ended.stderr.contains(name));
        assert!(ended.code != Some(0) && refused, "{limit:?} does not stop {eat:?}: {ended:?}");
    }
}

#[test]
fn each_limit_is_what_stops_its_eater() {
    check_limit(("--pids", "64"), &["processes"], "100", &["fork: EAGAIN"]);
    check_limit(("--memory", "64m"), &["memory"], "128", &["memory limit"]);
    check_limit(("--disk", "64m"), &["disk", "/root"], "128", &["EDQUOT", "ENOSPC"]);
    check_limit(("--disk", "8m"), &["inodes", "/root"], "20000", &["EDQUOT", "ENOSPC"]);
}

/// How many files a process may open is the host's own limit, which may not be liftable even for
/// its root. So it is lowered inside, and the same eater succeeds where it is not.
#[test]
fn the_limit_of_open_files_is_what_stops_who_opens_them() {
    if !testkit::needs_root() {
        return;
    }
    let outside = attack_outside(&["eat", "descriptors", "800"]);
    assert_eq!(outside.code, Some(0), "it does not bite outside: {outside:?}");
    let run = Run::new(User::Same).with_attacks();
    let ended = run
        .shell("/attacks/attacks eat descriptors 800; ulimit -n 400; /attacks/attacks eat descriptors 800");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(
        matches!(lines[..], ["succeeded: 800 descriptors", stopped] if stopped.contains("EMFILE")),
        "{ended:?}"
    );
}

#[test]
fn a_fork_bomb_does_not_reach_a_neighbour() {
    check_neighbour(|attacker| {
        let bomb = attacker.start("/opt/attacks eat processes");
        e2e::eventually("the bomb is at its limit", || attacker.logs(&bomb).contains("stopped: fork"));
    });
}

#[test]
fn eating_memory_ends_the_eater_alone() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat memory");
        assert_ne!(ran.code, Some(0), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn descriptors_run_out_for_the_one_who_opens_them() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat descriptors");
        assert!(ran.stdout.contains("EMFILE"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn a_full_disk_is_the_writers_alone() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat disk /root");
        assert!(ran.stdout.contains("EDQUOT") || ran.stdout.contains("ENOSPC"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn inodes_run_out_for_the_one_who_makes_files() {
    check_neighbour(|attacker| {
        let ran = attacker.run("/opt/attacks eat inodes /root");
        assert!(ran.stdout.contains("EDQUOT") || ran.stdout.contains("ENOSPC"), "{ran:?}");
        assert_eq!(attacker.run("echo alive").stdout, "alive\n");
    });
}

#[test]
fn temporary_directories_are_bounded_too() {
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
const FLAT: u64 = 48 << 20;

#[test]
fn a_flood_that_is_read_leaves_the_servers_memory_flat() {
    const FLOOD: u64 = 512 << 20;
    let server = Server::start();
    let mut sandbox = server.create();
    sandbox.upload_attacks();
    assert_eq!(sandbox.run("true").code, Some(0));
    let before = resident(server.pid());
    let request = json!({"argv": ["/opt/attacks", "flood", FLOOD.to_string()]});
    let mut stream = sandbox.inside_streaming("POST", "command", &request);
    assert_eq!(stream.status, 200);
    let mut buffer = vec![0; 1 << 20];
    let (mut taken, mut highest) = (0, before);
    while let Ok(count @ 1..) = stream.body.read(&mut buffer) {
        taken += count as u64;
        highest = highest.max(resident(server.pid()));
    }
    assert!(taken > 0, "nothing was streamed");
    assert!(highest < before + FLAT, "memory rose from {before} to {highest} bytes");
}

#[test]
fn a_flood_that_nobody_reads_leaves_the_servers_memory_flat() {
    const FLOOD: u64 = 256 << 20;
    let server = Server::start();
    let mut sandbox = server.create();
    sandbox.upload_attacks();
    let mut watcher = sandbox.another(server.client());
    let before = resident(server.pid());
    let request = json!({"argv": ["/opt/attacks", "flood", FLOOD.to_string()]});
    let unread = sandbox.inside_streaming("POST", "command", &request);
    assert_eq!(unread.status, 200);
    // The flood ends although nobody reads: a slow reader does not stall a command.
    e2e::eventually("the flood has ended", || {
        watcher.run_argv(&["/opt/attacks", "find-process", "attacks flood"]).code == Some(1)
    });
    let after = resident(server.pid());
    assert!(after < before + FLAT, "memory rose from {before} to {after} bytes");
    drop(unread);
}
