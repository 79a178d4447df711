//! Whether this process runs in a container, and which limits the container has.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::cgroups;
use crate::settings::TotalLimits;

/// The inode number that the kernel gives to the initial pid namespace (`PID_NS_INIT_INO` in
/// linux/nsfs.h), and to the initial cgroup namespace.
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;
const INITIAL_CGROUP_NAMESPACE: u64 = 0xEFFF_FFFB;

/// Whether this process runs in a container: with processes or control groups of its own. Files that engines
/// leave, such as `/.dockerenv`, say little: a machine whose disk was made from an image has them too.
pub fn is_in_container() -> bool {
    let own_namespace = |kind: &str, initial: u64| {
        fs::metadata(Path::new("/proc/self/ns").join(kind)).is_ok_and(|facts| facts.ino() != initial)
    };
    own_namespace("pid", INITIAL_PID_NAMESPACE)
        || own_namespace("cgroup", INITIAL_CGROUP_NAMESPACE)
        || cgroups::sees_only_a_part()
}

/// Returns the limits of the container that this process runs in, as far as they are visible; none outside
/// a container. They hold for the server together with its sandboxes.
pub fn container_limits() -> TotalLimits {
    if is_in_container() { cgroups::own_limits() } else { TotalLimits::default() }
}
