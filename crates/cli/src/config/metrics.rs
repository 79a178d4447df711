//! `[metrics]`: whether `/metrics` has numbers per owner, and for how many.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::raw::RawMetrics;

const DEFAULT_MAX_OWNERS: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MetricsSettings {
    pub per_owner: bool,
    /// How many owners have their own series.
    pub max_owners: usize,
}

impl MetricsSettings {
    /// How many owners have their own series; `None` if there are no metrics per owner.
    pub(crate) fn max_owner_series(self) -> Option<usize> {
        self.per_owner.then_some(self.max_owners)
    }
}

pub(super) fn check_metrics(raw: &RawMetrics) -> Result<MetricsSettings> {
    Ok(MetricsSettings {
        per_owner: raw.per_owner.unwrap_or(false),
        max_owners: super::positive_or("metrics.max_owners", raw.max_owners, DEFAULT_MAX_OWNERS)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<MetricsSettings> {
        check_metrics(&toml::from_str(text).expect("the types are right"))
    }

    #[test]
    fn metrics_per_owner_are_off_by_default_and_always_bounded() {
        assert_eq!(read("max_owners = 5").expect("it is right").max_owner_series(), None);
        assert_eq!(read("per_owner = true").expect("it is right").max_owner_series(), Some(100));
        assert_eq!(
            read("per_owner = true\nmax_owners = 5").expect("it is right").max_owner_series(),
            Some(5)
        );
        let error = read("max_owners = 0").expect_err("no bound").to_string();
        assert!(error.contains("`metrics.max_owners` is 0"), "{error}");
    }
}
