//! The resources of the host that this process may give to sandboxes: control groups, disks, ids and
//! networks. Root has all of them, an ordinary user only some.

use std::io;

use domain::{Bytes, SandboxId};
use linux::namespaces::SetgroupsPolicy;

use super::LauncherError;
use super::netns_pool::NetnsPool;
use super::snapshot::SnapshotStore;
use crate::cgroups::CgroupHierarchies;
use crate::jail::plan::LimitName;
use crate::network::uplink::Uplink;
use crate::settings::{LauncherSettings, LifetimePolicy};
use crate::uid_ranges::UidRanges;
use crate::volumes::{self, DiskUsage, PreparedVolume, VolumeStore};

/// The privileges of this process on the host.
pub(super) enum LauncherRights {
    Root(Box<RootState>),
    /// An ordinary user: one id, disks in memory, and control groups only if some were delegated.
    User {
        uid: u32,
        gid: u32,
        groups: Result<Box<CgroupHierarchies>, String>,
    },
}

pub(super) struct RootState {
    pub(super) groups: CgroupHierarchies,
    pub(super) volumes: VolumeStore,
    pub(super) ranges: UidRanges,
    pub(super) netns_pool: NetnsPool,
    pub(super) prepared_disks: Vec<PreparedVolume>,
    pub(super) snapshots: SnapshotStore,
    /// Sandboxes of an earlier launcher, whose inner guards may have other settings. Replacing a guard
    /// takes the kernel a long time, so that is done when the launcher is idle.
    pub(super) outdated_guards: Vec<SandboxId>,
}

/// The limit of prepared volumes; assigning one sets the real limit.
pub(super) const PREPARED_DISK_SIZE: Bytes = Bytes::from_mib(1024);

impl LauncherRights {
    /// Opens the resources of this host. The disks are mounted in this process's mount namespace.
    pub(super) fn open(settings: &LauncherSettings) -> Result<Self, LauncherError> {
        if linux::privileges::is_host_root() {
            return Ok(Self::Root(Box::new(RootState::open(settings)?)));
        }
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let mut groups = open_delegated_groups(settings);
        limit_delegated_total(settings, &mut groups).map_err(LauncherError::TotalLimits)?;
        Ok(Self::User { uid, gid, groups })
    }

    /// Prepares one more net namespace or volume if fewer than `wanted` are available; `true` if more are
    /// missing.
    pub(super) fn refill_prepared(&mut self, wanted: usize) -> io::Result<bool> {
        match self {
            Self::Root(root) => root.refill_prepared(wanted),
            Self::User { .. } => Ok(false),
        }
    }

    /// Whether fewer than half of the `wanted` net namespaces or volumes are available, or a copy of the snapshot that
    /// was restored last is missing.
    pub(super) fn prepared_are_low(&self, wanted: usize) -> bool {
        match self {
            Self::Root(root) => {
                let is_spare_missing = wanted > 0 && root.lacks_spare_disk();
                is_spare_missing || root.netns_pool.ready_count().min(root.prepared_disks.len()) < wanted / 2
            }
            Self::User { .. } => false,
        }
    }

    /// Removes the volumes that were prepared and not used.
    pub(super) fn discard_prepared(&mut self) -> io::Result<()> {
        let Self::Root(root) = self else { return Ok(()) };
        root.discard_spare_disk();
        let mut discarded = Ok(());
        for disk in std::mem::take(&mut root.prepared_disks) {
            discarded = discarded.and(root.volumes.discard(disk).map_err(io::Error::other));
        }
        discarded
    }

    /// Returns the usage of the disk of a sandbox, if it can be read.
    pub(super) fn disk_usage(&self, id: &SandboxId) -> Option<DiskUsage> {
        match self {
            Self::Root(root) => root.volumes.usage(id).ok(),
            Self::User { .. } => None,
        }
    }

    /// Returns a sandbox whose inner guard may have other settings, once.
    pub(super) fn next_outdated_guard(&mut self) -> Option<SandboxId> {
        match self {
            Self::Root(root) => root.outdated_guards.pop(),
            Self::User { .. } => None,
        }
    }

    /// Whether this sandbox has a disk that outlives its processes.
    pub(super) fn has_disk(&self, id: &SandboxId) -> bool {
        match self {
            Self::Root(root) => root.volumes.has_volume(id),
            Self::User { .. } => false,
        }
    }

    /// Whether a client paused the sandbox. One that is frozen only for a snapshot is thawed
    /// automatically.
    pub(super) fn is_paused(&self, id: &SandboxId) -> bool {
        match self {
            Self::Root(root) => root.snapshots.paused_before(id).unwrap_or(true),
            Self::User { .. } => true,
        }
    }

    /// Whether this host enforces a limit for every sandbox.
    pub(super) fn enforces(&self, limit: LimitName) -> bool {
        limit == LimitName::Disk
            || self.groups_for_new().is_some_and(|groups| groups.enforces(limit))
            || (limit == LimitName::Pids && self.bounds_processes_by_rlimit())
    }

    /// Whether RLIMIT_NPROC limits the processes of a sandbox. The kernel counts them for each uid of a
    /// user namespace. An ordinary user's sandbox has one uid and its own namespace, so the count is that
    /// of the sandbox; root's sandboxes have many uids. The kernel exempts the host's root from this limit,
    /// even without capabilities.
    pub(super) fn bounds_processes_by_rlimit(&self) -> bool {
        matches!(self, Self::User { uid, .. } if *uid != 0 || !is_host_uid_zero())
            && !self.groups_for_new().is_some_and(|groups| groups.enforces(LimitName::Pids))
    }

    /// Whether commands can be frozen and thawed.
    pub(super) fn can_freeze(&self) -> bool {
        self.groups_for_new().is_some()
    }

    pub(super) fn was_out_of_memory(&self, id: &SandboxId) -> bool {
        self.groups().is_some_and(|groups| groups.agent_was_killed_for_memory(id))
    }

    /// Returns the processor time that a sandbox has used.
    pub(super) fn cpu_micros(&self, id: &SandboxId) -> Option<u64> {
        self.groups()?.cpu_micros(id)
    }

    /// Whether a process that enters a sandbox may choose its groups.
    pub(super) fn setgroups_policy(&self) -> SetgroupsPolicy {
        match self {
            Self::Root(_) => SetgroupsPolicy::Allow,
            Self::User { .. } => SetgroupsPolicy::Deny,
        }
    }

    /// Returns the control groups that may contain sandboxes.
    pub(super) fn groups(&self) -> Option<&CgroupHierarchies> {
        match self {
            Self::Root(root) => Some(&root.groups),
            Self::User { groups, .. } => groups.as_deref().ok(),
        }
    }

    /// Returns the control groups in which a new sandbox can get its own.
    pub(super) fn groups_for_new(&self) -> Option<&CgroupHierarchies> {
        self.groups().filter(|groups| groups.can_make())
    }

    /// Returns why an ordinary user's control groups do not enforce all limits.
    pub(super) fn unenforced_reason(&self) -> Option<&str> {
        match self {
            Self::Root(_) => None,
            Self::User { groups: Ok(groups), .. } => groups.unenforced_reason(),
            Self::User { groups: Err(reason), .. } => Some(reason),
        }
    }
}

impl RootState {
    fn open(settings: &LauncherSettings) -> Result<Self, LauncherError> {
        let mut groups =
            CgroupHierarchies::find_for_root(&settings.instance).map_err(LauncherError::Groups)?;
        let kept = volumes::VolumeStoreSettings {
            kind: settings.disks,
            pool: settings.pool_bytes.map(Bytes),
            floor: Bytes(settings.free_space_floor),
            ..volumes::VolumeStoreSettings::default()
        };
        let turn = crate::backup::wait_for_backup(&settings.state_dir).map_err(|source| {
            LauncherError::Io { action: "lock", path: settings.state_dir.clone(), source }
        })?;
        let mut volumes = VolumeStore::open(&settings.state_dir.join("disk"), kept)?;
        drop(turn);
        let snapshots = SnapshotStore::open(settings, &groups, &mut volumes)?;
        let ranges =
            UidRanges::open(&settings.state_dir.join("ranges"), &settings.instance, settings.uid_base)?;
        let uplink = Uplink::new(settings.network.clone(), &settings.instance);
        let nets = NetnsPool::open(settings.prepared, uplink).map_err(LauncherError::Net)?;
        // Last, because the groups would not be removed if something else failed.
        groups.open().map_err(LauncherError::Groups)?;
        if settings.lifetime == LifetimePolicy::Own {
            leave_starter_groups(&mut groups).map_err(LauncherError::Groups)?;
            if let Err(error) = groups.limit_total(&settings.totals) {
                groups.close().map_err(LauncherError::Groups)?;
                return Err(LauncherError::TotalLimits(error));
            }
        }
        Ok(Self {
            groups,
            volumes,
            ranges,
            netns_pool: nets,
            prepared_disks: Vec::new(),
            snapshots,
            outdated_guards: Vec::new(),
        })
    }

    fn refill_prepared(&mut self, wanted: usize) -> io::Result<bool> {
        if self.netns_pool.uplink.drop_stale_connections()? || self.netns_pool.refill()? {
            return Ok(true);
        }
        if self.prepared_disks.len() < wanted {
            let disk = self.volumes.prepare(PREPARED_DISK_SIZE).map_err(io::Error::other)?;
            self.prepared_disks.push(disk);
        }
        Ok(self.prepared_disks.len() < wanted)
    }
}

/// Moves to our own groups, so that ending what started the server does not end its sandboxes.
fn leave_starter_groups(groups: &mut CgroupHierarchies) -> io::Result<()> {
    for (hierarchy, error) in groups.leave_starter_groups()? {
        tracing::warn!(
            hierarchy = %hierarchy.display(), %error,
            "failed to leave the control group in which the server was started; sandboxes are frozen or ended \
             with it"
        );
    }
    Ok(())
}

/// Opens the control groups that were delegated to an ordinary user, or returns why there are none.
fn open_delegated_groups(settings: &LauncherSettings) -> Result<Box<CgroupHierarchies>, String> {
    let open = || {
        let mut groups = CgroupHierarchies::find_delegated(&settings.instance, &settings.state_dir)?;
        groups.save_group_roots(&settings.state_dir)?;
        groups.open()?;
        Ok(Box::new(groups))
    };
    open().map_err(|error: io::Error| error.to_string())
}

/// Limits all sandboxes of an ordinary user's server together.
fn limit_delegated_total(
    settings: &LauncherSettings,
    groups: &mut Result<Box<CgroupHierarchies>, String>,
) -> io::Result<()> {
    if settings.lifetime != LifetimePolicy::Own {
        return Ok(());
    }
    match groups {
        Ok(groups) if groups.can_make() => match groups.limit_total(&settings.totals) {
            Err(error) => groups.close().and(Err(error)),
            limited => limited,
        },
        Ok(_) | Err(_) => match settings.totals.first_of_operator() {
            Some(limit) => {
                let message = format!("no control group enforces `limits.total_{}`", limit.as_str());
                Err(io::Error::new(io::ErrorKind::Unsupported, message))
            }
            None => Ok(()),
        },
    }
}

/// Whether uid 0 of this process may be that of the host. In a user namespace it is another uid there, unless its
/// map says the same number.
fn is_host_uid_zero() -> bool {
    // If the map cannot be read, the limit does not count as enforced.
    std::fs::read_to_string("/proc/self/uid_map").map_or(true, |map| maps_zero_to_zero(&map))
}

fn maps_zero_to_zero(map: &str) -> bool {
    map.lines().any(|line| line.split_whitespace().take(2).eq(["0", "0"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uid_zero_of_a_namespace_with_other_uids_is_not_that_of_the_host() {
        assert!(maps_zero_to_zero("         0          0 4294967295\n"));
        assert!(!maps_zero_to_zero("         0       1000          1\n"));
        assert!(!maps_zero_to_zero("         1     100000      65536\n         0       1000          1\n"));
    }
}
