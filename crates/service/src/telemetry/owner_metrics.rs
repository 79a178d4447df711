//! Metrics per owner, for a bounded number of owners.
//!
//! The first owners that are seen get their own row and keep it while the server runs, so that no counter ever
//! decreases. All later owners share one row.

use std::collections::BTreeMap;

use domain::{Owner, Phase};

use crate::Service;
use crate::telemetry::usage_history::UsageTotals;

/// The owner or owners of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnerLabel {
    Named(Owner),
    /// All owners beyond the limit together.
    Other,
}

/// The numbers of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnerMetrics {
    /// Existing sandboxes, by the name of their phase.
    pub phases: BTreeMap<&'static str, u64>,
    /// Sandboxes created since the server started.
    pub created: u64,
    /// Processor time since the server started.
    pub cpu_micros: u64,
    /// Memory in use at the last samples, in bytes.
    pub memory: u64,
    /// Disk space in use at the last samples, in bytes.
    pub disk: u64,
}

impl OwnerLabel {
    /// The value of the label. No owner's name begins with `_`.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Named(owner) => owner.as_str(),
            Self::Other => "_other",
        }
    }
}

/// The usage of owners since the server started.
pub(crate) struct OwnerTotals {
    max_owners: usize,
    rows: BTreeMap<OwnerLabel, UsageTotals>,
}

impl OwnerTotals {
    pub(crate) fn new(max_owners: usize) -> Self {
        Self { max_owners, rows: BTreeMap::new() }
    }

    /// The label of an owner's row; a new owner gets a row if one is free.
    pub(crate) fn label_for(&mut self, owner: &Owner) -> OwnerLabel {
        let named = OwnerLabel::Named(owner.clone());
        let owners = self.rows.len() - usize::from(self.rows.contains_key(&OwnerLabel::Other));
        let is_named = self.rows.contains_key(&named) || owners < self.max_owners;
        let label = if is_named { named } else { OwnerLabel::Other };
        self.rows.entry(label.clone()).or_default();
        label
    }

    pub(crate) fn add(&mut self, owner: &Owner, used: UsageTotals) {
        let label = self.label_for(owner);
        self.rows.entry(label).or_default().add(used);
    }

    /// All rows, without the numbers of existing sandboxes.
    pub(crate) fn rows(&self) -> BTreeMap<OwnerLabel, OwnerMetrics> {
        let row = |used: &UsageTotals| OwnerMetrics {
            created: used.created,
            cpu_micros: used.cpu_micros,
            ..OwnerMetrics::default()
        };
        self.rows.iter().map(|(label, used)| (label.clone(), row(used))).collect()
    }
}

impl Service {
    /// Metrics per owner, if the server was configured to keep them.
    pub fn owner_metrics(&self) -> Option<BTreeMap<OwnerLabel, OwnerMetrics>> {
        let phases: Vec<(Owner, Phase)> = self
            .0
            .lifecycle
            .registry
            .all()
            .iter()
            .map(|handle| (handle.owner.clone(), handle.phase()))
            .collect();
        self.0.telemetry.history.owner_metrics(&phases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_beyond_the_bound_share_one_row() {
        let mut totals = OwnerTotals::new(2);
        let created = UsageTotals { created: 1, cpu_micros: 10, ..UsageTotals::default() };
        for owner in ["a", "b", "c", "d", "a", "c"] {
            totals.add(&Owner::from_valid_name(owner), created);
        }
        let rows = totals.rows();
        let counts: Vec<(&str, u64, u64)> =
            rows.iter().map(|(label, row)| (label.as_str(), row.created, row.cpu_micros)).collect();
        assert_eq!(counts, [("a", 2, 20), ("b", 1, 10), ("_other", 3, 30)]);
        assert!(Owner::parse(OwnerLabel::Other.as_str()).is_err(), "no owner can have the shared label");
    }
}
