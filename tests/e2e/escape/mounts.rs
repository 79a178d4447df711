//! Mounts and namespaces.

use super::{Attack, Outside};

const NO_MOUNTS: &str = "no CAP_SYS_ADMIN, the filter for commands, and Landlock";
const NO_NAMESPACES: &str =
    "no user namespace may be made below the sandbox's own, and the filter for commands";

fn check(words: &[&str], refusals: &[&str], stopped_by: &str) {
    Attack { words, refusals, stopped_by }.check();
}

#[test]
fn nothing_can_be_mounted() {
    check(&["mount-tmpfs"], &["EPERM"], NO_MOUNTS);
}

#[test]
fn a_fresh_proc_cannot_be_mounted() {
    check(&["mount-proc"], &["EPERM"], NO_MOUNTS);
}

#[test]
fn the_newer_mount_calls_are_refused_too() {
    check(&["mount-by-descriptor"], &["EPERM", "ENOSYS"], NO_MOUNTS);
}

#[test]
fn a_read_only_mount_stays_so() {
    let attack =
        Attack { words: &["remount-writable", "/attacks"], refusals: &["EPERM"], stopped_by: NO_MOUNTS };
    Attack { words: &["remount-writable", "/"], ..attack }.check_outside(Outside::Bites);
    attack.check_inside();
}

#[test]
fn masks_cannot_be_removed() {
    let attack = Attack { words: &["uncover", "/proc/sys"], refusals: &["EPERM"], stopped_by: NO_MOUNTS };
    Attack { words: &["uncover", "/sys"], ..attack }.check_outside(Outside::Bites);
    attack.check_inside();
}

#[test]
fn no_release_agent_can_be_named() {
    let attack =
        Attack { words: &["mount-cgroup-release-agent"], refusals: &["EPERM"], stopped_by: NO_MOUNTS };
    // A kernel with cgroup v2 only has no release agent to set.
    if std::fs::read_to_string("/proc/filesystems").is_ok_and(|kinds| kinds.contains("\tcgroup\n")) {
        attack.check_outside(Outside::Bites);
    }
    attack.check_inside();
}

#[test]
fn the_root_cannot_be_changed() {
    check(&["pivot-root"], &["EPERM"], NO_MOUNTS);
}

#[test]
fn namespaces_of_other_processes_cannot_be_entered() {
    let own = std::process::id().to_string();
    let attack = Attack {
        words: &["join-namespaces", "1"],
        refusals: &["EPERM", "EACCES"],
        stopped_by: "the agent being untraceable, no CAP_SYS_ADMIN, and the filter for commands",
    };
    Attack { words: &["join-namespaces", &own], ..attack }.check_outside(Outside::Bites);
    attack.check_inside();
}

#[test]
fn no_namespace_can_be_made() {
    for kind in ["user", "mount", "net", "pid", "cgroup", "all"] {
        check(&["unshare", kind], &["EPERM", "ENOSPC", "EUSERS"], NO_NAMESPACES);
    }
}

#[test]
fn clone3_makes_no_user_namespace() {
    check(&["clone-user-namespace"], &["EPERM", "ENOSPC", "EUSERS", "ENOSYS"], NO_NAMESPACES);
}

#[test]
fn nested_namespaces_do_not_restore_mount_permission() {
    check(&["user-namespace-then-mount"], &["EPERM", "ENOSPC", "EUSERS"], NO_NAMESPACES);
}
