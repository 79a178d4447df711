//! A sandbox as a backend makes it: a spec in which nothing is left open.

use domain::{ResourceLimits, SandboxLimits, SandboxSpec};

use crate::LimitName;

/// A spec, and the values that the service decides for what the spec leaves open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedSpec {
    /// The spec with the name of an existing image: what the client's name stands for is decided.
    pub spec: SandboxSpec,
    pub limits: LimitPlan,
    /// How many commands may run at once.
    pub max_processes: u32,
}

/// The limits of a sandbox, and which of them must be enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitPlan {
    pub limits: SandboxLimits,
    /// The limits that the caller named. One that cannot be enforced is an error.
    pub named: Vec<LimitName>,
    /// Whether a default limit that cannot be enforced is an error as well.
    pub require_all: bool,
}

impl LimitPlan {
    /// Completes the limits that a caller named with defaults.
    pub fn new(named: &ResourceLimits, defaults: SandboxLimits, require_all: bool) -> Self {
        let all = [
            (LimitName::Memory, named.memory.is_some()),
            (LimitName::Cpus, named.cpus.is_some()),
            (LimitName::Pids, named.pids.is_some()),
            (LimitName::Disk, named.disk.is_some()),
        ];
        let is_named = all.into_iter().filter_map(|(limit, named)| named.then_some(limit));
        Self { limits: defaults.completing(named), named: is_named.collect(), require_all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::{Bytes, MilliCpus};

    #[test]
    fn defaults_fill_in_only_the_limits_that_were_not_named() {
        let defaults = SandboxLimits { memory: Bytes(1), cpus: MilliCpus(2), pids: 3, disk: Bytes(4) };
        let named = ResourceLimits { pids: Some(30), disk: Some(Bytes(40)), ..ResourceLimits::default() };
        let plan = LimitPlan::new(&named, defaults, true);
        assert_eq!(plan.limits, SandboxLimits { pids: 30, disk: Bytes(40), ..defaults });
        assert_eq!(plan.named, [LimitName::Pids, LimitName::Disk]);
        assert_eq!(LimitPlan::new(&ResourceLimits::default(), defaults, true).limits, defaults);
    }
}
