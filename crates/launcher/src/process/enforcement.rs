//! What a new sandbox gets enforced: the measures that will be in force, and the refusal of a plan that needs
//! more than this host enforces or the operator allows.

mod guest_users;

use backend::enforced::{EnforcedAmount, KillMeans, UserMapping};
use backend::{Measure, NetworkState};
use domain::{Bytes, MAX_PIDS, MIN_DISK, MIN_MEMORY};

use super::LauncherRights;
use super::create::ImageUser;
use crate::cgroups::has_legacy_controllers;
use crate::images::FoundImage;
use crate::jail::plan::{JailLimits, JailPlan, LimitName};
use crate::protocol::{EnforcedPlan, OpError};
use crate::settings::{LifetimePolicy, MaxLimits, TotalLimits, TotalOrigin};
use crate::volumes::VolumeKind;

/// Advice for an ordinary user who needs control groups with controllers.
const DELEGATED_SCOPE_COMMAND: &str =
    "start it in a control group of its own, `systemd-run --user --scope -p Delegate=yes coracle";

/// The limits and protections that the operator and this host allow for a sandbox.
pub(super) struct PlanRules<'a> {
    pub(super) rights: &'a LauncherRights,
    pub(super) lifetime: LifetimePolicy,
    pub(super) maxima: MaxLimits,
    pub(super) totals: TotalLimits,
}

impl PlanRules<'_> {
    /// Returns the measures that will be in force, or refuses the plan if one cannot be enforced.
    pub(super) fn check_plan(
        &self,
        plan: &JailPlan,
        image: &FoundImage,
        by_image: Option<(u32, u32)>,
        network: NetworkState,
    ) -> Result<EnforcedPlan, OpError> {
        let mut holds = EnforcedPlan { image: image.name.clone(), ..EnforcedPlan::default() };
        if plan.keep && self.lifetime == LifetimePolicy::Own {
            return Err(OpError::unsupported(
                "a server cannot keep the files of an ended sandbox; only `coracle run --keep` can",
                None,
            ));
        }
        self.check_limit_amounts(&plan.limits, &plan.named)?;
        match self.rights.image_user(plan, image) {
            ImageUser::Ignored => holds
                .degraded
                .push("the image's user is ignored: this sandbox has no user except root".to_owned()),
            ImageUser::Taken(_) if by_image.is_none() => holds.degraded.push(
                "directories of the host belong to root inside: the image does not define its user's ids"
                    .to_owned(),
            ),
            ImageUser::Taken(_) | ImageUser::None => {}
        }
        holds.degraded.extend(self.rights.missing_guest_users(plan));
        for limit in LimitName::ALL {
            if self.rights.enforces(limit) && !(plan.keep && limit == LimitName::Disk) {
                holds.measures.push(self.rights.limit_measure(limit, &plan.limits));
            } else if plan.named.contains(&limit) || plan.require_limits {
                return Err(self.unenforceable_limit_error(limit, &plan.named));
            } else {
                holds.degraded.push(self.describe_missing_limit(limit, plan));
            }
        }
        let root = matches!(self.rights, LauncherRights::Root(_));
        if plan.isolated_sessions && self.rights.can_freeze() {
            holds.measures.push(Measure::IsolatedSessions);
        }
        holds.measures.extend([
            Measure::Users(if root { UserMapping::OwnRange } else { UserMapping::CallersId }),
            Measure::Kill(if self.rights.can_freeze() {
                KillMeans::ControlGroup
            } else {
                KillMeans::Subreaper
            }),
            Measure::Network(network),
            Measure::SystemCallFilter,
            Measure::MountTree,
            Measure::NoUserNamespaces,
        ]);
        Ok(holds)
    }

    /// Makes the refusal for a limit that cannot be enforced, with advice.
    pub(super) fn unenforceable_limit_error(&self, limit: LimitName, named: &[LimitName]) -> OpError {
        let mut message = format!("this host cannot enforce the limit on {}", limit.as_str());
        let mut hint = "`coracle doctor` shows what is missing for it".to_owned();
        let served = self.lifetime == LifetimePolicy::Own;
        if let Some(reason) = self.rights.unenforced_reason() {
            message = format!("{message}: {reason}");
            hint = format!("{}; {hint}", self.delegation_hint());
        }
        if !named.contains(&limit) {
            let without = if served {
                "set `require_limits = false` in the configuration"
            } else {
                "leave `--require-limits` out"
            };
            hint = format!("{hint}; to do without default limits, {without}");
        }
        OpError::unsupported(message, Some(&hint))
    }

    /// The refusal to pause or resume: both require a control group for each sandbox.
    pub(super) fn pause_unsupported_error(&self) -> OpError {
        let reason = self.rights.unenforced_reason().unwrap_or("the sandbox has no control group");
        let hint = format!("{}; `coracle doctor` shows what is missing for it", self.delegation_hint());
        OpError::unsupported(format!("this host cannot pause sandboxes: {reason}"), Some(&hint))
    }

    /// A hint that tells an ordinary user how to get control groups on this host.
    fn delegation_hint(&self) -> String {
        let command = if self.lifetime == LifetimePolicy::Own { "serve" } else { "run" };
        if has_legacy_controllers() {
            "run it as root, since controllers of cgroup v1 cannot be delegated".to_owned()
        } else {
            format!("{DELEGATED_SCOPE_COMMAND} {command} ...`, or run it as root")
        }
    }

    fn describe_missing_limit(&self, limit: LimitName, plan: &JailPlan) -> String {
        match limit {
            LimitName::Disk if plan.keep => "files that are kept have no limit on disk".to_owned(),
            limit => limit.describe_unenforced(),
        }
    }

    /// Refuses limits above the maximum of the operator or the kernel, limits below what a sandbox needs
    /// to start, and a disk that is larger than the capacity.
    pub(super) fn check_limit_amounts(
        &self,
        limits: &JailLimits,
        named: &[LimitName],
    ) -> Result<(), OpError> {
        let MaxLimits { memory, cpus, pids, disk } = self.maxima;
        let most = JailLimits {
            memory: memory.unwrap_or(u64::MAX),
            cpus: cpus.unwrap_or(u32::MAX),
            pids: pids.unwrap_or(u32::MAX),
            disk: disk.unwrap_or(u64::MAX),
        };
        if limits.memory < MIN_MEMORY.0 {
            let shown = Bytes(limits.memory);
            let message =
                format!("memory of {shown} is less than the {MIN_MEMORY} that starting a process takes");
            return Err(OpError::amount(message, format!("name at least {MIN_MEMORY}")));
        }
        if limits.pids > MAX_PIDS {
            let message = format!("pids of {} is more than the {MAX_PIDS} that Linux can count", limits.pids);
            return Err(OpError::amount(message, format!("name at most {MAX_PIDS}")));
        }
        for limit in LimitName::ALL {
            let ((asked, shown), (most, bound)) = (limits.amount_of(limit), most.amount_of(limit));
            if asked > most {
                let message = format!("{} of {shown} is more than the {bound} allowed here", limit.as_str());
                return Err(OpError::amount(message, format!("name at most {bound}")));
            }
        }
        self.check_total_amounts(limits)?;
        let LauncherRights::Root(root) = self.rights else { return Ok(()) };
        if root.volumes.kind() != VolumeKind::Tmpfs && limits.disk < MIN_DISK.0 {
            let shown = Bytes(limits.disk);
            let message = format!("disk of {shown} is less than the {MIN_DISK} that a file system takes");
            return Err(OpError::amount(message, format!("name at least {MIN_DISK}")));
        }
        if named.contains(&LimitName::Disk)
            && let Some(pool) = root.volumes.capacity()
            && limits.disk > pool.0
        {
            let shown = Bytes(limits.disk);
            let message = format!("disk of {shown} is more than the {pool} of all disks");
            return Err(OpError::amount(message, format!("name at most {pool}")));
        }
        Ok(())
    }

    /// Refuses limits that can never fit, since all sandboxes together have less.
    fn check_total_amounts(&self, limits: &JailLimits) -> Result<(), OpError> {
        for limit in LimitName::ALL {
            let (asked, shown) = limits.amount_of(limit);
            let Some(total) = self.totals.get(limit).filter(|total| asked > total.amount) else {
                continue;
            };
            let (name, bound) = (limit.as_str(), total.shown(limit));
            let message =
                format!("{name} of {shown} can never fit into the {bound} of all sandboxes together");
            let hint = match total.origin {
                TotalOrigin::Operator => format!("name at most {bound}, or raise `limits.total_{name}`"),
                TotalOrigin::Container => {
                    format!("name at most {bound}, the limit of the container that the server runs in")
                }
            };
            return Err(OpError::amount(message, hint));
        }
        Ok(())
    }
}

impl LauncherRights {
    /// Returns a limit as it is enforced here.
    pub(super) fn limit_measure(&self, limit: LimitName, limits: &JailLimits) -> Measure {
        let (amount, _) = limits.amount_of(limit);
        let by = match (self, limit) {
            (Self::Root(root), LimitName::Disk) => match root.volumes.kind() {
                VolumeKind::Btrfs => "btrfs quota",
                VolumeKind::Ext4 | VolumeKind::Oneshot => "ext4 image",
                VolumeKind::Tmpfs => "tmpfs",
            },
            (Self::User { .. }, LimitName::Disk) => "tmpfs",
            (_, LimitName::Pids) if self.bounds_processes_by_rlimit() => "RLIMIT_NPROC",
            (_, limit) => self.groups().map_or("none", |groups| groups.version_label(limit)),
        };
        Measure::Limit(EnforcedAmount { limit: limit.into(), amount, by: by.to_owned() })
    }
}
