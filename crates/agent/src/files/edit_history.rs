//! The contents that files had before they were edited, so that edits can be undone.
//!
//! All of it is in one file in the directory of the journals, outside the sandbox's root. Only the agent can open it; the
//! worker of an edit gets a descriptor before it assumes the requested identity. A worker holds the lock of the file while it uses it,
//! which also keeps edits of one sandbox from overtaking each other.
//!
//! ```text
//! | MAX_STEPS slots of SLOT_BYTES | path, content | path, content | … up to MAX_DATA_BYTES
//!   a slot: sequence, user, position and lengths of its data, digest of the content after the edit
//! ```
//!
//! A step is written before its file is replaced: data first, then its slot. A worker that is killed in between
//! leaves a step that restores the content that the file has anyway; until that step is undone with `overwrite`, an undo with `refuse`
//! is refused.

use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{Mode, OFlags};

/// The name of the file. The names of journals contain no dot.
const FILE_NAME: &str = ".edits";

/// The maximum number of edits that can be undone, of all files together.
const MAX_STEPS: usize = 512;

/// The maximum number of bytes kept for all files together, with their paths.
const MAX_DATA_BYTES: u64 = 32 << 20;

/// The maximum number of edits of one file that can be undone.
const MAX_STEPS_PER_FILE: usize = 32;

/// The maximum number of bytes kept for one file, without its path.
const MAX_BYTES_PER_FILE: u64 = 8 << 20;

/// The longest path; the kernel's limit is 4096, and the name of a session comes before it.
const MAX_PATH_BYTES: usize = 8 << 10;

const SLOT_BYTES: usize = 64;
const DATA_START: u64 = (MAX_STEPS * SLOT_BYTES) as u64;

/// The history of edits, as one user sees it. The lock of the file is held as long as this exists.
#[derive(Debug)]
pub(super) struct EditHistory {
    file: File,
    uid: u32,
    slots: Vec<StepSlot>,
}

/// One edit that can be undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EditStep {
    /// `None` if the edit created the file.
    pub(super) before: Option<FormerFile>,
    pub(super) after: ContentDigest,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FormerFile {
    pub(super) content: Vec<u8>,
    /// Permission bits, for a file that was removed since.
    pub(super) mode: u32,
    /// The user to whom it belonged; others may not get its content.
    pub(super) owner: u32,
}

/// Recognises a content. It protects from mistakes, not from an attacker, who could only undo their own edits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ContentDigest {
    size: u64,
    hash: u64,
}

/// The slot that holds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepIndex(usize);

/// What is known about a step without reading its data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StepSlot {
    /// Grows with each step; zero means that the slot is free.
    sequence: u64,
    uid: u32,
    mode: u32,
    path_hash: u64,
    position: u64,
    path_length: u64,
    content_length: u64,
    after: ContentDigest,
    owner: u32,
    created: bool,
}

/// Opens the file in the directory of the journals and creates it if necessary.
pub(crate) fn open_history(journals: impl AsFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(journals, FILE_NAME, flags, Mode::from_raw_mode(0o600))
}

impl EditHistory {
    /// Takes over the file, whose lock is held.
    pub(super) fn load(file: File, uid: u32) -> io::Result<Self> {
        let mut index = vec![0; MAX_STEPS * SLOT_BYTES];
        let mut length = 0;
        while length < index.len() {
            match file.read_at(&mut index[length..], length as u64)? {
                0 => break,
                count => length += count,
            }
        }
        let slots = index.chunks_exact(SLOT_BYTES).map(StepSlot::from_bytes).collect();
        Ok(Self { file, uid, slots })
    }

    /// Keeps what is needed to undo an edit. Returns `None` if it is too long; earlier steps of the file
    /// are then dropped, since they would undo more than one edit.
    pub(super) fn add_step(&mut self, path: &[u8], step: &EditStep) -> io::Result<Option<StepIndex>> {
        let content = step.before.as_ref().map_or(&[][..], |before| &before.content);
        let (path_length, content_length) = (path.len() as u64, content.len() as u64);
        if content_length > MAX_BYTES_PER_FILE || path.len() > MAX_PATH_BYTES {
            self.forget_file(path)?;
            return Ok(None);
        }
        self.make_room_for_file(path, content_length)?;
        let (index, position) = self.make_room(path_length + content_length)?;
        let sequence = self.slots.iter().map(|slot| slot.sequence).max().unwrap_or(0).saturating_add(1);
        let slot = StepSlot {
            sequence,
            uid: self.uid,
            mode: step.before.as_ref().map_or(0, |before| before.mode),
            path_hash: hash_bytes(path),
            position,
            path_length,
            content_length,
            after: step.after,
            owner: step.before.as_ref().map_or(0, |before| before.owner),
            created: step.before.is_none(),
        };
        let written = self
            .file
            .write_all_at(path, DATA_START + position)
            .and_then(|()| self.file.write_all_at(content, DATA_START + position + path_length))
            .and_then(|()| self.write_slot(index, slot));
        if written.is_err() {
            // A part of the data must not take the space of later steps.
            self.trim_file()?;
        }
        written.map(|()| Some(index))
    }

    /// The last step of a file by this user.
    pub(super) fn last_step(&self, path: &[u8]) -> io::Result<Option<(StepIndex, EditStep)>> {
        let Some(index) = self.steps_of(path)?.pop() else { return Ok(None) };
        let slot = self.slots[index.0];
        let before = if slot.created {
            None
        } else {
            let content = self.read_data(slot.position + slot.path_length, slot.content_length)?;
            Some(FormerFile { content, mode: slot.mode, owner: slot.owner })
        };
        Ok(Some((index, EditStep { before, after: slot.after })))
    }

    pub(super) fn count_steps(&self, path: &[u8]) -> io::Result<u64> {
        Ok(self.steps_of(path)?.len() as u64)
    }

    pub(super) fn remove_step(&mut self, index: StepIndex) -> io::Result<()> {
        self.write_slot(index, StepSlot::default())?;
        self.trim_file()
    }

    /// Gives back the space behind the data of the last step.
    fn trim_file(&self) -> io::Result<()> {
        let end = self.slots.iter().filter(|slot| slot.sequence > 0).map(StepSlot::end).max().unwrap_or(0);
        self.file.set_len(DATA_START + end)
    }

    pub(super) fn forget_file(&mut self, path: &[u8]) -> io::Result<()> {
        for index in self.steps_of(path)? {
            self.remove_step(index)?;
        }
        Ok(())
    }

    /// The steps of a file by this user, the oldest first.
    fn steps_of(&self, path: &[u8]) -> io::Result<Vec<StepIndex>> {
        let hash = hash_bytes(path);
        let mut steps = Vec::new();
        for (index, slot) in self.slots.iter().enumerate() {
            let alike = slot.sequence > 0 && slot.uid == self.uid && slot.path_hash == hash;
            // Other paths may have the same hash.
            if alike && self.read_data(slot.position, slot.path_length)? == path {
                steps.push(StepIndex(index));
            }
        }
        steps.sort_unstable_by_key(|index| self.slots[index.0].sequence);
        Ok(steps)
    }

    /// Drops the oldest steps of a file until one more with this content is within its limits.
    fn make_room_for_file(&mut self, path: &[u8], content_length: u64) -> io::Result<()> {
        let steps = self.steps_of(path)?;
        let mut bytes =
            content_length + steps.iter().map(|index| self.slots[index.0].content_length).sum::<u64>();
        let mut count = steps.len();
        for index in steps {
            if count < MAX_STEPS_PER_FILE && bytes <= MAX_BYTES_PER_FILE {
                break;
            }
            bytes -= self.slots[index.0].content_length;
            count -= 1;
            self.remove_step(index)?;
        }
        Ok(())
    }

    /// Drops the oldest steps of all files until there is a free slot, and a free position for this many bytes.
    fn make_room(&mut self, length: u64) -> io::Result<(StepIndex, u64)> {
        loop {
            let free = self.slots.iter().position(|slot| slot.sequence == 0);
            if let Some(found) = free.zip(self.free_position(length)) {
                return Ok((StepIndex(found.0), found.1));
            }
            let used = self.slots.iter().enumerate().filter(|(_, slot)| slot.sequence > 0);
            let oldest = used.min_by_key(|(_, slot)| slot.sequence).map(|(index, _)| index);
            let oldest = oldest.ok_or_else(|| io::Error::other("a step that is longer than the history"))?;
            self.remove_step(StepIndex(oldest))?;
        }
    }

    /// The first gap between the data of steps that is long enough.
    fn free_position(&self, length: u64) -> Option<u64> {
        let mut used: Vec<&StepSlot> = self.slots.iter().filter(|slot| slot.sequence > 0).collect();
        used.sort_unstable_by_key(|slot| slot.position);
        let mut position = 0;
        for slot in used {
            if slot.position >= position + length {
                break;
            }
            position = position.max(slot.end());
        }
        (position + length <= MAX_DATA_BYTES).then_some(position)
    }

    fn read_data(&self, position: u64, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, DATA_START + position)?;
        Ok(bytes)
    }

    fn write_slot(&mut self, index: StepIndex, slot: StepSlot) -> io::Result<()> {
        self.file.write_all_at(&slot.to_bytes(), (index.0 * SLOT_BYTES) as u64)?;
        self.slots[index.0] = slot;
        Ok(())
    }
}

impl StepSlot {
    /// The position behind its data.
    fn end(&self) -> u64 {
        self.position + self.path_length + self.content_length
    }

    /// A slot whose numbers are impossible counts as free.
    fn from_bytes(bytes: &[u8]) -> Self {
        let number = |index: usize| {
            bytes.as_chunks::<8>().0.get(index).map_or(0, |number| u64::from_le_bytes(*number))
        };
        let half =
            |index: usize, shift: u32| u32::try_from(number(index) >> shift & 0xffff_ffff).unwrap_or(0);
        let slot = Self {
            sequence: number(0),
            uid: half(1, 0),
            mode: half(1, 32) & 0o777,
            path_hash: number(2),
            position: number(3),
            path_length: half(4, 0).into(),
            content_length: half(4, 32).into(),
            after: ContentDigest { size: number(5), hash: number(6) },
            owner: half(7, 0),
            created: half(7, 32) != 0,
        };
        let possible = slot.path_length <= MAX_PATH_BYTES as u64
            && slot.content_length <= MAX_BYTES_PER_FILE
            && slot.position <= MAX_DATA_BYTES
            && slot.end() <= MAX_DATA_BYTES;
        if possible { slot } else { Self::default() }
    }

    fn to_bytes(self) -> [u8; SLOT_BYTES] {
        let numbers = [
            self.sequence,
            u64::from(self.uid) | u64::from(self.mode) << 32,
            self.path_hash,
            self.position,
            self.path_length | self.content_length << 32,
            self.after.size,
            self.after.hash,
            u64::from(self.owner) | u64::from(self.created) << 32,
        ];
        let mut bytes = [0; SLOT_BYTES];
        for (place, number) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
            *place = number.to_le_bytes();
        }
        bytes
    }
}

impl ContentDigest {
    pub(super) fn of(content: &[u8]) -> Self {
        Self { size: content.len() as u64, hash: hash_bytes(content) }
    }
}

/// The history does not outlive its agent, so the result need not be the same in other versions.
fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a panic shows which step of a test failed")]
mod tests {
    use super::*;

    fn history(directory: &tempfile::TempDir, uid: u32) -> EditHistory {
        let journals = File::open(directory.path()).unwrap();
        EditHistory::load(open_history(&journals).unwrap().into(), uid).unwrap()
    }

    fn step(content: &[u8]) -> EditStep {
        let before = Some(FormerFile { content: content.to_owned(), mode: 0o640, owner: 7 });
        EditStep { before, after: ContentDigest::of(b"after") }
    }

    fn last(history: &EditHistory, path: &[u8]) -> Option<EditStep> {
        history.last_step(path).unwrap().map(|(_, step)| step)
    }

    #[test]
    fn steps_are_found_by_user_and_path_after_reopening() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = history(&directory, 1000);
        let created = EditStep { before: None, after: ContentDigest::of(b"") };
        for (path, step) in [("/a", &created), ("/b", &step(b"b1")), ("/a", &step(b"a1"))] {
            own.add_step(path.as_bytes(), step).unwrap().unwrap();
        }
        assert_eq!(last(&history(&directory, 0), b"/a"), None, "another user has another history");
        let mut own = history(&directory, 1000);
        assert_eq!(last(&own, b"/a"), Some(step(b"a1")));
        assert_eq!(own.count_steps(b"/a").unwrap(), 2);
        let (index, _) = own.last_step(b"/a").unwrap().unwrap();
        own.remove_step(index).unwrap();
        let mut own = history(&directory, 1000);
        assert_eq!(last(&own, b"/a"), Some(created));
        assert_eq!(last(&own, b"/b"), Some(step(b"b1")));
        own.forget_file(b"/a").unwrap();
        assert_eq!((last(&own, b"/a"), last(&own, b"/c")), (None, None));
    }

    #[test]
    fn steps_of_one_file_are_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = history(&directory, 0);
        own.add_step(b"/other", &step(b"other")).unwrap();
        for number in 0..MAX_STEPS_PER_FILE + 5 {
            own.add_step(b"/a", &step(&[b'x', u8::try_from(number).unwrap()])).unwrap().unwrap();
        }
        assert_eq!(own.count_steps(b"/a").unwrap(), MAX_STEPS_PER_FILE as u64);
        let large = vec![b'y'; usize::try_from(MAX_BYTES_PER_FILE / 2).unwrap()];
        for _ in 0..3 {
            own.add_step(b"/a", &step(&large)).unwrap().unwrap();
        }
        assert_eq!(own.count_steps(b"/a").unwrap(), 2);
        assert_eq!(last(&own, b"/a"), Some(step(&large)));
        assert_eq!(last(&own, b"/other"), Some(step(b"other")));
        let too_large = vec![0; usize::try_from(MAX_BYTES_PER_FILE).unwrap() + 1];
        assert_eq!(own.add_step(b"/a", &step(&too_large)).unwrap(), None);
        assert_eq!(own.count_steps(b"/a").unwrap(), 0, "an older step would undo two edits");
    }

    #[test]
    fn all_steps_together_are_bounded_and_the_oldest_is_dropped_first() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = history(&directory, 0);
        let name = |number: usize| format!("/{number}").into_bytes();
        for number in 0..MAX_STEPS + 3 {
            own.add_step(&name(number), &step(b"x")).unwrap().unwrap();
        }
        let kept = |own: &EditHistory, number| last(own, &name(number)).is_some();
        assert!(!kept(&own, 2) && kept(&own, 3) && kept(&own, MAX_STEPS + 2));
        let large = vec![b'y'; usize::try_from(MAX_BYTES_PER_FILE).unwrap()];
        for number in 0..9 {
            own.add_step(format!("/large{number}").as_bytes(), &step(&large)).unwrap().unwrap();
            let size = own.file.metadata().unwrap().len();
            assert!(size <= DATA_START + MAX_DATA_BYTES, "{size}");
        }
        assert_eq!(last(&own, b"/large8"), Some(step(&large)));
        assert!(last(&own, b"/large4").is_none() && !kept(&own, MAX_STEPS + 2));
        for number in 0..9 {
            own.forget_file(format!("/large{number}").as_bytes()).unwrap();
        }
        assert_eq!(own.file.metadata().unwrap().len(), DATA_START, "the space is given back");
    }

    #[test]
    fn damaged_history_is_empty() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        std::fs::write(&path, vec![0xff; 100_000]).unwrap();
        let mut own = history(&directory, 0);
        assert_eq!(last(&own, b"/a"), None);
        own.add_step(b"/a", &step(b"x")).unwrap().unwrap();
        assert_eq!(last(&history(&directory, 0), b"/a"), Some(step(b"x")));
    }

    #[test]
    fn data_of_steps_never_overlaps() {
        let directory = tempfile::tempdir().unwrap();
        let mut own = history(&directory, 0);
        let mut steps = Vec::new();
        for round in 0..200_usize {
            let path = format!("/{}", round % 7).into_bytes();
            let content = vec![u8::try_from(round).unwrap(); (round * 7919) % 300_000];
            own.add_step(&path, &step(&content)).unwrap().unwrap();
            steps.push((path, content));
            if round % 3 == 0 {
                let path = format!("/{}", round % 5).into_bytes();
                if let Some((index, _)) = own.last_step(&path).unwrap() {
                    own.remove_step(index).unwrap();
                }
            }
            let mut used: Vec<_> = own.slots.iter().filter(|slot| slot.sequence > 0).collect();
            used.sort_unstable_by_key(|slot| slot.position);
            assert!(used.windows(2).all(|pair| pair[0].end() <= pair[1].position), "{used:?}");
        }
        let (path, content) = steps.last().unwrap();
        assert_eq!(last(&own, path), Some(step(content)));
    }
}
