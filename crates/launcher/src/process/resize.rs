//! Changing the limits of a running sandbox.

use backend::EnforcedMeasures;
use domain::{Bytes, SandboxId};

use super::{Launcher, LauncherRights};
use crate::jail::plan::{JailLimits, LimitName};
use crate::jail::step::{JailStep, StepContext};
use crate::protocol::{OpError, ResizeRequest};
use crate::volumes::VolumeError;

impl Launcher {
    /// Sets the limits of a running sandbox and returns the measures. The record is written last, so a
    /// repeated request after a crash does everything again.
    pub fn resize_sandbox(&mut self, request: &ResizeRequest) -> Result<EnforcedMeasures, OpError> {
        let id = &request.id;
        let mut record = self.records.read(id).filter(|record| record.pidfd().is_some());
        let record = record.as_mut().ok_or_else(OpError::gone)?;
        let rules = self.plan_rules();
        rules.check_limit_amounts(&request.limits, &request.named)?;
        for limit in LimitName::ALL {
            let must_hold = request.named.contains(&limit) || request.require_limits;
            if must_hold && !self.rights.enforces(limit) {
                return Err(rules.unenforceable_limit_error(limit, &request.named));
            }
        }
        let mut limits = request.limits;
        if self.rights.bounds_processes_by_rlimit() && limits.pids != record.limits.pids {
            // The agent sets this limit on commands, and gets it only at its start.
            if request.named.contains(&LimitName::Pids) {
                let message = "the limit on processes of a running sandbox cannot be changed on this host";
                return Err(OpError::unsupported(message, None));
            }
            limits.pids = record.limits.pids;
        }
        if record.limits.disk != limits.disk {
            self.rights.resize_disk(id, Bytes(limits.disk))?;
        }
        if let Some(groups) = self.rights.groups() {
            groups.replace_limits(id, &limits).at_step(JailStep::Groups)?;
        }
        record.limits = limits;
        self.records.replace(id, record).at_step(JailStep::Record)?;
        Ok(self.rights.limit_measures(&limits))
    }
}

impl LauncherRights {
    /// Changes the limit of a disk. A disk that is a file or in memory cannot be resized.
    fn resize_disk(&mut self, id: &SandboxId, limit: Bytes) -> Result<(), OpError> {
        let kept =
            || OpError::unsupported("the disk of a running sandbox cannot be resized on this host", None);
        match self {
            Self::Root(root) => match root.volumes.resize(id, limit) {
                Err(VolumeError::FixedSize | VolumeError::OnlyMemory) => Err(kept()),
                resized => Ok(resized.map_err(std::io::Error::other).at_step(JailStep::Volume)?),
            },
            Self::User { .. } => Err(kept()),
        }
    }

    /// Returns the measures for the limits that this host enforces.
    fn limit_measures(&self, limits: &JailLimits) -> EnforcedMeasures {
        let held = LimitName::ALL.into_iter().filter(|limit| self.enforces(*limit));
        held.map(|limit| self.limit_measure(limit, limits)).collect()
    }
}
