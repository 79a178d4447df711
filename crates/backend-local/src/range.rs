//! Host uid ranges: 65536 ids for each sandbox, never shared by two that live at once.
//!
//! A range is recorded as `<state>/ranges/<index>` before it is used and the file goes when the
//! sandbox is gone, so after a crash the directory tells what is taken. Index 0 is not for
//! sandboxes: its first id is the server's own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How many ids a sandbox has.
pub const WIDTH: u32 = 65_536;
/// How many ranges there are, the server's included.
const COUNT: u32 = 4096;

/// The ids of one sandbox: `first` on the host is 0 inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub index: u32,
    pub first: u32,
}

/// Which ranges of a state directory are taken.
#[derive(Debug)]
pub struct Ranges {
    directory: PathBuf,
    base: u32,
    count: u32,
    by_id: BTreeMap<String, u32>,
    taken: BTreeSet<u32>,
    /// Ranges that overlap with what the host has given to its users.
    blocked: BTreeSet<u32>,
    next: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum RangeError {
    #[error("could not {action} `{path}`")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("ids from {0} on leave no room for {COUNT} ranges")]
    BadBase(u32),
    #[error("the server's own id {0} belongs to a user in /etc/subuid or /etc/subgid")]
    ServerBlocked(u32),
    #[error("all uid ranges are taken")]
    Exhausted,
}

impl RangeError {
    /// What somebody could do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::BadBase(_) | Self::ServerBlocked(_) => Some("choose another base for uid ranges"),
            Self::Exhausted => Some("remove sandboxes that are not needed"),
            Self::Io { .. } => None,
        }
    }
}

impl Ranges {
    /// Opens the ranges recorded in `directory`.
    pub fn open(directory: &Path, base: u32) -> Result<Self, RangeError> {
        Self::open_beside(directory, base, COUNT, &given_to_users()?)
    }

    /// As [`Ranges::open`], beside ids that others have: pairs of first id and count.
    fn open_beside(
        directory: &Path,
        base: u32,
        count: u32,
        given: &[(u64, u64)],
    ) -> Result<Self, RangeError> {
        let blocked = blocked(base, count, given)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).during("make", directory)?;
        let by_id = recorded(directory)?;
        let taken = by_id.values().copied().collect();
        let next = starting_place(directory) % count;
        Ok(Self { directory: directory.to_owned(), base, count, by_id, taken, blocked, next })
    }

    /// The range of the sandbox `id`, recorded before this returns. One that has a range keeps it.
    pub fn allocate(&mut self, id: &str) -> Result<Range, RangeError> {
        if let Some(range) = self.of(id) {
            return Ok(range);
        }
        // Going round means that a range rests as long as possible before it is used again.
        for step in 0..self.count {
            let index = (self.next + step) % self.count;
            if index == 0 || self.taken.contains(&index) || self.blocked.contains(&index) {
                continue;
            }
            self.record(index, id)?;
            self.next = index + 1;
            return Ok(self.range(index));
        }
        Err(RangeError::Exhausted)
    }

    /// The range that `id` has.
    pub fn of(&self, id: &str) -> Option<Range> {
        self.by_id.get(id).map(|index| self.range(*index))
    }

    /// Frees the range of `id`; nothing of the sandbox may be left. Having none is no error.
    pub fn release(&mut self, id: &str) -> Result<(), RangeError> {
        let Some(Range { index, .. }) = self.of(id) else { return Ok(()) };
        let path = self.path(index);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).during("remove", &path),
            _ => {
                self.taken.remove(&index);
                self.by_id.remove(id);
                Ok(())
            }
        }
    }

    /// The sandboxes that have a range.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.by_id.keys().map(String::as_str)
    }

    fn record(&mut self, index: u32, id: &str) -> Result<(), RangeError> {
        let path = self.path(index);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(id.as_bytes())).during("record the range", &path)?;
        self.taken.insert(index);
        self.by_id.insert(id.to_owned(), index);
        Ok(())
    }

    fn range(&self, index: u32) -> Range {
        Range { index, first: self.base + index * WIDTH }
    }

    fn path(&self, index: u32) -> PathBuf {
        self.directory.join(index.to_string())
    }
}

/// How many sandboxes can have a range, on a host where none has one yet.
pub fn free_ranges(base: u32) -> Result<usize, RangeError> {
    let blocked = blocked(base, COUNT, &given_to_users()?)?;
    Ok((1..COUNT).filter(|index| !blocked.contains(index)).count())
}

/// The ids that the host has given to its users, as pairs of first id and count.
fn given_to_users() -> Result<Vec<(u64, u64)>, RangeError> {
    let mut given = Vec::new();
    for path in [Path::new("/etc/subuid"), Path::new("/etc/subgid")] {
        match fs::read_to_string(path) {
            Ok(text) => given.extend(subordinate(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).during("read", path),
        }
    }
    Ok(given)
}

/// The ranges that would overlap with what was given.
fn blocked(base: u32, count: u32, given: &[(u64, u64)]) -> Result<BTreeSet<u32>, RangeError> {
    if u64::from(base) + u64::from(count) * u64::from(WIDTH) > u64::from(u32::MAX) || base == 0 {
        return Err(RangeError::BadBase(base));
    }
    let blocked: BTreeSet<u32> = (0..count).filter(|index| overlaps(base, *index, given)).collect();
    if blocked.contains(&0) { Err(RangeError::ServerBlocked(base)) } else { Ok(blocked) }
}

/// What the files say. An empty one was made by somebody killed before it was written, so
/// nothing uses that range.
fn recorded(directory: &Path) -> Result<BTreeMap<String, u32>, RangeError> {
    let mut by_id = BTreeMap::new();
    for entry in fs::read_dir(directory).during("list", directory)? {
        let path = entry.during("list", directory)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(index) = name.and_then(|name| name.parse().ok()) else { continue };
        let id = fs::read_to_string(&path).during("read", &path)?;
        if id.is_empty() {
            fs::remove_file(&path).during("remove", &path)?;
        } else {
            by_id.insert(id, index);
        }
    }
    Ok(by_id)
}

/// Servers with different state directories start at different places, so that their ranges are
/// unlikely to meet.
fn starting_place(directory: &Path) -> u32 {
    let bytes = directory.as_os_str().as_bytes();
    bytes.iter().fold(5381_u32, |sum, byte| sum.wrapping_mul(33) ^ u32::from(*byte))
}

/// The ids in a file such as /etc/subuid: lines of `user:first:count`. See subuid(5).
fn subordinate(text: &str) -> Vec<(u64, u64)> {
    let line = |line: &str| {
        let mut fields = line.split(':').skip(1);
        Some((fields.next()?.trim().parse().ok()?, fields.next()?.trim().parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn overlaps(base: u32, index: u32, given: &[(u64, u64)]) -> bool {
    let first = u64::from(base) + u64::from(index) * u64::from(WIDTH);
    let end = first + u64::from(WIDTH);
    given.iter().any(|(start, count)| *start < end && first < start.saturating_add(*count))
}

/// Says what was attempted on which path when something failed.
trait During<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, RangeError>;
}

impl<T> During<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, RangeError> {
        self.map_err(|source| RangeError::Io { action, path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test stops at the first surprise")]

    use tempfile::TempDir;

    use super::*;

    const FEW: u32 = 64;
    const BASE: u32 = 1_879_048_192;

    fn open(directory: &TempDir) -> Ranges {
        Ranges::open_beside(directory.path(), BASE, FEW, &[]).unwrap()
    }

    #[test]
    fn no_two_sandboxes_share_a_range_until_all_are_taken() {
        let directory = TempDir::new().unwrap();
        let mut ranges = open(&directory);
        let mut seen = BTreeSet::new();
        for number in 1..FEW {
            let range = ranges.allocate(&format!("s{number}")).unwrap();
            assert!(range.index > 0 && seen.insert(range.first));
        }
        assert!(matches!(ranges.allocate("more"), Err(RangeError::Exhausted)));
        ranges.release("s7").unwrap();
        ranges.allocate("more").unwrap();
    }

    #[test]
    fn what_was_recorded_is_found_again() {
        let directory = TempDir::new().unwrap();
        let range = open(&directory).allocate("a").unwrap();
        let other = range.index % (FEW - 2) + 1;
        fs::write(directory.path().join(other.to_string()), "").unwrap();
        let mut again = open(&directory);
        assert_eq!(again.of("a"), Some(range));
        assert_eq!(again.allocate("a").unwrap(), range);
        assert_eq!(again.ids().collect::<Vec<_>>(), ["a"]);
        again.release("a").unwrap();
        again.release("a").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_range_that_was_just_freed_rests() {
        let directory = TempDir::new().unwrap();
        let mut ranges = open(&directory);
        let first = ranges.allocate("a").unwrap();
        ranges.release("a").unwrap();
        assert_ne!(ranges.allocate("b").unwrap(), first);
    }

    #[test]
    fn ids_that_users_have_are_left_alone() {
        let directory = TempDir::new().unwrap();
        let text = format!("# none\nann:{}:{}\nbob:100000:65536\nbroken\n", BASE + WIDTH + 5, WIDTH);
        let given = subordinate(&text);
        assert_eq!(given.len(), 2);
        let mut ranges = Ranges::open_beside(directory.path(), BASE, FEW, &given).unwrap();
        let indexes: Vec<u32> = (3..FEW).map(|n| ranges.allocate(&n.to_string()).unwrap().index).collect();
        assert!(!indexes.contains(&1) && !indexes.contains(&2));
        assert!(matches!(ranges.allocate("more"), Err(RangeError::Exhausted)));
    }

    #[test]
    fn a_base_that_cannot_hold_them_is_refused() {
        let directory = TempDir::new().unwrap();
        let open = |base, given: &[(u64, u64)]| Ranges::open_beside(directory.path(), base, FEW, given);
        assert!(matches!(open(u32::MAX - 5, &[]), Err(RangeError::BadBase(_))));
        assert!(matches!(open(0, &[]), Err(RangeError::BadBase(_))));
        let all = [(u64::from(BASE), 1)];
        assert!(matches!(open(BASE, &all), Err(RangeError::ServerBlocked(_))));
    }
}
