//! `--mount`: host directories inside, as root and as user 1000, on both sides.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use e2e::run::{CommandOutput, ORDINARY_USER, RunCommand, TestUser};
use tempfile::TempDir;

/// A directory of the host that belongs to `uid`, with files that only their owners may read.
fn shared_by(uid: u32, mode: u32, files: &[(&str, u32)]) -> TempDir {
    let directory = TestUser::Same.make_home();
    for (name, owner) in files {
        let file = directory.path().join(name);
        fs::write(&file, format!("{name} from outside\n")).expect("our own directory");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("our own file");
        chown(&file, Some(*owner), Some(*owner)).expect("root has the permission");
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).expect("our own directory");
    chown(directory.path(), Some(uid), Some(uid)).expect("root has the permission");
    directory
}

/// A `run` with the directory at `/shared`, as root or as another user inside.
fn run_as(inside: u32, shared: &Path) -> RunCommand {
    let run = RunCommand::new(TestUser::Same).mount(shared, "/shared", "rw");
    if inside == 0 { run } else { run.flag("--user", &inside.to_string()) }
}

fn owner(path: &Path) -> u32 {
    fs::metadata(path).expect("it was written").uid()
}

/// Runs shell text in the directory on the host, as one of its users.
fn outside(uid: u32, directory: &Path, text: &str) -> CommandOutput {
    let mut command = Command::new("sh");
    command.args(["-c", text]).current_dir(directory);
    TestUser::Ordinary(uid).apply_to(&mut command);
    command.output().expect("there is a shell").into()
}

#[test]
fn a_directory_of_user_1000_is_its_own_inside_and_outside() {
    if !testkit::needs_root() {
        return;
    }
    for inside in [0, 1000] {
        let shared = shared_by(1000, 0o700, &[("theirs", 1000)]);
        let text = "cat /shared/theirs && echo more >> /shared/theirs && rm /shared/theirs && \
                    echo from inside > /shared/ours && chmod 600 /shared/ours";
        let ended = run_as(inside, shared.path()).run_shell(text);
        assert_eq!(ended.code, Some(0), "as {inside} inside: {ended:?}");
        assert_eq!(ended.stdout, "theirs from outside\n", "as {inside} inside");
        assert_eq!(owner(&shared.path().join("ours")), 1000, "as {inside} inside: another owner outside");
        let ended = outside(1000, shared.path(), "cat ours && echo more >> ours && rm ours");
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "from inside\n"), "{ended:?}");
    }
}

#[test]
fn root_and_user_1000_keep_their_identities_in_a_root_directory() {
    if !testkit::needs_root() {
        return;
    }
    // As in /tmp: every user may write, and delete their own files.
    let shared = shared_by(0, 0o1777, &[("roots", 0), ("users", 1000)]);
    let ended = run_as(1000, shared.path()).run_shell(
        "cat /shared/users && echo more >> /shared/users && rm /shared/users && \
         ! cat /shared/roots && ! rm -f /shared/roots && echo by the user > /shared/by-user",
    );
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "users from outside\n"), "{ended:?}");
    assert_eq!(owner(&shared.path().join("by-user")), 1000);
    let ended = run_as(0, shared.path())
        .run_shell("cat /shared/roots /shared/by-user && rm /shared/roots && echo by root > /shared/by-root");
    assert_eq!(ended.stdout, "roots from outside\nby the user\n", "{ended:?}");
    assert_eq!((ended.code, owner(&shared.path().join("by-root"))), (Some(0), 0), "{ended:?}");
    // The same outside: the user cannot touch root's files, and deletes its own.
    let ended = outside(1000, shared.path(), "! rm -f by-root && rm by-user");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    fs::remove_file(shared.path().join("by-root")).expect("root deletes its own");
}

#[test]
fn an_ordinary_users_mount_works_the_same() {
    if !testkit::needs_root() {
        return;
    }
    let TestUser::Ordinary(uid) = ORDINARY_USER else { panic!("it is one") };
    let shared = shared_by(uid, 0o755, &[("theirs", uid)]);
    let ended = RunCommand::new(ORDINARY_USER)
        .mount(shared.path(), "/shared", "rw")
        .run_shell("cat /shared/theirs && rm /shared/theirs && echo from inside > /shared/ours");
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "theirs from outside\n"), "{ended:?}");
    assert_eq!(owner(&shared.path().join("ours")), uid);
}
