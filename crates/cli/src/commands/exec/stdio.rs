//! Our own input and output. Both may block for any time, and signals must still be passed on, so threads read and
//! write them; only a regular file is written without one.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::FileType;
use rustix::io::Errno;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

/// The maximum that is read from input at once.
pub(super) const MAX_INPUT_PIECE: usize = 64 << 10;
/// The number of pieces of input or output that may wait between a thread and the conversation.
const MAX_QUEUED_PIECES: usize = 4;

/// A piece of a command's output.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OutputPiece {
    Stdout(Bytes),
    Stderr(Bytes),
    /// Output is missing here. Unfinished lines are ended, so that the halves of two lines are not
    /// taken for one.
    Gap,
}

/// Whether our input comes from something other than a terminal or `/dev/null`.
pub(super) fn is_redirected() -> bool {
    let Ok(stat) = rustix::fs::fstat(io::stdin()) else { return false };
    let null = rustix::fs::stat("/dev/null").is_ok_and(|null| {
        FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && null.st_rdev == stat.st_rdev
    });
    !null && !rustix::termios::isatty(io::stdin())
}

/// Reads our input piece by piece; the channel is closed at its end.
pub(super) fn read_input() -> mpsc::Receiver<Vec<u8>> {
    let (pieces, receiver) = mpsc::channel(MAX_QUEUED_PIECES);
    std::thread::spawn(move || {
        let mut buffer = vec![0; MAX_INPUT_PIECE];
        loop {
            match rustix::io::read(io::stdin(), &mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    if pieces.blocking_send(buffer[..count].to_vec()).is_err() {
                        return;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if wait_for_fd(&io::stdin(), PollFlags::IN) => {}
                // After a failed read there is no more input; the command reads end of file.
                Err(_) => return,
            }
        }
    });
    receiver
}

fn wait_for_fd(fd: &impl AsFd, flags: PollFlags) -> bool {
    rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(fd, flags)], None)).is_ok()
}

/// Writes output in the order in which it was received. A regular file takes it at once; anything else may block, so a
/// thread writes there.
pub(super) struct OutputWriter {
    files: RegularFiles,
    thread: Option<WriterThread>,
    /// The error after which nothing more is written.
    failure: Option<io::Error>,
}

/// Those of our outputs that are regular files.
#[derive(Debug)]
struct RegularFiles {
    stdout: Option<OpenLine>,
    stderr: Option<OpenLine>,
}

/// The thread for outputs that may block.
struct WriterThread {
    pieces: mpsc::Sender<OutputPiece>,
    thread: JoinHandle<io::Result<()>>,
}

impl OutputWriter {
    pub(super) fn start() -> Self {
        let line_of = |fd: &dyn AsFd| is_regular_file(fd.as_fd()).then(OpenLine::default);
        let files = RegularFiles { stdout: line_of(&io::stdout()), stderr: line_of(&io::stderr()) };
        Self { files, thread: None, failure: None }
    }

    /// Gives the output back if there is no room for it now.
    pub(super) fn try_write(&mut self, piece: OutputPiece) -> Option<OutputPiece> {
        if self.failure.is_some() {
            return Some(piece);
        }
        match self.files.write(&piece) {
            Ok(WrittenTo::File) => None,
            Ok(WrittenTo::Nothing) => self.thread.get_or_insert_with(WriterThread::start).try_write(piece),
            Err(error) => {
                self.failure = Some(error);
                Some(piece)
            }
        }
    }

    /// Waits for room; returns `false` if nothing will be written any more.
    pub(super) async fn wait_for_room(writer: Option<&Self>) -> bool {
        match writer.and_then(|writer| writer.thread.as_ref().filter(|_| writer.failure.is_none())) {
            Some(thread) => thread.pieces.reserve().await.is_ok(),
            None => false,
        }
    }

    /// Waits until everything is written.
    pub(super) async fn finish(self) -> Result<()> {
        if let Some(failure) = self.failure {
            return Err(failure.into());
        }
        let Some(WriterThread { pieces, thread }) = self.thread else { return Ok(()) };
        drop(pieces);
        let written = tokio::task::spawn_blocking(move || thread.join()).await?;
        Ok(written.ok().context("the thread that writes output died")??)
    }
}

/// Where a piece of output was written.
#[derive(Debug, PartialEq, Eq)]
enum WrittenTo {
    File,
    /// Nowhere yet: it belongs to an output that may block.
    Nothing,
}

impl RegularFiles {
    fn write(&mut self, piece: &OutputPiece) -> io::Result<WrittenTo> {
        let Self { stdout, stderr } = self;
        match (piece, stdout, stderr) {
            (OutputPiece::Stdout(bytes), Some(line), _) => line.write(&io::stdout(), bytes)?,
            (OutputPiece::Stderr(bytes), _, Some(line)) => line.write(&io::stderr(), bytes)?,
            (OutputPiece::Gap, stdout, stderr) => {
                let is_complete = stdout.is_some() && stderr.is_some();
                if let Some(line) = stdout {
                    line.end_line(&io::stdout())?;
                }
                if let Some(line) = stderr {
                    line.end_line(&io::stderr())?;
                }
                return Ok(if is_complete { WrittenTo::File } else { WrittenTo::Nothing });
            }
            (OutputPiece::Stdout(_) | OutputPiece::Stderr(_), _, _) => return Ok(WrittenTo::Nothing),
        }
        Ok(WrittenTo::File)
    }
}

impl WriterThread {
    fn start() -> Self {
        let (pieces, mut receiver) = mpsc::channel(MAX_QUEUED_PIECES);
        let thread = std::thread::spawn(move || {
            let (mut stdout, mut stderr) = (OpenLine::default(), OpenLine::default());
            while let Some(piece) = receiver.blocking_recv() {
                match piece {
                    OutputPiece::Stdout(bytes) => stdout.write(&io::stdout(), &bytes)?,
                    OutputPiece::Stderr(bytes) => stderr.write(&io::stderr(), &bytes)?,
                    // A line of a regular file is never open here.
                    OutputPiece::Gap => {
                        stdout.end_line(&io::stdout())?;
                        stderr.end_line(&io::stderr())?;
                    }
                }
            }
            Ok(())
        });
        Self { pieces, thread }
    }

    fn try_write(&self, piece: OutputPiece) -> Option<OutputPiece> {
        match self.pieces.try_send(piece) {
            Ok(()) => None,
            Err(TrySendError::Full(piece) | TrySendError::Closed(piece)) => Some(piece),
        }
    }
}

fn is_regular_file(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Whether the last line that was written is unfinished.
#[derive(Debug, Default)]
struct OpenLine(bool);

impl OpenLine {
    fn write(&mut self, fd: &impl AsFd, bytes: &[u8]) -> io::Result<()> {
        self.0 = bytes.last().map_or(self.0, |last| *last != b'\n');
        write_all(fd, bytes)
    }

    fn end_line(&mut self, fd: &impl AsFd) -> io::Result<()> {
        if std::mem::take(&mut self.0) { write_all(fd, b"\n") } else { Ok(()) }
    }
}

fn write_all(fd: &impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if wait_for_fd(fd, PollFlags::OUT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
