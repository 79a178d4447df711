//! Images created from the changes of a sandbox.

use super::*;

/// Imports the upper directories of a disk onto a base.
fn commit(state: &Path, name: &str, disk: &Path, below: ImportBase) -> Result<ImageRecord, ImageError> {
    let tree = |mount_point: &str, directory: &str| UpperTree {
        mount_point: mount_point.to_owned(),
        directory: directory.to_owned(),
    };
    let trees = vec![tree("/", "root.upper"), tree("/usr", "usr.upper"), tree("/usr/x", "usr-x.upper")];
    let source = ImportSource::Uppers { disk: disk.to_owned(), trees };
    let import_of =
        ImageImport { name, source, wanted: None, existing: ExistingImagePolicy::Refuse, most: None, below };
    import_image(state, import_of, UnpackMode::InProcess, &mut |_| {}).map(|made| made.record)
}

/// Creates a disk on which `/etc` was replaced, `/gone` removed and a program added.
fn disk() -> TempDir {
    let disk = TempDir::new().unwrap();
    for directory in ["root.upper/etc", "root.upper/tmp", "usr.upper/bin", "root.work"] {
        fs::create_dir_all(disk.path().join(directory)).unwrap();
    }
    fs::write(disk.path().join("usr.upper/bin/tool"), "x").unwrap();
    let upper = linux::fs::RootDirectory::open(&disk.path().join("root.upper")).unwrap();
    upper.make_whiteout(Path::new("gone")).unwrap();
    let etc = fs::File::open(disk.path().join("root.upper/etc")).unwrap();
    for (name, value) in [("user.overlay.opaque", b"y"), ("user.overlay.impure", b"y"), ("user.mine", b"1")] {
        rustix::fs::fsetxattr(&etc, name, value, rustix::fs::XattrFlags::empty()).unwrap();
    }
    let pipe = disk.path().join("root.upper/tmp/pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    disk
}

fn has_attribute(path: &Path, name: &str) -> bool {
    rustix::fs::getxattr(path, name, &mut [0_u8; 16][..]).is_ok()
}

#[test]
fn committed_uppers_keep_whiteouts() {
    let (state, disk) = (TempDir::new().unwrap(), disk());
    let record = commit(state.path(), "made", disk.path(), ImportBase::Host).unwrap();
    assert_eq!(record.base, ImageBase::Host);
    let points: Vec<&str> = record.layers.iter().map(|layer| layer.mount_point.as_str()).collect();
    assert_eq!(points, ["/", "/usr"], "a tree without changes has no layer");
    let root = tree(state.path(), &record, 0);
    let gone = fs::symlink_metadata(root.join("gone")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::rdev(&gone), 0);
    assert!(std::os::unix::fs::FileTypeExt::is_char_device(&gone.file_type()));
    assert!(has_attribute(&root.join("etc"), "user.overlay.opaque"));
    assert!(has_attribute(&root.join("etc"), "user.mine"));
    assert!(!has_attribute(&root.join("etc"), "user.overlay.impure"), "it describes another overlay");
    assert!(!root.join("tmp/pipe").exists());
    assert!(tree(state.path(), &record, 1).join("bin/tool").exists());
}

#[test]
fn committed_image_is_based_on_the_current_host() {
    let (state, disk) = (TempDir::new().unwrap(), disk());
    commit(state.path(), "made", disk.path(), ImportBase::Host).unwrap();
    let tree = |mount_point: &str, lower: &str| ImageTree {
        mount_point: mount_point.to_owned(),
        lowers: vec![PathBuf::from(lower)],
    };
    let host = HostImage { trees: vec![tree("/", "/skeleton"), tree("/usr", "/usr")] };
    let found = resolve_image(state.path(), &host, "made").unwrap();
    let lowers: Vec<usize> = found.trees.iter().map(|tree| tree.lowers.len()).collect();
    assert_eq!(lowers, [2, 2]);
    assert_eq!(found.trees[1].lowers[1], Path::new("/usr"));
    let split = HostImage { trees: vec![tree("/", "/skeleton")] };
    let changed = resolve_image(state.path(), &split, "made");
    assert!(matches!(changed, Err(ImageError::HostChanged { .. })), "{changed:?}");
}

#[test]
fn commit_onto_an_image_keeps_its_layers_and_its_configuration() {
    let (state, result) = import_bytes(&archive(GOOD));
    let mut base = result.unwrap();
    base.config.workdir = Some("/srv".to_owned());
    let record = commit(state.path(), "made", disk().path(), ImportBase::Image(base.clone())).unwrap();
    assert_eq!((record.base, record.config.workdir.as_deref()), (ImageBase::Own, Some("/srv")));
    assert_eq!(record.layers[0], base.layers[0]);
    assert!(matches!(
        commit(state.path(), "made", disk().path(), ImportBase::Host),
        Err(ImageError::Exists(_))
    ));
    // The layers of the base stay as long as another image is based on them.
    remove_image(state.path(), "test").unwrap();
    assert!(tree(state.path(), &record, 0).is_dir());
}

#[test]
fn upper_that_refers_to_another_file_is_rejected() {
    let (state, disk) = (TempDir::new().unwrap(), disk());
    let etc = fs::File::open(disk.path().join("root.upper/etc")).unwrap();
    rustix::fs::fsetxattr(&etc, "user.overlay.redirect", b"/x", rustix::fs::XattrFlags::empty()).unwrap();
    let refused = commit(state.path(), "made", disk.path(), ImportBase::Host);
    assert!(matches!(refused, Err(ImageError::Hostile { .. })), "{refused:?}");
}

#[test]
fn records_of_older_servers_are_read() {
    let text = r#"{"name": "a", "manifest": null, "config": {"entrypoint": [], "cmd": [], "env": [], "user": null,
        "workdir": null}, "layers": [{"digest": "DIGEST", "bytes": 1}]}"#;
    let text = text.replace("DIGEST", &Digest::of_content(b"x").to_string());
    let record: ImageRecord = serde_json::from_str(&text).unwrap();
    assert_eq!((record.base, record.layers[0].mount_point.as_str()), (ImageBase::Own, "/"));
}
