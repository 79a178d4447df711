//! The probe on this host, as root and as an ordinary user.
//!
//! The test forks, so it has its own main function instead of the test harness with its threads.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use backend_local::network::NetworkSettings;
use backend_local::probe::{Report, Status, probe};
use backend_local::range::DEFAULT_BASE;
use domain::Bytes;
use linux::namespaces::{Extent, Namespaces, Setgroups, become_ids, unshare, write_maps};
use linux::spawn::{End, Forked, SingleThread, exit_now, wait};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tempfile::TempDir;

fn main() {
    if !testkit::is_root() {
        testkit::skip("the probe test runs as root and as an ordinary user");
        return;
    }
    root_has_all_measures_and_nothing_is_left();
    too_little_free_space_is_reported();
    weaker_measures_of_an_ordinary_user_are_reported();
    delegated_group_is_used_and_restored();
    missing_user_namespaces_are_reported_with_a_fix();
    container_that_hides_parts_of_proc_is_reported();
    few_open_files_and_a_bad_uid_base_are_reported();
}

fn root_has_all_measures_and_nothing_is_left() {
    let state = TempDir::new().unwrap();
    let before = groups();
    let report = probe(state.path(), Bytes::mib(1), DEFAULT_BASE, &NetworkSettings::default());
    let missing: Vec<_> = report.checks.iter().filter(|check| check.status == Status::Missing).collect();
    assert!(report.sandboxes_can_run, "{missing:?}");
    assert!(!report.rootless);
    for (what, by) in [("disk", "btrfs quota"), ("kill", "cgroup.kill"), ("pause", "cgroup.freeze")] {
        assert_eq!(held_by(&report, what).as_deref(), Some(by));
    }
    assert!(held_by(&report, "memory").unwrap().starts_with("cgroup v"));
    assert_eq!(fs::read_dir(state.path()).unwrap().count(), 0, "the state directory is left as it was");
    assert_eq!(groups(), before, "no group is left");
}

fn too_little_free_space_is_reported() {
    let state = TempDir::new().unwrap();
    let report =
        probe(&state.path().join("not/made/yet"), Bytes(u64::MAX), DEFAULT_BASE, &NetworkSettings::default());
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "free space").unwrap();
    assert!(check.status == Status::Missing && check.fix.is_some());
    assert!(!state.path().join("not").exists());
}

fn weaker_measures_of_an_ordinary_user_are_reported() {
    let report =
        as_user(1000, || probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE, &NetworkSettings::default()));
    assert!(report.rootless);
    let weaker = |name: &str| {
        let check = report.checks.iter().find(|check| check.name == name).unwrap();
        check.status == Status::Weaker && !check.consequence.is_empty() && check.fix.is_some()
    };
    assert!(weaker("control groups") && weaker("disk") && weaker("users inside"));
    assert_eq!(held_by(&report, "memory"), None);
    assert_eq!(held_by(&report, "disk").as_deref(), Some("tmpfs"));
    if !report.sandboxes_can_run {
        testkit::skip("an ordinary user cannot make sandboxes on this host");
    }
    for check in report.checks.iter().filter(|check| check.status == Status::Missing) {
        assert!(check.fix.is_some(), "{check:?}");
    }
}

/// Delegates a new group in the v2 hierarchy of this host to a user.
fn delegated_group_is_used_and_restored() {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = table.lines().find(|line| line.contains(" - cgroup2 ")).unwrap();
    let root = Path::new(line.split(' ').nth(4).unwrap());
    let group = root.join(format!("coracle-probe-{}", std::process::id()));
    fs::create_dir(&group).unwrap();
    for name in ["", "cgroup.procs", "cgroup.subtree_control"] {
        std::os::unix::fs::chown(group.join(name), Some(1000), Some(1000)).unwrap();
    }
    let procs = group.join("cgroup.procs");
    let report = as_user_after(
        1000,
        || fs::write(procs, "0").unwrap(),
        || probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE, &NetworkSettings::default()),
    );
    // This fails if anything was left in the group.
    fs::remove_dir(&group).unwrap();
    assert!(report.rootless);
    assert_eq!(held_by(&report, "kill").as_deref(), Some("cgroup.kill"));
    assert_eq!(held_by(&report, "pause").as_deref(), Some("cgroup.freeze"));
    let offered = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
    for name in ["memory", "cpu", "pids"] {
        let check = report.checks.iter().find(|check| check.name == format!("{name} controller")).unwrap();
        let given = offered.split_whitespace().any(|word| word == name);
        assert_eq!(check.status == Status::Ok, given, "{check:?}");
        assert_eq!(check.fix.is_some(), !given, "{check:?}");
    }
}

/// A user namespace that allows no further user namespaces represents a host that forbids them.
fn missing_user_namespaces_are_reported_with_a_fix() {
    let report = as_user(1000, || {
        unshare(Namespaces::USER).unwrap();
        let own = [Extent { inside: 0, outside: 1000, count: 1 }];
        write_maps(rustix::process::getpid(), &own, &own, Setgroups::Deny).unwrap();
        fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
        probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE, &NetworkSettings::default())
    });
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "user namespaces").unwrap();
    assert_eq!(check.status, Status::Missing);
    assert!(check.fix.as_ref().unwrap().contains("user.max_user_namespaces"), "{check:?}");
}

/// A container covers parts of /proc, and the kernel then does not allow a new mount of /proc in it.
fn container_that_hides_parts_of_proc_is_reported() {
    let report = as_user(1000, || {
        unshare(Namespaces::USER.and(Namespaces::MOUNT)).unwrap();
        let same = [Extent { inside: 1000, outside: 1000, count: 1 }];
        write_maps(rustix::process::getpid(), &same, &same, Setgroups::Deny).unwrap();
        linux::mounts::make_private().unwrap();
        linux::mounts::mount("tmpfs", Path::new("/proc/irq"), Default::default(), "").unwrap();
        probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE, &NetworkSettings::default())
    });
    assert!(report.rootless && !report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "fresh /proc").unwrap();
    assert_eq!(check.status, Status::Missing);
    assert!(check.fix.as_ref().unwrap().contains("systempaths=unconfined"), "{check:?}");
}

fn few_open_files_and_a_bad_uid_base_are_reported() {
    let report = as_user(0, || {
        let few = rustix::process::Rlimit { current: Some(256), maximum: Some(256) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        probe(Path::new("/tmp"), Bytes::mib(1), u32::MAX, &NetworkSettings::default())
    });
    let status = |name: &str| {
        let check = report.checks.iter().find(|check| check.name == name).unwrap();
        assert!(check.fix.is_some() && !check.consequence.is_empty(), "{check:?}");
        check.status
    };
    assert_eq!(status("open files"), Status::Weaker);
    assert_eq!(status("uid ranges"), Status::Missing);
    assert!(!report.sandboxes_can_run);
}

fn held_by(report: &Report, what: &str) -> Option<String> {
    report.enforced.iter().find(|measure| measure.what == what).unwrap().by.clone()
}

/// Returns the names of our own groups in all hierarchies.
fn groups() -> BTreeSet<String> {
    let roots = ["unified", "memory", "cpu", "pids", "."].map(|name| Path::new("/sys/fs/cgroup").join(name));
    let ours = roots.iter().flat_map(|root| fs::read_dir(root.join("coracle")).into_iter().flatten());
    let names = ours.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("doctor")).collect()
}

/// Runs `work` as another user in a child and returns its report.
fn as_user(id: u32, work: impl FnOnce() -> Report) -> Report {
    as_user_after(id, || (), work)
}

/// Like [`as_user`], but runs `before` first as the current user.
fn as_user_after(id: u32, before: impl FnOnce(), work: impl FnOnce() -> Report) -> Report {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    match SingleThread::prove().unwrap().fork(Namespaces::NONE, None).unwrap() {
        Forked::Child => {
            drop(ours);
            before();
            become_ids(id, id, Setgroups::Allow).unwrap();
            // After a change of ids a process cannot see its own /proc files; a program that was
            // started as this user can.
            set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
            theirs.write_all(&serde_json::to_vec(&work()).unwrap()).unwrap();
            exit_now(0)
        }
        Forked::Parent { pidfd, .. } => {
            drop(theirs);
            let mut text = Vec::new();
            ours.read_to_end(&mut text).unwrap();
            assert_eq!(wait(pidfd.as_fd()).unwrap(), End::Code(0));
            serde_json::from_slice(&text).unwrap()
        }
    }
}
