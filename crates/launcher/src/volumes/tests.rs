//! Volumes on the real kernel: they need root, loop devices and a mount namespace per test.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test stops at the first surprise")]

mod named;
mod oneshot;
mod snapshots;

use std::fs::File;
use std::io::Write;

use linux::loopdev::LoopDevice;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use tempfile::TempDir;

use super::*;
use crate::ids::test_id;

const TEST_LIMIT: Bytes = Bytes::from_mib(32);

/// Runs `test` in a thread with a private mount namespace, as in the launcher.
fn in_launcher<T: Send>(test: impl FnOnce() -> T + Send) -> Option<T> {
    if !testkit::needs_root() {
        return None;
    }
    std::thread::scope(|scope| {
        let launcher = scope.spawn(|| {
            #[expect(deprecated, reason = "a mount namespace of its own leaves descriptors alone")]
            rustix::thread::unshare(UnshareFlags::NEWNS).unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            test()
        });
        Some(launcher.join().unwrap())
    })
}

fn settings(kind: VolumeKind) -> VolumeStoreSettings {
    let floor = Bytes::from_mib(1);
    VolumeStoreSettings {
        kind: Some(kind),
        pool: Some(Bytes::from_mib(1024)),
        floor,
        ..VolumeStoreSettings::default()
    }
}

fn for_both(test: impl Fn(&Path, &mut VolumeStore) + Sync) {
    for kind in [VolumeKind::Btrfs, VolumeKind::Ext4] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let mut volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            test(dir.path(), &mut volumes);
            close(dir.path(), volumes);
        });
    }
}

/// Unmounts everything, so that the temporary directory can be removed.
fn close(dir: &Path, volumes: VolumeStore) {
    drop(volumes);
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
    let ours = mounts.lines().rev().filter_map(|line| line.split(' ').nth(1));
    for target in ours.filter(|target| Path::new(target).starts_with(dir)) {
        rustix::mount::unmount(target, UnmountFlags::DETACH).unwrap();
    }
}

fn assigned(volumes: &mut VolumeStore, id: &str) -> SandboxVolume {
    let prepared = volumes.prepare(TEST_LIMIT).unwrap();
    volumes.assign(prepared, &test_id(id), TEST_LIMIT).unwrap()
}

/// Writes until the disk is full and returns the number of bytes written.
fn fill(path: &Path) -> u64 {
    let mut file = File::create(path).unwrap();
    let chunk = vec![7; 1 << 20];
    let mut written = 0;
    loop {
        match file.write_all(&chunk).and_then(|()| file.sync_data()) {
            Ok(()) => written += chunk.len() as u64,
            Err(error) => {
                assert_full(&error);
                return written;
            }
        }
        assert!(written <= TEST_LIMIT.0, "the limit is not enforced");
    }
}

fn assert_full(error: &io::Error) {
    let full = [io::ErrorKind::QuotaExceeded, io::ErrorKind::StorageFull];
    assert!(full.contains(&error.kind()), "{error}");
}

#[test]
fn volume_has_its_directories_and_belongs_to_root() {
    for_both(|_, volumes| {
        let volume = assigned(volumes, "a");
        assert_eq!(volume, volumes.sandbox_volume(&test_id("a")).unwrap());
        for tree in ["root", "usr"] {
            let (upper, work) = volume.tree_directories(tree);
            for directory in [upper, work] {
                let status = rustix::fs::stat(&directory).unwrap();
                assert_eq!((status.st_uid, status.st_mode & 0o7777), (0, 0o755), "{directory:?}");
            }
        }
        assert!(volume.journal.as_ref().unwrap().is_dir());
    });
}

#[test]
fn volumes_are_listed_until_they_are_removed() {
    for_both(|_, volumes| {
        assigned(volumes, "a");
        assigned(volumes, "b");
        drop(volumes.prepare(TEST_LIMIT).unwrap());
        let mut found = volumes.list_ids().unwrap();
        found.sort();
        assert_eq!(found, [test_id("a"), test_id("b")]);
        volumes.remove(&test_id("a")).unwrap();
        assert_eq!(volumes.list_ids().unwrap(), [test_id("b")]);
        volumes.remove(&test_id("a")).unwrap();
    });
}

#[test]
fn full_volume_does_not_affect_other_volumes() {
    for_both(|_, volumes| {
        let (full, other) = (assigned(volumes, "full"), assigned(volumes, "other"));
        let file = full.tree_directories("root").0.join("big");
        assert!(fill(&file) > TEST_LIMIT.0 / 2);
        std::fs::write(other.tree_directories("root").0.join("f"), vec![1; 1 << 20]).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(fill(&file) > TEST_LIMIT.0 / 2, "removing a file gives its space back");
    });
}

#[test]
fn number_of_empty_files_is_limited() {
    for_both(|_, volumes| {
        let small = Bytes::from_mib(8);
        let prepared = volumes.prepare(small).unwrap();
        let directory = volumes.assign(prepared, &test_id("a"), small).unwrap().tree_directories("root").0;
        let most = 1_000_000;
        let stopped = (0..most).find_map(|n| File::create(directory.join(n.to_string())).err());
        assert_full(&stopped.expect("the files are bounded"));
        let other = assigned(volumes, "b");
        std::fs::write(other.disk.join("f"), b"fine").unwrap();
    });
}

#[test]
fn full_disk_leaves_the_journal_writable() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Btrfs)).unwrap();
        let volume = assigned(&mut volumes, "a");
        fill(&volume.disk.join("big"));
        let mut journal = File::create(volume.journal.as_ref().unwrap().join("1")).unwrap();
        journal.write_all(&vec![0; 8 << 20]).unwrap();
        journal.sync_all().unwrap();
        close(dir.path(), volumes);
    });
}

#[test]
fn usage_is_counted_against_the_limit() {
    for_both(|_, volumes| {
        let volume = assigned(volumes, "a");
        let before = volumes.usage(&test_id("a")).unwrap();
        assert_eq!(before.limit, TEST_LIMIT);
        let file = File::create(volume.disk.join("f")).unwrap();
        (&file).write_all(&vec![1; 4 << 20]).unwrap();
        rustix::fs::syncfs(&file).unwrap();
        let grown = volumes.usage(&test_id("a")).unwrap().used.0 - before.used.0;
        assert!((4 << 20..5 << 20).contains(&grown), "{grown}");
        assert!(matches!(volumes.usage(&test_id("b")), Err(VolumeError::Unknown(_))));
    });
}

#[test]
fn assigned_limit_may_differ_from_the_prepared_one() {
    for_both(|_, volumes| {
        let prepared = volumes.prepare(TEST_LIMIT).unwrap();
        volumes.assign(prepared, &test_id("a"), Bytes::from_mib(64)).unwrap();
        assert_eq!(volumes.usage(&test_id("a")).unwrap().limit, Bytes::from_mib(64));
    });
}

#[test]
fn volumes_of_a_killed_launcher_are_adopted_and_attached_once() {
    for kind in [VolumeKind::Btrfs, VolumeKind::Ext4] {
        let dir = TempDir::new().unwrap();
        // The open file represents a sandbox that outlives the launcher and its namespace.
        let Some(mut held) = in_launcher(|| {
            let mut volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            let volume = assigned(&mut volumes, "a");
            drop(volumes.prepare(TEST_LIMIT).unwrap());
            File::create(volume.disk.join("f")).unwrap()
        }) else {
            return;
        };
        in_launcher(|| {
            let volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            assert_eq!(volumes.list_ids().unwrap(), [test_id("a")]);
            held.write_all(b"still here").unwrap();
            let seen = std::fs::read(volumes.sandbox_volume(&test_id("a")).unwrap().disk.join("f")).unwrap();
            assert_eq!(seen, b"still here");
            let file = if kind == VolumeKind::Btrfs {
                "pool.btrfs".to_owned()
            } else {
                format!("ext4/{}.img", test_id("a"))
            };
            assert_eq!(devices_of(&dir.path().join(file)), 1, "{kind:?}");
            drop(held);
            close(dir.path(), volumes);
        });
    }
}

/// Returns the number of loop devices that are backed by this file or by one below this directory.
fn devices_of(path: &Path) -> usize {
    let blocks = std::fs::read_dir("/sys/block").unwrap();
    let files = blocks
        .filter_map(|block| std::fs::read_to_string(block.unwrap().path().join("loop/backing_file")).ok());
    files.filter(|file| Path::new(file.trim()).starts_with(path)).count()
}

#[test]
fn removing_all_volumes_leaves_no_device() {
    for kind in [VolumeKind::Btrfs, VolumeKind::Ext4] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let mut volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            assigned(&mut volumes, "a");
            volumes.remove(&test_id("a")).unwrap();
            close(dir.path(), volumes);
            assert_eq!(devices_of(dir.path()), 0, "{kind:?}");
        });
    }
}

#[test]
fn too_little_free_space_refuses_volumes() {
    for kind in [VolumeKind::Btrfs, VolumeKind::Ext4] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let floor = Bytes(u64::MAX);
            let mut volumes =
                VolumeStore::open(dir.path(), VolumeStoreSettings { floor, ..settings(kind) }).unwrap();
            assert!(matches!(volumes.prepare(TEST_LIMIT), Err(VolumeError::NoRoom { .. })));
            close(dir.path(), volumes);
        });
    }
}

#[test]
fn assigning_a_taken_id_fails_and_keeps_its_volume() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Btrfs)).unwrap();
        let volume = assigned(&mut volumes, "a");
        std::fs::write(volume.disk.join("f"), b"mine").unwrap();
        let prepared = volumes.prepare(TEST_LIMIT).unwrap();
        assert!(volumes.assign(prepared, &test_id("a"), TEST_LIMIT).is_err());
        assert_eq!(std::fs::read(volume.disk.join("f")).unwrap(), b"mine");
        close(dir.path(), volumes);
    });
}

#[test]
fn pool_grows_while_it_is_in_use() {
    let dir = TempDir::new().unwrap();
    let size = || rustix::fs::statvfs(dir.path().join("pool")).unwrap().f_blocks;
    let before = in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Btrfs)).unwrap();
        let volume = assigned(&mut volumes, "a");
        (size(), File::create(volume.disk.join("f")).unwrap())
    });
    in_launcher(|| {
        let larger = VolumeStoreSettings { pool: Some(Bytes::from_mib(2048)), ..settings(VolumeKind::Btrfs) };
        let volumes = VolumeStore::open(dir.path(), larger).unwrap();
        let (blocks, held) = before.unwrap();
        assert_eq!(size(), blocks * 2);
        drop(held);
        close(dir.path(), volumes);
    });
}

#[test]
fn host_btrfs_is_used_directly_only_if_quotas_are_enabled() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let host = dir.path().join("host");
        make_directory(&host, 0o700).unwrap();
        pool_file::mount_pool(&dir.path().join("file"), &host, Some(Bytes::from_mib(2048))).unwrap();

        let state = host.join("state");
        let volumes = VolumeStore::open(&state, settings(VolumeKind::Btrfs)).unwrap();
        assert!(state.join("pool.btrfs").exists(), "without quotas there is a pool file");
        close(&state, volumes);

        linux::btrfs::enable_quota(File::open(&host).unwrap()).unwrap();
        let state = host.join("other");
        let mut volumes = VolumeStore::open(&state, settings(VolumeKind::Btrfs)).unwrap();
        assert!(!state.join("pool.btrfs").exists(), "with quotas there is none");
        fill(&assigned(&mut volumes, "a").disk.join("big"));
        volumes.remove(&test_id("a")).unwrap();
        close(dir.path(), volumes);
    });
}

#[test]
fn error_names_a_pool_file_without_a_filesystem() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        std::fs::write(dir.path().join("pool.btrfs"), vec![0; 1 << 20]).unwrap();
        let error = VolumeStore::open(dir.path(), settings(VolumeKind::Btrfs)).unwrap_err();
        assert!(matches!(error, VolumeError::BadPool { .. }), "{error:?}");
        let pool = File::open(dir.path().join("pool.btrfs")).unwrap();
        assert!(LoopDevice::find_attached(&pool).unwrap().is_none());
    });
}

#[test]
fn existing_volumes_decide_the_kind() {
    for (kind, other) in [(VolumeKind::Btrfs, VolumeKind::Ext4), (VolumeKind::Ext4, VolumeKind::Btrfs)] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let mut volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            assigned(&mut volumes, "a");
            close(dir.path(), volumes);
            let error = VolumeStore::open(dir.path(), settings(other)).unwrap_err();
            assert!(matches!(error, VolumeError::OtherKind { .. }), "{error:?}");
            assert!(error.hint().is_some_and(|hint| hint.contains("`disks`")), "{error:?}");
            let any = VolumeStoreSettings { kind: None, ..settings(kind) };
            let volumes = VolumeStore::open(dir.path(), any).unwrap();
            assert_eq!(volumes.kind(), kind);
            assert!(volumes.has_volume(&test_id("a")), "{kind:?}");
            close(dir.path(), volumes);
        });
    }
}

/// A start on a kernel without btrfs made a pool that could not be mounted, and used images instead.
#[test]
fn pool_that_was_never_mounted_does_not_decide_the_kind() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        pool_file::make_pool(&dir.path().join(POOL_FILE)).unwrap();
        assert_eq!(existing_kind(dir.path()).unwrap(), None);
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        assigned(&mut volumes, "a");
        close(dir.path(), volumes);
        assert_eq!(existing_kind(dir.path()).unwrap(), Some(VolumeKind::Ext4));
    });
}

#[test]
fn trees_are_named_after_their_mount_points() {
    let names: Vec<String> = ["/", "/usr", "/usr/local/"].map(tree_name).to_vec();
    assert_eq!(names, ["root", "usr", "usr-local"]);
}

/// The figures of `docs/decisions`: run it alone with `--ignored --nocapture`.
#[test]
#[ignore = "a soak of a minute or more"]
fn soak() {
    for (kind, rounds, alive) in [(VolumeKind::Ext4, 300, 100), (VolumeKind::Btrfs, 2000, 200)] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let pool = Some(Bytes::from_mib(20 << 10));
            let mut volumes =
                VolumeStore::open(dir.path(), VolumeStoreSettings { pool, ..settings(kind) }).unwrap();
            turn_over(&mut volumes, rounds, alive);
            if kind == VolumeKind::Btrfs {
                report(dir.path(), "200 alive, 1800 removed");
            }
            for id in volumes.list_ids().unwrap() {
                volumes.remove(&id).unwrap();
            }
            if kind == VolumeKind::Btrfs {
                wait_until_freed(dir.path());
            }
            close(dir.path(), volumes);
        });
    }
}

/// Makes, fills and removes volumes, of which `alive` exist at once, and prints the times.
fn turn_over(volumes: &mut VolumeStore, rounds: usize, alive: usize) {
    let mut times = Times::new();
    for round in 0..rounds {
        let prepared = timed(&mut times, "prepare", || volumes.prepare(TEST_LIMIT).unwrap());
        let id = test_id(&format!("s{round}"));
        let volume = timed(&mut times, "assign", || volumes.assign(prepared, &id, TEST_LIMIT).unwrap());
        let size = (round * 7919) % (4 << 20);
        std::fs::write(volume.tree_directories("root").0.join("data"), vec![3; size]).unwrap();
        timed(&mut times, "usage", || volumes.usage(&id).unwrap());
        if round >= alive {
            let old = test_id(&format!("s{}", round - alive));
            timed(&mut times, "remove", || volumes.remove(&old).unwrap());
        }
    }
    eprintln!("{:?}, {rounds} rounds, {alive} alive", volumes.kind());
    for (name, mut spent) in times {
        spent.sort();
        let at = |percent: usize| spent[(spent.len() - 1) * percent / 100].as_secs_f64() * 1e3;
        eprintln!("{name:8} p50 {:.3} p99 {:.3} max {:.3} ms", at(50), at(99), at(100));
    }
}

fn wait_until_freed(dir: &Path) {
    let root = File::open(dir.join("pool")).unwrap();
    let start = std::time::Instant::now();
    while quota_groups(&root) > 1 {
        // Each commit lets the kernel's cleaner continue.
        rustix::fs::syncfs(&root).unwrap();
        assert!(start.elapsed().as_secs() < 120, "removed volumes must be freed");
    }
    report(dir, &format!("all removed, freed after {:.1} s", start.elapsed().as_secs_f64()));
}

type Times = std::collections::BTreeMap<&'static str, Vec<std::time::Duration>>;

fn timed<T>(times: &mut Times, name: &'static str, work: impl FnOnce() -> T) -> T {
    let start = std::time::Instant::now();
    let result = work();
    times.entry(name).or_default().push(start.elapsed());
    result
}

fn report(dir: &Path, when: &str) {
    let root = File::open(dir.join("pool")).unwrap();
    rustix::fs::syncfs(&root).unwrap();
    let file = rustix::fs::stat(dir.join("pool.btrfs")).unwrap();
    let on_disk = file.st_blocks / 2048;
    eprintln!("{when}: {} quota groups, the pool file has {on_disk} MiB", quota_groups(&root));
}

fn quota_groups(root: &File) -> usize {
    let fsid = linux::btrfs::filesystem_id(root).unwrap();
    let groups = std::fs::read_dir(format!("/sys/fs/btrfs/{fsid}/qgroups")).unwrap();
    groups.filter(|group| group.as_ref().unwrap().file_name().to_string_lossy().starts_with("0_")).count()
}
