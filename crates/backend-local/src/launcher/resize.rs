//! Other limits for a sandbox that lives.

use domain::Bytes;

use super::protocol::{Refusal, Resize};
use super::{Launcher, Rights};
use crate::jail::plan::{LimitName, Limits};
use crate::jail::step::{At, Step};
use crate::volumes::VolumeError;

impl Launcher {
    /// Gives a living sandbox these limits and says what holds. The record comes last: asked again
    /// after a crash, the same is done once more.
    pub fn resize(&mut self, wish: &Resize) -> Result<Vec<(String, String)>, Refusal> {
        let id = &wish.id;
        let mut record = self.records.read(id).filter(|record| record.pidfd().is_some());
        let record = record.as_mut().ok_or_else(Refusal::gone)?;
        self.check_amounts(&wish.limits, &wish.named)?;
        for limit in LimitName::ALL {
            let must_hold = wish.named.contains(&limit) || wish.require_limits;
            if must_hold && !self.enforces(limit) {
                return Err(self.cannot_hold(limit, &wish.named));
            }
        }
        let mut limits = wish.limits;
        if self.bounds_processes_by_rlimit() && limits.pids != record.limits.pids {
            // Commands have theirs from the agent, which was told at its start.
            if wish.named.contains(&LimitName::Pids) {
                let message = "the limit on processes of a living sandbox cannot be changed here";
                return Err(Refusal::unsupported(message, None));
            }
            limits.pids = record.limits.pids;
        }
        if record.limits.disk != limits.disk {
            self.resize_disk(id, Bytes(limits.disk))?;
        }
        if let Some(groups) = self.groups() {
            groups.resize(id, &limits).at(Step::Groups)?;
        }
        record.limits = limits;
        self.records.replace(id, record).at(Step::Record)?;
        Ok(self.held(&limits))
    }

    /// Where a disk is a file or lies in memory, its size is its limit and stays.
    fn resize_disk(&mut self, id: &str, limit: Bytes) -> Result<(), Refusal> {
        let kept = || Refusal::unsupported("the disk of a living sandbox keeps its size here", None);
        match &mut self.rights {
            Rights::Root(root) => match root.volumes.resize(id, limit) {
                Err(VolumeError::FixedSize | VolumeError::OnlyMemory) => Err(kept()),
                resized => Ok(resized.map_err(std::io::Error::other).at(Step::Volume)?),
            },
            Rights::User { .. } => Err(kept()),
        }
    }

    /// The measures of limits that this host holds.
    fn held(&self, limits: &Limits) -> Vec<(String, String)> {
        let held = LimitName::ALL.into_iter().filter(|limit| self.enforces(*limit));
        held.map(|limit| (limit.word().to_owned(), self.describe(limit, limits))).collect()
    }
}
