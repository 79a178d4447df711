//! The identity of a state directory: renamed, copied, and beside another at the same path.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use e2e::binary::ProgramCopies;
use e2e::host;
use e2e::run::TestUser;
use e2e::sandbox::RemoteSandbox;
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

/// Copies a state directory as an operator would.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(copied.expect("there is cp").success());
}

fn state_of(server: &TestServer, id: &str) -> String {
    let answer = server.client().get(&format!("/v1/sandboxes/{id}")).expect("the server answers");
    answer.json()["status"]["state"].as_str().unwrap_or_default().to_owned()
}

/// Starts a lasting command and writes a file, both of which can be checked later.
fn mark(sandbox: &mut RemoteSandbox) {
    sandbox.start_background("sleep 4321");
    assert_eq!(sandbox.run("echo kept > /root/mark && sync").code, Some(0));
}

fn check_mark(sandbox: &mut RemoteSandbox) {
    assert_eq!(sandbox.run("cat /root/mark && pgrep -f 'sleep 4321' > /dev/null").stdout, "kept\n");
    assert_eq!(sandbox.run("pgrep -f 'sleep 432[1]' > /dev/null").code, Some(0), "its process lives");
}

#[test]
fn two_servers_at_one_path_do_not_touch_each_other() {
    if !testkit::is_root() {
        return testkit::skip_test("mount namespaces of a server's own are made by root");
    }
    let common = TestUser::Same.make_home();
    let place = common.path().join("state");
    fs::create_dir(&place).expect("our own directory");
    let start = || ServerBuilder::new().with_state_mounted_at(&place);
    let (first, second) = (start(), start());
    let mut killed = first.start();
    let other = second.start();
    let (mut one, mut two) = (killed.create_sandbox(), other.create_sandbox());
    mark(&mut one);
    mark(&mut two);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) {
                let mut sandbox = other.create_sandbox();
                assert_eq!(sandbox.run("echo here").stdout, "here\n");
                let path = format!("/v1/sandboxes/{}", sandbox.id);
                other.client().delete(&path).expect("the server answers");
                rounds += 1;
            }
            rounds
        });
        for _ in 0..3 {
            let mut sandbox = killed.create_sandbox();
            assert_eq!(sandbox.run("echo here").stdout, "here\n");
            killed.kill();
            killed.restart(&start());
        }
        done.store(true, Ordering::Relaxed);
        assert!(load.join().expect("no sandbox of the other was touched") > 0);
    });
    check_mark(&mut RemoteSandbox::existing(killed.client(), &one.id));
    check_mark(&mut two);
    assert!(!killed.log().contains(&two.id) && !other.log().contains(&one.id));
}

#[test]
fn renamed_directory_keeps_its_living_sandboxes() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's sandboxes are the same in this");
    }
    let mut before = TestServer::start();
    let mut sandbox = before.create_sandbox();
    mark(&mut sandbox);
    let agent = host::agent_pid(&sandbox.id).expect("its process runs");
    before.terminate();
    let home = TestUser::Same.make_home();
    fs::rename(before.state_directory(), home.path().join("state")).expect("one filesystem");
    let after = ServerBuilder::new().start_in(home);
    assert_eq!(state_of(&after, &sandbox.id), "Running");
    assert_eq!(host::agent_pid(&sandbox.id), Some(agent));
    let mut sandbox = RemoteSandbox::existing(after.client(), &sandbox.id);
    check_mark(&mut sandbox);
    let mut beside = after.create_sandbox();
    assert_eq!(beside.run("id -u").stdout, "0\n");
    let paused = after.client().post(&format!("/v1/sandboxes/{}/pause", sandbox.id), &json!({}));
    assert_eq!(paused.expect("the server answers").status, 202, "its groups are found");
}

#[test]
fn copied_directory_never_touches_the_sandboxes_of_the_original() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's sandboxes are the same in this");
    }
    let mut original = TestServer::start();
    let mut sandbox = original.create_sandbox();
    mark(&mut sandbox);
    let agent = host::agent_pid(&sandbox.id).expect("its process runs");
    let home = TestUser::Same.make_home();
    copy(&original.state_directory(), &home.path().join("state"));
    let mut beside = ServerBuilder::new().start_in(home);
    assert_eq!(state_of(&beside, &sandbox.id), "Failed", "a copy's sandboxes have stopped");
    assert_eq!(beside.create_sandbox().run("echo new").stdout, "new\n");
    beside.client().delete(&format!("/v1/sandboxes/{}", sandbox.id)).expect("the server answers");
    e2e::eventually("the copy drops the sandbox", || state_of(&beside, &sandbox.id).is_empty());
    assert_eq!(host::agent_pid(&sandbox.id), Some(agent));
    check_mark(&mut sandbox);
    beside.remove_all().expect("its own are removed");
    beside.terminate();
    // Once more, while the server of the original does not run.
    original.terminate();
    let home = TestUser::Same.make_home();
    copy(&original.state_directory(), &home.path().join("state"));
    let alone = ServerBuilder::new().start_in(home);
    assert_eq!(state_of(&alone, &sandbox.id), "Failed");
    alone.remove_all().expect("its own are removed");
    assert_eq!(host::agent_pid(&sandbox.id), Some(agent));
    original.restart(&ServerBuilder::new());
    assert_eq!(state_of(&original, &sandbox.id), "Running");
    check_mark(&mut RemoteSandbox::existing(original.client(), &sandbox.id));
}

#[test]
fn failed_start_leaves_a_copied_directory_as_it_was() {
    if !testkit::is_root() {
        return testkit::skip_test("an ordinary user's directory has one owner");
    }
    let mut original = TestServer::start();
    original.terminate();
    let home = TestUser::Same.make_home();
    let state = home.path().join("state");
    copy(&original.state_directory(), &state);
    let look = || {
        let find = Command::new("find").arg(&state).args(["-printf", "%p %u %g %m %s %T@\n"]).output();
        let mut lines: Vec<String> = String::from_utf8_lossy(&find.expect("there is find").stdout)
            .lines()
            .filter(|line| !line.contains("lock "))
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    };
    let before = look();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let mut failing = ServerBuilder::new().listen(&address).spawn(home.path());
    assert!(!failing.wait().expect("it is our child").success());
    assert_eq!(look(), before);
    let works = ServerBuilder::new().start_in(home);
    assert_eq!(works.create_sandbox().run("echo new").stdout, "new\n");
}

#[test]
fn run_in_a_copied_directory_leaves_the_original_alone() {
    for user in e2e::run::all_users() {
        let home = user.make_home();
        let (first, second) = (home.path().join("a"), home.path().join("b"));
        let run = |state: &Path, script: &str| {
            let mut command = ProgramCopies::shared().command();
            command.args(["run", "--state-dir"]).arg(state).args(["--", "sh", "-c", script]);
            command.env("HOME", home.path()).stdin(Stdio::null());
            user.apply_to(&mut command);
            command
        };
        let mut running = run(&first, "read line; echo $line")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary can be run");
        // Its agent listens, so the sandbox runs and is recorded.
        let agents = first.join("oneshot/run");
        e2e::eventually("its process runs", || {
            let sockets = fs::read_dir(&agents).into_iter().flatten().flatten();
            sockets.into_iter().any(|socket| UnixStream::connect(socket.path()).is_ok())
        });
        copy(&first, &second);
        let beside = run(&second, "echo beside").output().expect("the binary can be run");
        assert_eq!(String::from_utf8_lossy(&beside.stdout), "beside\n", "{beside:?}");
        let mut input = running.stdin.take().expect("a pipe");
        std::io::Write::write_all(&mut input, b"on\n").expect("it still reads");
        drop(input);
        let ended = running.wait_with_output().expect("it is our child");
        assert_eq!((ended.status.success(), ended.stdout.as_slice()), (true, b"on\n".as_slice()));
    }
}
