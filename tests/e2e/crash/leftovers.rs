//! The host resources that belong to one state directory, as sets.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use e2e::host::HostState;

/// All host resources that mention a state directory or its instance.
#[derive(Debug)]
pub(crate) struct HostLeftovers {
    host: HostState,
    /// Whether the packet filter of the instance exists.
    filter: bool,
    files: BTreeSet<PathBuf>,
}

impl HostLeftovers {
    fn capture(state: &Path, instance: &str) -> Self {
        let words = [state.display().to_string(), format!("/coracle/{instance}")];
        let mut files = BTreeSet::new();
        collect(state, 3, &mut files);
        let filter =
            linux::netlink::nftables::table_exists(&filter_table(state)).expect("filters can be read");
        Self { host: HostState::capture(state).mentioning(&words), filter, files }
    }

    /// Takes the snapshot after everything has ended. The kernel releases disks and removes network
    /// namespaces with their links some time after the last process that used them has ended. A link that
    /// still exists now would be missed at the end of the test.
    pub(crate) fn at_rest(state: &Path, instance: &str) -> Self {
        let mut look = Self::capture(state, instance);
        e2e::eventually("disks and links are released", || {
            look = Self::capture(state, instance);
            let host = &look.host;
            host.loop_devices.is_empty() && host.mounts.is_empty() && host.links.is_empty()
        });
        look
    }

    /// Waits until the host state equals this one.
    pub(crate) fn wait_for(&self, state: &Path, instance: &str) {
        let mut differences = Vec::new();
        let same = e2e::happens(|| {
            differences = Self::capture(state, instance).differences(self);
            differences.is_empty()
        });
        assert!(same, "the host differs from before: {differences:#?}");
    }

    /// The items that are in only one of the two snapshots.
    fn differences(&self, before: &Self) -> Vec<String> {
        let more = self.host.added_since(&before.host).into_iter().map(|line| format!("left: {line}"));
        let less = before.host.added_since(&self.host).into_iter().map(|line| format!("lost: {line}"));
        let files = self.files.symmetric_difference(&before.files);
        let filter = (self.filter != before.filter).then(|| format!("packet filter: {}", self.filter));
        more.chain(less).chain(filter).chain(files.map(|path| format!("file: {}", path.display()))).collect()
    }
}

/// The packet filter is named after the identity of the state directory of a server, or of `coracle run`.
fn filter_table(state: &Path) -> String {
    let file = fs::read(state.join("identity")).or_else(|_| fs::read(state.join("oneshot/identity")));
    let file = file.expect("a state directory has an identity");
    let identity: serde_json::Value = serde_json::from_slice(&file).expect("the identity is JSON");
    format!("coracle-{}", identity["instance"].as_str().expect("the instance is a text"))
}

/// Volumes that belong to a sandbox, and snapshots of them, in the mount namespace of the launcher.
pub(crate) fn volumes(launcher: u32, state: &Path) -> Vec<String> {
    let below = state.strip_prefix("/").expect("a state directory is absolute");
    let pool = Path::new("/proc").join(launcher.to_string()).join("root").join(below).join("disk/pool");
    let entries = fs::read_dir(&pool).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with("prepared-")).collect()
}

/// Waits until no sandbox has a volume. A create that was cut off is undone in the background, so its
/// volume may be there for a moment after the sandbox has left the list.
pub(super) fn wait_for_no_volumes(launcher: u32, state: &Path) {
    let mut left = Vec::new();
    let empty = e2e::happens(|| {
        left = volumes(launcher, state);
        left.is_empty()
    });
    assert!(empty, "volumes are left: {left:?}");
}

/// The rows of the database, of sandboxes, of keys that lead to one, and of snapshots.
pub(super) fn count_rows(state: &Path) -> i64 {
    let database = rusqlite::Connection::open(state.join("server/coracle.db")).expect("there is a database");
    database
        .query_row(
            "SELECT (SELECT count(*) FROM sandboxes) + (SELECT count(*) FROM keys) \
             + (SELECT count(*) FROM snapshots)",
            [],
            |row| row.get(0),
        )
        .expect("there are tables of all")
}

fn collect(directory: &Path, depth: usize, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if depth > 1 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), depth - 1, found);
        }
        found.insert(entry.path());
    }
}
