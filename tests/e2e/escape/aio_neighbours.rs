//! The user `gem` of a provisioned sandbox takes all that it can get, and looks for its neighbours and for what lies above
//! the directories of the host that are mounted. That the attacks work is shown by `exhaustion.rs`, `neighbours.rs`,
//! `files.rs`, `mounts.rs` and `devices.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use e2e::aio::{self, AioSandbox, StateRoot};
use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::server::{PeakMemory, TestServer};
use serde_json::json;

/// The growth of the server's memory that a flood may cause at any moment: buffers, not the flood itself.
const MAX_MEMORY_GROWTH: u64 = 48 << 20;
/// More than the memory of the server may grow, so that a server which collects the output of a command is found out.
const FLOOD_BYTES: u64 = 64 << 20;

/// An attacker and its neighbour, with files of the host below one state root.
struct Neighbours {
    attacker: AioSandbox,
    neighbour: AioSandbox,
    server: TestServer,
    root: StateRoot,
}

impl Neighbours {
    fn start() -> Self {
        let root = StateRoot::make();
        let server = root
            .server()
            // Small limits are reached sooner; the outcome is the same.
            .env("CORACLE_DEERFLOW_MEMORY", "128Mi")
            .env("CORACLE_DEERFLOW_DISK", "64Mi")
            .env("CORACLE_DEERFLOW_PIDS", "100")
            .start();
        let create =
            |user: &str| AioSandbox::create_with(&server, user, &json!({"user_id": user, "thread_id": "t"}));
        let (mut attacker, neighbour) = (create("attacker"), create("neighbour"));
        let program = fs::read(ProgramCopies::shared().attacks_path()).expect("our own copy");
        assert_eq!(attacker.try_upload("/home/gem/attacks", &program).expect("it answers").status, 200);
        assert_eq!(attacker.run("chmod +x attacks; id -un"), "gem");
        Self { attacker, neighbour, server, root }
    }

    fn attack(&mut self, words: &str) -> String {
        attack(&mut self.attacker, words)
    }

    /// Repeats an attack for as long as the neighbour's commands are measured. Returns what the attack printed, and the
    /// median time of those commands.
    fn measure_during(&mut self, words: &str) -> (String, Duration) {
        let Self { attacker, neighbour, .. } = self;
        let is_over = AtomicBool::new(false);
        let (begun, first_ended) = mpsc::channel();
        thread::scope(|scope| {
            let repeated = scope.spawn(|| {
                let printed = attack(attacker, words);
                begun.send(()).ok();
                while !is_over.load(Ordering::Relaxed) {
                    attack(attacker, words);
                }
                printed
            });
            // The first attack has shown that it works. If it failed, its own message is the one to print.
            let measured = first_ended.recv().map(|()| {
                let _over = SetOnDrop(&is_over);
                median_time(neighbour)
            });
            let printed = repeated.join().unwrap_or_else(|panic| resume_unwind(panic));
            (printed, measured.expect("the attack has not failed"))
        })
    }
}

/// Ends the repetition of an attack, also if the measurement fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs an attack that must not succeed, and checks that the sandbox goes on.
fn attack(attacker: &mut AioSandbox, words: &str) -> String {
    let body = json!({"command": format!("./attacks {words}"), "exec_dir": "/home/gem", "hard_timeout": 60});
    let ended = attacker.post("/v1/bash/exec", &body);
    assert!(ended["exit_code"] != 0 && ended["status"] != "timed_out", "{words} was not stopped: {ended}");
    assert_eq!(attacker.run("rm -rf /home/gem/work/*; echo alive"), "alive", "after {words}");
    ended["stdout"].as_str().unwrap_or_default().to_owned()
}

/// The median time of `true` in a sandbox over several runs.
fn median_time(sandbox: &mut AioSandbox) -> Duration {
    e2e::median_time(9, || {
        let began = Instant::now();
        sandbox.run("true");
        began.elapsed()
    })
}

#[test]
fn gem_exhausts_only_its_own_sandbox() {
    if !testkit::needs_root() {
        return;
    }
    let mut boxes = Neighbours::start();
    let before = median_time(&mut boxes.neighbour);
    let bound = before * 5 + Duration::from_millis(250) * e2e::slowness_factor();
    boxes.attacker.run("mkdir work");
    for (words, refusals) in [
        ("eat memory", &[] as &[&str]),
        ("eat descriptors", &["EMFILE"]),
        ("eat disk /home/gem/work", &["EDQUOT", "ENOSPC"]),
        ("eat inodes /home/gem/work", &["EDQUOT", "ENOSPC"]),
    ] {
        let (printed, during) = boxes.measure_during(words);
        let is_named = refusals.is_empty() || refusals.iter().any(|refusal| printed.contains(refusal));
        assert!(is_named, "{words} was stopped by something else: {printed}");
        assert!(during <= bound, "{words}: a neighbour's `true` took {during:?} instead of {before:?}");
    }

    // A fork bomb stays at its limit while the neighbour works.
    let bomb = json!({"session_id": "bomb", "command": "./attacks eat processes", "exec_dir": "/home/gem", "async_mode": true});
    boxes.attacker.post("/v1/bash/exec", &bomb);
    let mut printed = String::new();
    e2e::eventually("the bomb is at its limit", || {
        let output = boxes.attacker.post("/v1/bash/output", &json!({"session_id": "bomb"}));
        printed = output["stdout"].as_str().unwrap_or_default().to_owned();
        printed.contains("stopped: fork")
    });
    assert!(printed.contains("EAGAIN"), "{printed}");
    let during = median_time(&mut boxes.neighbour);
    assert!(during <= bound, "a neighbour's `true` took {during:?} instead of {before:?}");
    let removed = aio::keyed_client(boxes.server.address()).delete("/api/sandboxes/attacker");
    assert_eq!(removed.expect("the server answers").status, 200, "a sandbox full of processes is removed");
    assert_eq!(boxes.neighbour.run("echo fine"), "fine");
}

#[test]
fn a_flood_by_gem_leaves_the_servers_memory_flat() {
    if !testkit::needs_root() {
        return;
    }
    let mut boxes = Neighbours::start();
    let command = format!("/home/gem/attacks flood {FLOOD_BYTES}");
    for path in ["/v1/shell/exec", "/v1/bash/exec"] {
        let peak = PeakMemory::watch(boxes.server.pid());
        let ended = boxes.attacker.post(path, &json!({"command": command, "hard_timeout": 300}));
        let state = (&ended["status"], &ended["exit_code"]);
        assert_eq!(state, (&json!("completed"), &json!(0)), "{path} did not take the whole flood");
        let growth = peak.growth();
        assert!(growth < MAX_MEMORY_GROWTH, "{path}: memory rose by {growth} bytes");
    }
    assert_eq!(boxes.attacker.run("echo alive"), "alive");
}

#[test]
fn gem_reaches_no_neighbour_and_nothing_above_its_mounts() {
    if !testkit::needs_root() {
        return;
    }
    let mut boxes = Neighbours::start();
    let root = boxes.root.path();
    let token = "secret-of-the-neighbour";
    boxes.neighbour.run(&format!(
        "for at in /home/gem /mnt/user-data/workspace; do echo {token} > $at/secret; chmod 644 $at/secret; done"
    ));
    fs::write(root.join("secret"), token).expect("our own directory");
    fs::set_permissions(root.join("secret"), fs::Permissions::from_mode(0o644)).expect("our own file");
    let theirs = root.join("users/neighbour/threads/t/user-data/workspace/secret");
    assert_eq!(fs::read_to_string(&theirs).expect("it is shared").trim_end(), token);

    // By the paths that the files have inside, and by those of the host.
    let paths = [
        "/home/gem/secret",
        "/mnt/user-data/workspace/secret",
        &theirs.to_string_lossy(),
        &root.join("secret").to_string_lossy(),
    ]
    .map(str::to_owned);
    for path in &paths {
        for way in [
            "read",
            "read-through-proc",
            "read-through-descriptors",
            "read-through-dots",
            "read-through-symlink",
            "read-by-handle",
        ] {
            boxes.attack(&format!("{way} {path} {token}"));
        }
    }
    // Nothing above a mounted directory belongs to the sandbox, whether by `..` or by a link that it plants there.
    let planted = boxes.attacker.run(
        "cd /mnt/user-data/workspace && ln -s ../../../../../neighbour/threads/t/user-data/workspace up && \
         cat up/secret ../../../../../secret ../../../../secret 2>/dev/null; ls -d /mnt/user-data/.. ",
    );
    assert_eq!(planted, "/mnt/user-data/..");
    assert!(boxes.attack("remount-writable /mnt/skills/public").contains("EPERM"));
    for words in ["make-device character", "make-device block"] {
        boxes.attack(words);
    }
    check_no_special_files(&mut boxes, &root);

    // Processes and ports of the neighbour.
    let mark = format!("/tmp/mark-{}", boxes.neighbour.container);
    let service =
        format!("cp /bin/sleep {mark} && {mark} 600 & exec python3 -m http.server --bind 127.0.0.1 8099");
    boxes
        .neighbour
        .post("/v1/bash/exec", &json!({"session_id": "service", "command": service, "async_mode": true}));
    e2e::eventually("the marked process runs", || !host::pids_with_command_line(&mark).is_empty());
    e2e::eventually("the service answers", || {
        boxes.neighbour.try_get("/proxy/8099/").is_ok_and(|answer| answer.status == 200)
    });
    boxes.attacker.post("/v1/file/write", &json!({"file": "/home/gem/mark", "content": mark}));
    assert!(boxes.attack("find-process \"$(cat /home/gem/mark)\"").contains("ESRCH"));
    let pid = host::pids_with_command_line(&mark)[0];
    assert!(boxes.attack(&format!("signal {pid}")).contains("ESRCH"));
    assert!(boxes.attack("connect-tcp 8099").contains("ECONNREFUSED"));
}

/// Files with special rights that `gem` makes in a directory of the host have none there.
fn check_no_special_files(boxes: &mut Neighbours, root: &Path) {
    boxes.attacker.run(
        "cd /mnt/user-data/outputs && cp /bin/sh plain && cp /bin/sh owned && \
         chmod 4755 plain 2>/dev/null; chmod 2755 owned 2>/dev/null; mknod device c 1 1 2>/dev/null; true",
    );
    let outputs = root.join("users/attacker/threads/t/user-data/outputs");
    let modes: Vec<u32> = ["plain", "owned"]
        .iter()
        .map(|name| fs::metadata(outputs.join(name)).expect("it is shared").permissions().mode() & 0o6000)
        .collect();
    assert_eq!(modes, [0, 0], "a program with special rights lies on the host");
    assert!(!outputs.join("device").exists(), "a device lies on the host");
}
