//! The limits of the groups that this process is in.

use std::fs;
use std::path::{Path, PathBuf};

use super::mount_table::{self, CgroupMount};
use crate::settings::{TotalLimit, TotalLimits, TotalOrigin};

/// v1 shows a limit that nobody set as a number near this one.
const UNLIMITED_LEGACY_MEMORY: u64 = 1 << 62;

/// Whether only a part of a hierarchy is visible, as in a container without a cgroup namespace.
pub(crate) fn sees_only_a_part() -> bool {
    mount_table::read_cgroup_mounts()
        .is_ok_and(|mounts| mounts.iter().any(|mount| !mount.shows_whole_hierarchy()))
}

/// Returns the smallest limits of this process's groups and of the visible groups above them.
pub(crate) fn own_limits() -> TotalLimits {
    let Ok(mounts) = mount_table::read_cgroup_mounts() else { return TotalLimits::default() };
    let groups = OwnGroups { own: fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), mounts };
    let total = |amount: u64| TotalLimit { amount, origin: TotalOrigin::Container };
    TotalLimits {
        memory: groups.smallest("memory", unified_memory, legacy_memory).map(total),
        cpus: groups.smallest("cpu", unified_cpus, legacy_cpus).map(total),
        pids: groups.smallest("pids", pids, pids).map(total),
    }
}

struct OwnGroups {
    /// The text of `/proc/self/cgroup`.
    own: String,
    mounts: Vec<CgroupMount>,
}

impl OwnGroups {
    /// Returns the smallest value that `unified` or `legacy` reads in one of our groups.
    fn smallest(
        &self,
        controller: &str,
        unified: fn(&Path) -> Option<u64>,
        legacy: fn(&Path) -> Option<u64>,
    ) -> Option<u64> {
        let in_mount = |mount: &CgroupMount| {
            let (group, read) = match mount.kind.as_str() {
                "cgroup2" => (mount.parse_own_group(&self.own)?, unified),
                _ if mount.has_option(controller) => (mount.parse_own_legacy_group(&self.own)?, legacy),
                _ => return None,
            };
            let visible = group.ancestors().take_while(|above| above.starts_with(&mount.path));
            visible.filter_map(read).min()
        };
        self.mounts.iter().filter_map(in_mount).min()
    }
}

fn read(group: &Path, name: &str) -> Option<String> {
    let path: PathBuf = group.join(name);
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn unified_memory(group: &Path) -> Option<u64> {
    read(group, "memory.max")?.parse().ok()
}

fn legacy_memory(group: &Path) -> Option<u64> {
    let bytes: u64 = read(group, "memory.limit_in_bytes")?.parse().ok()?;
    (bytes < UNLIMITED_LEGACY_MEMORY).then_some(bytes)
}

/// Thousandths of a core.
fn unified_cpus(group: &Path) -> Option<u64> {
    let text = read(group, "cpu.max")?;
    let (quota, period) = text.split_once(' ')?;
    cpu_share(quota.parse().ok()?, period.parse().ok()?)
}

fn legacy_cpus(group: &Path) -> Option<u64> {
    // Without a limit the quota is -1.
    let quota: u64 = read(group, "cpu.cfs_quota_us")?.parse().ok()?;
    cpu_share(quota, read(group, "cpu.cfs_period_us")?.parse().ok()?)
}

fn cpu_share(quota: u64, period: u64) -> Option<u64> {
    quota.checked_mul(1000)?.checked_div(period).filter(|share| *share > 0)
}

fn pids(group: &Path) -> Option<u64> {
    read(group, "pids.max")?.parse().ok()
}
