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

use domain::Bytes;
use launcher::DEFAULT_UID_BASE;
use launcher::network::NetworkSettings;
use launcher::probe::{CheckStatus, ProbeReport, probe_host};
use linux::namespaces::{
    IdMapExtent, NamespaceSet, SetgroupsPolicy, switch_ids, unshare_namespaces, write_id_maps,
};
use linux::seccomp::SeccompProgram;
use linux::spawn::{ForkResult, ProcessExit, SingleThread, exit_now, wait_for_child};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tempfile::TempDir;

fn main() {
    if !testkit::is_root() {
        testkit::skip_test("the probe test runs as root and as an ordinary user");
        return;
    }
    root_has_all_measures_and_nothing_is_left();
    too_little_free_space_is_reported();
    weaker_measures_of_an_ordinary_user_are_reported();
    delegated_group_is_used_and_restored();
    missing_user_namespaces_are_reported_with_a_fix();
    container_that_hides_parts_of_proc_is_reported();
    filter_of_a_container_is_reported_as_one_cause();
    few_open_files_and_a_bad_uid_base_are_reported();
}

fn root_has_all_measures_and_nothing_is_left() {
    let state = TempDir::new().unwrap();
    let before = groups();
    let report = probe_host(state.path(), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default());
    let missing: Vec<_> = report.checks.iter().filter(|check| check.status == CheckStatus::Missing).collect();
    assert!(report.sandboxes_can_run, "{missing:?}");
    assert!(!report.rootless);
    for (what, by) in [("disk", "btrfs quota"), ("kill", "cgroup.kill"), ("pause", "cgroup.freeze")] {
        assert_eq!(enforced_by(&report, what).as_deref(), Some(by));
    }
    assert!(enforced_by(&report, "memory").unwrap().starts_with("cgroup v"));
    assert_eq!(fs::read_dir(state.path()).unwrap().count(), 0, "the state directory is left as it was");
    assert_eq!(groups(), before, "no group is left");
}

fn too_little_free_space_is_reported() {
    let state = TempDir::new().unwrap();
    let report = probe_host(
        &state.path().join("not/made/yet"),
        Bytes(u64::MAX),
        DEFAULT_UID_BASE,
        &NetworkSettings::default(),
    );
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "free space").unwrap();
    assert!(check.status == CheckStatus::Missing && check.fix.is_some());
    assert!(!state.path().join("not").exists());
}

fn weaker_measures_of_an_ordinary_user_are_reported() {
    let report = as_user(1000, || {
        probe_host(Path::new("/tmp"), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default())
    });
    assert!(report.rootless);
    let weaker = |name: &str| {
        let check = report.checks.iter().find(|check| check.name == name).unwrap();
        check.status == CheckStatus::Weaker && !check.consequence.is_empty() && check.fix.is_some()
    };
    assert!(weaker("control groups") && weaker("disk") && weaker("users inside"));
    assert_eq!(enforced_by(&report, "memory"), None);
    assert_eq!(enforced_by(&report, "disk").as_deref(), Some("tmpfs"));
    if !report.sandboxes_can_run {
        testkit::skip_test("an ordinary user cannot make sandboxes on this host");
    }
    for check in report.checks.iter().filter(|check| check.status == CheckStatus::Missing) {
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
        || probe_host(Path::new("/tmp"), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default()),
    );
    // This fails if anything was left in the group.
    fs::remove_dir(&group).unwrap();
    assert!(report.rootless);
    assert_eq!(enforced_by(&report, "kill").as_deref(), Some("cgroup.kill"));
    assert_eq!(enforced_by(&report, "pause").as_deref(), Some("cgroup.freeze"));
    let offered = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
    for name in ["memory", "cpu", "pids"] {
        let check = report.checks.iter().find(|check| check.name == format!("{name} controller")).unwrap();
        let given = offered.split_whitespace().any(|word| word == name);
        assert_eq!(check.status == CheckStatus::Ok, given, "{check:?}");
        assert_eq!(check.fix.is_some(), !given, "{check:?}");
    }
}

/// A user namespace that allows no further user namespaces represents a host that forbids them.
fn missing_user_namespaces_are_reported_with_a_fix() {
    let report = as_user(1000, || {
        unshare_namespaces(NamespaceSet::USER).unwrap();
        let own = [IdMapExtent { inside: 0, outside: 1000, count: 1 }];
        write_id_maps(rustix::process::getpid(), &own, &own, SetgroupsPolicy::Deny).unwrap();
        fs::write("/proc/sys/user/max_user_namespaces", "0").unwrap();
        probe_host(Path::new("/tmp"), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default())
    });
    assert!(!report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "user namespaces").unwrap();
    assert_eq!(check.status, CheckStatus::Missing);
    assert!(check.fix.as_ref().unwrap().contains("user.max_user_namespaces"), "{check:?}");
}

/// A container covers parts of /proc, and the kernel then does not allow a new mount of /proc in it.
fn container_that_hides_parts_of_proc_is_reported() {
    let report = as_user(1000, || {
        unshare_namespaces(NamespaceSet::USER.and(NamespaceSet::MOUNT)).unwrap();
        let same = [IdMapExtent { inside: 1000, outside: 1000, count: 1 }];
        write_id_maps(rustix::process::getpid(), &same, &same, SetgroupsPolicy::Deny).unwrap();
        linux::mounts::make_private().unwrap();
        linux::mounts::mount_filesystem("tmpfs", Path::new("/proc/irq"), Default::default(), "").unwrap();
        probe_host(Path::new("/tmp"), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default())
    });
    assert!(report.rootless && !report.sandboxes_can_run);
    let check = report.checks.iter().find(|check| check.name == "fresh /proc").unwrap();
    assert_eq!(check.status, CheckStatus::Missing);
    assert!(check.fix.as_ref().unwrap().contains("systempaths=unconfined"), "{check:?}");
}

/// Engines load a filter that answers clone3 with ENOSYS, so that programs fall back to clone.
fn filter_of_a_container_is_reported_as_one_cause() {
    // Load the number of the call; if it is 435, clone3, return ENOSYS; otherwise allow it.
    const FILTER: [u64; 4] =
        [0x20, 0x15 | 1 << 24 | 435 << 32, 0x06 | (0x0005_0000 | 38) << 32, 0x06 | 0x7fff_0000 << 32];
    let report = as_user(1000, || {
        linux::set_no_new_privs().unwrap();
        SeccompProgram::from_words(&FILTER).install().unwrap();
        probe_host(Path::new("/tmp"), Bytes::from_mib(1), DEFAULT_UID_BASE, &NetworkSettings::default())
    });
    assert!(!report.sandboxes_can_run);
    let missing: Vec<_> = report.checks.iter().filter(|check| check.status == CheckStatus::Missing).collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert_eq!(missing[0].detail, "a seccomp filter answers clone3 with ENOSYS");
    assert!(missing[0].fix.as_ref().unwrap().contains("seccomp=unconfined"), "{missing:?}");
}

fn few_open_files_and_a_bad_uid_base_are_reported() {
    let report = as_user(0, || {
        let few = rustix::process::Rlimit { current: Some(256), maximum: Some(256) };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
        probe_host(Path::new("/tmp"), Bytes::from_mib(1), u32::MAX, &NetworkSettings::default())
    });
    let status = |name: &str| {
        let check = report.checks.iter().find(|check| check.name == name).unwrap();
        assert!(check.fix.is_some() && !check.consequence.is_empty(), "{check:?}");
        check.status
    };
    assert_eq!(status("open files"), CheckStatus::Weaker);
    assert_eq!(status("uid ranges"), CheckStatus::Missing);
    assert!(!report.sandboxes_can_run);
}

fn enforced_by(report: &ProbeReport, what: &str) -> Option<String> {
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
fn as_user(id: u32, work: impl FnOnce() -> ProbeReport) -> ProbeReport {
    as_user_after(id, || (), work)
}

/// Like [`as_user`], but runs `before` first as the current user.
fn as_user_after(id: u32, before: impl FnOnce(), work: impl FnOnce() -> ProbeReport) -> ProbeReport {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    match SingleThread::prove().unwrap().fork(NamespaceSet::NONE, None).unwrap() {
        ForkResult::Child => {
            drop(ours);
            before();
            switch_ids(id, id, SetgroupsPolicy::Allow).unwrap();
            // After a change of ids a process cannot see its own /proc files; a program that was
            // started as this user can.
            set_dumpable_behavior(DumpableBehavior::Dumpable).unwrap();
            theirs.write_all(&serde_json::to_vec(&work()).unwrap()).unwrap();
            exit_now(0)
        }
        ForkResult::Parent { pidfd, .. } => {
            drop(theirs);
            let mut text = Vec::new();
            ours.read_to_end(&mut text).unwrap();
            assert_eq!(wait_for_child(pidfd.as_fd()).unwrap(), ProcessExit::Code(0));
            serde_json::from_slice(&text).unwrap()
        }
    }
}
