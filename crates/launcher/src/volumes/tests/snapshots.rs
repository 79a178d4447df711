//! Snapshots of volumes, with and without shared extents.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use domain::SnapshotId;

use super::*;

fn snapshot_id() -> SnapshotId {
    SnapshotId::from_entropy([0xff; 16])
}

fn take_snapshot(volumes: &VolumeStore, id: &str) {
    volumes.plan_snapshot(&test_id(id), &snapshot_id()).unwrap().run().unwrap();
}

fn restore_volume(volumes: &mut VolumeStore, id: &str) -> SandboxVolume {
    let (prepared, copying) = volumes.plan_restore(&snapshot_id()).unwrap();
    copying.run().unwrap();
    volumes.finish_restore(&prepared).unwrap();
    volumes.assign(prepared, &test_id(id), TEST_LIMIT).unwrap()
}

fn file(volume: &SandboxVolume) -> PathBuf {
    volume.tree_directories("root").0.join("file")
}

#[test]
fn restored_volume_has_the_files_of_the_snapshot_and_no_journal() {
    for_both(|_, volumes| {
        let source = assigned(volumes, "a");
        fs::write(file(&source), "before").unwrap();
        fs::write(source.journal.as_ref().unwrap().join("printed"), "x").unwrap();
        take_snapshot(volumes, "a");
        fs::write(file(&source), "after").unwrap();
        let copy = restore_volume(volumes, "b");
        assert_eq!(fs::read_to_string(file(&copy)).unwrap(), "before");
        assert_eq!(fs::read_dir(copy.journal.as_ref().unwrap()).unwrap().count(), 0);
        fs::write(file(&copy), "own").unwrap();
        assert_eq!(fs::read_to_string(file(&source)).unwrap(), "after");
        assert_eq!(volumes.list_snapshots().unwrap(), [snapshot_id()]);
        assert_eq!(volumes.list_ids().unwrap().len(), 2, "a snapshot is no volume");
    });
}

#[test]
fn snapshot_outlives_its_volume_and_restored_volumes_outlive_the_snapshot() {
    for_both(|_, volumes| {
        let source = assigned(volumes, "a");
        fs::write(file(&source), "kept").unwrap();
        take_snapshot(volumes, "a");
        volumes.remove(&test_id("a")).unwrap();
        let copy = restore_volume(volumes, "b");
        volumes.remove_snapshot(&snapshot_id()).unwrap();
        volumes.remove_snapshot(&snapshot_id()).unwrap();
        assert_eq!(volumes.list_snapshots().unwrap(), []);
        assert_eq!(fs::read_to_string(file(&copy)).unwrap(), "kept");
        assert!(volumes.plan_restore(&snapshot_id()).unwrap().1.run().is_err());
    });
}

#[test]
fn restored_volume_has_its_own_limit() {
    for_both(|_, volumes| {
        assigned(volumes, "a");
        take_snapshot(volumes, "a");
        let copy = restore_volume(volumes, "b");
        let written = fill(&file(&copy));
        assert!(written > TEST_LIMIT.0 / 2, "{written}");
        assert!(
            fill(&file(&volumes.sandbox_volume(&test_id("a")).unwrap())) > TEST_LIMIT.0 / 2,
            "the other has its own"
        );
    });
}

#[test]
fn image_cannot_be_restored_with_another_size() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        assigned(&mut volumes, "a");
        take_snapshot(&volumes, "a");
        let (prepared, copying) = volumes.plan_restore(&snapshot_id()).unwrap();
        copying.run().unwrap();
        let (done, total) = copying.progress().unwrap();
        assert!(done == total && total.0 > 0, "{done} of {total}");
        volumes.finish_restore(&prepared).unwrap();
        let refused = volumes.assign(prepared, &test_id("b"), Bytes::from_mib(64)).unwrap_err();
        assert!(matches!(refused, VolumeError::OtherSize { .. }) && refused.hint().is_some(), "{refused}");
        assert_eq!(volumes.list_ids().unwrap(), [test_id("a")]);
        close(dir.path(), volumes);
    });
}

#[test]
fn snapshot_that_is_a_link_or_a_pipe_is_not_mounted() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        assigned(&mut volumes, "a");
        take_snapshot(&volumes, "a");
        let kept = dir.path().join("ext4/snapshots").join(format!("{}.img", snapshot_id()));
        let outside = dir.path().join("outside");
        fs::rename(&kept, outside.with_extension("img")).unwrap();
        std::os::unix::fs::symlink(outside.with_extension("img"), &kept).unwrap();
        assert!(volumes.open_snapshot(&snapshot_id()).is_err(), "a link was followed");
        fs::remove_file(&kept).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &kept, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert!(volumes.open_snapshot(&snapshot_id()).is_err(), "a pipe was opened");
        fs::remove_file(&kept).unwrap();
        fs::rename(outside.with_extension("img"), &kept).unwrap();
        volumes.open_snapshot(&snapshot_id()).unwrap();
        close(dir.path(), volumes);
    });
}

/// If a program writes numbered records and waits for each, no record is missing in a snapshot.
#[test]
fn snapshot_during_writing_contains_every_flushed_record() {
    const RECORD: usize = 512;
    for_both(|_, volumes| {
        let source = assigned(volumes, "a");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let path = file(&source);
            scope.spawn(|| {
                let mut log = File::create(path).unwrap();
                for number in 0_u8.. {
                    if stop.load(Ordering::Relaxed) || number == u8::MAX {
                        return;
                    }
                    log.write_all(&[number; RECORD]).unwrap();
                    log.sync_data().unwrap();
                }
            });
            while fs::metadata(file(&source)).map_or(0, |facts| facts.len()) < 4096 {
                std::thread::yield_now();
            }
            take_snapshot(volumes, "a");
            stop.store(true, Ordering::Relaxed);
        });
        let bytes = fs::read(file(&restore_volume(volumes, "b"))).unwrap();
        assert!(bytes.len() >= 4096, "{}", bytes.len());
        for (number, record) in (0_u8..).zip(bytes.chunks_exact(RECORD)) {
            assert!(record.iter().all(|byte| *byte == number), "record {number} is torn");
        }
    });
}

#[test]
fn disk_can_be_thawed_after_an_interrupted_copy() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        let volume = assigned(&mut volumes, "a");
        linux::freeze::freeze_filesystem(File::open(&volume.disk).unwrap()).unwrap();
        volumes.thaw_disk(&test_id("a")).unwrap();
        volumes.thaw_disk(&test_id("a")).unwrap();
        fs::write(file(&volume), "x").unwrap();
        close(dir.path(), volumes);
    });
}

/// With simple quotas, which Linux has since 6.7, an extent counts in the subvolume that wrote it.
#[test]
fn extents_of_a_snapshot_count_for_their_writer_and_not_for_restored_volumes() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Btrfs)).unwrap();
        if !volumes.counts_restored() {
            let source = assigned(&mut volumes, "a");
            let half = vec![7; usize::try_from(TEST_LIMIT.0 / 2).unwrap()];
            let write = |name: &str| {
                let mut file = File::create(source.tree_directories("root").0.join(name))?;
                file.write_all(&half).and_then(|()| file.sync_all())
            };
            write("first").unwrap();
            take_snapshot(&volumes, "a");
            fs::remove_file(source.tree_directories("root").0.join("first")).unwrap();
            assert_full(&write("second").unwrap_err());
            let copy = restore_volume(&mut volumes, "b");
            assert!(
                volumes.usage(&test_id("b")).unwrap().used.0 < TEST_LIMIT.0 / 4,
                "{:?}",
                volumes.usage(&test_id("b"))
            );
            assert!(fill(&file(&copy)) > TEST_LIMIT.0 / 2, "it has its whole limit");
        }
        close(dir.path(), volumes);
    });
}
