//! Quotas: how much each owner may have at once.

use std::collections::BTreeMap;
use std::fmt;

use domain::{Bytes, MilliCpus, Owner, ResourceLimits, SandboxLimits};

/// The most that one owner may have; `None` means no limit but the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerQuota {
    pub sandboxes: Option<usize>,
    pub cpus: Option<MilliCpus>,
    pub memory: Option<Bytes>,
    pub disk: Option<Bytes>,
}

/// The quotas of all owners.
#[derive(Clone, Debug, Default)]
pub struct OwnerQuotas {
    pub named: BTreeMap<Owner, OwnerQuota>,
    /// The quota of every owner that is not named, except the operator: a quota limits the operator only
    /// if it names the operator.
    pub others: OwnerQuota,
}

impl OwnerQuotas {
    pub(crate) fn quota_of(&self, owner: &Owner) -> OwnerQuota {
        let unnamed = if *owner == Owner::operator() { OwnerQuota::default() } else { self.others };
        self.named.get(owner).copied().unwrap_or(unnamed)
    }
}

/// The resources that a sandbox, or all sandboxes of an owner, may use: a sum of limits, not of actual usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResourceCost {
    pub(crate) sandboxes: usize,
    pub(crate) millicpus: u64,
    pub(crate) memory: u64,
    pub(crate) disk: u64,
}

impl ResourceCost {
    /// A limit that the caller did not set counts as the server's default.
    pub(crate) fn from_limits(resources: &ResourceLimits, defaults: SandboxLimits) -> Self {
        let SandboxLimits { memory, cpus, pids: _, disk } = defaults.completing(resources);
        Self { sandboxes: 1, millicpus: u64::from(cpus.0), memory: memory.0, disk: disk.0 }
    }

    /// The cost that remains when the sandbox is dead: its slot and its disk, but nothing that runs.
    pub(crate) fn while_dead(self) -> Self {
        Self { millicpus: 0, memory: 0, ..self }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(other.sandboxes),
            millicpus: self.millicpus.saturating_add(other.millicpus),
            memory: self.memory.saturating_add(other.memory),
            disk: self.disk.saturating_add(other.disk),
        }
    }

    /// The first part of the quota that this exceeds.
    pub(crate) fn exceeds(self, quota: &OwnerQuota) -> Option<QuotaExcess> {
        let count = |most: usize| {
            (self.sandboxes > most).then(|| QuotaExcess::new(QuotaResource::Sandboxes, self.sandboxes, most))
        };
        let bytes = |what, wanted: u64, most: Bytes| {
            (wanted > most.0).then(|| QuotaExcess::new(what, Bytes(wanted), most))
        };
        let cpus = |most: MilliCpus| {
            let wanted = MilliCpus(u32::try_from(self.millicpus).unwrap_or(u32::MAX));
            (self.millicpus > u64::from(most.0)).then(|| QuotaExcess::new(QuotaResource::Cpus, wanted, most))
        };
        quota
            .sandboxes
            .and_then(count)
            .or_else(|| quota.cpus.and_then(cpus))
            .or_else(|| quota.memory.and_then(|most| bytes(QuotaResource::Memory, self.memory, most)))
            .or_else(|| quota.disk.and_then(|most| bytes(QuotaResource::Disk, self.disk, most)))
    }
}

/// What a quota bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaResource {
    Sandboxes,
    Cpus,
    Memory,
    Disk,
}

impl fmt::Display for QuotaResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sandboxes => "sandboxes",
            Self::Cpus => "cpus",
            Self::Memory => "memory",
            Self::Disk => "disk",
        })
    }
}

/// A part of a quota that would be exceeded, with its numbers as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaExcess {
    pub what: QuotaResource,
    pub wanted: String,
    pub most: String,
}

impl QuotaExcess {
    pub(crate) fn new(what: QuotaResource, wanted: impl ToString, most: impl ToString) -> Self {
        Self { what, wanted: wanted.to_string(), most: most.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_add_up_and_the_first_exceeded_is_reported() {
        let usual = SandboxLimits { memory: Bytes(100), cpus: MilliCpus(500), ..SandboxLimits::ZERO };
        let named =
            ResourceLimits { memory: Some(Bytes(30)), disk: Some(Bytes(7)), ..ResourceLimits::default() };
        let sum = ResourceCost::from_limits(&ResourceLimits::default(), usual)
            .and(ResourceCost::from_limits(&named, usual));
        assert_eq!(sum, ResourceCost { sandboxes: 2, millicpus: 1000, memory: 130, disk: 7 });
        let exact = OwnerQuota {
            sandboxes: Some(2),
            cpus: Some(MilliCpus(1000)),
            memory: Some(Bytes(130)),
            disk: Some(Bytes(7)),
        };
        assert_eq!(sum.exceeds(&exact), None);
        assert_eq!(sum.exceeds(&OwnerQuota::default()), None);
        assert_eq!(
            sum.exceeds(&OwnerQuota { memory: Some(Bytes(129)), ..exact }),
            Some(QuotaExcess::new(QuotaResource::Memory, "130", "129"))
        );
        assert_eq!(
            sum.exceeds(&OwnerQuota { sandboxes: Some(1), disk: Some(Bytes(1)), ..exact }),
            Some(QuotaExcess::new(QuotaResource::Sandboxes, 2, 1))
        );
    }

    #[test]
    fn unnamed_owner_has_the_quota_of_the_others() {
        let own = OwnerQuota { sandboxes: Some(9), ..OwnerQuota::default() };
        let others = OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() };
        let quotas = OwnerQuotas { named: BTreeMap::from([(Owner::from_valid_name("a"), own)]), others };
        assert_eq!(
            (quotas.quota_of(&Owner::from_valid_name("a")), quotas.quota_of(&Owner::from_valid_name("b"))),
            (own, others)
        );
    }

    #[test]
    fn the_operator_is_limited_only_by_a_quota_of_its_own() {
        let others = OwnerQuota { sandboxes: Some(1), ..OwnerQuota::default() };
        let quotas = OwnerQuotas { others, ..OwnerQuotas::default() };
        assert_eq!(quotas.quota_of(&Owner::operator()), OwnerQuota::default());
        let own = OwnerQuota { sandboxes: Some(2), ..OwnerQuota::default() };
        let quotas = OwnerQuotas { named: BTreeMap::from([(Owner::operator(), own)]), ..quotas };
        assert_eq!(quotas.quota_of(&Owner::operator()), own);
    }
}
