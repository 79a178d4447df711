//! Slots that owners share: requests in progress, long streams, connections.
//!
//! No single owner can take them all. Some are reserved for the others, and a part of those for the
//! operator:
//!
//! ```text
//! ├───────────── total ─────────────────────────────────────────────┤
//! ├───────────── one owner ────────────────┤
//! ├───────────── all owners but the operator ─────────┤
//! ├───────────── the operator ────────────────────────┤
//! ```
//! A server without keys has only one owner, who may take all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use domain::Owner;

/// The slots that one owner must leave to others, and those of them that only the operator may take.
const MAX_RESERVED: usize = 128;
const RESERVED_SHARE: usize = 4;

/// Whether the caller is the only owner there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SoleOwner {
    Yes,
    No,
}

/// Why there is no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotRefusal {
    /// All slots are taken.
    Server,
    /// The owner has as many as one may have.
    Owner { limit: usize },
}

pub(crate) struct OwnerSlots {
    total: usize,
    /// Shows how many are taken.
    gauge: metrics::Gauge,
    counts: Mutex<SlotCounts>,
}

#[derive(Default)]
struct SlotCounts {
    taken: usize,
    by_owner: HashMap<Owner, usize>,
}

/// One slot, given back when this is dropped.
pub(crate) struct OwnerSlot {
    slots: Arc<OwnerSlots>,
    owner: Owner,
}

impl OwnerSlots {
    pub(crate) fn new(total: usize, gauge: metrics::Gauge) -> Arc<Self> {
        Arc::new(Self { total, gauge, counts: Mutex::default() })
    }

    /// Takes a slot for an owner.
    pub(crate) fn try_take(
        self: &Arc<Self>,
        owner: &Owner,
        sole: SoleOwner,
    ) -> Result<OwnerSlot, SlotRefusal> {
        let is_operator = *owner == Owner::operator();
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count_of = |owner: &Owner| counts.by_owner.get(owner).copied().unwrap_or(0);
        let (own, operators) = (count_of(owner), count_of(&Owner::operator()));
        let limit = self.limit_of_one(is_operator, sole);
        if own >= limit {
            return Err(if limit == self.total { SlotRefusal::Server } else { SlotRefusal::Owner { limit } });
        }
        let full = counts.taken >= self.total;
        let only_operators_left = !is_operator && counts.taken - operators >= self.total - self.operators();
        if full || only_operators_left {
            return Err(SlotRefusal::Server);
        }
        counts.taken += 1;
        *counts.by_owner.entry(owner.clone()).or_default() += 1;
        self.gauge.increment(1);
        Ok(OwnerSlot { slots: self.clone(), owner: owner.clone() })
    }

    /// The most that one owner may take.
    fn limit_of_one(&self, is_operator: bool, sole: SoleOwner) -> usize {
        match (sole, is_operator) {
            (SoleOwner::Yes, _) => self.total,
            (SoleOwner::No, true) => self.total - (self.reserved() - self.operators()),
            (SoleOwner::No, false) => self.total - self.reserved(),
        }
    }

    /// The slots that one owner leaves to others.
    fn reserved(&self) -> usize {
        MAX_RESERVED.min(self.total / RESERVED_SHARE)
    }

    /// Those of the reserved slots that only the operator may take.
    fn operators(&self) -> usize {
        self.reserved() / 2
    }
}

impl OwnerSlot {
    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }
}

impl Drop for OwnerSlot {
    fn drop(&mut self) {
        let mut counts = self.slots.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.taken -= 1;
        self.slots.gauge.decrement(1);
        if let Some(count) = counts.by_owner.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                counts.by_owner.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(name: &str) -> Owner {
        Owner::parse(name).unwrap()
    }

    /// Takes slots until one is refused.
    fn take_all(slots: &Arc<OwnerSlots>, owner: &Owner, sole: SoleOwner) -> (Vec<OwnerSlot>, SlotRefusal) {
        let mut taken = Vec::new();
        loop {
            match slots.try_take(owner, sole) {
                Ok(slot) => taken.push(slot),
                Err(refusal) => return (taken, refusal),
            }
        }
    }

    #[test]
    fn one_owner_leaves_slots_to_others_and_the_operator() {
        let slots = OwnerSlots::new(1024, metrics::Gauge::noop());
        let (one, refusal) = take_all(&slots, &owner("one"), SoleOwner::No);
        assert_eq!((one.len(), refusal), (896, SlotRefusal::Owner { limit: 896 }));
        let (other, refusal) = take_all(&slots, &owner("other"), SoleOwner::No);
        assert_eq!((other.len(), refusal), (64, SlotRefusal::Server));
        let (operator, refusal) = take_all(&slots, &Owner::operator(), SoleOwner::No);
        assert_eq!((operator.len(), refusal), (64, SlotRefusal::Server));
        drop(one);
        assert_eq!(slots.counts.lock().unwrap().taken, 128);
        drop((other, operator));
        let counts = slots.counts.lock().unwrap();
        assert_eq!((counts.taken, counts.by_owner.len()), (0, 0));
    }

    #[test]
    fn the_operator_leaves_slots_to_owners() {
        let slots = OwnerSlots::new(1024, metrics::Gauge::noop());
        let (operator, refusal) = take_all(&slots, &Owner::operator(), SoleOwner::No);
        assert_eq!((operator.len(), refusal), (960, SlotRefusal::Owner { limit: 960 }));
        let (one, _) = take_all(&slots, &owner("one"), SoleOwner::No);
        assert_eq!(one.len(), 64);
    }

    #[test]
    fn a_sole_owner_may_take_all() {
        for total in [0, 1, 1024] {
            let slots = OwnerSlots::new(total, metrics::Gauge::noop());
            let (all, refusal) = take_all(&slots, &Owner::operator(), SoleOwner::Yes);
            assert_eq!((all.len(), refusal), (total, SlotRefusal::Server));
        }
    }

    #[test]
    fn few_slots_are_reserved_of_few() {
        for (total, of_one) in [(1, 1), (4, 3), (16, 12), (512, 384), (2048, 1920)] {
            let slots = OwnerSlots::new(total, metrics::Gauge::noop());
            assert_eq!(take_all(&slots, &owner("one"), SoleOwner::No).0.len(), of_one, "{total}");
        }
    }
}
