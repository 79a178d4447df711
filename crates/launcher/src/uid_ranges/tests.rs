//! Ranges, alone and beside other state directories.
#![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::os::unix::ffi::OsStrExt;

use tempfile::TempDir;

use super::*;
use crate::ids::test_id;

const FEW: u32 = 64;
const BASE: u32 = DEFAULT_UID_BASE;

/// Opens a state directory that also holds the claims of the host.
fn open(state: &TempDir) -> UidRanges {
    open_on(state, state)
}

fn open_on(host: &TempDir, state: &TempDir) -> UidRanges {
    let (ranges, host) = (state.path().join("ranges"), host.path().join("uids"));
    UidRanges::open_beside(&ranges, &name_of(state), &host, BASE, FEW, Vec::new()).unwrap()
}

/// Returns a distinct identity for each directory.
fn name_of(state: &TempDir) -> String {
    state.path().file_name().unwrap().to_str().unwrap().to_owned()
}

/// Allocates all ranges that this state directory can get.
fn take_all(ranges: &mut UidRanges, name: &str) -> BTreeSet<u32> {
    let all = (0..).map(|number| ranges.allocate(&test_id(&format!("{name}{number}"))));
    all.map_while(Result::ok).map(|range| range.first).collect()
}

#[test]
fn two_state_directories_never_share_a_range() {
    let (host, one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut first, mut second) = (open_on(&host, &one), open_on(&host, &two));
    let a = first.allocate(&test_id("a")).unwrap();
    let taken = take_all(&mut second, "b");
    assert!((31..=32).contains(&taken.len()), "one of the two blocks is left for the second: {taken:?}");
    assert!(!taken.contains(&a.first));
}

#[test]
fn unaligned_base_does_not_share_ranges_either() {
    let (host, one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let taken = take_all(&mut open_on(&host, &one), "a");
    let (ranges, uids) = (two.path().join("ranges"), host.path().join("uids"));
    let mut second = UidRanges::open_beside(&ranges, "other", &uids, BASE - 5, FEW, Vec::new()).unwrap();
    assert_eq!(taken.len(), FEW as usize - 1);
    second.allocate(&test_id("b")).unwrap_err();
}

#[test]
fn claims_of_a_killed_launcher_are_freed_with_its_sandboxes() {
    let (host, one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let taken = take_all(&mut open_on(&host, &one), "a");
    open_on(&host, &two).allocate(&test_id("b")).expect_err("the sandboxes of the killed launcher still run");
    let mut first = open_on(&host, &one);
    for number in 0..taken.len() {
        first.release(&test_id(&format!("a{number}"))).unwrap();
    }
    first.allocate(&test_id("new")).unwrap();
    drop(first);
    let mut second = open_on(&host, &two);
    let before = take_all(&mut second, "b").len();
    assert!((31..=32).contains(&before), "all but the block of the last one: {before}");
    drop(one);
    let after = take_all(&mut second, "c").len();
    assert_eq!(before + after, taken.len(), "a state directory that is gone uses nothing");
}

#[test]
fn claims_of_a_running_launcher_are_not_taken_over() {
    let (host, one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut first = open_on(&host, &one);
    let a = first.allocate(&test_id("a")).unwrap();
    first.release(&test_id("a")).unwrap();
    let taken = take_all(&mut open_on(&host, &two), "b");
    assert!(!taken.contains(&a.first));
    first.allocate(&test_id("a")).unwrap();
}

#[test]
fn ranges_of_a_former_base_stay_taken_while_their_sandboxes_run() {
    let state = TempDir::new().unwrap();
    let old = open(&state).allocate(&test_id("a")).unwrap();
    let (ranges, uids) = (state.path().join("ranges"), state.path().join("uids"));
    let mut moved =
        UidRanges::open_beside(&ranges, &name_of(&state), &uids, BASE - 5, FEW, Vec::new()).unwrap();
    let taken = take_all(&mut moved, "b");
    assert!(taken.iter().all(|first| first.abs_diff(old.first) >= IDS_PER_RANGE), "{old:?} {taken:?}");
    assert!(taken.len() > 32);
}

#[test]
fn no_two_sandboxes_share_a_range_until_all_are_taken() {
    let directory = TempDir::new().unwrap();
    let mut ranges = open(&directory);
    let mut seen = BTreeSet::new();
    for number in 1..FEW {
        let range = ranges.allocate(&test_id(&format!("s{number}"))).unwrap();
        assert!(range.index > 0 && seen.insert(range.first));
    }
    assert!(matches!(ranges.allocate(&test_id("more")), Err(UidRangeError::Exhausted)));
    ranges.release(&test_id("s7")).unwrap();
    ranges.allocate(&test_id("more")).unwrap();
}

#[test]
fn recorded_range_is_found_after_reopening() {
    let directory = TempDir::new().unwrap();
    let range = open(&directory).allocate(&test_id("a")).unwrap();
    let other = range.index % (FEW - 2) + 1;
    fs::write(directory.path().join("ranges").join(other.to_string()), "").unwrap();
    let mut again = open(&directory);
    assert_eq!(again.range_of(&test_id("a")), Some(range));
    assert_eq!(again.allocate(&test_id("a")).unwrap(), range);
    again.release(&test_id("a")).unwrap();
    again.release(&test_id("a")).unwrap();
    assert_eq!(fs::read_dir(directory.path().join("ranges")).unwrap().count(), 0);
}

#[test]
fn freed_range_is_not_reused_at_once() {
    let directory = TempDir::new().unwrap();
    let mut ranges = open(&directory);
    let first = ranges.allocate(&test_id("a")).unwrap();
    ranges.release(&test_id("a")).unwrap();
    assert_ne!(ranges.allocate(&test_id("b")).unwrap(), first);
}

#[test]
fn subordinate_ids_of_users_are_not_allocated() {
    let directory = TempDir::new().unwrap();
    let text =
        format!("# none\nann:{}:{}\nbob:100000:65536\nbroken\n", BASE + IDS_PER_RANGE + 5, IDS_PER_RANGE);
    let given = parse_subordinate_ids(&text);
    assert_eq!(given.len(), 2);
    let path = directory.path();
    let mut ranges =
        UidRanges::open_beside(&path.join("ranges"), "i", &path.join("uids"), BASE, FEW, given).unwrap();
    let indexes: Vec<u32> =
        (3..FEW).map(|n| ranges.allocate(&test_id(&format!("s{n}"))).unwrap().index).collect();
    assert!(!indexes.contains(&1) && !indexes.contains(&2));
    assert!(matches!(ranges.allocate(&test_id("more")), Err(UidRangeError::Exhausted)));
}

#[test]
fn base_without_room_for_all_ranges_is_refused() {
    let directory = TempDir::new().unwrap();
    let (ranges, uids) = (directory.path().join("ranges"), directory.path().join("uids"));
    let open =
        |base, given: &[(u64, u64)]| UidRanges::open_beside(&ranges, "i", &uids, base, FEW, given.to_vec());
    assert!(matches!(open(u32::MAX - 5, &[]), Err(UidRangeError::BadBase(_))));
    assert!(matches!(open(0, &[]), Err(UidRangeError::BadBase(_))));
    let all = [(u64::from(BASE), 1)];
    assert!(matches!(open(BASE, &all), Err(UidRangeError::ServerBlocked(_))));
}

#[test]
fn claims_follow_a_renamed_state_directory() {
    let (host, parent) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (before, after) = (parent.path().join("a"), parent.path().join("b"));
    let uids = host.path().join("uids");
    let open = |state: &Path, name| {
        UidRanges::open_beside(&state.join("ranges"), name, &uids, BASE, FEW, Vec::new()).unwrap()
    };
    let a = open(&before, "one").allocate(&test_id("a")).unwrap();
    fs::rename(&before, &after).unwrap();
    drop(open(&after, "one"));
    let taken = take_all(&mut open(&before, "two"), "b");
    assert!(!taken.contains(&a.first), "the renamed directory still has a sandbox there");
    assert_eq!(open(&after, "one").range_of(&test_id("a")), Some(a));
}

#[test]
fn servers_with_equal_paths_are_distinguished_by_identity() {
    let (host, one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    // The rename imitates two mount namespaces with different directories at one path.
    let uids = host.path().join("uids");
    let path = host.path().join("state");
    let open =
        |name| UidRanges::open_beside(&path.join("ranges"), name, &uids, BASE, FEW, Vec::new()).unwrap();
    fs::rename(one.path(), &path).unwrap();
    let mut first = open("one");
    let a = first.allocate(&test_id("a")).unwrap();
    fs::rename(&path, one.path()).unwrap();
    fs::rename(two.path(), &path).unwrap();
    let taken = take_all(&mut open("two"), "b");
    assert!(!taken.contains(&a.first));
}

#[test]
fn claim_of_an_older_version_is_recognised_by_its_path() {
    let state = TempDir::new().unwrap();
    let a = open(&state).allocate(&test_id("a")).unwrap();
    let (uids, ranges) = (state.path().join("uids"), state.path().join("ranges"));
    for entry in fs::read_dir(&uids).unwrap() {
        let path = entry.unwrap().path();
        if !path.ends_with("lock") {
            fs::write(path, ranges.as_os_str().as_bytes()).unwrap();
        }
    }
    assert_eq!(open(&state).allocate(&test_id("a")).unwrap(), a);
    let other = TempDir::new().unwrap();
    let taken = take_all(&mut open_on(&state, &other), "b");
    assert!(!taken.contains(&a.first));
}
