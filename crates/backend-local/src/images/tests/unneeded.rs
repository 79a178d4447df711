//! What goes and what stays when nobody needs it.

use std::time::{Duration, SystemTime};

use super::layouts::{as_directory, config, layout, two_layers};
use super::*;

fn add(state: &Path, name: &str, content: &[u8]) -> Record {
    let layers = vec![archive(&[(EntryType::Regular, "usr/file", "", content)])];
    let (files, _) = layout(&layers, &config(&layers));
    take_in(state, name, as_directory(&files).path()).unwrap()
}

/// Writes the record of a sandbox that needs the layers of an image.
fn use_it(state: &Path, record: &Record) -> PathBuf {
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
    assert_eq!(remove(state.path(), "a").unwrap().layers, 0);
    assert!(find(state.path(), "a").unwrap().is_none());
    assert!(tree(state.path(), &record, 0).is_dir());
    fs::remove_file(sandbox).unwrap();
    assert_eq!(collect(state.path(), None).unwrap().bytes, 4 + 2 * budget::ENTRY);
    assert!(is_empty(state.path()));
}

#[test]
fn layers_stay_while_a_snapshot_stands_on_them() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let sandbox = use_it(state.path(), &record);
    fs::create_dir(state.path().join("snapshots")).unwrap();
    let snapshot = state.path().join("snapshots/s.json");
    fs::rename(sandbox, &snapshot).unwrap();
    assert_eq!(remove(state.path(), "a").unwrap().layers, 0);
    assert!(tree(state.path(), &record, 0).is_dir());
    fs::remove_file(snapshot).unwrap();
    assert_eq!(collect(state.path(), None).unwrap().layers, 1);
}

#[test]
fn layers_of_a_snapshot_stay_and_locks_beside_it_are_no_records() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let snapshots = state.path().join("snapshots");
    fs::create_dir_all(&snapshots).unwrap();
    fs::write(snapshots.join("errands"), b"").unwrap();
    let kept = snapshots.join("snapshot.json");
    fs::write(&kept, serde_json::json!({"made_of": {"record": record}}).to_string()).unwrap();
    assert_eq!(remove(state.path(), "a").unwrap().layers, 0);
    fs::remove_file(kept).unwrap();
    assert_eq!(collect(state.path(), None).unwrap().layers, 1);
}

#[test]
fn nothing_goes_while_a_record_cannot_be_read() {
    let state = TempDir::new().unwrap();
    let record = add(state.path(), "a", b"1234");
    let sandbox = use_it(state.path(), &record);
    fs::write(&sandbox, b"{\"boot\": \"b").unwrap();
    assert_eq!(remove(state.path(), "a").unwrap(), Collected::default());
    assert!(tree(state.path(), &record, 0).is_dir());
}

#[test]
fn the_least_recently_used_images_make_room_and_used_ones_stay() {
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
    let one = 8 + 2 * budget::ENTRY;
    assert_eq!(collect(state.path(), Some(4 * one)).unwrap(), Collected::default());
    let gone = collect(state.path(), Some(2 * one)).unwrap();
    assert_eq!(
        (gone.images, gone.layers, gone.bytes),
        (vec!["oldest".to_owned(), "newer".to_owned()], 2, 2 * one)
    );
    let left: Vec<String> = records(state.path()).unwrap().into_iter().map(|(image, _)| image.name).collect();
    assert_eq!(left, ["newest", "used"]);
}

#[test]
fn what_a_killed_import_left_goes_with_the_next_collection() {
    let layers = two_layers();
    let (files, _) = layout(&layers, &config(&layers));
    let state = TempDir::new().unwrap();
    take_in(state.path(), "a", as_directory(&files).path()).unwrap();
    fs::create_dir_all(state.path().join("images/draft/0/usr")).unwrap();
    // Killed after its layers got their names and before it got its own.
    fs::remove_file(state.path().join("images/names/a")).unwrap();
    assert_eq!(collect_if_free(state.path(), None).unwrap().unwrap().layers, 2);
    assert!(is_empty(state.path()));
}

#[test]
fn nobody_waits_for_who_changes_the_images_if_they_do_not_want_to() {
    let state = TempDir::new().unwrap();
    let held = store::Store::open(state.path()).unwrap();
    assert!(collect_if_free(state.path(), None).unwrap().is_none());
    drop(held);
    assert!(collect_if_free(state.path(), None).unwrap().is_some());
}
