//! What one state directory holds on the host, as sets.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use e2e::host::Host;

/// A look at everything that mentions a state directory or the instance behind it.
#[derive(Debug)]
pub(crate) struct Remains {
    host: Host,
    /// Whether the packet filter of the instance is there.
    filter: bool,
    files: BTreeSet<PathBuf>,
}

impl Remains {
    fn look(state: &Path, instance: &str) -> Self {
        let words = [state.display().to_string(), format!("/coracle/{instance}")];
        let mut files = BTreeSet::new();
        collect(state, 3, &mut files);
        let filter = linux::netlink::filter::table_exists(&format!("coracle-{instance}")).unwrap_or(false);
        Self { host: Host::look(state).mentioning(&words), filter, files }
    }

    /// A look after everything has ended: the kernel lets go of disks a moment later.
    pub(crate) fn at_rest(state: &Path, instance: &str) -> Self {
        let mut look = Self::look(state, instance);
        e2e::eventually("the disks are let go", || {
            look = Self::look(state, instance);
            look.host.loop_devices.is_empty() && look.host.mounts.is_empty()
        });
        look
    }

    /// Waits until all is as it was when this look was taken.
    pub(crate) fn wait_for(&self, state: &Path, instance: &str) {
        let mut differences = Vec::new();
        let same = e2e::happens(|| {
            differences = Self::look(state, instance).differences(self);
            differences.is_empty()
        });
        assert!(same, "not as before: {differences:#?}");
    }

    /// What is in one of two looks and not in the other.
    fn differences(&self, before: &Self) -> Vec<String> {
        let more = self.host.left_since(&before.host).into_iter().map(|line| format!("left: {line}"));
        let less = before.host.left_since(&self.host).into_iter().map(|line| format!("lost: {line}"));
        let files = self.files.symmetric_difference(&before.files);
        let filter = (self.filter != before.filter).then(|| format!("packet filter: {}", self.filter));
        more.chain(less).chain(filter).chain(files.map(|path| format!("file: {}", path.display()))).collect()
    }
}

/// Volumes that belong to a sandbox, and snapshots of them, in the mount namespace of the launcher.
pub(crate) fn volumes(launcher: u32, state: &Path) -> Vec<String> {
    let below = state.strip_prefix("/").expect("a state directory is absolute");
    let pool = Path::new("/proc").join(launcher.to_string()).join("root").join(below).join("disk/pool");
    let entries = fs::read_dir(&pool).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| !name.starts_with("prepared-")).collect()
}

/// The rows of the database, of sandboxes and of snapshots.
pub(super) fn rows(state: &Path) -> i64 {
    let database = rusqlite::Connection::open(state.join("server/coracle.db")).expect("there is a database");
    database
        .query_row("SELECT (SELECT count(*) FROM sandboxes) + (SELECT count(*) FROM snapshots)", [], |row| {
            row.get(0)
        })
        .expect("there are tables of both")
}

fn collect(directory: &Path, depth: usize, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if depth > 1 && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), depth - 1, found);
        }
        found.insert(entry.path());
    }
}
