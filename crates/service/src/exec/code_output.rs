//! A run of code: its output, and the events that its kernel reports.
//!
//! Neither the kernel nor the agent is trusted: each event is one line of JSON of bounded length, and a line that
//! cannot be parsed becomes [`CodeEvent::Garbled`].

mod kernel_event;

use bytes::Bytes;
use domain::{JournalOffset, StreamKind};

use crate::exec::contexts::SIGINT;
use crate::exec::output_stream::OutputEvent;
use crate::{OutputStream, ProcessEnd, SandboxRef, ServiceError, SignalTarget};

pub use kernel_event::{CodeError, MimeForms};

/// The longest line that is reassembled; agents cut lines before this.
const MAX_LINE_BYTES: usize = (8 << 20) + 1;

/// A run of code. Dropping it lets the code run on or interrupts it, as [`crate::DisconnectPolicy`] says.
pub struct CodeExecution {
    following: OutputStream,
    lines: LineAssembler,
    /// The sandbox in which to interrupt the code if this is dropped before its end.
    interrupt_in: Option<SandboxRef>,
}

/// An event of running code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CodeEvent {
    Output {
        stream: StreamKind,
        bytes: Bytes,
    },
    /// Output that is no longer kept.
    Gap {
        from: JournalOffset,
        to: JournalOffset,
    },
    /// The number of this run in its context, counted from the start of the kernel.
    Count(u64),
    /// A value that the code displayed.
    Display(MimeForms),
    /// The value of the last expression.
    Result(MimeForms),
    Error(CodeError),
    /// The kernel sent a line that cannot be parsed or exceeds a limit.
    Garbled,
    /// The last event.
    Ended(ProcessEnd),
}

/// Reassembles lines that arrive in pieces.
#[derive(Default)]
struct LineAssembler {
    line: Vec<u8>,
    /// Received bytes that are not split into lines yet.
    rest: Bytes,
    /// The beginning of this line may be missing; if the line cannot be parsed, it is dropped silently.
    broken: bool,
}

impl CodeExecution {
    pub(crate) fn new(following: OutputStream, interrupt_in: Option<SandboxRef>) -> Self {
        Self { following, lines: LineAssembler::default(), interrupt_in }
    }

    /// Waits for the next event. The future may be dropped and called again without losing an event.
    pub async fn next(&mut self) -> Result<CodeEvent, ServiceError> {
        loop {
            if let Some(event) = self.lines.next_event() {
                return Ok(event);
            }
            match self.following.next().await? {
                OutputEvent::Output { stream: StreamKind::KernelEvent, bytes, .. } => self.lines.rest = bytes,
                OutputEvent::Output { stream, bytes, .. } => return Ok(CodeEvent::Output { stream, bytes }),
                OutputEvent::Gap { from, to, .. } => {
                    self.lines = LineAssembler { broken: true, ..LineAssembler::default() };
                    return Ok(CodeEvent::Gap { from, to });
                }
                OutputEvent::Ended(ended) => {
                    self.interrupt_in = None;
                    return Ok(CodeEvent::Ended(ended));
                }
            }
        }
    }
}

impl Drop for CodeExecution {
    fn drop(&mut self) {
        let Some(sandbox) = self.interrupt_in.take() else { return };
        // The signal goes to the run and not to the context, which may run other code by now.
        let run = self.following.process.clone();
        tokio::spawn(async move {
            let interrupted = sandbox.processes().signal_process(&run, SIGINT, SignalTarget::Group).await;
            if let Err(error) = interrupted {
                tracing::debug!(%error, "failed to interrupt code whose reader disconnected");
            }
        });
    }
}

impl LineAssembler {
    /// Returns the event of the next complete line, if one has arrived.
    fn next_event(&mut self) -> Option<CodeEvent> {
        while !self.rest.is_empty() {
            let end = self.rest.iter().position(|byte| *byte == b'\n');
            let piece = self.rest.split_to(end.map_or(self.rest.len(), |end| end + 1));
            let room = MAX_LINE_BYTES.saturating_sub(self.line.len());
            self.line.extend_from_slice(&piece[..piece.len().min(room)]);
            if end.is_none() {
                continue;
            }
            let line = std::mem::take(&mut self.line);
            let broken = std::mem::take(&mut self.broken);
            match kernel_event::parse_kernel_event(&line) {
                Some(event) => return Some(event),
                None if broken => {}
                None => return Some(CodeEvent::Garbled),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_pieces(pieces: &[&str]) -> Vec<CodeEvent> {
        let mut lines = LineAssembler::default();
        let mut events = Vec::new();
        for piece in pieces {
            lines.rest = Bytes::copy_from_slice(piece.as_bytes());
            while let Some(event) = lines.next_event() {
                events.push(event);
            }
        }
        events
    }

    fn forms(mime: &str, text: &str) -> MimeForms {
        MimeForms::from([(mime.to_owned(), text.to_owned())])
    }

    #[test]
    fn events_may_arrive_in_pieces_and_several_at_once() {
        let events = parse_pieces(&[
            "{\"count\":3}\n{\"resu",
            "lt\":{\"text/plain\":\"4\"}}\n{\"display\":",
            "{\"a\":\"b\"}}\n",
        ]);
        let expected = [
            CodeEvent::Count(3),
            CodeEvent::Result(forms("text/plain", "4")),
            CodeEvent::Display(forms("a", "b")),
        ];
        assert_eq!(events, expected);
    }

    #[test]
    fn error_needs_only_a_name() {
        let CodeEvent::Error(error) = &parse_pieces(&["{\"error\":{\"ename\":\"E\"}}\n"])[0] else {
            panic!("an error")
        };
        assert_eq!((error.name.as_str(), error.value.as_str(), error.traceback.len()), ("E", "", 0));
    }

    #[test]
    fn unreadable_lines_become_garbled_events() {
        for nonsense in [
            "\n",
            "{}\n",
            "[]\n",
            "{\"count\":-1}\n",
            "{\"count\":1,\"result\":{}}\n",
            "{\"result\":{}}\n",
            "{\"result\":{\"a\":1}}\n",
            "{\"result\":{\"\":\"x\"}}\n",
            "{\"error\":{}}\n",
            "{\"no\":1}\n",
        ] {
            assert_eq!(
                parse_pieces(&[nonsense, "{\"count\":1}\n"]),
                [CodeEvent::Garbled, CodeEvent::Count(1)]
            );
        }
    }

    #[test]
    fn endless_line_is_bounded_in_memory() {
        let mut lines = LineAssembler::default();
        for _ in 0..10 {
            lines.rest = Bytes::from(vec![b'x'; 1 << 20]);
            assert_eq!(lines.next_event(), None);
        }
        assert!(lines.line.len() <= MAX_LINE_BYTES);
        lines.rest = Bytes::from_static(b"\n{\"count\":1}\n");
        assert_eq!(lines.next_event(), Some(CodeEvent::Garbled));
        assert_eq!(lines.next_event(), Some(CodeEvent::Count(1)));
    }

    #[test]
    fn line_cut_by_a_gap_is_skipped() {
        let mut lines = LineAssembler { broken: true, ..LineAssembler::default() };
        lines.rest = Bytes::from_static(b"st of it\"}}\n{\"count\":1}\nx\n");
        assert_eq!(lines.next_event(), Some(CodeEvent::Count(1)));
        assert_eq!(lines.next_event(), Some(CodeEvent::Garbled));
    }
}
