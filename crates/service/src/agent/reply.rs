//! The replies that a request may get, as types. A reply of another kind is an error of the agent.

use wire::AgentReply;
use wire::file_edits::{EditReport, UndoReport};
use wire::files::FileInfo;
use wire::process::{ProcessStatus, SessionStatus, TreeStatus};

/// A reply that fits a request.
pub(crate) trait ExpectedReply: Sized {
    /// Returns `None` for a reply that does not fit.
    fn from_reply(reply: AgentReply) -> Option<Self>;
}

/// The request was carried out, and there is nothing more to say.
impl ExpectedReply for () {
    fn from_reply(reply: AgentReply) -> Option<Self> {
        matches!(reply, AgentReply::Ok).then_some(())
    }
}

/// Any reply fits; only a fault is of interest.
impl ExpectedReply for AgentReply {
    fn from_reply(reply: AgentReply) -> Option<Self> {
        Some(reply)
    }
}

/// The process runs.
pub(crate) struct ProcessStarted;

impl ExpectedReply for ProcessStarted {
    fn from_reply(reply: AgentReply) -> Option<Self> {
        matches!(reply, AgentReply::Started { .. }).then_some(Self)
    }
}

/// The session is open. Only one with a process of its own is reported as started.
pub(crate) struct SessionOpened;

impl ExpectedReply for SessionOpened {
    fn from_reply(reply: AgentReply) -> Option<Self> {
        matches!(reply, AgentReply::Ok | AgentReply::Started { .. }).then_some(Self)
    }
}

/// The text that was stored with a session.
pub(crate) struct SessionNote(pub(crate) String);

/// The size of a whole file whose bytes follow.
pub(crate) struct ReadingSize(pub(crate) u64);

/// Offsets of output, and when it was read from there on, in milliseconds since 1970.
pub(crate) struct OutputTimes(pub(crate) Vec<(u64, u64)>);

/// The number of replacements made in each file.
pub(crate) struct ReplacedCounts(pub(crate) Vec<u64>);

macro_rules! expect_replies {
    ($($expected:ty: $pattern:pat => $value:expr;)*) => {$(
        impl ExpectedReply for $expected {
            fn from_reply(reply: AgentReply) -> Option<Self> {
                match reply {
                    $pattern => Some($value),
                    _ => None,
                }
            }
        }
    )*};
}

expect_replies! {
    ProcessStatus: AgentReply::Status(status) => status;
    Vec<ProcessStatus>: AgentReply::Statuses(statuses) => statuses;
    SessionStatus: AgentReply::Session(status) => status;
    Vec<SessionStatus>: AgentReply::Sessions(sessions) => sessions;
    Vec<TreeStatus>: AgentReply::Trees(trees) => trees;
    Vec<FileInfo>: AgentReply::Info(infos) => infos;
    SessionNote: AgentReply::Note(note) => Self(note);
    ReadingSize: AgentReply::Reading { size } => Self(size);
    OutputTimes: AgentReply::OutputTimes(times) => Self(times);
    ReplacedCounts: AgentReply::Replaced(counts) => Self(counts);
    EditReport: AgentReply::Edited(report) => report;
    UndoReport: AgentReply::Undone(report) => report;
}
