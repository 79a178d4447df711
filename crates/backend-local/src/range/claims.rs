//! Which ids of this host belong to which state directory, so that no two give out the same.
//!
//! The ids are cut into blocks of 2²¹, which is 32 ranges. `<directory>/<block>` names the state
//! directory that may use a block; `<directory>/lock` is held while one is claimed. A claim
//! outlives its claimer, because sandboxes do. It is taken over when nobody holds it any more:
//! no launcher has its file locked, and no range in the block is recorded where it points to.
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

/// How many ids are claimed at once, as a power of two.
const BLOCK_BITS: u32 = 21;

/// The claims of one state directory.
#[derive(Debug)]
pub(super) struct Claims {
    directory: PathBuf,
    /// Where our ranges are recorded.
    records: PathBuf,
    /// The blocks that are ours, each with its locked file.
    held: BTreeMap<u32, File>,
}

impl Claims {
    pub(super) fn open(directory: &Path, records: &Path) -> Result<Self, RangeError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).during("make", directory)?;
        Ok(Self { directory: directory.to_owned(), records: records.to_owned(), held: BTreeMap::new() })
    }

    /// Whether the range from `first` on lies in blocks that are ours already.
    pub(super) fn holds(&self, first: u32) -> bool {
        blocks(first).all(|block| self.held.contains_key(&block))
    }

    /// Makes the range from `first` on ours alone; `false` if it belongs to somebody else.
    pub(super) fn take(&mut self, first: u32) -> Result<bool, RangeError> {
        for block in blocks(first).collect::<BTreeSet<u32>>() {
            if !self.held.contains_key(&block) {
                match self.claim(block)? {
                    Some(file) => self.held.insert(block, file),
                    None => return Ok(false),
                };
            }
        }
        Ok(true)
    }

    fn claim(&self, block: u32) -> Result<Option<File>, RangeError> {
        let turn = self.directory.join("lock");
        let one_at_a_time = open(&turn).during("open", &turn)?;
        lock(&one_at_a_time, FlockOperation::LockExclusive).during("lock", &turn)?;
        let path = self.directory.join(block.to_string());
        let mut file = open(&path).during("open", &path)?;
        let mut holder = Vec::new();
        file.read_to_end(&mut holder).during("read", &path)?;
        let ours = self.records.as_os_str().as_bytes();
        if holder != ours {
            let busy = !lock(&file, FlockOperation::NonBlockingLockExclusive).during("lock", &path)?;
            if busy || is_used(block, holder) {
                return Ok(None);
            }
            // Emptied first: somebody killed half-way leaves a name of nothing.
            file.set_len(0).and_then(|()| file.rewind()).during("take over", &path)?;
            file.write_all(ours).during("write", &path)?;
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
fn is_used(block: u32, holder: Vec<u8>) -> bool {
    let records = PathBuf::from(std::ffi::OsString::from_vec(holder));
    match recorded(&records) {
        Ok(records) => records.iter().any(|record| blocks(record.first).any(|used| used == block)),
        Err(RangeError::Io { source, .. }) if is_gone(&source) => false,
        // What cannot be read may be full of sandboxes.
        Err(_) => true,
    }
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
