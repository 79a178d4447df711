//! Quotas: how much each owner may have at once.

use std::collections::BTreeMap;

use domain::{Bytes, Cpus, Owner, Resources};

/// The most that one owner may have; `None` means no limit but the host's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    pub sandboxes: Option<usize>,
    pub cpus: Option<Cpus>,
    pub memory: Option<Bytes>,
    pub disk: Option<Bytes>,
}

/// The quotas of all owners.
#[derive(Clone, Debug, Default)]
pub struct Quotas {
    pub named: BTreeMap<Owner, Quota>,
    /// The quota of every owner that is not named, except the operator: a quota limits the operator only
    /// if it names the operator.
    pub others: Quota,
}

impl Quotas {
    pub(crate) fn of(&self, owner: &Owner) -> Quota {
        let unnamed = if *owner == Owner::single() { Quota::default() } else { self.others };
        self.named.get(owner).copied().unwrap_or(unnamed)
    }
}

/// The resources that a sandbox, or all sandboxes of an owner, may use: a sum of limits, not of actual usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) sandboxes: usize,
    pub(crate) millicpus: u64,
    pub(crate) memory: u64,
    pub(crate) disk: u64,
}

impl Cost {
    /// A limit that the caller did not set counts as the server's default.
    pub(crate) fn of(resources: &Resources, usual: &Resources) -> Self {
        let bytes = |named: Option<Bytes>, usual: Option<Bytes>| named.or(usual).map_or(0, |bytes| bytes.0);
        Self {
            sandboxes: 1,
            millicpus: resources.cpus.or(usual.cpus).map_or(0, |cpus| u64::from(cpus.0)),
            memory: bytes(resources.memory, usual.memory),
            disk: bytes(resources.disk, usual.disk),
        }
    }

    /// The cost that remains when the sandbox is dead: its slot and its disk, but nothing that runs.
    pub(crate) fn of_dead(self) -> Self {
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
    pub(crate) fn exceeds(self, quota: &Quota) -> Option<Excess> {
        let count =
            |most: usize| (self.sandboxes > most).then(|| Excess::new("sandboxes", self.sandboxes, most));
        let bytes = |what, wanted: u64, most: Bytes| {
            (wanted > most.0).then(|| Excess::new(what, Bytes(wanted), most))
        };
        let cpus = |most: Cpus| {
            let wanted = Cpus(u32::try_from(self.millicpus).unwrap_or(u32::MAX));
            (self.millicpus > u64::from(most.0)).then(|| Excess::new("cpus", wanted, most))
        };
        quota
            .sandboxes
            .and_then(count)
            .or_else(|| quota.cpus.and_then(cpus))
            .or_else(|| quota.memory.and_then(|most| bytes("memory", self.memory, most)))
            .or_else(|| quota.disk.and_then(|most| bytes("disk", self.disk, most)))
    }
}

/// A part of a quota that would be exceeded, with its numbers as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excess {
    /// `sandboxes`, `cpus`, `memory` or `disk`.
    pub what: &'static str,
    pub wanted: String,
    pub most: String,
}

impl Excess {
    pub(crate) fn new(what: &'static str, wanted: impl ToString, most: impl ToString) -> Self {
        Self { what, wanted: wanted.to_string(), most: most.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_add_up_and_the_first_exceeded_is_reported() {
        let usual = Resources { memory: Some(Bytes(100)), cpus: Some(Cpus(500)), ..Resources::default() };
        let named = Resources { memory: Some(Bytes(30)), disk: Some(Bytes(7)), ..Resources::default() };
        let sum = Cost::of(&Resources::default(), &usual).and(Cost::of(&named, &usual));
        assert_eq!(sum, Cost { sandboxes: 2, millicpus: 1000, memory: 130, disk: 7 });
        let exact = Quota {
            sandboxes: Some(2),
            cpus: Some(Cpus(1000)),
            memory: Some(Bytes(130)),
            disk: Some(Bytes(7)),
        };
        assert_eq!(sum.exceeds(&exact), None);
        assert_eq!(sum.exceeds(&Quota::default()), None);
        assert_eq!(
            sum.exceeds(&Quota { memory: Some(Bytes(129)), ..exact }),
            Some(Excess::new("memory", "130", "129"))
        );
        assert_eq!(
            sum.exceeds(&Quota { sandboxes: Some(1), disk: Some(Bytes(1)), ..exact }),
            Some(Excess::new("sandboxes", 2, 1))
        );
    }

    #[test]
    fn unnamed_owner_has_the_quota_of_the_others() {
        let own = Quota { sandboxes: Some(9), ..Quota::default() };
        let others = Quota { sandboxes: Some(1), ..Quota::default() };
        let quotas = Quotas { named: BTreeMap::from([(Owner::named("a"), own)]), others };
        assert_eq!((quotas.of(&Owner::named("a")), quotas.of(&Owner::named("b"))), (own, others));
    }

    #[test]
    fn the_operator_is_limited_only_by_a_quota_of_its_own() {
        let others = Quota { sandboxes: Some(1), ..Quota::default() };
        let quotas = Quotas { others, ..Quotas::default() };
        assert_eq!(quotas.of(&Owner::single()), Quota::default());
        let own = Quota { sandboxes: Some(2), ..Quota::default() };
        let quotas = Quotas { named: BTreeMap::from([(Owner::single(), own)]), ..quotas };
        assert_eq!(quotas.of(&Owner::single()), own);
    }
}
