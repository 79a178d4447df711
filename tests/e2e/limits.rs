//! Each limit, hit. These tests run on the host and, by `cargo xtask vm`, on a kernel with
//! cgroup v2 alone, so they use what the smallest userland has.

use std::fs;
use std::time::{Duration, Instant};

use e2e::host;
use e2e::run::{ORDINARY_USER, RunCommand, TestUser};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

fn run() -> RunCommand {
    RunCommand::new(TestUser::Same).with_attacks()
}

#[test]
fn memory_past_the_limit_is_reported_as_oom() {
    let ended = run().flag("--memory", "64m").run_argv(&["/attacks/attacks", "eat", "memory"]);
    assert_eq!(ended.code, Some(137), "{ended:?}");
    assert!(ended.stderr.to_lowercase().contains("memory"), "the output lacks the reason: {ended:?}");
}

#[test]
fn memory_within_the_limit_is_given() {
    let ended = run().flag("--memory", "256m").run_argv(&[
        "dd",
        "if=/dev/zero",
        "of=/dev/null",
        "bs=100M",
        "count=1",
    ]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn a_busy_loop_gets_its_share_of_the_processor() {
    // The time since boot and the shell's own processor time, before and after the loop.
    let text = "report() { read -r now _ < /proc/uptime; echo $now; times; }; report; \
                end=$((SECONDS + 4)); while ((SECONDS < end)); do :; done; report";
    let ended = run().flag("--cpus", "0.2").run_argv(&["bash", "-c", text]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let [began, used_before, _, ended, used_after, _] = lines[..] else { panic!("{lines:?}") };
    let elapsed = seconds(ended) - seconds(began);
    let share = (processor_seconds(used_after) - processor_seconds(used_before)) / elapsed;
    assert!((0.05..=0.3).contains(&share), "the loop got {share:.2} of a processor: {lines:?}");
}

/// The time that `times` of a shell reports for itself, user and system: `0m0.8s 0m0.0s`.
fn processor_seconds(line: &str) -> f64 {
    line.split_whitespace()
        .map(|word| {
            let (minutes, rest) = word.trim_end_matches('s').split_once('m').expect("minutes and seconds");
            seconds(minutes) * 60.0 + seconds(rest)
        })
        .sum()
}

fn seconds(text: &str) -> f64 {
    text.parse().unwrap_or_else(|error| panic!("`{text}`: {error}"))
}

#[test]
fn processes_stop_at_their_limit() {
    let text = "for i in $(seq 1 100); do sleep 30 & done; wait";
    let ended = run().flag("--pids", "20").flag("--timeout", "20s").run_shell(text);
    let refused = ended.stderr.contains("fork") || ended.stderr.contains("Resource temporarily unavailable");
    assert!(refused, "100 processes were started: {ended:?}");
}

#[test]
fn disk_past_the_limit_is_refused() {
    let ended = run().flag("--disk", "64m").run_argv(&["/attacks/attacks", "eat", "disk", "/root"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("EDQUOT") || ended.stdout.contains("ENOSPC"), "{ended:?}");
    let written: u64 = number_after(&ended.stdout, "after ");
    assert!((16..=64).contains(&written), "{written} MiB fitted into 64 MiB");
}

#[test]
fn inodes_past_the_limit_are_refused() {
    let ended = run().flag("--disk", "8m").run_argv(&["/attacks/attacks", "eat", "inodes", "/root"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("EDQUOT") || ended.stdout.contains("ENOSPC"), "{ended:?}");
}

#[test]
fn the_whole_image_is_under_the_disk_limit() {
    // A second tree, at /usr, must count against the same limit.
    let text =
        "head -c 100m /dev/zero > /usr/bin/filler; head -c 100m /dev/zero > /root/filler; df /root /usr/bin";
    let ended = run().flag("--disk", "64m").run_shell(text);
    let refusals =
        ended.stderr.matches("No space left").count() + ended.stderr.matches("quota exceeded").count();
    assert_eq!(refusals, 2, "{ended:?}");
}

fn number_after(text: &str, words: &str) -> u64 {
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("no `{words}` in `{text}`"));
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("digits")
}

#[test]
fn a_deadline_kills_a_child_that_left_its_session() {
    // The number of seconds marks the process among all others.
    let seconds = (100_000 + std::process::id()).to_string();
    let began = Instant::now();
    let ended = run().flag("--timeout", "2s").run_argv(&["/attacks/attacks", "daemon", &seconds]);
    assert_eq!(ended.code, Some(124), "{ended:?}");
    assert!(ended.stdout.contains("daemon "), "the child did not start: {ended:?}");
    assert!(
        began.elapsed() < Duration::from_secs(15) * e2e::slowness_factor(),
        "it took {:?}",
        began.elapsed()
    );
    assert_eq!(host::pids_with_command_line(&format!("daemon {seconds}")), Vec::<u32>::new());
}

#[test]
fn a_deadline_of_one_command_kills_its_tree_and_nothing_else() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.upload_attacks();
    let kept = (200_000 + std::process::id()).to_string();
    sandbox.start_background(&format!("sleep {kept}"));
    let seconds = (300_000 + std::process::id()).to_string();
    let request =
        json!({"argv": ["/opt/attacks", "daemon", seconds], "timeout": 1500 * e2e::slowness_factor()});
    let ran = sandbox.run_with(&request);
    assert_ne!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.contains("daemon "), "the child did not start: {ran:?}");
    e2e::eventually("its child is gone", || {
        host::pids_with_command_line(&format!("daemon {seconds}")).is_empty()
    });
    assert_eq!(
        host::pids_with_command_line(&format!("sleep {kept}")).len(),
        1,
        "another command was killed too"
    );
}

#[test]
fn a_paused_sandbox_uses_no_processor_and_resumes_where_it_was() {
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let mark = format!("mark-{}", sandbox.id);
    sandbox.start_background(&format!("exec -a {mark} bash -c 'while :; do :; done' {mark}"));
    // A process has no command line for a moment while it executes the loop.
    let busy = || host::pids_with_command_line(&mark).into_iter().find(|pid| ticks(*pid) > 5);
    let mut found = None;
    e2e::eventually("the loop works", || {
        found = busy();
        found.is_some()
    });
    let pid = found.expect("it was just found");
    assert_eq!(sandbox.change_lifecycle("pause"), 202);
    e2e::eventually("it is paused", || sandbox.state().as_deref() == Some("Paused"));
    let stopped_at = ticks(pid);
    std::thread::park_timeout(Duration::from_millis(500));
    assert_eq!(ticks(pid), stopped_at, "the paused process continues");
    assert_eq!(sandbox.change_lifecycle("resume"), 202);
    e2e::eventually("the process continues", || ticks(pid) > stopped_at);
}

/// Processor time of a process so far, in ticks.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum()
}

/// The median of several runs, each of which must get the right response.
fn median_time(sandbox: &mut RemoteSandbox) -> Duration {
    e2e::median_time(9, || {
        let ran = sandbox.run_argv(&["echo", "answered"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "answered\n"), "{ran:?}");
        ran.took
    })
}

/// How many times longer than usual a response may take in an exhausted sandbox. Half of the time the quota
/// of the period is spent, and every process waits for the next; a command that had to share the processor
/// with every process of a bomb would take a hundred times as long.
const MAX_SLOWDOWN: u32 = 25;

/// Few enough that a bomb reaches the limit soon, on the slowest machine.
const PIDS: usize = 64;

/// Checks that commands are still answered in the usual time after `burden` was put on the sandbox.
fn check_answers_under(memory: &str, burden: impl FnOnce(&mut RemoteSandbox)) {
    let server = ServerBuilder::new().env("CORACLE_LIMITS_PIDS", &PIDS.to_string()).start();
    let mut sandbox =
        server.create_sandbox_with(&json!({"resourceLimits": {"cpu": "500m", "memory": memory}}));
    sandbox.upload_attacks();
    let before = median_time(&mut sandbox);
    burden(&mut sandbox);
    let during = median_time(&mut sandbox);
    let bound = (before * MAX_SLOWDOWN).max(Duration::from_millis(250) * e2e::slowness_factor());
    assert!(during <= bound, "an answer took {during:?} instead of {before:?}");
}

#[test]
fn an_exec_is_answered_while_a_busy_loop_eats_the_quota() {
    check_answers_under("128Mi", |sandbox| {
        let mark = format!("mark-{}", sandbox.id);
        sandbox.start_background(&format!("exec -a {mark} bash -c 'while :; do :; done' {mark}"));
        e2e::eventually("the loop works", || {
            host::pids_with_command_line(&mark).first().is_some_and(|pid| ticks(*pid) > 5)
        });
    });
}

#[test]
fn an_exec_is_answered_while_a_fork_bomb_sits_at_the_limit() {
    // Enough memory that the process limit is reached first.
    check_answers_under("256Mi", |sandbox| {
        let bomb = sandbox.start_background("/opt/attacks eat processes");
        // Each process of the bomb prints one line when it is refused; then all of them wait.
        let mostly = PIDS * 3 / 4;
        e2e::eventually("the bomb sits at its limit", || {
            sandbox.logs(&bomb).matches("stopped: fork").count() >= mostly
        });
    });
}

#[test]
fn an_exec_is_answered_while_a_fork_bomb_spins() {
    check_answers_under("256Mi", |sandbox| {
        let bomb = sandbox.start_background(&format!("/opt/attacks eat processor {}", PIDS * 3 / 4));
        e2e::eventually("the bomb spins", || sandbox.logs(&bomb).contains("spinning"));
    });
}

#[test]
fn an_exec_is_answered_after_an_oom_kill() {
    check_answers_under("128Mi", |sandbox| {
        let ran = sandbox.run("/opt/attacks eat memory");
        assert_ne!(ran.code, Some(0), "{ran:?}");
    });
}

/// The server asks for this when a sandbox makes no progress at its memory limit. Here the test asks itself.
#[test]
fn largest_process_is_killed_and_reported_as_oom() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    let small = sandbox.start_background("sleep 600");
    // `dd` has read its block and waits until somebody reads from the pipe.
    let hold = "mkfifo /tmp/f; exec 3<>/tmp/f; echo begun; exec dd if=/dev/zero bs=60M count=1 >&3";
    let large = sandbox.start_background(hold);
    e2e::eventually("`dd` has read its block", || {
        sandbox.run("set -- $(cat /proc/[0-9]*/statm | sort -n -k 2 | tail -1); test $2 -gt 15000").code
            == Some(0)
    });
    let answer = ask_agent(&server, &sandbox.id, r#"{"version":1,"request":"kill_largest"}"#);
    assert!(answer.contains("\"ok\""), "{answer:?}");
    e2e::eventually("the largest process has ended", || sandbox.status(&large)["running"] == false);
    let status = sandbox.status(&large);
    assert!(status["error"].as_str().is_some_and(|error| error.contains("memory")), "{status}");
    assert_eq!(sandbox.status(&small)["running"], true);
}

/// Three samples of ten seconds show that it makes no progress. Without them it would go on for ever.
#[test]
fn program_that_rereads_files_at_its_memory_limit_is_killed() {
    const LIMIT: Duration = Duration::from_secs(120);
    if std::env::var_os("CORACLE_TEST_LONG").is_none() {
        return testkit::skip_test("it takes a minute; CORACLE_TEST_LONG=1 runs it");
    }
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {"cpu": "1", "memory": "64Mi"}}));
    sandbox.upload_attacks();
    assert_eq!(sandbox.run("head -c 32M /dev/urandom > /root/file; sync /root/file").code, Some(0));
    let small = sandbox.start_background("sleep 600");
    let crawling = sandbox.start_background("exec /opt/attacks eat refaults /root/file 60");
    let ended = e2e::happens_within(LIMIT, || sandbox.status(&crawling)["running"] == false);
    let status = sandbox.status(&crawling);
    assert!(ended, "it still runs: {status}");
    assert!(status["error"].as_str().is_some_and(|error| error.contains("memory")), "{status}");
    assert!(server.log().contains("sandbox makes no progress at its memory limit"), "the kernel killed it");
    assert_eq!(sandbox.status(&small)["running"], true);
}

/// Sends one request to the agent of a sandbox, as the server does, and returns its frames.
fn ask_agent(server: &TestServer, id: &str, request: &str) -> String {
    let socket = server.state_directory().join("run").join(id);
    let mut stream = std::os::unix::net::UnixStream::connect(socket).expect("the agent listens");
    let length = u32::try_from(request.len()).expect("it is short").to_le_bytes();
    let frame = [&length[..], &[0], request.as_bytes()].concat();
    std::io::Write::write_all(&mut stream, &frame).expect("the agent reads");
    let mut answer = Vec::new();
    std::io::Read::read_to_end(&mut stream, &mut answer).expect("the agent closes the connection");
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn ordinary_user_gets_the_name_of_an_unenforceable_limit() {
    if !testkit::needs_root() {
        return;
    }
    // An ordinary user cannot make a group here, so a limit that was given must fail.
    let ended = RunCommand::new(ORDINARY_USER).flag("--memory", "64m").run_argv(&["true"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("memory") && ended.stderr.contains("hint:"), "{ended:?}");
}
