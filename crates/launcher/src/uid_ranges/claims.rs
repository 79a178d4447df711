//! Claims on blocks of host ids, so that no two state directories assign the same ids.
//!
//! The ids are divided into blocks of 2²¹, which is 32 ranges. `<directory>/<block>` names the state
//! directory that may use a block, by its identity and its path; `<directory>/lock` is held while
//! a block is claimed. A claim outlives the launcher that made it, because sandboxes do. It is taken
//! over when it is no longer used: no launcher has its file locked, and the state directory that it
//! names records no range in the block. If the path does not exist or belongs to another state
//! directory, the directory may have been renamed; its sandboxes are then found by their control
//! groups.
//!
//! All claims are in a directory that is empty after a reboot of the host, when no sandbox is left
//! either. The first range of each server, which holds only the server's uid, is not claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{IDS_PER_RANGE, UidRangeError, UidRangeErrorContext, read_records};
use crate::cgroups::CgroupHierarchies;
use crate::identity;

/// The size of a block of ids, as a power of two.
const BLOCK_BITS: u32 = 21;

/// The claims of one state directory.
#[derive(Debug)]
pub(super) struct BlockClaims {
    directory: PathBuf,
    ours: ClaimHolder,
    /// The blocks that this state directory has claimed, each with its locked file.
    held: BTreeMap<u32, File>,
}

/// The state directory that claimed a block.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ClaimHolder {
    /// The identity of the state directory; absent in claims of older versions.
    instance: Option<String>,
    /// The directory that records its ranges.
    records: PathBuf,
}

impl ClaimHolder {
    /// Parses a claim: the identity on its own line, then the path. Older versions wrote only the
    /// path, which begins with a slash.
    fn parse(text: Vec<u8>) -> Self {
        let end = text.iter().position(|byte| *byte == b'\n').filter(|_| text.first() != Some(&b'/'));
        let instance = end.and_then(|end| String::from_utf8(text[..end].to_vec()).ok());
        let path = end.map_or(text.as_slice(), |end| &text[end + 1..]).to_vec();
        Self { instance, records: PathBuf::from(std::ffi::OsString::from_vec(path)) }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut text = self.instance.clone().unwrap_or_default().into_bytes();
        text.push(b'\n');
        text.extend_from_slice(self.records.as_os_str().as_bytes());
        text
    }
}

/// The action for a block that is unclaimed, or claimed by a state directory that no longer uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnusedBlockAction {
    TakeOver,
    Leave,
}

impl BlockClaims {
    pub(super) fn open(directory: &Path, instance: &str, records: &Path) -> Result<Self, UidRangeError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).during("make", directory)?;
        let ours = ClaimHolder { instance: Some(instance.to_owned()), records: records.to_owned() };
        Ok(Self { directory: directory.to_owned(), ours, held: BTreeMap::new() })
    }

    /// Locks the blocks of a range that was allocated earlier, if this state directory claimed them,
    /// and updates the path of its records.
    pub(super) fn refresh(&mut self, first: u32) -> Result<(), UidRangeError> {
        for block in blocks_of_range(first) {
            if !self.held.contains_key(&block)
                && let Some(file) = self.claim_block(block, UnusedBlockAction::Leave)?
            {
                self.held.insert(block, file);
            }
        }
        Ok(())
    }

    /// Whether the range that starts at `first` lies in blocks that are already claimed and locked.
    pub(super) fn holds_range(&self, first: u32) -> bool {
        blocks_of_range(first).all(|block| self.held.contains_key(&block))
    }

    /// Claims the range that starts at `first`; `false` if it belongs to another state directory.
    pub(super) fn claim_range(&mut self, first: u32) -> Result<bool, UidRangeError> {
        for block in blocks_of_range(first).collect::<BTreeSet<u32>>() {
            if !self.held.contains_key(&block) {
                match self.claim_block(block, UnusedBlockAction::TakeOver)? {
                    Some(file) => self.held.insert(block, file),
                    None => return Ok(false),
                };
            }
        }
        Ok(true)
    }

    fn claim_block(&self, block: u32, unused: UnusedBlockAction) -> Result<Option<File>, UidRangeError> {
        let turn = self.directory.join("lock");
        let one_at_a_time = open_claim_file(&turn).during("open", &turn)?;
        lock_file(&one_at_a_time, FlockOperation::LockExclusive).during("lock", &turn)?;
        let path = self.directory.join(block.to_string());
        if unused == UnusedBlockAction::Leave && !path.exists() {
            return Ok(None);
        }
        let mut file = open_claim_file(&path).during("open", &path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).during("read", &path)?;
        let holder = ClaimHolder::parse(text);
        if holder != self.ours {
            // Processes with the same identity share a claim.
            let same = holder.instance.is_some() && holder.instance == self.ours.instance;
            let ours = same || (holder.instance.is_none() && holder.records == self.ours.records);
            let busy =
                !same && !lock_file(&file, FlockOperation::NonBlockingLockExclusive).during("lock", &path)?;
            if busy || (!ours && (unused == UnusedBlockAction::Leave || is_block_used(block, &holder))) {
                return Ok(None);
            }
            // The file is emptied first, so that a process killed half-way leaves an empty claim.
            file.set_len(0).and_then(|()| file.rewind()).during("take over", &path)?;
            file.write_all(&self.ours.to_bytes()).during("write", &path)?;
        }
        lock_file(&file, FlockOperation::LockShared).during("lock", &path)?;
        Ok(Some(file))
    }
}

/// Returns the blocks that a range lies in; two different ones if its base is not aligned.
fn blocks_of_range(first: u32) -> impl Iterator<Item = u32> {
    [first >> BLOCK_BITS, first.saturating_add(IDS_PER_RANGE - 1) >> BLOCK_BITS].into_iter()
}

/// Whether the holder of an unlocked block still has sandboxes in it.
fn is_block_used(block: u32, holder: &ClaimHolder) -> bool {
    let state = holder.records.parent().unwrap_or(&holder.records);
    let here = match (&holder.instance, identity::stored_instance(state)) {
        (Some(instance), Ok(Some(found))) => *instance == found,
        _ => true,
    };
    match read_records(&holder.records) {
        Ok(records) if here => {
            records.iter().any(|record| blocks_of_range(record.first).any(|used| used == block))
        }
        // The directory is gone or was replaced by another one: it may have been renamed.
        Ok(_) => has_cgroups(holder),
        Err(UidRangeError::Io { source, .. }) if is_gone(&source) => has_cgroups(holder),
        // Records that cannot be read may describe sandboxes.
        Err(_) => true,
    }
}

fn has_cgroups(holder: &ClaimHolder) -> bool {
    let Some(instance) = &holder.instance else { return false };
    // Groups that cannot be listed may contain sandboxes.
    CgroupHierarchies::find_for_root(instance)
        .and_then(|groups| groups.list_sandboxes())
        .map_or(true, |ids| !ids.is_empty())
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn open_claim_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Locks a file; `false` if another process has it locked and `operation` does not wait.
fn lock_file(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match rustix::io::retry_on_intr(|| rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
