//! The space that an image may use: one count of entries and bytes for all of its layers, and the
//! space that must stay free on the disk.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use super::{ImageError, ImageErrorContext};

const MAX_ENTRIES: u64 = 4_000_000;
const MAX_BYTES: u64 = 64 << 30;
/// A host that is nearly full must not be filled up.
const MIN_FREE_SPACE: u64 = 256 << 20;
const MIN_FREE_INODES: u64 = 10_000;
/// The size charged per entry in addition to its content. Empty files and links need space, too.
pub(super) const ENTRY_SIZE: u64 = 4096;
/// The limit in the message about an image that would fit if the images in use were removed.
pub(super) const LIMIT_BESIDE_USED_IMAGES: &str = "`images.max_bytes` minus the images in use";
/// How often disk space and progress are checked, in entries and in bytes of one file.
pub(super) const CHECK_INTERVAL_ENTRIES: u64 = 1000;
pub(super) const CHECK_INTERVAL_BYTES: u64 = 64 << 20;

/// The space that the layers of an image have used so far.
pub(super) struct ImageBudget {
    entries: u64,
    bytes: u64,
    most: u64,
    /// The limit as text for messages.
    bound: &'static str,
}

impl ImageBudget {
    /// `most` is the operator's limit for all images together, which also applies to a single one.
    pub(super) fn new(most: Option<u64>) -> Self {
        let (most, bound) = match most {
            Some(most) if most < MAX_BYTES => (most, "the limit `images.max_bytes`"),
            _ => (MAX_BYTES, "64 GiB"),
        };
        Self { entries: 0, bytes: 0, most, bound }
    }

    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts an entry with this many bytes of attributes.
    pub(super) fn count_entry(&mut self, attributes: u64) -> Result<(), ImageError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(ImageError::TooLarge("four million entries"));
        }
        self.spend_bytes(ENTRY_SIZE.saturating_add(attributes))
    }

    pub(super) fn spend_bytes(&mut self, bytes: u64) -> Result<(), ImageError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.most { Err(ImageError::TooLarge(self.bound)) } else { Ok(()) }
    }

    /// The number of bytes of a file to write before the next check: one more than is left, so that
    /// exceeding the limit is detected.
    pub(super) fn next_chunk_size(&self) -> u64 {
        self.most.saturating_sub(self.bytes).saturating_add(1).min(CHECK_INTERVAL_BYTES)
    }
}

/// Returns an error when the disk of `place` is nearly full.
pub(super) fn check_free_space(place: impl AsFd) -> Result<(), ImageError> {
    let status = rustix::fs::fstatvfs(place).map_err(io::Error::from);
    let status = status.during("measure", Path::new("the disk"))?;
    if status.f_bavail.saturating_mul(status.f_frsize) < MIN_FREE_SPACE {
        return Err(ImageError::TooLarge("the free space on this disk"));
    }
    // File systems that allocate inodes on demand, like btrfs, report none.
    if status.f_files > 0 && status.f_favail < MIN_FREE_INODES {
        return Err(ImageError::TooLarge("the free space on this disk: hardly any inodes are left"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_files_and_attributes_use_up_the_budget() {
        let mut budget = ImageBudget::new(Some(3 * ENTRY_SIZE));
        budget.count_entry(0).expect("the budget allows three entries");
        budget.count_entry(ENTRY_SIZE).expect("the budget allows three entries");
        assert_eq!(budget.next_chunk_size(), 1);
        assert!(matches!(budget.count_entry(0), Err(ImageError::TooLarge(_))));
    }

    #[test]
    fn operator_limit_cannot_exceed_the_fixed_limit() {
        let mut budget = ImageBudget::new(Some(u64::MAX));
        budget.spend_bytes(MAX_BYTES).expect("the fixed limit is allowed");
        assert!(budget.spend_bytes(1).is_err());
    }
}
