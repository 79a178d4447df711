//! The limits of all sandboxes together. In a container they are those of the container, unless the operator
//! sets others.

use anyhow::{Result, anyhow};
use domain::{Bytes, MilliCpus};
use launcher::plan::LimitName;
use launcher::settings::{TotalLimit, TotalLimits, TotalOrigin};

use super::raw::RawLimits;
use super::{LimitSettings, parse_amount, positive_or};
use crate::output::WithHint;
use crate::values;

/// Reads the limits that the operator wrote; `container` has those for the others.
pub(super) fn check_totals(raw: &RawLimits, container: TotalLimits) -> Result<TotalLimits> {
    let chosen = |amount: Option<u64>, own: Option<TotalLimit>| {
        amount.map(|amount| TotalLimit { amount, origin: TotalOrigin::Operator }).or(own)
    };
    let memory = raw.total_memory.as_ref();
    let memory = memory.map(|amount| parse_amount("limits.total_memory", amount, values::parse_bytes));
    let cpus = raw.total_cpus.as_ref();
    let cpus = cpus.map(|amount| parse_amount("limits.total_cpus", amount, values::parse_cpus));
    let pids = raw.total_pids.map(|count| positive_or("limits.total_pids", Some(count), count));
    Ok(TotalLimits {
        memory: chosen(memory.transpose()?.map(|bytes| bytes.0), container.memory),
        cpus: chosen(cpus.transpose()?.map(|cpus| cpus.0.into()), container.cpus),
        pids: chosen(pids.transpose()?.map(u64::from), container.pids),
    })
}

impl LimitSettings {
    /// Lowers defaults that nobody chose, or that the container does not allow, so that a sandbox for which
    /// a client names no limits fits. A default above a limit of the operator is an error.
    pub(super) fn fit_into_totals(mut self, raw: &RawLimits) -> Result<Self> {
        let fit = |limit: LimitName, default: u64, written: bool| {
            let Some(total) = self.totals.get(limit).filter(|total| default > total.amount) else {
                return Ok(default);
            };
            if written && total.origin == TotalOrigin::Operator {
                let name = limit.as_str();
                return Err(anyhow!("`limits.{name}` is more than `limits.total_{name}`"))
                    .with_hint("a sandbox for which a client names no limit would never fit");
            }
            Ok(total.amount)
        };
        let memory = fit(LimitName::Memory, self.memory.0, raw.memory.is_some())?;
        let cpus = fit(LimitName::Cpus, self.cpus.0.into(), raw.cpus.is_some())?;
        let pids = fit(LimitName::Pids, self.pids.into(), raw.pids.is_some())?;
        self.memory = Bytes(memory);
        self.cpus = MilliCpus(u32::try_from(cpus).unwrap_or(u32::MAX));
        self.pids = u32::try_from(pids).unwrap_or(u32::MAX);
        Ok(self)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]
mod tests {
    use super::super::check_limits;
    use super::*;

    fn raw(text: &str) -> RawLimits {
        toml::from_str(text).unwrap()
    }

    fn container() -> TotalLimits {
        let total = |amount| Some(TotalLimit { amount, origin: TotalOrigin::Container });
        TotalLimits { memory: total(256 << 20), cpus: total(500), pids: None }
    }

    #[test]
    fn defaults_are_lowered_to_the_limits_of_the_container() {
        let limits = check_limits(&raw(""), container()).unwrap();
        assert_eq!((limits.memory, limits.cpus, limits.pids), (Bytes::from_mib(256), MilliCpus(500), 512));
        let limits = check_limits(&raw("memory = '1g'"), container()).unwrap();
        assert_eq!(limits.memory, Bytes::from_mib(256));
    }

    #[test]
    fn total_of_the_operator_replaces_that_of_the_container() {
        let limits = check_limits(&raw("total_memory = '8g'\ntotal_pids = 100"), container()).unwrap();
        let operator = |amount| Some(TotalLimit { amount, origin: TotalOrigin::Operator });
        assert_eq!(limits.totals.memory, operator(8 << 30));
        assert_eq!(limits.totals.cpus, container().cpus);
        assert_eq!((limits.totals.pids, limits.pids), (operator(100), 100));
    }

    #[test]
    fn default_above_the_total_of_the_operator_is_refused() {
        let text = "memory = '2g'\ntotal_memory = '1g'";
        let error = check_limits(&raw(text), TotalLimits::default()).unwrap_err();
        assert_eq!(error.to_string(), "`limits.memory` is more than `limits.total_memory`");
        assert!(check_limits(&raw("total_pids = 0"), TotalLimits::default()).is_err());
    }
}
