//! Another user of the host opens nothing in a state directory. To open a file is enough to lock it, and some locks
//! keep servers from starting.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use e2e::run::{TestUser, all_users};
use e2e::server::{ServerBuilder, TestServer};
use serde_json::json;

/// A user who has nothing to do with the server.
const OTHER_USER: TestUser = TestUser::Ordinary(61_235);

/// Opens every path of its input without following links, connects to sockets, and prints those that are not
/// refused by their permissions.
const OPEN_EACH: &str = r#"
import errno, os, socket, stat, sys
for path in sys.stdin.buffer.read().split(b"\0"):
    if not path:
        continue
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            socket.socket(socket.AF_UNIX).connect(path)
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENOENT):
            continue
    print(os.fsdecode(path))
"#;

/// Everything below a directory, and the directory itself.
fn list_all(directory: &Path) -> Vec<PathBuf> {
    let mut found = vec![directory.to_owned()];
    // The server may remove a directory meanwhile.
    let Ok(entries) = fs::read_dir(directory) else { return found };
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(list_all(&entry.path())),
            Ok(_) => found.push(entry.path()),
            Err(_) => {}
        }
    }
    found
}

/// The paths of `directory` that the other user can open.
fn list_open_to_others(directory: &Path) -> Vec<PathBuf> {
    let mut command = Command::new("python3");
    command.args(["-c", OPEN_EACH]).current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
    OTHER_USER.apply_to(&mut command);
    let mut child = command.spawn().expect("there is a Python");
    let mut input = child.stdin.take().expect("it is a pipe");
    for path in list_all(directory) {
        input.write_all(path.as_os_str().as_bytes()).expect("the script reads everything first");
        input.write_all(b"\0").expect("the script reads everything first");
    }
    drop(input);
    let output = child.wait_with_output().expect("it is our child");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect()
}

fn take_snapshot(server: &TestServer, sandbox: &str) {
    let path = format!("/v1/sandboxes/{sandbox}/snapshots");
    let answer = server.client().post(&path, &json!({})).expect("an answer");
    assert_eq!(answer.status, 202, "{}", answer.text());
    let id = answer.json()["id"].as_str().expect("an id is a text").to_owned();
    e2e::eventually("the snapshot is taken", || {
        let answer = server.client().get(&format!("/v1/snapshots/{id}")).expect("an answer");
        answer.json()["status"]["state"] == "Ready"
    });
}

/// The control shows that the other user reaches a file there whose mode lets it.
#[test]
fn other_users_open_nothing_in_a_state_directory() {
    if !testkit::needs_root() {
        return;
    }
    for user in all_users() {
        let server = ServerBuilder::new().as_user(user).env("CORACLE_REQUIRE_LIMITS", "false").start();
        let mut sandbox = server.create_sandbox_with(&json!({"resourceLimits": {}}));
        assert_eq!(sandbox.run("echo runs").stdout, "runs\n");
        if user == TestUser::Same {
            take_snapshot(&server, &sandbox.id);
        }
        let state = server.state_directory();
        assert_eq!(list_open_to_others(&state), Vec::<PathBuf>::new(), "{user:?}");
        let control = state.join("identity");
        fs::set_permissions(&control, fs::Permissions::from_mode(0o644)).expect("our own file");
        assert_eq!(list_open_to_others(&state), [control], "{user:?}");
    }
}
