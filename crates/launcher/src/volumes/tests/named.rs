//! Named volumes, on both kinds of storage.

use domain::volume::VolumeLifetime;
use domain::{Owner, VolumeId, VolumeName};

use super::*;

fn volume(letter: u8) -> domain::Volume {
    domain::Volume {
        id: VolumeId::from_entropy([letter; 20]),
        owner: Owner::from_valid_name("tenant"),
        name: VolumeName::parse("data").unwrap(),
        size: TEST_LIMIT,
        lifetime: VolumeLifetime::WithSandboxes,
    }
}

fn found(volumes: &VolumeStore) -> Vec<domain::Volume> {
    volumes.list_named().unwrap().into_iter().map(|found| found.volume).collect()
}

#[test]
fn named_volume_is_listed_with_its_owner_and_separately_from_sandbox_disks() {
    for_both(|_, volumes| {
        let made = volume(3);
        volumes.make_named(&made).unwrap();
        volumes.make_named(&made).unwrap();
        assigned(volumes, "a");
        assert_eq!(found(volumes), std::slice::from_ref(&made));
        assert_eq!(volumes.list_ids().unwrap(), [test_id("a")]);
        let data = volumes.named_data(&made.id).unwrap();
        assert_eq!(rustix::fs::stat(&data).unwrap().st_mode & 0o7777, 0o755);
        volumes.remove_named(&made.id).unwrap();
        volumes.remove_named(&made.id).unwrap();
        assert_eq!((found(volumes), volumes.named_data(&made.id)), (Vec::new(), None));
        assert_eq!(volumes.list_ids().unwrap(), [test_id("a")], "the disk of the sandbox is kept");
    });
}

#[test]
fn size_of_a_named_volume_is_a_hard_limit() {
    for_both(|_, volumes| {
        let made = volume(4);
        volumes.make_named(&made).unwrap();
        let data = volumes.named_data(&made.id).unwrap();
        assert!(fill(&data.join("file")) <= TEST_LIMIT.0);
        let used = volumes.list_named().unwrap()[0].used;
        assert!(used.0 > TEST_LIMIT.0 / 2 && used.0 <= TEST_LIMIT.0 * 2, "{used}");
        let small = domain::Volume { id: VolumeId::from_entropy([5; 20]), size: Bytes(1), ..made };
        assert!(matches!(volumes.make_named(&small), Err(VolumeError::TooSmall { .. })));
    });
}

#[test]
fn complete_volumes_survive_a_killed_launcher_and_incomplete_ones_are_removed() {
    for kind in [VolumeKind::Btrfs, VolumeKind::Ext4] {
        let dir = TempDir::new().unwrap();
        in_launcher(|| {
            let mut volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            let (whole, half) = (volume(6), volume(7));
            volumes.make_named(&whole).unwrap();
            let data = volumes.named_data(&whole.id).unwrap();
            std::fs::write(data.join("kept"), "kept").unwrap();
            volumes.make_named(&half).unwrap();
            match kind {
                VolumeKind::Ext4 => {
                    let image = |name: String| dir.path().join("ext4").join(format!("{name}.img"));
                    let (from, to) = (format!("volume-{}", half.id), format!("prepared-volume-{}", half.id));
                    std::fs::rename(image(from), image(to)).unwrap();
                }
                _ => {
                    let parent = dir.path().join("pool/named-volumes");
                    let partial = parent.join(format!("partial-{}", half.id));
                    std::fs::rename(parent.join(half.id.as_str()), partial).unwrap();
                }
            }
            close(dir.path(), volumes);
            let volumes = VolumeStore::open(dir.path(), settings(kind)).unwrap();
            assert_eq!(found(&volumes), std::slice::from_ref(&whole), "{kind:?}");
            let data = volumes.named_data(&whole.id).unwrap();
            assert_eq!(std::fs::read_to_string(data.join("kept")).unwrap(), "kept", "{kind:?}");
            close(dir.path(), volumes);
        });
    }
}

#[test]
fn unreadable_volume_is_kept_and_does_not_hide_others() {
    for_both(|dir, volumes| {
        let (good, bad) = (volume(8), volume(9));
        volumes.make_named(&good).unwrap();
        volumes.make_named(&bad).unwrap();
        let data = volumes.named_data(&bad.id).unwrap();
        // This is how a power loss leaves a file that was never flushed.
        std::fs::write(data.with_file_name("label"), "").unwrap();
        assert_eq!(found(volumes), std::slice::from_ref(&good));
        assert_eq!(volumes.named_data(&bad.id), Some(data), "{}", dir.display());
    });
}

#[test]
fn unmountable_image_is_kept_and_does_not_prevent_a_start() {
    let dir = TempDir::new().unwrap();
    in_launcher(|| {
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        let (good, bad) = (volume(8), volume(9));
        volumes.make_named(&good).unwrap();
        close(dir.path(), volumes);
        let images = dir.path().join("ext4");
        let broken = images.join(format!("volume-{}.img", bad.id));
        for path in [&broken, &images.join(format!("{}.img", test_id("a")))] {
            std::fs::write(path, vec![0; 1 << 20]).unwrap();
        }
        let mut volumes = VolumeStore::open(dir.path(), settings(VolumeKind::Ext4)).unwrap();
        assert_eq!(found(&volumes), std::slice::from_ref(&good));
        assert!(broken.exists());
        assert_eq!(
            volumes.list_ids().unwrap(),
            [test_id("a")],
            "the disk of the sandbox must be listed, so that it can be removed"
        );
        volumes.remove(&test_id("a")).unwrap();
        assert!(
            volumes.list_ids().unwrap().is_empty() && !images.join(format!("{}.img", test_id("a"))).exists()
        );
        close(dir.path(), volumes);
    });
}
