//! Host uid ranges: 65536 ids for each sandbox, never shared by two running sandboxes.
//!
//! A range is recorded as `<state>/ranges/<index>` before it is used, and the file is removed after
//! the sandbox is gone, so the directory shows after a crash which ranges are taken. Index 0 is not
//! for sandboxes: its first id is the server's uid. The module `claims` keeps these ranges apart
//! from those of other state directories on this host.

mod claims;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use self::claims::BlockClaims;
use domain::SandboxId;

/// The number of ids of a sandbox.
pub(crate) const IDS_PER_RANGE: u32 = 65_536;
/// The first id of the ranges unless configured; well above the ids that adduser and systemd assign.
pub const DEFAULT_UID_BASE: u32 = 1_879_048_192;
/// The directory in which the state directories of this host record their ids.
const HOST_CLAIMS: &str = "/run/coracle/uids";
/// The number of ranges, including the server's.
const COUNT: u32 = 4096;

/// The ids of one sandbox: `first` on the host is 0 inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UidRange {
    pub index: u32,
    pub first: u32,
}

/// The ranges of a state directory, and which of them are taken.
#[derive(Debug)]
pub(crate) struct UidRanges {
    directory: PathBuf,
    claims: BlockClaims,
    base: u32,
    count: u32,
    by_id: BTreeMap<SandboxId, u32>,
    taken: BTreeSet<u32>,
    /// Ranges that overlap with ids that the host assigns to its users.
    blocked: BTreeSet<u32>,
    next: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum UidRangeError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("uid base {0} leaves no room for {COUNT} ranges")]
    BadBase(u32),
    #[error("server uid {0} belongs to a user in /etc/subuid or /etc/subgid, or to a sandbox")]
    ServerBlocked(u32),
    #[error("all uid ranges are taken")]
    Exhausted,
}

impl UidRangeError {
    /// Returns advice for the operator.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::BadBase(_) | Self::ServerBlocked(_) => Some("choose another base for uid ranges"),
            Self::Exhausted => Some("remove sandboxes that are not needed"),
            Self::Io { .. } => None,
        }
    }
}

impl UidRanges {
    /// Opens the ranges recorded in `directory`, for the state directory with this identity.
    pub(crate) fn open(directory: &Path, instance: &str, base: u32) -> Result<Self, UidRangeError> {
        Self::open_beside(directory, instance, Path::new(HOST_CLAIMS), base, COUNT, read_subordinate_ids()?)
    }

    /// Like [`UidRanges::open`], but avoids the ids in `given`: pairs of first id and count.
    fn open_beside(
        directory: &Path,
        instance: &str,
        host: &Path,
        base: u32,
        count: u32,
        mut given: Vec<(u64, u64)>,
    ) -> Result<Self, UidRangeError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).during("make", directory)?;
        let records = read_records(directory)?;
        remove_incomplete_records(directory, &records)?;
        let directory = directory.to_owned();
        let mut claims = BlockClaims::open(host, instance, &directory)?;
        for record in &records {
            claims.refresh(record.first)?;
        }
        // Sandboxes may still run with ids from a different base that was configured earlier.
        let regular = |record: &UidRangeRecord| {
            base.checked_add(record.index.saturating_mul(IDS_PER_RANGE)) == Some(record.first)
        };
        let odd = records.iter().filter(|record| !regular(record));
        given.extend(odd.map(|record| (record.first.into(), IDS_PER_RANGE.into())));
        let blocked = blocked_ranges(base, count, &given)?;
        let taken = records.iter().map(|record| record.index).collect();
        let by_id = records.into_iter().filter_map(|record| Some((record.id?, record.index))).collect();
        let next = starting_index(instance) % count;
        Ok(Self { directory, claims, base, count, by_id, taken, blocked, next })
    }

    /// Returns a range for the sandbox `id`, recorded before this returns. A sandbox that has a range
    /// keeps it, unless another state directory took the range over while the sandbox was not running.
    pub(crate) fn allocate(&mut self, id: &SandboxId) -> Result<UidRange, UidRangeError> {
        if let Some(range) = self.range_of(id) {
            if self.claims.claim_range(range.first)? {
                return Ok(range);
            }
            self.release(id)?;
        }
        let index = self.find_free()?;
        self.write_record(index, id)?;
        self.next = index + 1;
        Ok(self.range_at(index))
    }

    /// Finds a free range, preferably in a block that this state directory has already claimed.
    fn find_free(&mut self) -> Result<u32, UidRangeError> {
        // Searching round-robin leaves a freed range unused for as long as possible.
        let (next, count) = (self.next, self.count);
        let round = (0..count).map(move |step| (next + step) % count);
        let ours = |index: &u32| self.claims.holds_range(self.range_at(*index).first) && self.is_free(*index);
        if let Some(index) = round.clone().find(ours) {
            return Ok(index);
        }
        for index in round {
            if self.is_free(index) && self.claims.claim_range(self.range_at(index).first)? {
                return Ok(index);
            }
        }
        Err(UidRangeError::Exhausted)
    }

    fn is_free(&self, index: u32) -> bool {
        index != 0 && !self.taken.contains(&index) && !self.blocked.contains(&index)
    }

    /// Returns the range of `id`, if it has one.
    pub(crate) fn range_of(&self, id: &SandboxId) -> Option<UidRange> {
        self.by_id.get(id).map(|index| self.range_at(*index))
    }

    /// Frees the range of `id`; nothing of the sandbox may be left. It is not an error if `id` has none.
    pub(crate) fn release(&mut self, id: &SandboxId) -> Result<(), UidRangeError> {
        let Some(UidRange { index, .. }) = self.range_of(id) else { return Ok(()) };
        let path = self.record_path(index);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).during("remove", &path),
            _ => {
                self.taken.remove(&index);
                self.by_id.remove(id);
                Ok(())
            }
        }
    }

    fn write_record(&mut self, index: u32, id: &SandboxId) -> Result<(), UidRangeError> {
        let path = self.record_path(index);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        let text = format!("{id} {}", self.range_at(index).first);
        file.and_then(|mut file| file.write_all(text.as_bytes())).during("record the range", &path)?;
        self.taken.insert(index);
        self.by_id.insert(id.clone(), index);
        Ok(())
    }

    fn range_at(&self, index: u32) -> UidRange {
        UidRange { index, first: self.base + index * IDS_PER_RANGE }
    }

    fn record_path(&self, index: u32) -> PathBuf {
        self.directory.join(index.to_string())
    }
}

/// Returns how many sandboxes can have a range on a host where no range is taken yet.
pub(crate) fn free_ranges(base: u32) -> Result<usize, UidRangeError> {
    let blocked = blocked_ranges(base, COUNT, &read_subordinate_ids()?)?;
    Ok((1..COUNT).filter(|index| !blocked.contains(index)).count())
}

/// Returns the ids that the host assigns to its users, as pairs of first id and count.
fn read_subordinate_ids() -> Result<Vec<(u64, u64)>, UidRangeError> {
    let mut given = Vec::new();
    for path in [Path::new("/etc/subuid"), Path::new("/etc/subgid")] {
        match fs::read_to_string(path) {
            Ok(text) => given.extend(parse_subordinate_ids(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).during("read", path),
        }
    }
    Ok(given)
}

/// Returns the ranges that overlap with `given`.
fn blocked_ranges(base: u32, count: u32, given: &[(u64, u64)]) -> Result<BTreeSet<u32>, UidRangeError> {
    if u64::from(base) + u64::from(count) * u64::from(IDS_PER_RANGE) > u64::from(u32::MAX) || base == 0 {
        return Err(UidRangeError::BadBase(base));
    }
    let blocked: BTreeSet<u32> = (0..count).filter(|index| range_overlaps(base, *index, given)).collect();
    if blocked.contains(&0) { Err(UidRangeError::ServerBlocked(base)) } else { Ok(blocked) }
}

/// The record of a range in use.
struct UidRangeRecord {
    index: u32,
    /// Unknown if the record has an id of another form. Its range is still taken.
    id: Option<SandboxId>,
    first: u32,
}

/// Reads the record files. An incomplete file was left by a process that was killed before it
/// finished writing, so nothing uses that range.
fn read_records(directory: &Path) -> Result<Vec<UidRangeRecord>, UidRangeError> {
    let mut records = Vec::new();
    for entry in fs::read_dir(directory).during("list", directory)? {
        let path = entry.during("list", directory)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(index) = name.and_then(|name| name.parse().ok()) else { continue };
        let text = match fs::read_to_string(&path) {
            // The sandbox ended while the directory was being read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text.during("read", &path)?,
        };
        if let Some((id, first)) = text.split_once(' ')
            && let Ok(first) = first.parse()
        {
            records.push(UidRangeRecord { index, id: SandboxId::parse(id).ok(), first });
        }
    }
    Ok(records)
}

/// Removes the files of ranges that nothing uses.
fn remove_incomplete_records(directory: &Path, records: &[UidRangeRecord]) -> Result<(), UidRangeError> {
    for entry in fs::read_dir(directory).during("list", directory)? {
        let path = entry.during("list", directory)?.path();
        let is_record = |record: &UidRangeRecord| path.ends_with(record.index.to_string());
        if !records.iter().any(is_record) {
            fs::remove_file(&path).during("remove", &path)?;
        }
    }
    Ok(())
}

/// Returns the index at which the search starts. It differs between servers, so that their ranges are
/// unlikely to collide even if they do not see each other's claims.
fn starting_index(instance: &str) -> u32 {
    instance.bytes().fold(5381_u32, |sum, byte| sum.wrapping_mul(33) ^ u32::from(byte))
}

/// Parses the ids in a file such as /etc/subuid: lines of `user:first:count`. See subuid(5).
fn parse_subordinate_ids(text: &str) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let mut fields = line.split(':').skip(1);
        Some((fields.next()?.trim().parse().ok()?, fields.next()?.trim().parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn range_overlaps(base: u32, index: u32, given: &[(u64, u64)]) -> bool {
    let first = u64::from(base) + u64::from(index) * u64::from(IDS_PER_RANGE);
    let end = first + u64::from(IDS_PER_RANGE);
    given.iter().any(|(start, count)| *start < end && first < start.saturating_add(*count))
}

/// Adds the attempted action and the path to an error.
trait UidRangeErrorContext<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, UidRangeError>;
}

impl<T> UidRangeErrorContext<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, UidRangeError> {
        self.map_err(|source| UidRangeError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
