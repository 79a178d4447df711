//! Pools: sandboxes that are created before they are requested.

use std::time::Duration;

use crate::quantity::MIN_MEMORY;
use crate::spec::SandboxSpec;

/// Sandboxes of one kind that are kept warm. A request for that kind claims one of them, and
/// everything else is bound then: owner, key, labels, variables, limits, mounts, entrypoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    pub name: String,
    /// The spec of the warm sandboxes.
    pub template: SandboxSpec,
    pub capacity: PoolCapacity,
    pub refill: RefillRate,
}

/// The number of sandboxes in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolCapacity {
    /// The number of sandboxes kept warm.
    pub level: usize,
    /// The minimum number of warm sandboxes; never more than `level`.
    pub least_level: usize,
    /// The maximum number of sandboxes, including claimed ones that still run.
    pub most: usize,
    /// The minimum number of sandboxes, counted like `most`.
    pub least: usize,
}

/// How fast a pool is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefillRate {
    /// The maximum number of sandboxes started per second.
    pub per_second: u32,
    /// The maximum number of sandboxes being created at the same time.
    pub at_once: u32,
}

/// The reason why a pool is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error(
        "a pool name must be 1 to 253 lower-case letters, digits and hyphens, with no hyphen at either end"
    )]
    Name,
    #[error("the minimum number of sandboxes in a pool exceeds the maximum")]
    Capacity,
    #[error("the refill rate of a pool must be 1 to 1000 sandboxes per second, 1 to 64 at once")]
    Refill,
    #[error("the memory of a pool's sandboxes is below the minimum of {MIN_MEMORY}")]
    Memory,
}

impl Default for RefillRate {
    fn default() -> Self {
        Self { per_second: 20, at_once: 2 }
    }
}

impl RefillRate {
    /// The time between two starts.
    pub fn start_interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.max(1)
    }
}

impl PoolCapacity {
    /// Keeps `level` sandboxes warm, regardless of how many were claimed.
    pub fn with_level(level: usize) -> Self {
        Self { level, least_level: 0, most: usize::MAX, least: 0 }
    }

    /// The number of sandboxes that should be warm while `taken` claimed ones run.
    pub fn wanted_warm(&self, taken: usize) -> usize {
        let least = self.least.saturating_sub(taken);
        self.level.max(least).min(self.most.saturating_sub(taken))
    }
}

impl PoolSpec {
    pub fn check(&self) -> Result<(), PoolError> {
        let PoolCapacity { level, least_level, most, least } = self.capacity;
        let RefillRate { per_second, at_once } = self.refill;
        if !is_pool_name(&self.name) {
            Err(PoolError::Name)
        } else if least_level > level || least > most || level > most {
            Err(PoolError::Capacity)
        } else if !(1..=1000).contains(&per_second) || !(1..=64).contains(&at_once) {
            Err(PoolError::Refill)
        } else if self.template.resources.memory.is_some_and(|memory| memory < MIN_MEMORY) {
            Err(PoolError::Memory)
        } else {
            Ok(())
        }
    }

    /// Whether a warm sandbox can become one with this spec, which has the same image. Its users,
    /// the files of a snapshot and support for isolated sessions cannot be changed later, so they
    /// must match.
    pub fn fits_spec(&self, spec: &SandboxSpec) -> bool {
        let SandboxSpec { guest, isolated_sessions, .. } = &self.template;
        spec.guest == *guest && spec.isolated_sessions == *isolated_sessions && spec.snapshot.is_none()
    }
}

fn is_pool_name(text: &str) -> bool {
    let plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (1..=253).contains(&text.len()) && plain && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImageDefaults, IsolatedSessions};

    fn check(capacity: PoolCapacity, taken: usize, expected: usize) {
        assert_eq!(capacity.wanted_warm(taken), expected, "{capacity:?} with {taken} taken");
    }

    #[test]
    fn warm_level_stays_within_the_maximum() {
        let plain = PoolCapacity::with_level(5);
        check(plain, 0, 5);
        check(plain, 1000, 5);
        let bounded = PoolCapacity { most: 8, ..plain };
        check(bounded, 3, 5);
        check(bounded, 4, 4);
        check(bounded, 9, 0);
        let filled = PoolCapacity { least: 7, ..bounded };
        check(filled, 0, 7);
        check(filled, 1, 6);
        check(filled, 4, 4);
    }

    #[test]
    fn warm_sandbox_fits_only_equal_isolation_of_sessions() {
        for (warm, wanted) in
            [(IsolatedSessions::Off, IsolatedSessions::On), (IsolatedSessions::On, IsolatedSessions::Off)]
        {
            let spec = |isolated_sessions| SandboxSpec { isolated_sessions, ..SandboxSpec::with_defaults() };
            let (name, capacity) = ("a".to_owned(), PoolCapacity::with_level(1));
            let refill = RefillRate { per_second: 1, at_once: 1 };
            let pool = PoolSpec { name, template: spec(warm), capacity, refill };
            assert!(pool.fits_spec(&spec(warm)) && !pool.fits_spec(&spec(wanted)), "{warm:?} for {wanted:?}");
        }
    }

    #[test]
    fn warm_sandbox_fits_only_an_equal_guest() {
        let mut other = SandboxSpec::with_defaults();
        other.guest.image_defaults = ImageDefaults::Ignored;
        let (name, capacity) = ("a".to_owned(), PoolCapacity::with_level(1));
        let pool = PoolSpec { name, template: other.clone(), capacity, refill: RefillRate::default() };
        assert!(pool.fits_spec(&other) && !pool.fits_spec(&SandboxSpec::with_defaults()));
    }

    #[test]
    fn invalid_pools_are_rejected() {
        let pool = |name: &str, capacity, per_second| PoolSpec {
            name: name.to_owned(),
            template: SandboxSpec::with_defaults(),
            capacity,
            refill: RefillRate { per_second, at_once: 1 },
        };
        let five = PoolCapacity::with_level(5);
        assert_eq!(pool("warm-1", five, 1).check(), Ok(()));
        for name in ["", "-a", "a-", "A", "a_b", "a/b", &"a".repeat(254)] {
            assert_eq!(pool(name, five, 1).check(), Err(PoolError::Name), "{name}");
        }
        for capacity in [
            PoolCapacity { least_level: 6, ..five },
            PoolCapacity { most: 4, ..five },
            PoolCapacity { most: 6, least: 7, ..five },
        ] {
            assert_eq!(pool("a", capacity, 1).check(), Err(PoolError::Capacity), "{capacity:?}");
        }
        assert_eq!(pool("a", five, 0).check(), Err(PoolError::Refill));
    }
}
