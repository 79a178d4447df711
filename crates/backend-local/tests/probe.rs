//! The probe on this host, as root and as an ordinary user.
//!
//! It forks, so it has a main function of its own instead of the test harness with its threads.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use backend_local::probe::{Report, Status, probe};
use backend_local::range::DEFAULT_BASE;
use domain::Bytes;
use linux::namespaces::{
    Extent, Fork, Namespaces, Setgroups, become_ids, exit_now, fork_into, reap, unshare, write_maps,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tempfile::TempDir;

fn main() {
    if !testkit::is_root() {
        testkit::skip("the probe looks at this host as root and as somebody else");
        return;
    }
    as_root_everything_holds_and_nothing_stays();
    too_little_space_is_told();
    an_ordinary_user_is_told_what_is_weaker();
    without_user_namespaces_the_way_to_get_them_is_told();
}

fn as_root_everything_holds_and_nothing_stays() {
    let state = TempDir::new().unwrap();
    let before = groups();
    let report = probe(state.path(), Bytes::mib(1), DEFAULT_BASE);
    let missing: Vec<_> = report.checks.iter().filter(|check| check.status == Status::Missing).collect();
    assert!(report.sandboxes_can_run, "{missing:?}");
    assert!(!report.rootless);
    for (what, by) in [("disk", "btrfs quota"), ("kill", "cgroup.kill"), ("pause", "cgroup.freeze")] {
        assert_eq!(held_by(&report, what).as_deref(), Some(by));
    }
    assert!(held_by(&report, "memory").unwrap().starts_with("cgroup v"));
    assert_eq!(fs::read_dir(state.path()).unwrap().count(), 0, "the state directory is left as it was");
    assert_eq!(groups(), before, "no group stays");
}

fn too_little_space_is_told() {
    let state = TempDir::new().unwrap();
    let report = probe(&state.path().join("not/made/yet"), Bytes(u64::MAX), DEFAULT_BASE);
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "free space").unwrap();
    assert!(check.status == Status::Missing && check.fix.is_some());
    assert!(!state.path().join("not").exists());
}

fn an_ordinary_user_is_told_what_is_weaker() {
    let report = as_user(1000, || probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE));
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

/// A user namespace in which no more may be made stands for a host that forbids them.
fn without_user_namespaces_the_way_to_get_them_is_told() {
    let report = as_user(1000, || {
        unshare(Namespaces::USER).unwrap();
        let own = [Extent { inside: 0, outside: 1000, count: 1 }];
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        write_maps(pid, &own, &own, Setgroups::Deny).unwrap();
        fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
        probe(Path::new("/tmp"), Bytes::mib(1), DEFAULT_BASE)
    });
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "user namespaces").unwrap();
    assert_eq!(check.status, Status::Missing);
    assert!(check.fix.as_ref().unwrap().contains("user.max_user_namespaces"), "{check:?}");
}

fn held_by(report: &Report, what: &str) -> Option<String> {
    report.enforced.iter().find(|measure| measure.what == what).unwrap().by.clone()
}

/// The names of our own groups, wherever they are.
fn groups() -> BTreeSet<String> {
    let roots = ["unified", "memory", "cpu", "pids", "."].map(|name| Path::new("/sys/fs/cgroup").join(name));
    let ours = roots.iter().flat_map(|root| fs::read_dir(root.join("coracle")).into_iter().flatten());
    let names = ours.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with("doctor")).collect()
}

/// Runs `work` as another user in a child and brings its report back.
fn as_user(id: u32, work: impl FnOnce() -> Report) -> Report {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    match fork_into(Namespaces::NONE, None).unwrap() {
        Fork::Child => {
            drop(ours);
            become_ids(id, id, Setgroups::Allow).unwrap();
            // Changing ids hides our own /proc files from us; a program that was started as this
            // user would see them.
            set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
            theirs.write_all(&serde_json::to_vec(&work()).unwrap()).unwrap();
            exit_now(0)
        }
        Fork::Parent { pidfd, .. } => {
            drop(theirs);
            let mut text = Vec::new();
            ours.read_to_end(&mut text).unwrap();
            assert!(reap(pidfd.as_fd()).unwrap());
            serde_json::from_slice(&text).unwrap()
        }
    }
}
