//! Which ids of this host belong to which state directory, so that no two give out the same.
//!
//! The ids are cut into blocks of 2²¹, which is 32 ranges. `<directory>/<block>` names the state
//! directory that may use a block, by its identity and its path; `<directory>/lock` is held while
//! one is claimed. A claim outlives its claimer, because sandboxes do. It is taken over when nobody
//! holds it any more: no launcher has its file locked, and no range in the block is recorded where
//! it points to. A path that leads to nothing, or to another state directory, tells nothing about
//! a directory that was renamed; its sandboxes are then looked for by their control groups.
//!
//! All of it is in a directory that is empty after a restart of the host, as no sandbox is left
//! then. The first range of every server, which holds its own id alone, is not claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{During, RangeError, WIDTH, recorded};
use crate::cgroups::Hierarchies;
use crate::identity;

/// How many ids are claimed at once, as a power of two.
const BLOCK_BITS: u32 = 21;

/// The claims of one state directory.
#[derive(Debug)]
pub(super) struct Claims {
    directory: PathBuf,
    ours: Holder,
    /// The blocks that are ours, each with its locked file.
    held: BTreeMap<u32, File>,
}

/// Who claimed a block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    /// The identity of the state directory; absent in claims of older versions.
    instance: Option<String>,
    /// Where its ranges are recorded.
    records: PathBuf,
}

impl Holder {
    /// The content of a claim: the identity on a line of its own, then the path. Older versions
    /// wrote the path alone, which begins with a slash.
    fn read(text: Vec<u8>) -> Self {
        let end = text.iter().position(|byte| *byte == b'\n').filter(|_| text.first() != Some(&b'/'));
        let instance = end.and_then(|end| String::from_utf8(text[..end].to_vec()).ok());
        let path = end.map_or(text.as_slice(), |end| &text[end + 1..]).to_vec();
        Self { instance, records: PathBuf::from(std::ffi::OsString::from_vec(path)) }
    }

    fn write(&self) -> Vec<u8> {
        let mut text = self.instance.clone().unwrap_or_default().into_bytes();
        text.push(b'\n');
        text.extend_from_slice(self.records.as_os_str().as_bytes());
        text
    }
}

/// What to do about a block that belongs to nobody or to somebody who has no use for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unused {
    TakeOver,
    Leave,
}

impl Claims {
    pub(super) fn open(directory: &Path, instance: &str, records: &Path) -> Result<Self, RangeError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).during("make", directory)?;
        let ours = Holder { instance: Some(instance.to_owned()), records: records.to_owned() };
        Ok(Self { directory: directory.to_owned(), ours, held: BTreeMap::new() })
    }

    /// Holds the blocks of a range that was given out before, if the claims on them are ours, and
    /// writes where our records are now.
    pub(super) fn refresh(&mut self, first: u32) -> Result<(), RangeError> {
        for block in blocks(first) {
            if !self.held.contains_key(&block)
                && let Some(file) = self.claim(block, Unused::Leave)?
            {
                self.held.insert(block, file);
            }
        }
        Ok(())
    }

    /// Whether the range from `first` on lies in blocks that are ours already.
    pub(super) fn holds(&self, first: u32) -> bool {
        blocks(first).all(|block| self.held.contains_key(&block))
    }

    /// Makes the range from `first` on ours alone; `false` if it belongs to somebody else.
    pub(super) fn take(&mut self, first: u32) -> Result<bool, RangeError> {
        for block in blocks(first).collect::<BTreeSet<u32>>() {
            if !self.held.contains_key(&block) {
                match self.claim(block, Unused::TakeOver)? {
                    Some(file) => self.held.insert(block, file),
                    None => return Ok(false),
                };
            }
        }
        Ok(true)
    }

    fn claim(&self, block: u32, unused: Unused) -> Result<Option<File>, RangeError> {
        let turn = self.directory.join("lock");
        let one_at_a_time = open(&turn).during("open", &turn)?;
        lock(&one_at_a_time, FlockOperation::LockExclusive).during("lock", &turn)?;
        let path = self.directory.join(block.to_string());
        if unused == Unused::Leave && !path.exists() {
            return Ok(None);
        }
        let mut file = open(&path).during("open", &path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).during("read", &path)?;
        let holder = Holder::read(text);
        if holder != self.ours {
            // Several processes with our identity share a claim.
            let same = holder.instance.is_some() && holder.instance == self.ours.instance;
            let ours = same || (holder.instance.is_none() && holder.records == self.ours.records);
            let busy =
                !same && !lock(&file, FlockOperation::NonBlockingLockExclusive).during("lock", &path)?;
            if busy || (!ours && (unused == Unused::Leave || is_used(block, &holder))) {
                return Ok(None);
            }
            // Emptied first: somebody killed half-way leaves a name of nothing.
            file.set_len(0).and_then(|()| file.rewind()).during("take over", &path)?;
            file.write_all(&self.ours.write()).during("write", &path)?;
        }
        lock(&file, FlockOperation::LockShared).during("lock", &path)?;
        Ok(Some(file))
    }
}

/// The blocks that a range lies in; two if its base is crooked.
fn blocks(first: u32) -> impl Iterator<Item = u32> {
    [first >> BLOCK_BITS, first.saturating_add(WIDTH - 1) >> BLOCK_BITS].into_iter()
}

/// Whether the holder of a block that nobody has locked still has sandboxes in it.
fn is_used(block: u32, holder: &Holder) -> bool {
    let state = holder.records.parent().unwrap_or(&holder.records);
    let here = match (&holder.instance, identity::stored(state)) {
        (Some(instance), Ok(Some(found))) => *instance == found,
        _ => true,
    };
    match recorded(&holder.records) {
        Ok(records) if here => records.iter().any(|record| blocks(record.first).any(|used| used == block)),
        // The directory is gone or another took its place: it may have been renamed.
        Ok(_) => has_groups(holder),
        Err(RangeError::Io { source, .. }) if is_gone(&source) => has_groups(holder),
        // What cannot be read may be full of sandboxes.
        Err(_) => true,
    }
}

fn has_groups(holder: &Holder) -> bool {
    let Some(instance) = &holder.instance else { return false };
    // Groups that cannot be listed may be full of sandboxes.
    Hierarchies::find(instance).and_then(|groups| groups.list()).map_or(true, |ids| !ids.is_empty())
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Locks a file; `false` if it is locked by somebody else and that was not waited for.
fn lock(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match rustix::io::retry_on_intr(|| rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
