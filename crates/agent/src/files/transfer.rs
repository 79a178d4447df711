//! Reads, writes and appends file contents.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use wire::files::FileAttributes;
use wire::frame::{CHUNK_SIZE, MAX_PAYLOAD};
use wire::{AgentReply, Fault, FaultKind};

use super::attributes::ResolvedAttributes;
use super::draft::DraftFile;
use super::{ErrorContext, FileWorker, make_parents};
use crate::fault;

pub(super) const DEFAULT_FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// The maximum number of symbolic links followed, as in the kernel.
const MAX_LINKS: usize = 40;

/// How long an append waits for other appends, and an edit for other edits.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

impl FileWorker<'_> {
    pub(super) fn read_file(&mut self, path: &Path, offset: u64, length: Option<u64>) -> Result<(), Fault> {
        let mut file = open_regular(path)?;
        let size = file.metadata().or_fault("stat", path)?.len();
        file.seek(SeekFrom::Start(offset.min(size))).or_fault("seek", path)?;
        self.connection.send_reply(&AgentReply::Reading { size })?;
        let mut left = length.unwrap_or(u64::MAX);
        let mut known = size.saturating_sub(offset);
        while left > 0 {
            let count = if known > 0 {
                self.send_known_bytes(&mut file, left.min(known))?
            } else {
                self.send_further_bytes(&mut file, path, left)?
            };
            if count == 0 {
                break;
            }
            known = known.saturating_sub(count);
            left -= count;
        }
        Ok(self.connection.send_end()?)
    }

    /// Sends one frame of bytes that are known to exist.
    fn send_known_bytes(&mut self, file: &mut File, most: u64) -> Result<u64, Fault> {
        let length = usize::try_from(most).unwrap_or(MAX_PAYLOAD).min(MAX_PAYLOAD);
        self.connection.send_file(file, length)?;
        Ok(length as u64)
    }

    /// Sends bytes beyond the size that the file had at first: it may have grown, or be a kernel
    /// file whose reported size is zero.
    fn send_further_bytes(&mut self, file: &mut File, path: &Path, most: u64) -> Result<u64, Fault> {
        let mut buffer = vec![0; usize::try_from(most).unwrap_or(CHUNK_SIZE).min(CHUNK_SIZE)];
        let count = file.read(&mut buffer).or_fault("read", path)?;
        if count > 0 {
            self.connection.send_data(&buffer[..count])?;
        }
        Ok(count as u64)
    }

    /// Writes under a temporary name where possible and renames it at the end, so that a partial
    /// file is never visible and the old one stays if the sender disconnects.
    pub(super) fn write_file(&mut self, path: &Path, attributes: &FileAttributes) -> Result<(), Fault> {
        let wanted = ResolvedAttributes::new(attributes)?;
        make_parents(path)?;
        let target = follow_links(path)?;
        let mut draft = DraftFile::new(&target)?;
        while let Some(bytes) = self.connection.receive_data()? {
            draft.append_bytes(bytes)?;
        }
        draft.put_in_place(&wanted)?;
        self.send_ok()
    }

    /// Locks the file, so that the bytes of each append stay together. If the sender disconnects
    /// before its end, its bytes are removed again.
    pub(super) fn append_file(&mut self, path: &Path, attributes: &FileAttributes) -> Result<(), Fault> {
        let wanted = ResolvedAttributes::new(attributes)?;
        make_parents(path)?;
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, wanted.new_mode.unwrap_or(DEFAULT_FILE_MODE))
            .or_fault("open", path)?;
        let mut file = File::from(file);
        check_regular(&file, path)?;
        self.lock_file(&file, path)?;
        let before = file.metadata().or_fault("stat", path)?.len();
        let mut added = 0;
        let result = self.append_received(&mut file, path, &mut added);
        if result.is_err() && file.metadata().or_fault("stat", path)?.len() == before + added {
            // If the file is longer, a program that does not lock has appended to it, so it must
            // not be truncated.
            file.set_len(before).or_fault("truncate", path)?;
        }
        result?;
        wanted.apply_to_file(&file, path)?;
        self.send_ok()
    }

    fn append_received(&mut self, file: &mut File, path: &Path, added: &mut u64) -> Result<(), Fault> {
        while let Some(bytes) = self.connection.receive_data()? {
            let mut rest = bytes;
            while !rest.is_empty() {
                let count = file.write(rest).or_fault("write", path)?;
                *added += count as u64;
                rest = &rest[count..];
            }
        }
        Ok(())
    }

    /// A process in the sandbox may hold the lock forever, so the wait is bounded, and it ends if
    /// the server disconnects.
    pub(super) fn lock_file(&self, file: &File, path: &Path) -> Result<(), Fault> {
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::AGAIN) if begun.elapsed() < LOCK_TIMEOUT => self.pause_before_retry(path)?,
                locked => return locked.or_fault("lock", path),
            }
        }
    }

    fn pause_before_retry(&self, path: &Path) -> Result<(), Fault> {
        let pause = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        match rustix::event::poll(&mut fds, Some(&pause)).or_fault("wait", path)? {
            0 => Ok(()),
            _ => Err(fault::from_kind(FaultKind::Other, "talk", "a broken connection")),
        }
    }
}

/// Opens a file for reading, without waiting for the other end of a pipe.
pub(super) fn open_regular(path: &Path) -> Result<File, Fault> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).or_fault("open", path)?);
    check_regular(&file, path)?;
    Ok(file)
}

pub(super) fn check_regular(file: &File, path: &Path) -> Result<(), Fault> {
    let metadata = file.metadata().or_fault("stat", path)?;
    if metadata.is_dir() {
        return Err(fault::from_errno(Errno::ISDIR, "open", &path.to_string_lossy()));
    }
    if metadata.is_file() { Ok(()) } else { Err(not_regular_fault(path)) }
}

pub(super) fn not_regular_fault(path: &Path) -> Fault {
    fault::from_kind(FaultKind::Invalid, "open", &format!("{}: not a regular file", path.display()))
}

/// Resolves all links, so that a link stays a link when its target is replaced.
pub(super) fn follow_links(path: &Path) -> Result<PathBuf, Fault> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            // Not a link, or the path does not exist.
            Err(_) => return Ok(path),
        }
    }
    Err(fault::from_errno(Errno::LOOP, "open", &path.to_string_lossy()))
}
