//! The output of a process, stored in a file; `docs/journal.md` describes the format.
//!
//! ```text
//! | header | record | record | …first bytes… | dropped | record | …last bytes… | end record |
//!                                            ▲         ▲                       ▲
//!                                           head      tail                    end
//! ```
//! Positions only grow. After the first bytes they wrap around a ring of fixed size in the file, so
//! new output overwrites the output that retention drops. Punching holes instead would make the
//! filesystem write the dropped data to the disk first. Bytes that could not be written have no
//! record: a reader sees from the offsets that they are missing, in the same way as for dropped
//! bytes. The file is created with the first record.
//!
//! Once the ring has been filled, it continues in memory if there is some, at the same offsets, and is
//! copied to the file at the end of the process; see [`super::ring_memory`].

use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use wire::StreamTag;
use wire::process::{OutputRetention, ProcessEnd};

use super::ring_memory::{RingMemory, RingMemoryBudget};

/// The maximum number of bytes in one record and in one read from a pipe.
pub(crate) const MAX_RECORD_BYTES: usize = 64 << 10;
/// How many times of output are reported.
const MAX_TIMES: usize = 4096;
/// How many records are read to find them. Nothing else happens in the agent meanwhile.
const MAX_TIMED_RECORDS: usize = 1 << 15;

const MAGIC: &[u8; 8] = b"CRCLJRN3";
const HEADER_LENGTH: usize = 40;
const RECORD_HEADER_LENGTH: usize = 29;
/// The position of the first record.
const FIRST_RECORD_POSITION: u64 = HEADER_LENGTH as u64;
/// The stream of the record that contains the end of the process.
const END_STREAM: u8 = 0;

/// The distance between the marks from which a reader can start.
const MARK_INTERVAL: u64 = 64 << 10;

/// For this many milliseconds a record may be extended, so that a program which prints single bytes
/// does not fill the file with headers.
const MAX_EXTEND_MS: u64 = 1000;

/// How much more than the retention is kept, so that output is dropped in few large steps.
const TRIM_SLACK_BYTES: u64 = 128 << 10;

/// Space in the ring for output that arrives before anything is dropped: what the pipes of a
/// command still hold when it ends or is paused, with the headers.
const RING_MARGIN: u64 = 3 << 20;

/// Removes the journals of an earlier start of this sandbox, whose processes are gone. Other files
/// stay: they only use space of this sandbox.
pub(crate) fn remove_old_journals(directory: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let listed = rustix::fs::openat(directory, c".", flags, Mode::empty())?;
    for entry in rustix::fs::Dir::new(listed)? {
        let entry = entry?;
        if entry.file_type() == rustix::fs::FileType::RegularFile {
            rustix::fs::unlinkat(directory, entry.file_name(), AtFlags::empty())?;
        }
    }
    Ok(())
}

#[derive(Debug)]
pub(crate) struct Journal {
    name: Rc<str>,
    retention: OutputRetention,
    file: Option<OwnedFd>,
    /// The overall offset behind the last byte.
    written: u64,
    /// How many of these bytes were errors.
    stderr: u64,
    /// The file position behind the last record.
    end: u64,
    marks: Vec<JournalMark>,
    /// The end of the first bytes, once there are that many.
    head: Option<JournalMark>,
    /// The start of the last bytes, once something was dropped.
    tail: Option<JournalMark>,
    last: Option<JournalRecord>,
    finished: bool,
    /// Bytes from this offset on are kept regardless of retention.
    pinned: Option<u64>,
    memory_budget: RingMemoryBudget,
    memory: Option<MemoryRing>,
}

/// The part of the ring that is in memory.
#[derive(Debug)]
struct MemoryRing {
    memory: RingMemory,
    /// Records from this position on are in memory, those before it in the file.
    from: u64,
}

/// The start of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct JournalMark {
    offset: u64,
    position: u64,
}

#[derive(Clone, Copy, Debug)]
struct JournalRecord {
    position: u64,
    stream: u8,
    time_ms: u64,
    offset: u64,
    length: u32,
    /// How many bytes before this record were errors. Readers need it after a gap.
    stderr: u64,
}

/// The position of a reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalCursor {
    pub(crate) offset: u64,
    /// The record to continue with, if it is known.
    record: Option<u64>,
}

/// The next item for a reader.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JournalPiece {
    /// `length` bytes are in the buffer.
    Output { stream: StreamTag, offset: u64, length: usize },
    Gap {
        from: u64,
        to: u64,
        /// How many bytes before `to` were errors.
        stderr: u64,
    },
    /// There is nothing to read until more is printed.
    Nothing,
}

impl JournalCursor {
    pub(crate) fn at(offset: u64) -> Self {
        Self { offset, record: None }
    }
}

impl JournalRecord {
    fn encode_header(&self) -> [u8; RECORD_HEADER_LENGTH] {
        let mut bytes = [0; RECORD_HEADER_LENGTH];
        bytes[0] = self.stream;
        bytes[1..9].copy_from_slice(&self.time_ms.to_le_bytes());
        bytes[9..17].copy_from_slice(&self.offset.to_le_bytes());
        bytes[17..21].copy_from_slice(&self.length.to_le_bytes());
        bytes[21..29].copy_from_slice(&self.stderr.to_le_bytes());
        bytes
    }

    fn from_header(position: u64, bytes: &[u8; RECORD_HEADER_LENGTH]) -> Self {
        let word = |from: usize| bytes[from..from + 8].try_into().map_or(0, u64::from_le_bytes);
        let length = bytes[17..21].try_into().map_or(0, u32::from_le_bytes);
        Self { position, stream: bytes[0], time_ms: word(1), offset: word(9), length, stderr: word(21) }
    }

    /// How many bytes before its byte `skip` were errors.
    fn stderr_before(&self, skip: u64) -> u64 {
        self.stderr + if self.stream == StreamTag::Stderr as u8 { skip } else { 0 }
    }

    fn end_position(&self) -> u64 {
        self.position + RECORD_HEADER_LENGTH as u64 + u64::from(self.length)
    }
}

impl Journal {
    pub(crate) fn new(
        name: impl Into<Rc<str>>,
        retention: OutputRetention,
        memory_budget: RingMemoryBudget,
    ) -> Self {
        Self {
            name: name.into(),
            retention,
            file: None,
            written: 0,
            stderr: 0,
            end: FIRST_RECORD_POSITION,
            marks: Vec::new(),
            head: None,
            tail: None,
            last: None,
            finished: false,
            pinned: None,
            memory_budget,
            memory: None,
        }
    }

    /// Keeps everything from this offset on, for a reader that the process waits for.
    pub(crate) fn pin(&mut self, offset: Option<u64>) {
        self.pinned = offset;
        self.trim();
    }

    /// How much of the file a reader has not read yet.
    pub(crate) fn backlog(&self, cursor: &JournalCursor) -> u64 {
        if cursor.offset >= self.written { 0 } else { self.end.saturating_sub(self.start_position(cursor)) }
    }

    /// The maximum size of the last bytes in the ring, with headers.
    pub(crate) fn max_tail_bytes(&self) -> u64 {
        self.retention.last.saturating_add(self.retention.last / 2).saturating_add(1 << 20)
    }

    /// The size of the ring after the first bytes.
    fn ring_size(&self) -> u64 {
        self.max_tail_bytes().saturating_add(TRIM_SLACK_BYTES).saturating_add(RING_MARGIN)
    }

    /// The file offset of a position, and the number of bytes from there to the end of the ring.
    fn file_offset(&self, position: u64) -> (u64, u64) {
        match self.head {
            Some(head) if position >= head.position => {
                let into = (position - head.position) % self.ring_size();
                (head.position + into, self.ring_size() - into)
            }
            _ => (position, u64::MAX),
        }
    }

    /// Whether the ring has wrapped, so that positions differ from file offsets.
    fn has_wrapped(&self, end: u64) -> bool {
        self.head.is_some_and(|head| end - head.position > self.ring_size())
    }

    pub(crate) fn retention(&self) -> OutputRetention {
        self.retention
    }

    /// The overall offset behind the last byte.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Stores output. Even if it cannot be written, the bytes are counted: a reader sees a gap
    /// instead of them.
    pub(crate) fn append(&mut self, directory: BorrowedFd<'_>, stream: StreamTag, bytes: &[u8], now_ms: u64) {
        let room = self.retention.first.saturating_sub(self.written);
        let first = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
        let (head, rest) = bytes.split_at(first);
        self.append_records(directory, stream, head, now_ms);
        if self.head.is_none() && self.written >= self.retention.first {
            self.head = Some(JournalMark { offset: self.written, position: self.end });
            self.last = None;
        }
        self.append_records(directory, stream, rest, now_ms);
        self.trim();
        if self.memory.is_none() && self.has_wrapped(self.end) {
            self.continue_in_memory();
        }
    }

    /// Keeps later records in memory, if there is some. A process that has printed more than is kept usually prints
    /// much more.
    fn continue_in_memory(&mut self) {
        if let Some(memory) = self.memory_budget.take(self.ring_size()) {
            self.memory = Some(MemoryRing { memory, from: self.end });
            self.last = None;
        }
    }

    /// Copies the records that are in memory to the file. If that fails, the whole ring is dropped.
    fn leave_memory(&mut self) {
        let Some(ring) = self.memory.take() else { return };
        let Some(head) = self.head else { return };
        let tail = self.tail;
        let from = tail.map_or(ring.from, |tail| tail.position.max(ring.from));
        // The copy overwrites records that the header in the file still lists, so it says first that the whole
        // ring is dropped.
        self.tail = Some(JournalMark { offset: self.written, position: self.end });
        let copied = self.write_header().and_then(|()| self.copy_to_file(&ring, from));
        if copied.is_err() {
            self.marks.retain(|mark| mark.position < head.position);
            return;
        }
        self.tail = tail;
        self.write_header().ok();
    }

    fn copy_to_file(&self, ring: &MemoryRing, mut from: u64) -> rustix::io::Result<()> {
        let file = self.file.as_ref().ok_or(Errno::BADF)?;
        let mut buffer = vec![0; MAX_RECORD_BYTES];
        while from < self.end {
            let (offset, room) = self.file_offset(from);
            let length = room.min(self.end - from).min(buffer.len() as u64);
            let piece = &mut buffer[..usize::try_from(length).unwrap_or(usize::MAX)];
            read_exactly(ring.memory.as_fd(), piece, offset)?;
            if rustix::io::pwrite(file, piece, offset)? != piece.len() {
                return Err(Errno::NOSPC);
            }
            from += length;
        }
        Ok(())
    }

    fn append_records(&mut self, directory: BorrowedFd<'_>, stream: StreamTag, bytes: &[u8], now_ms: u64) {
        for piece in bytes.chunks(MAX_RECORD_BYTES) {
            let kept = self.open(directory).and_then(|()| self.append_piece(stream, piece, now_ms));
            if kept.is_err() {
                self.last = None;
            }
            self.written += piece.len() as u64;
            if stream == StreamTag::Stderr {
                self.stderr += piece.len() as u64;
            }
        }
    }

    fn append_piece(&mut self, stream: StreamTag, bytes: &[u8], now_ms: u64) -> rustix::io::Result<()> {
        let length = u32::try_from(bytes.len()).expect("a piece is no longer than a record");
        if let Some(record) = self.extensible_record(stream, bytes.len(), now_ms) {
            let longer = JournalRecord { length: record.length + length, ..record };
            self.check_ring_space(longer.end_position())?;
            self.write_at(bytes, self.end)?;
            // The length is written last: until then the record is the shorter one.
            self.write_at(&longer.encode_header(), record.position)?;
            self.last = Some(longer);
            return self.advance_end(longer.end_position());
        }
        let record = JournalRecord {
            position: self.end,
            stream: stream as u8,
            time_ms: now_ms,
            offset: self.written,
            length,
            stderr: self.stderr,
        };
        self.write_record(&record, bytes)?;
        let far = self.marks.last().is_none_or(|mark| record.position - mark.position >= MARK_INTERVAL);
        if far || self.head.is_some_and(|head| head.position == record.position) {
            self.marks.push(JournalMark { offset: record.offset, position: record.position });
        }
        self.last = Some(record);
        self.advance_end(record.end_position())
    }

    /// Moves the end of the records. Someone who reads only the file needs it in the header once
    /// the ring has wrapped; until then the records end with the file.
    fn advance_end(&mut self, end: u64) -> rustix::io::Result<()> {
        self.end = end;
        if self.has_wrapped(end) && self.memory.is_none() { self.write_header() } else { Ok(()) }
    }

    fn extensible_record(&self, stream: StreamTag, length: usize, now_ms: u64) -> Option<JournalRecord> {
        self.last.filter(|record| {
            record.stream == stream as u8
                && record.length as usize + length <= MAX_RECORD_BYTES
                && now_ms.saturating_sub(record.time_ms) < MAX_EXTEND_MS
                && record.offset + u64::from(record.length) == self.written
        })
    }

    /// Appends the last record, so that the end is known from the file alone.
    pub(crate) fn finish(&mut self, directory: BorrowedFd<'_>, ended: &ProcessEnd) {
        self.leave_memory();
        let json = serde_json::to_vec(ended).expect("numbers and words always become JSON");
        let length = u32::try_from(json.len()).expect("an end is a short text");
        let record = JournalRecord {
            position: self.end,
            stream: END_STREAM,
            time_ms: ended.ended_ms,
            offset: self.written,
            length,
            stderr: self.stderr,
        };
        // If the disk is full, the end is known only while the agent runs.
        self.open(directory)
            .and_then(|()| self.write_record(&record, &json))
            .and_then(|()| {
                if self.has_wrapped(record.end_position()) {
                    self.write_header_until(record.end_position())
                } else {
                    Ok(())
                }
            })
            .ok();
        self.last = None;
        self.finished = true;
    }

    /// Closes the file until the next read, unless more output may come.
    pub(crate) fn close_if_finished(&mut self) {
        if self.finished {
            self.file = None;
        }
    }

    pub(crate) fn remove_file(self, directory: BorrowedFd<'_>) {
        // The file may never have been created.
        rustix::fs::unlinkat(directory, &*self.name, AtFlags::empty()).ok();
    }

    /// Reads the next piece at the cursor, as much as fits in the buffer, and advances the cursor.
    pub(crate) fn read(
        &mut self,
        directory: BorrowedFd<'_>,
        cursor: &mut JournalCursor,
        buffer: &mut [u8],
    ) -> JournalPiece {
        let piece = self.find_piece(directory, cursor, buffer).unwrap_or(JournalPiece::Gap {
            // Bytes that cannot be read back become a gap for this reader, which then continues.
            from: cursor.offset,
            to: self.written,
            stderr: self.stderr,
        });
        match piece {
            JournalPiece::Output { offset, length, .. } => cursor.offset = offset + length as u64,
            JournalPiece::Gap { to, .. } => cursor.offset = to,
            JournalPiece::Nothing => {}
        }
        piece
    }

    fn find_piece(
        &mut self,
        directory: BorrowedFd<'_>,
        cursor: &mut JournalCursor,
        buffer: &mut [u8],
    ) -> rustix::io::Result<JournalPiece> {
        if cursor.offset >= self.written {
            return Ok(JournalPiece::Nothing);
        }
        self.open(directory)?;
        let mut position = self.start_position(cursor);
        while position < self.end {
            let record = self.read_record_header(position)?;
            cursor.record = Some(position);
            if record.offset > cursor.offset {
                let (from, to) = (cursor.offset, record.offset);
                return Ok(JournalPiece::Gap { from, to, stderr: record.stderr });
            }
            let skip = cursor.offset - record.offset;
            if skip < u64::from(record.length) {
                return self.read_output(&record, skip, buffer);
            }
            position = self.skip_gap(record.end_position());
        }
        Ok(JournalPiece::Gap { from: cursor.offset, to: self.written, stderr: self.stderr })
    }

    /// How many bytes before an offset were errors; `None` if the record there is not kept, or not written yet.
    pub(crate) fn stderr_before(&mut self, directory: BorrowedFd<'_>, offset: u64) -> Option<u64> {
        if offset == 0 {
            return Some(0);
        }
        if offset >= self.written {
            return (offset == self.written).then_some(self.stderr);
        }
        self.open(directory).ok()?;
        let mut position = self.start_position(&JournalCursor::at(offset));
        while position < self.end {
            let record = self.read_record_header(position).ok()?;
            let skip = offset.checked_sub(record.offset)?;
            if skip < u64::from(record.length) {
                return Some(record.stderr_before(skip));
            }
            position = self.skip_gap(record.end_position());
        }
        None
    }

    /// Returns the offset and the time of each record from an offset on, at most the last
    /// [`MAX_TIMES`]. Times that cannot be read are left out.
    pub(crate) fn read_times(&mut self, directory: BorrowedFd<'_>, from: u64) -> Vec<(u64, u64)> {
        let mut times = VecDeque::new();
        if from >= self.written || self.open(directory).is_err() {
            return Vec::new();
        }
        let mut position = self.start_position(&JournalCursor::at(from));
        for _ in 0..MAX_TIMED_RECORDS {
            if position >= self.end {
                break;
            }
            let Ok(record) = self.read_record_header(position) else { break };
            if record.stream != END_STREAM && record.offset + u64::from(record.length) > from {
                times.push_back((record.offset, record.time_ms));
            }
            if times.len() > MAX_TIMES {
                times.pop_front();
            }
            position = self.skip_gap(record.end_position());
        }
        times.into()
    }

    /// The position of a record at or before the cursor.
    fn start_position(&self, cursor: &JournalCursor) -> u64 {
        if let Some(position) = cursor.record.filter(|position| !self.is_dropped(*position)) {
            return position;
        }
        let after = self.marks.partition_point(|mark| mark.offset <= cursor.offset);
        let start = after.checked_sub(1).map_or(FIRST_RECORD_POSITION, |index| self.marks[index].position);
        self.skip_gap(start)
    }

    fn is_dropped(&self, position: u64) -> bool {
        self.dropped_range().is_some_and(|(from, to)| (from..to).contains(&position))
    }

    fn skip_gap(&self, position: u64) -> u64 {
        self.dropped_range().filter(|_| self.is_dropped(position)).map_or(position, |(_, to)| to)
    }

    fn dropped_range(&self) -> Option<(u64, u64)> {
        Some((self.head?.position, self.tail?.position))
    }

    /// Drops the bytes between the first and the last ones.
    fn trim(&mut self) {
        let Some(head) = self.head else { return };
        let start = self.tail.unwrap_or(head);
        // Headers count only if they have become most of the file.
        let largest = self.max_tail_bytes();
        let mark = if self.written - start.offset > self.retention.last.saturating_add(TRIM_SLACK_BYTES) {
            let keep = self.written - self.retention.last;
            let keep = self.pinned.map_or(keep, |pinned| keep.min(pinned));
            self.marks.iter().rev().find(|mark| mark.offset <= keep)
        } else if self.end - start.position > largest.saturating_add(TRIM_SLACK_BYTES) {
            let keep = self.end - largest;
            let unread = |mark: &JournalMark| self.pinned.is_some_and(|pinned| mark.offset > pinned);
            self.marks.iter().find(|mark| mark.position >= keep).filter(|mark| !unread(mark))
        } else {
            None
        };
        if let Some(mark) = mark.copied().filter(|mark| mark.position > start.position) {
            self.drop_until(head, mark);
        }
    }

    fn drop_until(&mut self, head: JournalMark, mark: JournalMark) {
        self.tail = Some(mark);
        self.marks.retain(|other| other.position < head.position || other.position >= mark.position);
        // The header is written before anything is overwritten, so that someone who reads only the
        // file never steps into dropped records. If the disk is full, both writes fail. While the ring
        // is in memory, nothing in the file is overwritten.
        if self.memory.is_none() {
            self.write_header().ok();
        }
    }

    fn open(&mut self, directory: BorrowedFd<'_>) -> rustix::io::Result<()> {
        if self.file.is_some() {
            return Ok(());
        }
        let fresh = self.end == FIRST_RECORD_POSITION;
        let create = if fresh { OFlags::CREATE | OFlags::EXCL } else { OFlags::empty() };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | create;
        let name = &*self.name;
        let file = rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o600))?;
        self.file = Some(file);
        if fresh && let Err(errno) = self.write_header() {
            self.file = None;
            rustix::fs::unlinkat(directory, name, AtFlags::empty())?;
            return Err(errno);
        }
        Ok(())
    }

    /// Fails if the write would overwrite records that are still kept.
    fn check_ring_space(&self, end: u64) -> rustix::io::Result<()> {
        let tail = self.tail.or(self.head);
        if tail.is_some_and(|tail| end - tail.position > self.ring_size()) {
            Err(Errno::NOSPC)
        } else {
            Ok(())
        }
    }

    fn write_record(&self, record: &JournalRecord, bytes: &[u8]) -> rustix::io::Result<()> {
        self.check_ring_space(record.end_position())?;
        let header = record.encode_header();
        let (offset, room) = self.file_offset(record.position);
        if room < (header.len() + bytes.len()) as u64 {
            self.write_at(&header, record.position)?;
            return self.write_at(bytes, record.position + header.len() as u64);
        }
        // Nearly all records need only one call.
        let file = self.storage_at(record.position)?;
        let written = rustix::io::pwritev(file, &[IoSlice::new(&header), IoSlice::new(bytes)], offset)?;
        self.check_written(written, header.len() + bytes.len())
    }

    /// The file or the memory that holds the record of a position.
    fn storage_at(&self, position: u64) -> rustix::io::Result<BorrowedFd<'_>> {
        match &self.memory {
            Some(ring) if position >= ring.from => Ok(ring.memory.as_fd()),
            _ => self.file.as_ref().map(AsFd::as_fd).ok_or(Errno::BADF),
        }
    }

    /// Writes bytes at a position, wrapping at the end of the ring.
    fn write_at(&self, bytes: &[u8], position: u64) -> rustix::io::Result<()> {
        let file = self.storage_at(position)?;
        let (offset, room) = self.file_offset(position);
        let (first, rest) = bytes.split_at(usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len()));
        self.check_written(rustix::io::pwrite(file, first, offset)?, first.len())?;
        if rest.is_empty() { Ok(()) } else { self.write_at(rest, position + room) }
    }

    fn check_written(&self, written: usize, length: usize) -> rustix::io::Result<()> {
        if written == length {
            return Ok(());
        }
        // The disk is full. A partial record must not be taken for a whole one: the file is
        // truncated before it, or in the ring the header marks the end.
        if let Some(file) = self.file.as_ref().filter(|_| !self.has_wrapped(self.end)) {
            rustix::fs::ftruncate(file, self.end)?;
        }
        Err(Errno::NOSPC)
    }

    fn read_record_header(&self, position: u64) -> rustix::io::Result<JournalRecord> {
        let mut bytes = [0; RECORD_HEADER_LENGTH];
        self.read_at(&mut bytes, position)?;
        Ok(JournalRecord::from_header(position, &bytes))
    }

    fn read_output(
        &self,
        record: &JournalRecord,
        skip: u64,
        buffer: &mut [u8],
    ) -> rustix::io::Result<JournalPiece> {
        let stream = StreamTag::from_byte(record.stream).ok_or(Errno::IO)?;
        let left = usize::try_from(u64::from(record.length) - skip).unwrap_or(usize::MAX);
        let length = left.min(buffer.len());
        self.read_at(&mut buffer[..length], record.position + RECORD_HEADER_LENGTH as u64 + skip)?;
        Ok(JournalPiece::Output { stream, offset: record.offset + skip, length })
    }

    /// Reads bytes at a position, wrapping at the end of the ring.
    fn read_at(&self, buffer: &mut [u8], position: u64) -> rustix::io::Result<()> {
        let file = self.storage_at(position)?;
        let (offset, room) = self.file_offset(position);
        let middle = usize::try_from(room).unwrap_or(usize::MAX).min(buffer.len());
        let (first, rest) = buffer.split_at_mut(middle);
        read_exactly(file, first, offset)?;
        if rest.is_empty() { Ok(()) } else { self.read_at(rest, position + room) }
    }

    fn write_header(&self) -> rustix::io::Result<()> {
        self.write_header_until(self.end)
    }

    /// Writes the header of a file whose records end at this position.
    fn write_header_until(&self, end: u64) -> rustix::io::Result<()> {
        let file = self.file.as_ref().ok_or(Errno::BADF)?;
        let (gap_start, gap_end) = self.dropped_range().unwrap_or((0, 0));
        let (ring, end) = if self.has_wrapped(end) { (self.ring_size(), end) } else { (0, 0) };
        let mut bytes = [0; HEADER_LENGTH];
        bytes[..8].copy_from_slice(MAGIC);
        for (index, number) in [gap_start, gap_end, ring, end].into_iter().enumerate() {
            bytes[8 + 8 * index..16 + 8 * index].copy_from_slice(&number.to_le_bytes());
        }
        match rustix::io::pwrite(file, &bytes, 0)? {
            count if count == bytes.len() => Ok(()),
            _ => Err(Errno::NOSPC),
        }
    }
}

fn read_exactly(file: BorrowedFd<'_>, buffer: &mut [u8], position: u64) -> rustix::io::Result<()> {
    match rustix::io::pread(file, &mut *buffer, position)? {
        count if count == buffer.len() => Ok(()),
        _ => Err(Errno::IO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Reads to the end and checks that output and gaps cover everything from `from` on exactly
    /// once.
    fn read_all(journal: &mut Journal, directory: BorrowedFd<'_>, from: u64, written: &[u8]) -> u64 {
        let mut cursor = JournalCursor::at(from);
        let mut buffer = [0; 1000];
        let (mut next, mut missing) = (from, 0);
        loop {
            match journal.read(directory, &mut cursor, &mut buffer) {
                JournalPiece::Output { offset, length, .. } => {
                    assert_eq!(offset, next);
                    let start = usize::try_from(offset).expect("the journal is small");
                    assert_eq!(&buffer[..length], &written[start..start + length]);
                    next += length as u64;
                }
                JournalPiece::Gap { from, to, .. } => {
                    assert_eq!(from, next);
                    assert!(to > from);
                    missing += to - from;
                    next = to;
                }
                JournalPiece::Nothing => return missing,
            }
            assert_eq!(cursor.offset, next);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn nothing_is_lost_duplicated_or_invented(
            first in 0u64..200_000,
            last in 0u64..200_000,
            pieces in proptest::collection::vec((1u8..=3, 1usize..70_000, 0u64..2000), 1..40),
            part in 0.0f64..1.2,
        ) {
            let temporary = tempfile::tempdir().expect("a temporary directory");
            let directory = std::fs::File::open(temporary.path()).expect("it was just made");
            let mut journal = Journal::new("test", OutputRetention { first, last, lossless: false, stall_ms: None }, RingMemoryBudget::default());
            let (mut written, mut now, mut live) = (Vec::new(), 0, JournalCursor::at(0));
            for (number, (stream, length, later)) in pieces.iter().enumerate() {
                let stream = StreamTag::from_byte(*stream).expect("the range is the three tags");
                now += later;
                let bytes: Vec<u8> = (0..*length).map(|index| (index ^ number).to_le_bytes()[0]).collect();
                written.extend_from_slice(&bytes);
                journal.append(directory.as_fd(), stream, &bytes, now);
                // A follower that keeps up misses nothing, whatever is dropped after it was read.
                let mut buffer = vec![0; MAX_RECORD_BYTES];
                loop {
                    match journal.read(directory.as_fd(), &mut live, &mut buffer) {
                        JournalPiece::Nothing => break,
                        JournalPiece::Output { .. } => {}
                        gap @ JournalPiece::Gap { .. } => prop_assert!(*length as u64 > last, "{gap:?}"),
                    }
                }
            }
            let total = written.len() as u64;
            prop_assert_eq!(journal.written(), total);
            let missing = read_all(&mut journal, directory.as_fd(), 0, &written);
            prop_assert!(missing <= total.saturating_sub(first + last), "{} bytes are missing", missing);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "any offset will do")]
            let from = (total as f64 * part) as u64;
            read_all(&mut journal, directory.as_fd(), from, &written);
        }
    }

    #[test]
    fn errors_are_counted_across_gaps() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let retention = OutputRetention { first: 1000, last: 20_000, lossless: false, stall_ms: None };
        let mut journal = Journal::new("test", retention, RingMemoryBudget::default());
        // The errors before each offset.
        let mut errors = vec![0];
        let mut print = |journal: &mut Journal, stream: StreamTag, length: usize| {
            journal.append(directory.as_fd(), stream, &vec![7; length], 0);
            let before = *errors.last().expect("it is never empty");
            let is_error = stream == StreamTag::Stderr;
            errors.extend((1..=length as u64).map(|count| before + if is_error { count } else { 0 }));
        };
        for number in 0..300 {
            print(&mut journal, StreamTag::Stdout, 1500 + number);
            print(&mut journal, StreamTag::Stderr, 3 * number + 1);
        }
        // Output that cannot be written is a gap, too. A descriptor that cannot be written to stands for a full disk.
        let file = journal.file.replace(directory.try_clone().expect("it is open").into());
        print(&mut journal, StreamTag::Stderr, 500);
        journal.file = file;
        print(&mut journal, StreamTag::Stdout, 5);
        let (mut cursor, mut buffer, mut gaps) = (JournalCursor::at(0), vec![0; MAX_RECORD_BYTES], 0);
        let at = |offset: u64| errors[usize::try_from(offset).expect("the journal is small")];
        loop {
            match journal.read(directory.as_fd(), &mut cursor, &mut buffer) {
                JournalPiece::Gap { from, to, stderr } => {
                    gaps += 1;
                    assert_eq!(stderr, at(to), "{from}..{to}");
                    assert_eq!(journal.stderr_before(directory.as_fd(), from + 1), None);
                }
                JournalPiece::Output { offset, .. } => {
                    assert_eq!(journal.stderr_before(directory.as_fd(), offset), Some(at(offset)));
                    assert_eq!(journal.stderr_before(directory.as_fd(), offset + 1), Some(at(offset + 1)));
                }
                JournalPiece::Nothing => break,
            }
        }
        assert_eq!(gaps, 2, "bytes were dropped and lost");
        assert_eq!(journal.stderr_before(directory.as_fd(), journal.written()), errors.last().copied());
        assert_eq!(journal.stderr_before(directory.as_fd(), journal.written() + 1), None);
    }

    fn ended() -> ProcessEnd {
        ProcessEnd {
            exit: wire::process::ExitReason::Code(0),
            written: 0,
            ended_ms: 0,
            duration_ms: 0,
            user_ms: 0,
            system_ms: 0,
            max_rss_kib: 0,
            interrupted: false,
            signalled: None,
        }
    }

    #[test]
    fn times_are_those_of_the_records_from_an_offset_on() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let retention = OutputRetention { first: 1000, last: 1000, lossless: false, stall_ms: None };
        let mut journal = Journal::new("test", retention, RingMemoryBudget::default());
        assert_eq!(journal.read_times(directory.as_fd(), 0), []);
        // Output that follows within a second belongs to the same record.
        for (text, now) in [("one\n", 5000), ("two\n", 5400), ("three\n", 7000), ("four\n", 9000)] {
            journal.append(directory.as_fd(), StreamTag::Stdout, text.as_bytes(), now);
        }
        let all = [(0, 5000), (8, 7000), (14, 9000)];
        assert_eq!(journal.read_times(directory.as_fd(), 0), all);
        journal.finish(directory.as_fd(), &ended());
        journal.close_if_finished();
        for (from, expected) in [(0, &all[..]), (7, &all), (8, &all[1..]), (14, &all[2..]), (19, &[])] {
            assert_eq!(journal.read_times(directory.as_fd(), from), expected, "{from}");
        }
    }

    #[test]
    fn only_the_last_times_are_reported() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let retention = OutputRetention { first: 0, last: 1 << 20, lossless: false, stall_ms: None };
        let mut journal = Journal::new("test", retention, RingMemoryBudget::default());
        let count = MAX_TIMES as u64 + 10;
        for number in 0..count {
            journal.append(directory.as_fd(), StreamTag::Stdout, b"x", number * 2000);
        }
        let times = journal.read_times(directory.as_fd(), 0);
        assert_eq!((times.len(), times.last()), (MAX_TIMES, Some(&(count - 1, (count - 1) * 2000))));
    }

    fn check_long_output(budget: RingMemoryBudget, in_memory: bool) {
        use std::os::unix::fs::MetadataExt;
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let (first, last) = (100_000, 300_000);
        let retention = OutputRetention { first, last, lossless: false, stall_ms: None };
        let mut journal = Journal::new("test", retention, budget);
        let mut written = Vec::new();
        for number in 0..400_usize {
            let bytes: Vec<u8> = (0..50_001).map(|index| (index ^ number).to_le_bytes()[0]).collect();
            journal.append(directory.as_fd(), StreamTag::Stdout, &bytes, 0);
            written.extend_from_slice(&bytes);
        }
        let total = written.len() as u64;
        assert!(total > 3 * journal.ring_size(), "the ring wrapped more than once");
        assert_eq!(journal.memory.is_some(), in_memory);
        let missing = read_all(&mut journal, directory.as_fd(), 0, &written);
        assert!(missing > 0 && missing <= total - first - last, "{missing}");
        assert_eq!(read_all(&mut journal, directory.as_fd(), total - last, &written), 0);
        journal.finish(directory.as_fd(), &ended());
        journal.close_if_finished();
        assert!(journal.memory.is_none());
        assert_eq!(read_all(&mut journal, directory.as_fd(), 0, &written), missing, "the file has the same");
        let size = std::fs::metadata(temporary.path().join("test")).expect("the journal exists").size();
        assert!(
            size <= FIRST_RECORD_POSITION + first + MAX_RECORD_BYTES as u64 + journal.ring_size(),
            "{size}"
        );
    }

    #[test]
    fn long_output_wraps_in_a_file_of_bounded_size() {
        check_long_output(RingMemoryBudget::empty(), false);
    }

    #[test]
    fn long_output_continues_in_memory_and_ends_in_the_file() {
        let budget = RingMemoryBudget::default();
        check_long_output(budget.clone(), true);
        assert!(budget.take(32 << 20).is_some(), "the memory was returned");
    }

    #[test]
    fn output_in_memory_is_a_gap_if_it_cannot_be_written() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let retention = OutputRetention { first: 1000, last: 100_000, lossless: false, stall_ms: None };
        let mut journal = Journal::new("test", retention, RingMemoryBudget::default());
        let bytes = vec![7; MAX_RECORD_BYTES];
        let mut written = Vec::new();
        while journal.memory.is_none() {
            journal.append(directory.as_fd(), StreamTag::Stdout, &bytes, 0);
            written.extend_from_slice(&bytes);
        }
        journal.append(directory.as_fd(), StreamTag::Stdout, &bytes, 0);
        written.extend_from_slice(&bytes);
        // A descriptor that cannot be written to stands for a full disk.
        journal.file = Some(std::fs::File::open(temporary.path().join("test")).expect("it exists").into());
        journal.finish(directory.as_fd(), &ended());
        let missing = read_all(&mut journal, directory.as_fd(), 0, &written);
        assert_eq!(missing, written.len() as u64 - 1000);
    }

    #[test]
    fn pinned_output_is_never_overwritten() {
        let temporary = tempfile::tempdir().expect("a temporary directory");
        let directory = std::fs::File::open(temporary.path()).expect("it was just made");
        let mut journal = Journal::new(
            "test",
            OutputRetention { first: 0, last: 100_000, lossless: true, stall_ms: None },
            RingMemoryBudget::default(),
        );
        journal.pin(Some(0));
        let bytes = vec![7; MAX_RECORD_BYTES];
        let pieces = 2 * journal.ring_size() / MAX_RECORD_BYTES as u64;
        for _ in 0..pieces {
            journal.append(directory.as_fd(), StreamTag::Stdout, &bytes, 0);
        }
        let written = vec![7; usize::try_from(pieces).expect("few") * MAX_RECORD_BYTES];
        let (mut cursor, mut buffer) = (JournalCursor::at(0), vec![0; MAX_RECORD_BYTES]);
        let first = journal.read(directory.as_fd(), &mut cursor, &mut buffer);
        assert_eq!(
            first,
            JournalPiece::Output { stream: StreamTag::Stdout, offset: 0, length: MAX_RECORD_BYTES }
        );
        // Output for which there is no space is an exact gap, as on a full disk.
        assert!(read_all(&mut journal, directory.as_fd(), 0, &written) > 0);
        journal.pin(None);
        assert_eq!(journal.written(), written.len() as u64);
    }
}
