//! Pools: sandboxes that are made before anybody asks for one.

use std::time::Duration;

use crate::quantity::MIN_MEMORY;
use crate::spec::Spec;

/// Sandboxes of one kind that are kept warm. Whoever needs one of that kind gets it with
/// everything else bound late: owner, key, labels, variables, limits, mounts, entrypoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    /// What the warm ones are made of.
    pub template: Spec,
    pub capacity: Capacity,
    pub refill: Refill,
}

/// How many sandboxes a pool has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// So many are kept warm.
    pub level: usize,
    /// At least so many are to be warm; never more than `level`.
    pub least_level: usize,
    /// There are never more, those that were taken and still live included.
    pub most: usize,
    /// As many as `most` counts there are at least.
    pub least: usize,
}

/// How fast a pool is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refill {
    /// No more are begun in one second.
    pub per_second: u32,
    /// No more are being made at the same time.
    pub at_once: u32,
}

/// Why something cannot be a pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPool {
    #[error(
        "the name of a pool has 1 to 253 lower-case letters, digits and hyphens, and begins and ends with no hyphen"
    )]
    Name,
    #[error("the least number of a pool's sandboxes is above the most")]
    Capacity,
    #[error("a pool is filled with 1 to 1000 sandboxes a second, 1 to 64 at once")]
    Refill,
    #[error("the memory of a pool's sandboxes is less than the {MIN_MEMORY} that starting a process takes")]
    Memory,
}

impl Default for Refill {
    fn default() -> Self {
        Self { per_second: 20, at_once: 2 }
    }
}

impl Refill {
    /// The time between two beginnings.
    pub fn interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.max(1)
    }
}

impl Capacity {
    /// So many warm ones, whatever was taken.
    pub fn level(level: usize) -> Self {
        Self { level, least_level: 0, most: usize::MAX, least: 0 }
    }

    /// How many should be warm while so many that were taken live.
    pub fn wanted(&self, taken: usize) -> usize {
        let least = self.least.saturating_sub(taken);
        self.level.max(least).min(self.most.saturating_sub(taken))
    }
}

impl Pool {
    pub fn check(&self) -> Result<(), NotAPool> {
        let Capacity { level, least_level, most, least } = self.capacity;
        let Refill { per_second, at_once } = self.refill;
        if !is_name(&self.name) {
            Err(NotAPool::Name)
        } else if least_level > level || least > most || level > most {
            Err(NotAPool::Capacity)
        } else if !(1..=1000).contains(&per_second) || !(1..=64).contains(&at_once) {
            Err(NotAPool::Refill)
        } else if self.template.resources.memory.is_some_and(|memory| memory < MIN_MEMORY) {
            Err(NotAPool::Memory)
        } else {
            Ok(())
        }
    }

    /// Whether a sandbox of this spec, which has the same image, can be made of a warm one: all
    /// but its inhabitants, the files of a snapshot and the right to nest, which it cannot be
    /// given later nor be rid of.
    pub fn fits(&self, spec: &Spec) -> bool {
        let Spec { guest, nesting, .. } = &self.template;
        spec.guest == *guest && spec.nesting == *nesting && spec.snapshot.is_none()
    }
}

fn is_name(text: &str) -> bool {
    let plain = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    (1..=253).contains(&text.len()) && plain && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nesting;

    fn check(capacity: Capacity, taken: usize, expected: usize) {
        assert_eq!(capacity.wanted(taken), expected, "{capacity:?} with {taken} taken");
    }

    #[test]
    fn the_level_is_kept_within_what_there_may_be_in_all() {
        let plain = Capacity::level(5);
        check(plain, 0, 5);
        check(plain, 1000, 5);
        let bounded = Capacity { most: 8, ..plain };
        check(bounded, 3, 5);
        check(bounded, 4, 4);
        check(bounded, 9, 0);
        let filled = Capacity { least: 7, ..bounded };
        check(filled, 0, 7);
        check(filled, 1, 6);
        check(filled, 4, 4);
    }

    #[test]
    fn a_warm_one_has_the_right_to_nest_that_is_wanted_no_less_and_no_more() {
        for (warm, wanted) in [(Nesting::Off, Nesting::On), (Nesting::On, Nesting::Off)] {
            let spec = |nesting| Spec { nesting, ..Spec::plain() };
            let (name, capacity) = ("a".to_owned(), Capacity::level(1));
            let refill = Refill { per_second: 1, at_once: 1 };
            let pool = Pool { name, template: spec(warm), capacity, refill };
            assert!(pool.fits(&spec(warm)) && !pool.fits(&spec(wanted)), "{warm:?} for {wanted:?}");
        }
    }

    #[test]
    fn what_cannot_be_a_pool_is_refused() {
        let pool = |name: &str, capacity, per_second| Pool {
            name: name.to_owned(),
            template: Spec::plain(),
            capacity,
            refill: Refill { per_second, at_once: 1 },
        };
        let five = Capacity::level(5);
        assert_eq!(pool("warm-1", five, 1).check(), Ok(()));
        for name in ["", "-a", "a-", "A", "a_b", "a/b", &"a".repeat(254)] {
            assert_eq!(pool(name, five, 1).check(), Err(NotAPool::Name), "{name}");
        }
        for capacity in [
            Capacity { least_level: 6, ..five },
            Capacity { most: 4, ..five },
            Capacity { most: 6, least: 7, ..five },
        ] {
            assert_eq!(pool("a", capacity, 1).check(), Err(NotAPool::Capacity), "{capacity:?}");
        }
        assert_eq!(pool("a", five, 0).check(), Err(NotAPool::Refill));
    }
}
