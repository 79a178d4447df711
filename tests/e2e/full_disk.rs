//! A full state disk: creates fail cleanly, running sandboxes continue, and creates succeed again once
//! there is space.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use e2e::http::HttpResponse;
use e2e::run::TestUser;
use e2e::server::{ServerBuilder, TestServer};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;
use serde_json::json;

/// Small enough to fill quickly, large enough for a pool of disks.
const DISK: &str = "size=768m,mode=755";

/// Runs `test` in its own mount namespace, in which a small filesystem is the state directory below `home`.
/// Everything that the test starts is in that namespace too.
fn with_a_small_disk(home: &Path, test: impl FnOnce() + Send) {
    let state = home.join("state");
    fs::create_dir(&state).expect("our own directory");
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            #[expect(deprecated, reason = "a mount namespace of its own leaves descriptors alone")]
            rustix::thread::unshare(UnshareFlags::NEWNS).expect("root has the permission");
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).expect("root has the permission");
            let options = std::ffi::CString::new(DISK).expect("it has no zero byte");
            rustix::mount::mount("tmpfs", &state, "tmpfs", MountFlags::empty(), Some(options.as_c_str()))
                .expect("root has the permission");
            test();
        });
        let ended = inside.join();
        // Inside its namespace, the test could not remove the directory that something was mounted on.
        fs::remove_dir_all(home).ok();
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Writes until not even a byte fits.
fn fill(filler: &Path) {
    let mut file = File::create(filler).expect("there is room for a name");
    for size in [1 << 20, 4096, 1] {
        while file.write_all(&vec![0x5a; size]).is_ok() {}
    }
}

fn create(server: &TestServer) -> HttpResponse {
    let request = json!({
        "image": {"uri": "host"},
        "timeout": 600,
        "resourceLimits": {"cpu": "1", "memory": "128Mi"},
        "extensions": {"coracle.disk": "64Mi"},
        "entrypoint": ["tail", "-f", "/dev/null"],
    });
    server.client().post("/v1/sandboxes", &request).expect("the server answers")
}

/// Enough space for running sandboxes, and below the minimum for creating one.
const SPACE_LEFT: u64 = 8 << 20;
const MIN_FREE_SPACE: &str = "16Mi";

/// Checks that the create was refused for lack of disk space, with the message of the protocol.
fn check_full(answer: &HttpResponse) {
    assert_eq!(answer.status, 429, "a create on a full disk: {}", answer.text());
    assert!(answer.header("retry-after").is_some(), "{:?}", answer.headers);
    let problem = answer.json();
    assert!(problem["code"].as_str().is_some_and(|code| code.ends_with("EXHAUSTED")), "{problem}");
    assert!(problem["message"].as_str().is_some_and(|words| words.contains("disk")), "{problem}");
}

#[test]
fn a_full_state_disk_fails_creates_and_nothing_else() {
    if !testkit::needs_root() {
        return;
    }
    let home = TestUser::Same.make_home();
    let path = home.path().to_owned();
    with_a_small_disk(&path, move || {
        let server = ServerBuilder::new().env("CORACLE_FREE_SPACE_FLOOR", MIN_FREE_SPACE).start_in(home);
        let mut sandbox = server.create_sandbox_with(&json!({"extensions": {"coracle.disk": "64Mi"}}));
        assert_eq!(sandbox.run("echo before > /root/file; sync").code, Some(0));
        let kept = sandbox.start_background("while sleep 0.05; do echo tick; done");
        let filler = server.state_directory().join("filler");
        fill(&filler);

        // First no space at all is left, and then less than a sandbox needs.
        check_full(&create(&server));
        let filled = fs::metadata(&filler).expect("it is ours").len();
        File::options()
            .write(true)
            .open(&filler)
            .and_then(|file| file.set_len(filled - SPACE_LEFT))
            .expect("it is ours");
        check_full(&create(&server));

        // The running sandbox continues: its commands, its output, its files.
        for round in 0..5 {
            let ran = sandbox.run("cat /root/file; echo more");
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "before\nmore\n"), "{round}: {ran:?}");
        }
        assert_eq!(sandbox.state().as_deref(), Some("Running"));
        let ticks = sandbox.logs(&kept).matches("tick").count();
        e2e::eventually("a running command continues", || {
            sandbox.logs(&kept).matches("tick").count() > ticks
        });
        let page = server.client().get("/v1/sandboxes").expect("the server answers").json();
        assert_eq!(
            page["items"].as_array().map(Vec::len),
            Some(1),
            "a failed sandbox is still listed: {page}"
        );

        fs::remove_file(&filler).expect("it is ours");
        e2e::eventually("creates succeed again", || create(&server).status == 202);
        let ran = sandbox.run("echo after >> /root/file && sync && cat /root/file");
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "before\nafter\n"), "{ran:?}");
        sandbox.delete();
        drop(server);
    });
}
