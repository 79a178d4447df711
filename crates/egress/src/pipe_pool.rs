//! Pipes through which bytes are spliced. A pipe is taken only while bytes are in it, so idle connections hold none.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

/// How many empty pipes are kept.
const MAX_KEPT_PIPES: usize = 64;
/// What one pipe may hold. The kernel gives less to a user with many pipes.
pub(crate) const PIPE_BYTES: usize = 256 << 10;

#[derive(Debug, Default)]
pub(crate) struct PipePool(Mutex<Vec<SplicePipe>>);

/// An empty pipe, or one with bytes on their way.
#[derive(Debug)]
pub(crate) struct SplicePipe {
    pub(crate) reader: OwnedFd,
    pub(crate) writer: OwnedFd,
}

impl PipePool {
    /// Takes an empty pipe.
    pub(crate) fn take(&self) -> io::Result<SplicePipe> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept {
            Some(pipe) => Ok(pipe),
            None => SplicePipe::open(),
        }
    }

    /// Returns a pipe, which must be empty.
    pub(crate) fn put(&self, pipe: SplicePipe) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MAX_KEPT_PIPES {
            kept.push(pipe);
        }
    }
}

impl SplicePipe {
    fn open() -> io::Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        if let Err(error) = fcntl_setpipe_size(&writer, PIPE_BYTES) {
            tracing::debug!(%error, "pipe keeps its default size");
        }
        Ok(Self { reader, writer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn returned_pipe_is_used_again() {
        let pool = PipePool::default();
        let pipe = pool.take().expect("a pipe");
        let number = pipe.reader.as_raw_fd();
        pool.put(pipe);
        assert_eq!(pool.take().expect("a pipe").reader.as_raw_fd(), number);
    }

    #[test]
    fn few_empty_pipes_are_kept() {
        let pool = PipePool::default();
        let taken: Vec<SplicePipe> = (0..MAX_KEPT_PIPES + 5).map(|_| pool.take().expect("a pipe")).collect();
        taken.into_iter().for_each(|pipe| pool.put(pipe));
        assert_eq!(pool.0.lock().expect("no panic").len(), MAX_KEPT_PIPES);
    }
}
