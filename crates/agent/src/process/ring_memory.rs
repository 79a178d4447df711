//! Memory for the ring of a journal whose process prints more than is kept.
//!
//! Nearly all of such output is dropped again soon. In a file of the sandbox's disk every byte would still pay for
//! the filesystem's reservations; here it is only copied. The memory is a memfd and not a buffer, so that it goes
//! back to the kernel at once. It is counted in the agent's control group, and an agent has only
//! [`MAX_RING_MEMORY`] of it: further journals stay in their files, and without control groups all do.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::MemfdFlags;

/// How much memory the rings of all journals of an agent may use together. This is enough for one process that
/// keeps the default amount of output.
const MAX_RING_MEMORY: u64 = 32 << 20;

/// The memory that is left for rings; all journals of an agent share it.
#[derive(Clone, Debug)]
pub(crate) struct RingMemoryBudget {
    free: Rc<Cell<u64>>,
}

/// The memory of one ring. Dropping it returns its size to the budget.
#[derive(Debug)]
pub(super) struct RingMemory {
    file: OwnedFd,
    size: u64,
    budget: RingMemoryBudget,
}

impl Default for RingMemoryBudget {
    fn default() -> Self {
        Self { free: Rc::new(Cell::new(MAX_RING_MEMORY)) }
    }
}

impl RingMemoryBudget {
    /// A budget without memory.
    pub(crate) fn empty() -> Self {
        Self { free: Rc::new(Cell::new(0)) }
    }

    /// Takes memory for a ring; `None` if too much is in use, or the kernel has none.
    pub(super) fn take(&self, size: u64) -> Option<RingMemory> {
        let left = self.free.get().checked_sub(size)?;
        let file = rustix::fs::memfd_create(c"journal", MemfdFlags::CLOEXEC).ok()?;
        self.free.set(left);
        Some(RingMemory { file, size, budget: self.clone() })
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        self.budget.free.set(self.budget.free.get() + self.size);
    }
}

impl AsFd for RingMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_returned() {
        let budget = RingMemoryBudget::default();
        let first = budget.take(MAX_RING_MEMORY - 1).expect("nothing is in use");
        assert!(budget.take(2).is_none());
        let second = budget.take(1).expect("one byte is left");
        drop((first, second));
        assert!(budget.take(MAX_RING_MEMORY + 1).is_none());
        assert!(budget.take(MAX_RING_MEMORY).is_some());
        assert!(RingMemoryBudget::empty().take(1).is_none());
    }
}
