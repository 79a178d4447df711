//! Images that are used again and again.

use std::os::unix::fs::MetadataExt;

use super::*;

fn open(dir: &Path) -> VolumeStore {
    let volumes = VolumeStore::open(dir, settings(VolumeKind::Oneshot)).unwrap();
    assert_eq!(volumes.kind(), VolumeKind::Oneshot);
    volumes
}

fn images(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir.join("oneshot")).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|word| word == "img")).collect()
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn oneshot_disk_has_the_space_of_its_limit_and_no_more() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = open(dir.path());
        for mebibytes in [8, 16, 64, 256, 1024, 2048, 10240] {
            let limit = Bytes::from_mib(mebibytes);
            let id = test_id("space");
            let prepared = volumes.prepare(Bytes::from_mib(1)).unwrap();
            let volume = volumes.assign(prepared, &id, limit).unwrap();
            let status = rustix::fs::statvfs(&volume.disk).unwrap();
            let free = status.f_bavail * status.f_frsize;
            let range = limit.0 / 1000 * 999..=limit.0 / 1000 * 1006;
            assert!(range.contains(&free), "{free} bytes are free on a disk of {limit}");
            assert!(status.f_files <= limit.0 / 4096, "{} files on a disk of {limit}", status.f_files);
            volumes.remove(&id).unwrap();
        }
    });
}

#[test]
fn oneshot_image_is_empty_when_it_is_used_again() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        for round in 0..5 {
            let mut volumes = open(dir.path());
            let volume = assigned(&mut volumes, "again");
            let (upper, _) = volume.tree_directories("root");
            assert_eq!(std::fs::read_dir(&upper).unwrap().count(), 0, "in round {round}");
            for number in 0..200 {
                std::fs::write(upper.join(number.to_string()), "x").unwrap();
            }
            volumes.remove(&test_id("again")).unwrap();
            assert!(!volumes.has_volume(&test_id("again")));
            // The image of the last round may still be in use by a process that another test has forked.
            assert!(images(dir.path()).len() <= 2, "in round {round}");
        }
    });
}

#[test]
fn oneshot_image_in_use_is_not_used_by_others() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut one = open(dir.path());
        let kept = assigned(&mut one, "one");
        std::fs::write(kept.disk.join("mark"), "one").unwrap();
        let mark = File::open(kept.disk.join("mark")).unwrap();
        in_launcher(|| {
            let mut other = open(dir.path());
            let volume = assigned(&mut other, "other");
            assert!(!volume.disk.join("mark").exists());
            assert!(images(dir.path()).len() >= 2);
            other.remove(&test_id("other")).unwrap();
        });
        assert_eq!(mark.metadata().unwrap().len(), 3);
        drop(mark);
        one.remove(&test_id("one")).unwrap();
    });
}

#[test]
fn oneshot_image_returns_its_space() {
    const WRITTEN: usize = 16 << 20;
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = open(dir.path());
        let volume = assigned(&mut volumes, "large");
        std::fs::write(volume.disk.join("large"), vec![7; WRITTEN]).unwrap();
        volumes.remove(&test_id("large")).unwrap();
        assert!(images(dir.path()).iter().all(|image| allocated(image) < 1 << 20));

        // A process that is killed leaves its image as it is, and the next one empties it.
        in_launcher(|| {
            let mut killed = open(dir.path());
            let volume = assigned(&mut killed, "killed");
            std::fs::write(volume.disk.join("large"), vec![7; WRITTEN]).unwrap();
            drop(killed);
        });
        // The kernel writes the content and releases the device after the process has ended.
        for image in images(dir.path()) {
            File::open(image).unwrap().lock().unwrap();
        }
        assert!(images(dir.path()).iter().any(|image| allocated(image) > 1 << 20));
        volumes.remove(&test_id("killed")).unwrap();
        let left: Vec<u64> = images(dir.path()).iter().map(|image| allocated(image)).collect();
        assert!(left.iter().all(|bytes| *bytes < 1 << 20), "{left:?}");
    });
}

#[test]
fn template_of_another_version_can_be_used() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = open(dir.path());
        assigned(&mut volumes, "first");
        volumes.remove(&test_id("first")).unwrap();
        // A filesystem that is larger than this version would make it.
        let name = |limit: Bytes| dir.path().join(format!("oneshot/{}.template", limit.0));
        let larger = Bytes(TEST_LIMIT.0 * 2);
        let prepared = volumes.prepare(larger).unwrap();
        volumes.assign(prepared, &test_id("larger"), larger).unwrap();
        volumes.remove(&test_id("larger")).unwrap();
        std::fs::rename(name(larger), name(TEST_LIMIT)).unwrap();
        assigned(&mut volumes, "second");
        volumes.remove(&test_id("second")).unwrap();
    });
}

#[test]
fn pool_of_earlier_versions_is_removed() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        std::fs::write(dir.path().join("pool.btrfs"), "old").unwrap();
        drop(open(dir.path()));
        assert!(!dir.path().join("pool.btrfs").exists());
    });
}
