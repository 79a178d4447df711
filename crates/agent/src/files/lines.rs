//! Reads lines of a text file.
//!
//! The file is read twice: first to find the lines and to check that they are text, so that a file that is not text
//! is reported before any of it is sent, and then to send them. Only a piece of it is held in memory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use memchr::memchr_iter;
use wire::frame::CHUNK_SIZE;
use wire::{AgentReply, Fault, FaultKind};

use super::transfer::open_regular;
use super::{ErrorContext, FileWorker};
use crate::fault;

/// How long finding the lines may take.
const LINES_TIMEOUT: Duration = Duration::from_secs(100);

/// After how many pieces it is checked whether to give up.
const PIECES_BETWEEN_CHECKS: u64 = 64;

/// Why the lines could not be found.
#[derive(Debug)]
enum LineError {
    Read(std::io::Error),
    /// The bytes are not UTF-8.
    NotText,
    /// It took too long, or the server has closed the connection.
    Stopped,
}

impl FileWorker<'_> {
    /// Sends the lines from `start`, counted from zero, up to `end`, with their line endings. Lines beyond the end of
    /// the file are empty.
    pub(super) fn read_lines(&mut self, path: &Path, start: u64, end: Option<u64>) -> Result<(), Fault> {
        let mut file = open_regular(path)?;
        let size = file.metadata().or_fault("stat", path)?.len();
        let begun = Instant::now();
        let stops = || begun.elapsed() > LINES_TIMEOUT || self.is_abandoned();
        let lines =
            find_lines(&mut file, start, end.unwrap_or(u64::MAX), stops).map_err(|error| match error {
                LineError::Read(error) => fault::from_io(&error, "read", &path.to_string_lossy()),
                LineError::NotText => fault::from_kind(FaultKind::NotText, "read", &path.to_string_lossy()),
                LineError::Stopped => {
                    let subject = format!("{}: its lines were not found in time", path.display());
                    fault::from_kind(FaultKind::Other, "read", &subject)
                }
            })?;
        file.seek(SeekFrom::Start(lines.start)).or_fault("seek", path)?;
        self.connection.send_reply(&AgentReply::Reading { size })?;
        let mut left = lines.end - lines.start;
        let mut buffer = vec![0; CHUNK_SIZE];
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK_SIZE).min(CHUNK_SIZE);
            let count = file.read(&mut buffer[..most]).or_fault("read", path)?;
            if count == 0 {
                let subject = format!("{}: it became shorter meanwhile", path.display());
                return Err(fault::from_kind(FaultKind::Other, "read", &subject));
            }
            self.connection.send_data(&buffer[..count])?;
            left -= count as u64;
        }
        Ok(self.connection.send_end()?)
    }
}

/// The bytes of the lines from `start` up to `end`. All bytes before their end must be text. A file can seem to be much
/// longer than a disk, so `stops` is asked now and then whether to give up.
fn find_lines(
    file: &mut File,
    start: u64,
    end: u64,
    stops: impl Fn() -> bool,
) -> Result<Range<u64>, LineError> {
    if start >= end {
        return Ok(0..0);
    }
    let mut buffer = vec![0; CHUNK_SIZE];
    // The end of a piece may be in the middle of a character, whose bytes are then moved to the beginning.
    let mut partial = 0;
    let (mut offset, mut line) = (0_u64, 0_u64);
    let mut first = if start == 0 { Some(0) } else { None };
    let mut pieces = 0_u64;
    loop {
        pieces += 1;
        if pieces.is_multiple_of(PIECES_BETWEEN_CHECKS) && stops() {
            return Err(LineError::Stopped);
        }
        let count = file.read(&mut buffer[partial..]).map_err(LineError::Read)?;
        let piece_start = offset + partial as u64;
        if count == 0 {
            let end = piece_start;
            return if partial == 0 { Ok(first.unwrap_or(end)..end) } else { Err(LineError::NotText) };
        }
        let fresh = &buffer[partial..partial + count];
        first = first.or_else(|| line_offset(fresh, start - line).map(|index| piece_start + index as u64));
        let last = line_offset(fresh, end - line);
        let length = last.map_or(partial + count, |index| partial + index);
        let checked = check_text(&buffer[..length])?;
        if let Some(index) = last {
            let end = piece_start + index as u64;
            return Ok(first.unwrap_or(end)..end);
        }
        line += memchr_iter(b'\n', fresh).count() as u64;
        partial = length - checked;
        buffer.copy_within(checked..length, 0);
        offset += checked as u64;
    }
}

/// The index after the `count`th line feed, if there are so many.
fn line_offset(bytes: &[u8], count: u64) -> Option<usize> {
    let before = usize::try_from(count.checked_sub(1)?).ok()?;
    memchr_iter(b'\n', bytes).nth(before).map(|index| index + 1)
}

/// How many bytes are complete characters; the rest is the beginning of one.
fn check_text(bytes: &[u8]) -> Result<usize, LineError> {
    match std::str::from_utf8(bytes) {
        Ok(_) => Ok(bytes.len()),
        Err(error) if error.error_len().is_none() => Ok(error.valid_up_to()),
        Err(_) => Err(LineError::NotText),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn lines(text: &[u8], start: u64, end: u64) -> Result<Vec<u8>, LineError> {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.write_all(text).and_then(|()| file.rewind()).expect("it can be written");
        let range = find_lines(&mut file, start, end, || false)?;
        let index = |offset| usize::try_from(offset).expect("it is in the text");
        Ok(text[index(range.start)..index(range.end)].to_vec())
    }

    fn check(text: &str, start: u64, end: u64, expected: &str) {
        let found = lines(text.as_bytes(), start, end).expect("it is text");
        assert_eq!(String::from_utf8_lossy(&found), expected, "{start}..{end}");
    }

    #[test]
    fn lines_are_counted_from_zero_and_keep_their_endings() {
        let text = "a\r\nb\n\nd";
        for (start, end, expected) in [
            (0, u64::MAX, text),
            (0, 1, "a\r\n"),
            (1, 3, "b\n\n"),
            (3, 4, "d"),
            (3, 9, "d"),
            (4, 9, ""),
            (9, u64::MAX, ""),
            (2, 2, ""),
            (3, 1, ""),
        ] {
            check(text, start, end, expected);
        }
        check("", 0, 5, "");
        check("\n", 0, 1, "\n");
        check("\n", 1, 2, "");
    }

    #[test]
    fn lines_and_characters_may_span_pieces() {
        let long = "é".repeat(CHUNK_SIZE);
        let text = format!("x{long}\n{long}ü\nend\n");
        check(&text, 0, 1, &format!("x{long}\n"));
        check(&text, 1, 2, &format!("{long}ü\n"));
        check(&text, 2, 3, "end\n");
    }

    #[test]
    fn bytes_that_are_not_text_are_refused_up_to_the_last_line() {
        for (text, start, end) in [
            (b"a\xff\nb\n".as_slice(), 0, 1),
            (b"a\xff\nb\n", 1, 2),
            (b"a\nb\xc3", 0, 9),
            (b"a\nb\xc3\n", 1, 2),
        ] {
            assert!(matches!(lines(text, start, end), Err(LineError::NotText)), "{text:?}");
        }
        assert_eq!(lines(b"a\nb\xff\n", 0, 1).expect("the rest is not read"), b"a\n");
    }

    /// A file without lines that seems to be very long.
    #[test]
    fn search_for_lines_can_be_stopped() {
        let mut file = tempfile::tempfile().expect("a temporary file");
        file.set_len(1 << 40).expect("a hole takes no space");
        assert!(matches!(find_lines(&mut file, 0, 10, || true), Err(LineError::Stopped)));
    }
}
