//! A compromised server may put anything in the directory of its database.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::process::Command;

use rustix::fs::{CWD, FileType, mknodat};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tempfile::TempDir;

use super::*;

fn current_owner() -> DirectoryOwner {
    DirectoryOwner { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() }
}

#[test]
fn only_plain_files_of_the_owner_are_a_database() {
    let server = TempDir::new().unwrap();
    let elsewhere = TempDir::new_in(server.path()).unwrap();
    fs::write(elsewhere.path().join("file"), "x").unwrap();
    fs::write(server.path().join("coracle.db"), "x").unwrap();
    fs::write(server.path().join("coracle.db-wal"), "x").unwrap();
    check_files(server.path(), current_owner()).unwrap();
    let other = DirectoryOwner { uid: current_owner().uid + 1, ..current_owner() };
    assert!(matches!(check_files(server.path(), other), Err(BackupError::ForeignDatabase(_))));
    for ending in ["", "-wal", "-shm", "-journal"] {
        let path = server.path().join(format!("coracle.db{ending}"));
        let file = elsewhere.path().join("file");
        let ways: [(&str, &dyn Fn()); 4] = [
            ("a pipe", &|| mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap()),
            ("a link", &|| std::os::unix::fs::symlink(&file, &path).unwrap()),
            ("another name of a file", &|| fs::hard_link(&file, &path).unwrap()),
            ("a directory", &|| fs::create_dir(&path).unwrap()),
        ];
        for (what, put) in ways {
            fs::remove_file(&path).ok();
            put();
            let refused = check_files(server.path(), current_owner());
            assert!(matches!(refused, Err(BackupError::ForeignDatabase(_))), "{what} as coracle.db{ending}");
            fs::remove_file(&path).or_else(|_| fs::remove_dir(&path)).unwrap();
        }
        if ending.is_empty() {
            fs::write(&path, "x").unwrap();
        }
    }
    check_files(server.path(), current_owner()).unwrap();
}

#[test]
#[expect(clippy::zombie_processes, reason = "what is tested waits for them")]
fn a_copy_that_takes_too_long_is_killed() {
    let sleeping = Command::new("sleep").arg("600").spawn().unwrap();
    let pidfd = pidfd_open(Pid::from_child(&sleeping), PidfdFlags::empty()).unwrap();
    assert_eq!(wait_or_kill(&pidfd, Duration::from_millis(50)).unwrap(), None);
    let ending = Command::new("true").spawn().unwrap();
    let pidfd = pidfd_open(Pid::from_child(&ending), PidfdFlags::empty()).unwrap();
    assert_eq!(wait_or_kill(&pidfd, Duration::from_secs(60)).unwrap(), Some(ProcessExit::Code(0)));
}

#[test]
fn copy_that_is_not_a_plain_file_is_refused() {
    let place = TempDir::new().unwrap();
    let (copied, target) = (place.path().join("copied"), place.path().join("target"));
    fs::write(place.path().join("other"), "x").unwrap();
    std::os::unix::fs::symlink(place.path().join("other"), &copied).unwrap();
    assert!(take_copy(&copied, &target, current_owner()).is_err() && !target.exists());
    fs::remove_file(&copied).unwrap();
    mknodat(CWD, &copied, FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(take_copy(&copied, &target, current_owner()).is_err() && !target.exists());
    fs::remove_file(&copied).unwrap();
    take_copy(&copied, &target, current_owner()).unwrap();
    fs::File::create(&copied).unwrap().set_len(MAX_DATABASE_SIZE + 1).unwrap();
    let refused = take_copy(&copied, &target, current_owner());
    assert!(matches!(refused, Err(BackupError::LargeDatabase { .. })) && !target.exists(), "{refused:?}");
    fs::write(&copied, "rows").unwrap();
    take_copy(&copied, &target, current_owner()).unwrap();
    assert_eq!(fs::read(&target).unwrap(), b"rows");
}
