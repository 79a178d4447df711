//! Images of several layers, as OCI layouts and in the `docker save` format.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;

/// The files of an image, from which layouts and archives are created.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

pub(super) fn config(layers: &[Vec<u8>]) -> Value {
    let digests: Vec<String> = layers.iter().map(|layer| Digest::of_content(layer).to_string()).collect();
    json!({
        "architecture": host_architecture(), "os": "linux",
        "config": {
            "Entrypoint": ["/usr/bin/tool"], "Cmd": ["serve"], "Env": ["PATH=/own/bin", "A=b=c", "odd"],
            "User": "app:staff", "WorkingDir": "/srv/app",
        },
        "rootfs": {"type": "layers", "diff_ids": digests},
    })
}

/// Adds `content` to the blobs and returns its descriptor.
fn blob(files: &mut Files, kind: &str, content: Vec<u8>) -> Value {
    let digest = Digest::of_content(&content);
    let descriptor = json!({
        "mediaType": format!("application/vnd.oci.image.{kind}"),
        "digest": digest.to_string(), "size": content.len(),
    });
    files.insert(format!("blobs/sha256/{}", digest.hex()), content);
    descriptor
}

/// Creates a layout with one image for this host and one for another; also returns the digest of
/// the first.
pub(super) fn layout(layers: &[Vec<u8>], config: &Value) -> (Files, Digest) {
    let mut files = Files::new();
    let config = blob(&mut files, "config.v1+json", config.to_string().into_bytes());
    let layers: Vec<Value> = layers
        .iter()
        .map(|layer| blob(&mut files, "layer.v1.tar+zstd", zstd::encode_all(layer.as_slice(), 1).unwrap()))
        .collect();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers}).to_string();
    let digest = Digest::of_content(manifest.as_bytes());
    let mut ours = blob(&mut files, "manifest.v1+json", manifest.into_bytes());
    ours["platform"] = json!({"os": "linux", "architecture": host_architecture()});
    let mut other = ours.clone();
    other["digest"] = json!(Digest::of_content(b"other").to_string());
    other["platform"]["architecture"] = json!("s390x");
    let index = json!({"schemaVersion": 2, "manifests": [other, ours]});
    files.insert("index.json".to_owned(), index.to_string().into_bytes());
    files.insert("oci-layout".to_owned(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec());
    (files, digest)
}

pub(super) fn docker_save(layers: &[Vec<u8>]) -> Files {
    let mut files = Files::new();
    let names: Vec<String> = (0..layers.len()).map(|place| format!("{place}/layer.tar")).collect();
    for (name, layer) in names.iter().zip(layers) {
        files.insert(name.clone(), layer.clone());
    }
    files.insert("config.json".to_owned(), config(layers).to_string().into_bytes());
    let manifest = json!([{"Config": "config.json", "RepoTags": ["a:1"], "Layers": names}]);
    files.insert("manifest.json".to_owned(), manifest.to_string().into_bytes());
    files
}

pub(super) fn as_tar(files: &Files) -> Vec<u8> {
    let entries: Vec<_> = files
        .iter()
        .map(|(name, content)| (EntryType::Regular, name.as_str(), "", content.as_slice()))
        .collect();
    archive(&entries)
}

pub(super) fn as_directory(files: &Files) -> TempDir {
    let directory = TempDir::new().unwrap();
    for (name, content) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    directory
}

pub(super) fn two_layers() -> Vec<Vec<u8>> {
    let bottom = archive(&[
        (EntryType::Directory, "usr/", "", b""),
        (EntryType::Regular, "usr/bin/tool", "", b"tool"),
        (EntryType::Regular, "usr/gone", "", b"gone"),
        (EntryType::Symlink, "lib", "usr/lib", b""),
        (EntryType::Regular, "opt/old/file", "", b"old"),
    ]);
    let top = archive(&[
        (EntryType::Regular, "usr/.wh.gone", "", b""),
        (EntryType::Regular, "opt/old/.wh..wh..opq", "", b""),
        (EntryType::Regular, "opt/old/new", "", b"new"),
        (EntryType::Regular, "lib/file", "", b"mine"),
        (EntryType::Regular, "usr/.wh..wh.plnk", "", b""),
    ]);
    vec![bottom, top]
}

fn opaque(path: &Path) -> bool {
    let mut value = [0; 8];
    rustix::fs::getxattr(path, "user.overlay.opaque", &mut value).is_ok_and(|length| &value[..length] == b"y")
}

fn check(state: &Path, record: &ImageRecord) {
    assert_eq!(record.config.command(), ["/usr/bin/tool", "serve"]);
    assert_eq!(record.config.user.as_deref(), Some("app:staff"));
    assert_eq!(record.config.workdir.as_deref(), Some("/srv/app"));
    let env = [("A", "b=c"), ("PATH", "/own/bin")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(record.config.env, env);
    let (bottom, top) = (tree(state, record, 0), tree(state, record, 1));
    assert_eq!(fs::read(bottom.join("usr/bin/tool")).unwrap(), b"tool");
    let gone = fs::symlink_metadata(top.join("usr/gone")).unwrap();
    assert_eq!((gone.mode() & 0o170_000, gone.rdev()), (0o020_000, 0), "a whiteout");
    assert!(opaque(&top.join("opt/old")) && !opaque(&top.join("usr")));
    assert!(top.join("lib/file").is_file(), "a link of a lower layer is not followed");
    assert_eq!(fs::read_dir(top.join("usr")).unwrap().count(), 1, "bookkeeping is left out");
}

#[test]
fn layout_is_imported_as_a_directory_and_as_a_tar() {
    let layers = two_layers();
    let (files, digest) = layout(&layers, &config(&layers));
    let (state, directory) = (TempDir::new().unwrap(), as_directory(&files));
    let record = import_path(state.path(), "a/b:1", directory.path()).unwrap();
    assert_eq!(record.manifest, Some(digest));
    check(state.path(), &record);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&as_tar(&files)).unwrap();
    for bytes in [as_tar(&files), gzip.finish().unwrap()] {
        let (state, record) = import_bytes(&bytes);
        check(state.path(), &record.unwrap());
    }
}

#[test]
fn archive_with_two_manifests_is_rejected() {
    let layers = two_layers();
    let saved = docker_save(&layers);
    let (oci, _) = layout(&layers, &config(&layers));
    for (files, twice, again) in
        [(&saved, "manifest.json", "./manifest.json"), (&oci, "index.json", "index.json")]
    {
        let mut entries: Vec<_> = files
            .iter()
            .map(|(name, content)| (EntryType::Regular, name.as_str(), "", &content[..]))
            .collect();
        entries.push((EntryType::Regular, again, "", files[twice].as_slice()));
        let (state, result) = import_bytes(&archive(&entries));
        assert!(
            matches!(&result, Err(ImageError::Hostile { reason, .. }) if reason.contains("twice")),
            "{result:?}"
        );
        assert!(is_empty(state.path()));
        entries.pop();
        entries.push((EntryType::Symlink, again, "config.json", b""));
        assert!(import_bytes(&archive(&entries)).1.is_err(), "a link in the place of {twice}");
    }
}

#[test]
fn old_docker_save_format_is_imported() {
    let (state, record) = import_bytes(&as_tar(&docker_save(&two_layers())));
    check(state.path(), &record.unwrap());
}

#[test]
fn layer_of_two_images_is_stored_once() {
    let layers = two_layers();
    let state = TempDir::new().unwrap();
    for (name, layers) in [("one", &layers[..]), ("two", &layers[..1])] {
        let (files, _) = layout(layers, &config(layers));
        import_path(state.path(), name, as_directory(&files).path()).unwrap();
    }
    assert_eq!(fs::read_dir(state.path().join("images/layers")).unwrap().count(), 2);
    let (content, entries) = (4 + 4 + 3 + 3 + 4, 10);
    let parents = 7;
    assert_eq!(stored_image_bytes(state.path()).unwrap(), content + (entries + parents) * budget::ENTRY_SIZE);
    remove_image(state.path(), "one").unwrap();
    assert_eq!(fs::read_dir(state.path().join("images/layers")).unwrap().count(), 1);
}

#[test]
fn content_that_does_not_match_its_digest_is_rejected() {
    let layers = two_layers();
    let (files, digest) = layout(&layers, &config(&layers));
    for (name, content) in files.iter().filter(|(name, _)| name.starts_with("blobs/")) {
        let mut changed = files.clone();
        let mut content = content.clone();
        // One more blank: still the same document, and still an archive.
        content.push(b' ');
        changed.insert(name.clone(), content);
        let state = TempDir::new().unwrap();
        let result = import_path(state.path(), "a", as_directory(&changed).path());
        assert!(matches!(result, Err(ImageError::Mismatch(_) | ImageError::Io { .. })), "{name} {result:?}");
        assert!(is_empty(state.path()));
    }
    let wrong = config(&[layers[1].clone(), layers[0].clone()]);
    let (swapped, _) = layout(&layers, &wrong);
    let state = TempDir::new().unwrap();
    let result = import_path(state.path(), "a", as_directory(&swapped).path());
    assert!(matches!(result, Err(ImageError::Mismatch(_))), "{result:?}");
    for (wanted, fits) in [(digest, true), (Digest::of_content(b"another"), false)] {
        let source = ImportSource::open(as_directory(&files).path()).unwrap();
        let import = ImageImport {
            name: "a",
            source,
            wanted: Some(wanted),
            existing: ExistingImagePolicy::Replace,
            most: None,
            below: ImportBase::Nothing,
        };
        let result = import_image(state.path(), import, UnpackMode::InProcess, &mut |_| {});
        assert_eq!(result.is_ok(), fits, "{result:?}");
    }
}

#[test]
fn image_for_another_processor_is_rejected() {
    let layers = two_layers();
    let mut foreign = config(&layers);
    foreign["architecture"] = json!("s390x");
    let (files, _) = layout(&layers, &foreign);
    let state = TempDir::new().unwrap();
    let result = import_path(state.path(), "a", as_directory(&files).path());
    assert!(matches!(result, Err(ImageError::NoPlatform(_))), "{result:?}");
}

#[test]
fn repeated_layers_are_mounted_once() {
    let layers = two_layers();
    let twice = [layers[0].clone(), layers[1].clone(), layers[0].clone()];
    let (files, _) = layout(&twice, &config(&twice));
    let state = TempDir::new().unwrap();
    let record = import_path(state.path(), "a", as_directory(&files).path()).unwrap();
    assert_eq!(record.layers.len(), 3);
    let found = resolve_image(state.path(), &HostImage { trees: Vec::new() }, "a").unwrap();
    assert_eq!(found.trees[0].lowers.len(), 3, "two layers and the base");
    assert_eq!(found.trees[0].lowers[0], tree(state.path(), &record, 0));
}
