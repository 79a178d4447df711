//! Collection of unneeded images and layers.

use std::time::{Duration, SystemTime};

use super::layouts::{as_directory, config, layout, two_layers};
use super::*;

fn add(state: &Path, name: &str, content: &[u8]) -> ImageRecord {
    add_within(state, name, content, None).unwrap().record
}

/// Like [`add`], with a limit of `most` bytes for all images together.
fn add_within(
    state: &Path,
    name: &str,
    content: &[u8],
    most: Option<u64>,
) -> Result<ImportedImage, ImageError> {
    let layers = vec![archive(&[(EntryType::Regular, "usr/file", "", content)])];
    let (files, _) = layout(&layers, &config(&layers));
    let source = ImportSource::open(as_directory(&files).path())?;
    let import = ImageImport {
        name,
        source,
        wanted: None,
        existing: ExistingImagePolicy::Replace,
        most,
        below: ImportBase::Nothing,
    };
    import_image(state, import, UnpackMode::InProcess, &mut |_| {})
}

fn listed(state: &Path) -> Vec<String> {
    list_images(state).unwrap().into_iter().map(|(image, _)| image.name).collect()
}

/// Writes the record of a sandbox that needs the layers of an image.
fn use_it(state: &Path, record: &ImageRecord) -> PathBuf {
    let boxes = state.join("boxes");
    fs::create_dir_all(&boxes).unwrap();
    let path = boxes.join("sandbox");
    fs::write(&path, serde_json::json!({"boot": "b", "made_of": {"record": record}}).to_string()).unwrap();
    path
}

#[test]
fn layers_of_a_removed_image_stay_while_a_sandbox_needs_them() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let sandbox = use_it(state.path(), &record);
    assert_eq!(remove_image(state.path(), "a").unwrap().layers, 0);
    assert!(find_image(state.path(), "a").unwrap().is_none());
    assert!(tree(state.path(), &record, 0).is_dir());
    fs::remove_file(sandbox).unwrap();
    assert_eq!(collect_images(state.path(), None).unwrap().bytes, 4 + 2 * budget::ENTRY_SIZE);
    assert!(is_empty(state.path()));
}

#[test]
fn layers_stay_while_a_snapshot_needs_them() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let sandbox = use_it(state.path(), &record);
    fs::create_dir(state.path().join("snapshots")).unwrap();
    let snapshot = state.path().join("snapshots/s.json");
    fs::rename(sandbox, &snapshot).unwrap();
    assert_eq!(remove_image(state.path(), "a").unwrap().layers, 0);
    assert!(tree(state.path(), &record, 0).is_dir());
    fs::remove_file(snapshot).unwrap();
    assert_eq!(collect_images(state.path(), None).unwrap().layers, 1);
}

#[test]
fn layers_of_a_snapshot_stay_and_lock_files_are_ignored() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let snapshots = state.path().join("snapshots");
    fs::create_dir_all(&snapshots).unwrap();
    fs::write(snapshots.join("errands"), b"").unwrap();
    let kept = snapshots.join("snapshot.json");
    fs::write(&kept, serde_json::json!({"made_of": {"record": record}}).to_string()).unwrap();
    assert_eq!(remove_image(state.path(), "a").unwrap().layers, 0);
    fs::remove_file(kept).unwrap();
    assert_eq!(collect_images(state.path(), None).unwrap().layers, 1);
}

#[test]
fn unreadable_record_prevents_collection() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let sandbox = use_it(state.path(), &record);
    fs::write(&sandbox, b"{\"boot\": \"b").unwrap();
    assert_eq!(remove_image(state.path(), "a").unwrap(), CollectionResult::default());
    assert!(tree(state.path(), &record, 0).is_dir());
}

#[test]
fn least_recently_used_images_are_removed_and_used_ones_stay() {
    let state = TempDir::new().unwrap();
    let names = ["oldest", "used", "newer", "newest"];
    for (age, name) in names.iter().enumerate() {
        let record = add(state.path(), name, format!("{name:8}").as_bytes());
        let path = state.path().join("images/names").join(name);
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 + age as u64);
        fs::File::open(path).unwrap().set_modified(used).unwrap();
        if *name == "used" {
            use_it(state.path(), &record);
        }
    }
    let one = 8 + 2 * budget::ENTRY_SIZE;
    assert_eq!(collect_images(state.path(), Some(4 * one)).unwrap(), CollectionResult::default());
    let gone = collect_images(state.path(), Some(2 * one)).unwrap();
    assert_eq!(
        (gone.images, gone.layers, gone.bytes),
        (vec!["oldest".to_owned(), "newer".to_owned()], 2, 2 * one)
    );
    assert_eq!(listed(state.path()), ["newest", "used"]);
}

#[test]
fn new_image_is_not_removed_for_itself() {
    let state = TempDir::new().unwrap();
    let one = 8 + 2 * budget::ENTRY_SIZE;
    add(state.path(), "old", b"12345678");
    // As if the clock had been set back: the new image appears older.
    let later = SystemTime::now() + Duration::from_secs(3600);
    fs::File::open(state.path().join("images/names/old")).unwrap().set_modified(later).unwrap();
    let made = add_within(state.path(), "new", b"abcdefgh", Some(one)).unwrap();
    assert_eq!(made.gone.images, ["old"]);
    assert_eq!(listed(state.path()), ["new"]);
    assert!(tree(state.path(), &made.record, 0).is_dir());
}

#[test]
fn image_that_does_not_fit_is_rejected_and_changes_nothing() {
    let state = TempDir::new().unwrap();
    let one = 8 + 2 * budget::ENTRY_SIZE;
    let used = add(state.path(), "used", b"12345678");
    use_it(state.path(), &used);
    add(state.path(), "new", b"as it is");
    let before = space_for_image(state.path(), Some(2 * one), "new").unwrap();
    assert_eq!(before, Some(one), "unused and replaced images count as free space");
    let result = add_within(state.path(), "new", b"one byte ", Some(2 * one));
    assert!(matches!(result, Err(ImageError::TooLarge(budget::LIMIT_BESIDE_USED_IMAGES))), "{result:?}");
    assert_eq!(
        find_image(state.path(), "new").unwrap().unwrap().bytes(),
        one,
        "the old image is still there"
    );
    assert_eq!(list_layers(state.path()).unwrap().len(), 2);
    add_within(state.path(), "again", b"12345678", Some(one))
        .expect("layers in use need no additional space");
    assert_eq!(listed(state.path()), ["again", "used"]);
}

#[test]
fn leftovers_of_a_killed_import_are_collected() {
    let layers = two_layers();
    let (files, _) = layout(&layers, &config(&layers));
    let state = TempDir::new().unwrap();
    import_path(state.path(), "a", as_directory(&files).path()).unwrap();
    fs::create_dir_all(state.path().join("images/draft/0/usr")).unwrap();
    // Killed after its layers were named and before the image was named.
    fs::remove_file(state.path().join("images/names/a")).unwrap();
    assert_eq!(collect_images_if_unlocked(state.path(), None).unwrap().unwrap().layers, 2);
    assert!(is_empty(state.path()));
}

#[test]
fn collect_if_free_does_not_wait_for_the_lock() {
    let state = TempDir::new().unwrap();
    let held = store::ImageStore::open(state.path()).unwrap();
    assert!(collect_images_if_unlocked(state.path(), None).unwrap().is_none());
    drop(held);
    assert!(collect_images_if_unlocked(state.path(), None).unwrap().is_some());
}
