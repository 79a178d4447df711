//! Byte offsets in each of the two streams of a command.
//!
//! The agent has one overall offset for both. A reader that knows both offsets at one place knows them at every later
//! place: output is counted, and a gap tells how many of the bytes before its end were errors.

use domain::StreamKind;
use service::OutputEvent;

/// A place in the output of a command, or any two offsets that a client asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamOffsets {
    pub(super) stdout: u64,
    pub(super) stderr: u64,
}

impl StreamOffsets {
    /// The overall offset, if this is a place.
    pub(super) fn overall(self) -> u64 {
        self.stdout.saturating_add(self.stderr)
    }

    /// The place after an event.
    pub(super) fn advance(&mut self, event: &OutputEvent) {
        match event {
            OutputEvent::Output { stream, bytes, .. } => {
                let offset = match stream {
                    StreamKind::Stderr => &mut self.stderr,
                    StreamKind::Stdout | StreamKind::Terminal | StreamKind::KernelEvent => &mut self.stdout,
                };
                *offset = offset.saturating_add(bytes.len() as u64);
            }
            OutputEvent::Gap { to, stderr_before, .. } => {
                // Without the number all is taken for output. Offsets never go back, whatever the agent reports.
                let stderr = stderr_before.unwrap_or(self.stderr).max(self.stderr);
                let stderr = stderr.min(to.0.saturating_sub(self.stdout));
                *self = Self { stdout: to.0.saturating_sub(stderr), stderr };
            }
            OutputEvent::Ended(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use domain::JournalOffset;

    use super::*;

    #[test]
    fn offsets_are_known_after_a_gap() {
        let mut place = StreamOffsets::default();
        let output = |stream, at, bytes: &'static [u8]| OutputEvent::Output {
            stream,
            at: JournalOffset(at),
            bytes: bytes.into(),
        };
        place.advance(&output(StreamKind::Stdout, 0, b"abc"));
        place.advance(&output(StreamKind::Stderr, 3, b"de"));
        assert_eq!(place, StreamOffsets { stdout: 3, stderr: 2 });
        let gap = |to, stderr_before| OutputEvent::Gap {
            from: JournalOffset(5),
            to: JournalOffset(to),
            stderr_before,
        };
        for (stderr_before, stdout, stderr) in
            [(Some(40), 60, 40), (Some(2), 98, 2), (None, 98, 2), (Some(0), 98, 2), (Some(100), 3, 97)]
        {
            let mut after = place;
            after.advance(&gap(100, stderr_before));
            assert_eq!(after, StreamOffsets { stdout, stderr }, "{stderr_before:?}");
        }
    }
}
