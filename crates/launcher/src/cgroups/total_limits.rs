//! Limits over all sandboxes of a server together, on the group of this instance.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::limits::{CPU_PERIOD_MICROS, cpu_quota};
use super::{CgroupController, CgroupHierarchies, ROOT_GROUP_NAME, write_if_present};
use crate::jail::plan::LimitName;
use crate::settings::{TotalLimit, TotalLimits, TotalOrigin};

impl CgroupHierarchies {
    /// Sets the limits of all sandboxes together, and removes those that an earlier start has set. Fails
    /// with `Unsupported` if the operator asked for a limit that no group here enforces.
    pub(crate) fn limit_total(&mut self, totals: &TotalLimits) -> io::Result<()> {
        for limit in [LimitName::Memory, LimitName::Cpus, LimitName::Pids] {
            let total = totals.get(limit);
            let Some(group) = self.instance_group(limit) else {
                match total {
                    Some(TotalLimit { origin: TotalOrigin::Operator, .. }) => {
                        let message = format!("no control group enforces `limits.total_{}`", limit.as_str());
                        return Err(io::Error::new(io::ErrorKind::Unsupported, message));
                    }
                    // The container itself enforces its limits.
                    Some(_) | None => continue,
                }
            };
            let amount = total.map(|total| total.amount);
            match limit {
                LimitName::Memory => self.limit_total_memory(&group, amount)?,
                LimitName::Cpus => self.limit_total_cpus(&group, amount)?,
                LimitName::Pids => self.limit_total_pids(&group, amount)?,
                LimitName::Disk => {}
            }
        }
        self.total_cpus = totals.cpus.and_then(|total| u32::try_from(total.amount).ok());
        Ok(())
    }

    /// Returns the group of this instance in the hierarchy that enforces `limit`.
    fn instance_group(&self, limit: LimitName) -> Option<PathBuf> {
        let root = match self.controller_for(limit) {
            CgroupController::Unified => &self.unified,
            CgroupController::Legacy(root) => root,
            CgroupController::Absent => return None,
        };
        Some(root.join(ROOT_GROUP_NAME).join(&self.instance))
    }

    fn limit_total_memory(&self, group: &Path, bytes: Option<u64>) -> io::Result<()> {
        if self.memory == CgroupController::Unified {
            fs::write(group.join("memory.max"), bytes.map_or("max".to_owned(), |bytes| bytes.to_string()))?;
            // Swap would let sandboxes use more than the limit; the file is absent without swap accounting.
            return write_if_present(
                &group.join("memory.swap.max"),
                if bytes.is_some() { "0" } else { "max" },
            );
        }
        let text = bytes.map_or("-1".to_owned(), |bytes| bytes.to_string());
        // The limit on memory with swap must never be below the limit on memory.
        let with_swap = group.join("memory.memsw.limit_in_bytes");
        write_if_present(&with_swap, "-1")?;
        fs::write(group.join("memory.limit_in_bytes"), &text)?;
        write_if_present(&with_swap, &text)
    }

    fn limit_total_cpus(&self, group: &Path, cpus: Option<u64>) -> io::Result<()> {
        let quota = cpus.map(|cpus| cpu_quota(u32::try_from(cpus).unwrap_or(u32::MAX)));
        if self.cpu == CgroupController::Unified {
            let quota = quota.map_or("max".to_owned(), |quota| quota.to_string());
            return fs::write(group.join("cpu.max"), format!("{quota} {CPU_PERIOD_MICROS}"));
        }
        let file = group.join("cpu.cfs_quota_us");
        let Some(quota) = quota else { return fs::write(file, "-1") };
        match fs::write(&file, quota.to_string()) {
            // On v1 a group cannot have more than the one above it, and a sandbox of an earlier start has.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                lower_cpu_quotas(group, quota)?;
                fs::write(file, quota.to_string())
            }
            other => other,
        }
    }

    fn limit_total_pids(&self, group: &Path, count: Option<u64>) -> io::Result<()> {
        let ceiling = pids_ceiling()?;
        fs::write(group.join("pids.max"), count.map_or(ceiling, |count| count.min(ceiling)).to_string())
    }
}

/// One of this many processes is left for the host.
const HOST_PIDS_SHARE: u64 = 8;

/// Returns how many processes all sandboxes together may have, so that some are left for the host.
pub(super) fn pids_ceiling() -> io::Result<u64> {
    let most = fs::read_to_string("/proc/sys/kernel/pid_max")?;
    let most: u64 = most.trim().parse().map_err(io::Error::other)?;
    Ok(most - most / HOST_PIDS_SHARE)
}

/// Lowers the quotas of all sandboxes in a v1 group to `quota`.
fn lower_cpu_quotas(group: &Path, quota: u64) -> io::Result<()> {
    for entry in fs::read_dir(group)? {
        let file = entry?.path().join("cpu.cfs_quota_us");
        let present = match fs::read_to_string(&file) {
            Ok(text) => text.trim().parse::<u64>().ok(),
            // This is a file, or a group that was just removed.
            Err(_) => continue,
        };
        if present.is_some_and(|present| present > quota) {
            fs::write(&file, quota.to_string())?;
        }
    }
    Ok(())
}
