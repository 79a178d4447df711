//! What an image may take up: one count of entries and bytes for all of its layers, and what must
//! stay free on the disk.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use super::{During, ImageError};

const MOST_ENTRIES: u64 = 4_000_000;
const MOST_BYTES: u64 = 64 << 30;
/// A host that is nearly full must not be filled up.
const LEAST_FREE: u64 = 256 << 20;
const LEAST_FREE_FILES: u64 = 10_000;
/// What an entry takes up beside its content. An empty file is not free, and neither is a link.
pub(super) const ENTRY: u64 = 4096;
/// The bound of an image that would fit if nobody used the others.
pub(super) const BESIDE_USED: &str = "`images.max_bytes` leaves beside the images in use";
/// How often room and progress are looked at, in entries and in bytes of one file.
pub(super) const EVERY: u64 = 1000;
pub(super) const EVERY_BYTES: u64 = 64 << 20;

/// What the layers of an image have used so far.
pub(super) struct Budget {
    entries: u64,
    bytes: u64,
    most: u64,
    /// The bound in words.
    bound: &'static str,
}

impl Budget {
    /// With `most`, what the operator lets all images have together, one alone has no more.
    pub(super) fn new(most: Option<u64>) -> Self {
        let (most, bound) = match most {
            Some(most) if most < MOST_BYTES => (most, "`images.max_bytes` allows"),
            _ => (MOST_BYTES, "64 GiB"),
        };
        Self { entries: 0, bytes: 0, most, bound }
    }

    pub(super) fn entries(&self) -> u64 {
        self.entries
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counts an entry with so many bytes of attributes.
    pub(super) fn enter(&mut self, attributes: u64) -> Result<(), ImageError> {
        self.entries += 1;
        if self.entries > MOST_ENTRIES {
            return Err(ImageError::TooLarge("four million entries"));
        }
        self.spend(ENTRY.saturating_add(attributes))
    }

    pub(super) fn spend(&mut self, bytes: u64) -> Result<(), ImageError> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.most { Err(ImageError::TooLarge(self.bound)) } else { Ok(()) }
    }

    /// How much of a file is written before this is asked again: one byte more than is left, so
    /// that who passes the bound is noticed.
    pub(super) fn piece(&self) -> u64 {
        self.most.saturating_sub(self.bytes).saturating_add(1).min(EVERY_BYTES)
    }
}

/// Refuses to go on when the disk of `place` is nearly full.
pub(super) fn check_room(place: impl AsFd) -> Result<(), ImageError> {
    let status = rustix::fs::fstatvfs(place).map_err(io::Error::from);
    let status = status.during("measure", Path::new("the disk"))?;
    if status.f_bavail.saturating_mul(status.f_frsize) < LEAST_FREE {
        return Err(ImageError::TooLarge("this disk has room for"));
    }
    // A file system that makes files as they are needed, like btrfs, counts none.
    if status.f_files > 0 && status.f_favail < LEAST_FREE_FILES {
        return Err(ImageError::TooLarge("this disk has room for: it has hardly any inodes left"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_files_and_attributes_use_up_the_budget() {
        let mut budget = Budget::new(Some(3 * ENTRY));
        budget.enter(0).expect("there is room for three");
        budget.enter(ENTRY).expect("there is room for three");
        assert_eq!(budget.piece(), 1);
        assert!(matches!(budget.enter(0), Err(ImageError::TooLarge(_))));
    }

    #[test]
    fn an_operator_cannot_allow_more_than_any_image_may_have() {
        let mut budget = Budget::new(Some(u64::MAX));
        budget.spend(MOST_BYTES).expect("so much is allowed");
        assert!(budget.spend(1).is_err());
    }
}
