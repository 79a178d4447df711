//! Faults: the agent's error replies.

use std::io;

use rustix::io::Errno;
use wire::{Fault, FaultKind, FaultOperation};

/// The maximum number of characters of a subject in a reply.
const MAX_SUBJECT_CHARS: usize = 4096;

/// The kind of fault that an error number of the kernel stands for.
pub(crate) fn kind_of(errno: Errno) -> FaultKind {
    match errno {
        Errno::NOENT | Errno::SRCH => FaultKind::NotFound,
        Errno::EXIST | Errno::NOTEMPTY => FaultKind::AlreadyExists,
        Errno::NOTDIR => FaultKind::NotADirectory,
        Errno::ISDIR => FaultKind::IsADirectory,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => FaultKind::Permission,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => FaultKind::NoSpace,
        Errno::INVAL | Errno::NAMETOOLONG | Errno::LOOP | Errno::MSGSIZE => FaultKind::Invalid,
        Errno::AGAIN | Errno::BUSY | Errno::MFILE | Errno::NFILE => FaultKind::Busy,
        Errno::CONNREFUSED | Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH => FaultKind::Refused,
        _ => FaultKind::Other,
    }
}

/// A fault with an error number of the kernel.
pub(crate) fn from_errno(errno: Errno, operation: impl Into<FaultOperation>, subject: &str) -> Fault {
    Fault {
        kind: kind_of(errno),
        errno: Some(errno.raw_os_error()),
        operation: operation.into(),
        subject: truncate_subject(subject),
    }
}

/// Like [`from_errno`], for errors of the standard library.
pub(crate) fn from_io(error: &io::Error, operation: impl Into<FaultOperation>, subject: &str) -> Fault {
    match Errno::from_io_error(error) {
        Some(errno) => from_errno(errno, operation, subject),
        None => from_kind(FaultKind::Other, operation, &format!("{subject}: {error}")),
    }
}

/// A fault that did not come from the kernel.
pub(crate) fn from_kind(kind: FaultKind, operation: impl Into<FaultOperation>, subject: &str) -> Fault {
    Fault { kind, errno: None, operation: operation.into(), subject: truncate_subject(subject) }
}

/// A subject may come from a request and be as long as one; a reply must fit its frame.
fn truncate_subject(subject: &str) -> String {
    match subject.char_indices().nth(MAX_SUBJECT_CHARS) {
        Some((end, _)) => subject[..end].to_owned(),
        None => subject.to_owned(),
    }
}
