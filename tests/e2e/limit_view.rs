//! The limits of a sandbox as `/proc` and `/sys` show them inside.

use std::fs;
use std::time::Duration;

use e2e::run::{ORDINARY_USER, RunCommand, TestUser};
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

/// Prints the visible memory in bytes, and the processors by every interface that programs use.
const PRINT_LIMITS: &str = "awk '/^MemTotal:|^SwapTotal:/ {print $2 * 1024}' /proc/meminfo; nproc; \
    getconf _NPROCESSORS_ONLN; python3 -c 'import os; print(os.cpu_count())'; \
    grep -c ^processor /proc/cpuinfo; grep -c '^cpu[0-9]' /proc/stat; cat /sys/devices/system/cpu/online; \
    ls -d /sys/devices/system/cpu/cpu* | wc -l";

fn host_processors() -> usize {
    let stat = fs::read_to_string("/proc/stat").expect("every host has it");
    stat.lines().filter(|line| line.starts_with("cpu")).count() - 1
}

/// The output of [`PRINT_LIMITS`] for these limits.
fn expected(memory: u64, processors: usize) -> String {
    let count = processors.min(host_processors());
    let list = if count == 1 { "0".to_owned() } else { format!("0-{}", count - 1) };
    format!("{memory}\n0\n{count}\n{count}\n{count}\n{count}\n{count}\n{list}\n{count}\n")
}

#[test]
fn free_and_nproc_show_the_limits_of_a_run() {
    if !testkit::needs_root() {
        return;
    }
    let run = |cpus: &str, argv: &[&str]| {
        let ended =
            RunCommand::new(TestUser::Same).flag("--memory", "256m").flag("--cpus", cpus).run_argv(argv);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stdout
    };
    let free = run("1", &["free", "-b"]);
    let memory: Vec<&str> = free.lines().nth(1).expect("a line for memory").split_whitespace().collect();
    assert_eq!(memory[1], (256 << 20).to_string(), "{free}");
    let swap: Vec<&str> = free.lines().nth(2).expect("a line for swap").split_whitespace().collect();
    assert_eq!(swap[1], "0", "{free}");
    for (cpus, processors) in [("0.5", 1), ("1", 1), ("1.5", 2), ("64", 64)] {
        assert_eq!(run(cpus, &["sh", "-c", PRINT_LIMITS]), expected(256 << 20, processors), "{cpus}");
    }
}

#[test]
fn thread_count_set_by_the_caller_is_kept() {
    if !testkit::needs_root() {
        return;
    }
    let run = RunCommand::new(TestUser::Same).flag("--cpus", "1").flag("--env", "OMP_NUM_THREADS=7");
    assert_eq!(run.run_argv(&["nproc"]).stdout, "7\n");
}

/// The kernel keeps tables for each pair of a filesystem and a memory group, so a sandbox has few filesystems.
#[test]
fn files_in_memory_are_on_one_filesystem() {
    if !testkit::needs_root() {
        return;
    }
    let show = "stat -c %d /dev /dev/shm /sys /proc/meminfo | sort -u | wc -l; cut -d ' ' -f 3 /proc/self/mountinfo | sort -u | grep -c ^0:";
    let shown = RunCommand::new(TestUser::Same).flag("--memory", "256m").run_argv(&["sh", "-c", show]);
    let lines: Vec<&str> = shown.stdout.lines().collect();
    assert_eq!(lines[0], "1", "{shown:?}");
    // In memory, `/proc` and what hides directories in it, `/dev/pts`, the overlays of `/` and `/usr`, and the
    // host's `/dev`.
    assert!(lines[1].parse::<u32>().is_ok_and(|count| count <= 7), "{shown:?}");
}

/// Programs inside cannot change the shown values, and the files expose nothing else.
#[test]
fn limit_view_files_are_read_only_inside() {
    if !testkit::needs_root() {
        return;
    }
    let text = "for f in /proc/meminfo /proc/stat /proc/cpuinfo /sys/devices/system/cpu/online; do \
        (echo x > $f) 2>/dev/null && echo written; chmod 666 $f 2>/dev/null && echo changed; \
        rm -f $f 2>/dev/null && echo removed; done; mkdir /sys/x 2>/dev/null && echo made; \
        touch /sys/devices/x 2>/dev/null && echo made; \
        for fd in /proc/1/fd/*; do (echo x > $fd/meminfo) 2>/dev/null && echo through; done; head -c 9 /proc/meminfo";
    let ended = RunCommand::new(TestUser::Same).run_argv(&["sh", "-c", text]);
    assert_eq!(ended.stdout, "MemTotal:", "{ended:?}");
}

#[test]
fn memory_in_use_is_updated_for_a_running_program() {
    if !testkit::needs_root() {
        return;
    }
    // A read returns the value computed at the read before, so the program reads until it sees its own use.
    const GROWS: &str = "def look(): return {l.split(':')[0]: int(l.split()[1]) for l in open('/proc/meminfo')}\n\
        before = look()\nheld = bytearray(100 << 20)\n\
        while True:\n    now = look()\n    if before['MemAvailable'] - now['MemAvailable'] > 90 << 10: break\n\
        assert now['MemFree'] <= now['MemAvailable'] <= now['MemTotal'] == 256 << 10, now\nprint('seen')";
    let run = RunCommand::new(TestUser::Same).flag("--memory", "256m").flag("--timeout", "60s");
    let ended = run.run_argv(&["python3", "-c", GROWS]);
    assert_eq!(ended.stdout, "seen\n", "{ended:?}");
}

/// A refresh is not taken for a read, which would cause the next refresh.
#[test]
#[expect(clippy::disallowed_methods, reason = "what must not happen has no event")]
fn agent_does_nothing_while_nobody_reads() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox = server.create_sandbox();
    sandbox.run("cat /proc/meminfo /proc/stat");
    sandbox.run("sleep 0.2; cat /proc/meminfo /proc/stat");
    let record = fs::read(server.state_directory().join("boxes").join(&sandbox.id)).expect("it has a record");
    let record: serde_json::Value = serde_json::from_slice(&record).expect("it is JSON");
    let status = format!("/proc/{}/status", record["process"]["pid"]);
    let wakeups = || {
        let status = fs::read_to_string(&status).expect("the agent runs");
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        line.expect("every process has it").to_owned()
    };
    e2e::eventually("the agent sleeps", || {
        let before = wakeups();
        // Longer than the time between two refreshes.
        std::thread::sleep(Duration::from_millis(500));
        wakeups() == before
    });
}

/// A warm sandbox gets its limits when it is claimed, after it was made with others.
#[test]
fn a_sandbox_from_a_pool_shows_the_limits_it_was_taken_with() {
    if !testkit::needs_root() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("coracle.toml");
    fs::write(&file, "[[pool]]\nname = \"warm\"\nlevel = 1\n").expect("our own directory");
    let server = ServerBuilder::new().argument("--config").argument(&file.display().to_string()).start();
    let mut client = server.client();
    e2e::eventually("the pool is full", || {
        client.get("/v1/pools/warm").expect("the server answers").json()["status"]["available"] == 1
    });
    let limits = json!({"cpu": "0.5", "memory": "200Mi"});
    let mut taken =
        server.create_sandbox_with(&json!({"resourceLimits": limits, "extensions": {"poolRef": "warm"}}));
    let shown = client.get(&format!("/v1/sandboxes/{}", taken.id)).expect("the server answers").json();
    assert_eq!(shown["allocation"]["poolRef"], "warm", "{shown}");
    assert_eq!(taken.run(PRINT_LIMITS).stdout, expected(200 << 20, 1));
}

/// A session with its own namespaces has its own `/proc`, which shows the same.
#[test]
fn an_isolated_session_shows_the_limits_of_its_sandbox() {
    if !testkit::needs_root() {
        return;
    }
    let server = TestServer::start();
    let mut sandbox: RemoteSandbox = server.create_sandbox_with(&json!({
        "resourceLimits": {"cpu": "1", "memory": "300Mi"},
        "extensions": {"bootstrap.execd.isolation": "enable"},
    }));
    let request = json!({"workspace": {"path": "/tmp", "mode": "rw"}});
    let opened = sandbox.request_inside("POST", "v1/isolated/session", &request);
    assert_eq!(opened.status, 201, "{}", opened.text());
    let session = opened.json()["session_id"].as_str().expect("an id").to_owned();
    let body = json!({"code": PRINT_LIMITS});
    let answer = sandbox.request_inside("POST", &format!("v1/isolated/session/{session}/run"), &body);
    assert_eq!(e2e::sandbox::CommandRun::from_events(&answer.text()).stdout, expected(300 << 20, 1));
}

#[test]
fn host_values_are_shown_if_no_limit_applies() {
    if !testkit::needs_root() {
        return;
    }
    let ended = RunCommand::new(ORDINARY_USER).run_argv(&[
        "sh",
        "-c",
        "head -n 1 /proc/meminfo; grep -c ^processor /proc/cpuinfo",
    ]);
    let host = fs::read_to_string("/proc/meminfo").expect("every host has it");
    let total = host.lines().next().expect("the first line is the total");
    assert_eq!(ended.stdout, format!("{total}\n{}\n", host_processors()), "{ended:?}");
}
