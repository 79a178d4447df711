//! The output of the Jupyter kernel process itself, outside its protocol.
//!
//! Most of it repeats the protocol or is meant for the operator of a notebook server, so it is not
//! passed on. But when a kernel ends, its last output is the reason.

use std::io;
use std::process::Stdio;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;

/// How much is kept.
const MAX_CAPTURED_BYTES: usize = 4096;

#[derive(Debug)]
pub(super) struct CapturedOutput {
    /// `None` once all writers have closed the pipe.
    pipe: Option<Receiver>,
    kept: Vec<u8>,
}

impl CapturedOutput {
    /// Returns the reader and two handles for the output to capture.
    pub(super) fn capture() -> io::Result<(Self, [Stdio; 2])> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&read, true)?;
        let words = Self { pipe: Some(Receiver::from_owned_fd(read)?), kept: Vec::new() };
        Ok((words, [Stdio::from(write.try_clone()?), Stdio::from(write)]))
    }

    /// Reads once; the caller repeats it.
    pub(super) async fn read_once(&mut self) {
        let Some(pipe) = &mut self.pipe else { return std::future::pending().await };
        let mut buffer = [0; 4096];
        match pipe.read(&mut buffer).await {
            Ok(length @ 1..) => self.append(&buffer[..length]),
            _ => self.pipe = None,
        }
    }

    fn append(&mut self, piece: &[u8]) {
        self.kept.extend_from_slice(piece);
        self.kept.drain(..self.kept.len().saturating_sub(MAX_CAPTURED_BYTES));
    }

    /// Discards the output so far, because it explains nothing that happens later.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }

    /// All that was kept, including what is still in the pipe.
    pub(super) fn into_bytes(mut self) -> Vec<u8> {
        let mut buffer = [0; 4096];
        while let Some(Ok(length @ 1..)) = self.pipe.as_ref().map(|pipe| pipe.try_read(&mut buffer)) {
            self.append(&buffer[..length]);
        }
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn last_part_of_long_output_is_kept() {
        let (mut words, [first, second]) = CapturedOutput::capture().expect("there is a pipe");
        let script = "head -c 10000 /dev/zero; echo the end >&2";
        let mut command = tokio::process::Command::new("sh");
        command.args(["-c", script]).stdout(first).stderr(second);
        let mut child = command.spawn().expect("there is a shell");
        drop(command);
        let ended = loop {
            tokio::select! {
                ended = child.wait() => break ended,
                () = words.read_once() => {}
            }
        };
        assert!(ended.expect("it ends").success());
        let last = words.into_bytes();
        assert!(last.ends_with(b"the end\n") && last.len() == MAX_CAPTURED_BYTES, "{}", last.len());
    }
}
