//! Converts between the types of the service and those of the wire protocol. Data from the agent is validated here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use domain::process::{Command, Directory, Io, Missing, Process, Size, Stdin};
use domain::{
    Backpressure, Exit, Identity, Nest, NestMount, NestStatus, ProcessId, Retention, SessionId, Sharing,
    Store, Stream, View,
};
use wire::StreamTag;

use crate::agent_client::AgentError;
use crate::{
    Attributes, Busy, Change, Edit, Ended, FileInfo, FileKind, OpenSession, ProcessStatus, ProcessTree,
    Reach, Run, RunPlace, SessionStatus, TreeKind, TreeUsage, WatchEvent,
};

/// The years 1 to 9999, which every calendar and format can show.
const CALENDAR: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

pub(crate) fn start(id: &ProcessId, process: Process) -> wire::process::Start {
    wire::process::Start {
        process: id.as_str().to_owned(),
        command: match process.command {
            Command::Argv(words) => wire::process::Command::Argv(words),
            Command::Shell { text, login } => wire::process::Command::Shell { text, login },
        },
        identity: identity(&process.identity),
        directory: process.directory.map(directory),
        env: process.env,
        terminal: match process.io {
            Io::Pipes => None,
            Io::Terminal(size) => Some(terminal(size)),
        },
        stdin: process.stdin == Stdin::Piped,
        tag: process.tag,
        deadline_ms: process.deadline.map(millis),
        retention: retention(process.retention, process.backpressure),
        follow: true,
    }
}

pub(crate) fn open_session(id: &SessionId, request: OpenSession) -> wire::process::OpenSession {
    wire::process::OpenSession {
        session: id.as_str().to_owned(),
        identity: identity(&request.identity),
        directory: request.directory.map(directory),
        env: request.env,
        terminal: request.terminal.map(terminal),
        nest: request.nest.map(nest),
    }
}

fn nest(nest: Nest) -> wire::nest::Nest {
    let mount = |mount: NestMount| wire::nest::NestMount {
        source: mount.source,
        target: mount.target,
        without_links: mount.without_links,
        view: match mount.view {
            View::ReadWrite => wire::nest::View::ReadWrite,
            View::ReadOnly => wire::nest::View::ReadOnly,
            View::Overlay(store) => wire::nest::View::Overlay { kept: store == Store::Disk },
        },
    };
    wire::nest::Nest {
        mounts: nest.mounts.into_iter().map(mount).collect(),
        share_temporary: nest.temporary == Sharing::Shared,
        share_network: nest.network == Sharing::Shared,
        screen: wire::nest::Screen { only: nest.screen.only, without: nest.screen.without },
        idle_ms: nest.idle.map(millis),
        note: nest.note,
    }
}

pub(crate) fn run(session: &SessionId, id: &ProcessId, run: Run) -> wire::process::RunInSession {
    wire::process::RunInSession {
        session: session.as_str().to_owned(),
        process: id.as_str().to_owned(),
        text: run.text,
        directory: run.directory.map(directory),
        deadline_ms: run.deadline.map(millis),
        retention: retention(run.retention, run.backpressure),
        follow: true,
        queue: run.busy == Busy::Queue,
        env: run.env,
        beside: run.place == RunPlace::Beside,
    }
}

pub(crate) fn identity(identity: &Identity) -> wire::process::Identity {
    match identity {
        Identity::Default => wire::process::Identity::Default,
        Identity::User(name) => wire::process::Identity::User(name.clone()),
        Identity::Ids { uid, gid } => wire::process::Identity::Ids { uid: *uid, gid: *gid },
    }
}

pub(crate) fn reach(reach: Reach) -> wire::process::Reach {
    match reach {
        Reach::Group => wire::process::Reach::Group,
        Reach::Tree => wire::process::Reach::Tree,
    }
}

pub(crate) fn attributes(attributes: Attributes) -> wire::files::Attributes {
    let Attributes { mode, new_mode, owner, group } = attributes;
    wire::files::Attributes { mode, new_mode, owner, group }
}

pub(crate) fn edit(edit: Edit) -> wire::files::Edit {
    let Edit { path, old, new } = edit;
    wire::files::Edit { path, old, new }
}

fn directory(directory: Directory) -> wire::process::Directory {
    wire::process::Directory {
        path: directory.path,
        missing: match directory.missing {
            Missing::Fail => wire::process::Missing::Fail,
            Missing::Create => wire::process::Missing::Create,
            Missing::Ignore => wire::process::Missing::Ignore,
        },
        expand: directory.expand,
    }
}

fn terminal(size: Size) -> wire::process::TerminalSize {
    wire::process::TerminalSize { columns: size.columns, rows: size.rows }
}

fn retention(retention: Retention, backpressure: Backpressure) -> wire::process::Retention {
    let (hold, stall_limit) = match backpressure {
        Backpressure::Off => (false, None),
        Backpressure::On { stall_limit } => (true, stall_limit),
    };
    let Retention { first, last } = retention;
    wire::process::Retention { first, last, hold, stall_ms: stall_limit.map(millis) }
}

/// Whole milliseconds, at least one: a deadline of zero would have another meaning.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1000)).unwrap_or(u64::MAX).max(1)
}

pub(crate) fn status(status: wire::process::ProcessStatus) -> Result<ProcessStatus, AgentError> {
    Ok(ProcessStatus {
        process: process_id(&status.process)?,
        tag: status.tag,
        session: status.session.as_deref().map(process_id).transpose()?,
        command: status.command,
        started: moment(i64::try_from(status.started_ms).unwrap_or(i64::MAX)),
        written: status.written,
        first: status.first,
        ended: status.ended.as_ref().map(ended),
        left: status.left,
    })
}

pub(crate) fn tree(tree: wire::process::TreeStatus) -> Result<ProcessTree, AgentError> {
    Ok(ProcessTree {
        id: process_id(&tree.id)?,
        kind: match tree.kind {
            wire::process::TreeKind::Command => TreeKind::Command,
            wire::process::TreeKind::Run => TreeKind::Run,
            wire::process::TreeKind::Session => TreeKind::Session,
            wire::process::TreeKind::Context => TreeKind::Context,
        },
        session: tree.session.as_deref().map(process_id).transpose()?,
        tag: tree.tag,
        text: tree.text,
        busy: tree.busy,
        started: Some(moment(i64::try_from(tree.started_ms).unwrap_or(i64::MAX))),
        ended: tree.ended.as_ref().map(ended),
        left: tree.left,
        usage: tree.usage.map(|usage| TreeUsage {
            cpu: Duration::from_millis(usage.cpu_ms),
            memory: domain::Bytes(usage.memory_bytes),
            processes: usage.processes,
        }),
    })
}

/// A session of an agent that does not support [`wire::Request::Trees`].
pub(crate) fn session_tree(status: &wire::process::SessionStatus) -> Result<ProcessTree, AgentError> {
    let shell = if status.terminal { "terminal" } else { "shell" };
    Ok(ProcessTree {
        id: process_id(&status.session)?,
        kind: if status.kernel.is_some() { TreeKind::Context } else { TreeKind::Session },
        session: None,
        tag: None,
        text: status.kernel.clone().unwrap_or_else(|| shell.to_owned()),
        busy: status.busy,
        started: None,
        ended: None,
        left: false,
        usage: None,
    })
}

pub(crate) fn session(status: &wire::process::SessionStatus) -> Result<SessionStatus, AgentError> {
    let session = process_id(&status.session)?;
    let nest = status.nest.as_ref().map(|nest| NestStatus {
        created: moment(i64::try_from(nest.created_ms).unwrap_or(i64::MAX)),
        used: moment(i64::try_from(nest.used_ms).unwrap_or(i64::MAX)),
        idle_left: nest.idle_left_ms.map(Duration::from_millis),
        alive: nest.alive,
    });
    Ok(SessionStatus { session, busy: status.busy, terminal: status.terminal, nest })
}

pub(crate) fn ended(ended: &wire::process::Ended) -> Ended {
    Ended {
        exit: match ended.exit {
            wire::process::Exit::Code(code) => Exit::Code(code),
            wire::process::Exit::Signal(signal) => Exit::Signal(signal),
            wire::process::Exit::Oom => Exit::Oom,
            wire::process::Exit::Deadline => Exit::Deadline,
            wire::process::Exit::Lost => Exit::Lost,
        },
        written: ended.written,
        ended: moment(i64::try_from(ended.ended_ms).unwrap_or(i64::MAX)),
        duration: Duration::from_millis(ended.duration_ms),
        user: Duration::from_millis(ended.user_ms),
        system: Duration::from_millis(ended.system_ms),
        max_rss: domain::Bytes(ended.max_rss_kib.saturating_mul(1024)),
    }
}

pub(crate) fn stream(tag: StreamTag) -> Stream {
    match tag {
        StreamTag::Stdout => Stream::Stdout,
        StreamTag::Stderr => Stream::Stderr,
        StreamTag::Terminal => Stream::Terminal,
        StreamTag::Tell => Stream::Tell,
    }
}

pub(crate) fn file_info(info: wire::files::FileInfo) -> FileInfo {
    FileInfo {
        path: info.path,
        kind: match info.kind {
            wire::files::FileKind::File => FileKind::File,
            wire::files::FileKind::Directory => FileKind::Directory,
            wire::files::FileKind::Symlink => FileKind::Symlink,
            wire::files::FileKind::Other => FileKind::Other,
        },
        size: info.size,
        mode: info.mode & 0o7777,
        uid: info.uid,
        gid: info.gid,
        owner: info.owner,
        group: info.group,
        modified: moment(info.modified_ms),
        created: moment(info.created_ms),
        link_target: info.link_target,
    }
}

pub(crate) fn watch_event(event: wire::files::WatchEvent) -> WatchEvent {
    WatchEvent {
        path: event.path,
        change: match event.change {
            wire::files::Change::Created => Change::Created,
            wire::files::Change::Written => Change::Written,
            wire::files::Change::Removed => Change::Removed,
            wire::files::Change::Renamed => Change::Renamed,
            wire::files::Change::Attributes => Change::Attributes,
            wire::files::Change::Overflow => Change::Overflow,
        },
    }
}

fn process_id(text: &str) -> Result<ProcessId, AgentError> {
    ProcessId::parse(text).map_err(|_error| AgentError::Impossible("a process with an invalid id"))
}

/// A time that any front can format; times outside the calendar are clamped to its limits.
fn moment(millis: i64) -> SystemTime {
    let millis = millis.clamp(*CALENDAR.start(), *CALENDAR.end());
    let span = Duration::from_millis(millis.unsigned_abs());
    if millis < 0 { UNIX_EPOCH - span } else { UNIX_EPOCH + span }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_from_the_agent_are_clamped_to_the_calendar() {
        for millis in [i64::MIN, -1, 0, 1, i64::MAX] {
            let time = moment(millis);
            let years = Duration::from_secs(10_000 * 366 * 86_400);
            assert!(time < UNIX_EPOCH + years && time > UNIX_EPOCH - years);
        }
        assert_eq!(moment(-1500), UNIX_EPOCH - Duration::from_millis(1500));
    }

    #[test]
    fn short_deadline_is_at_least_one_millisecond() {
        assert_eq!(millis(Duration::ZERO), 1);
        assert_eq!(millis(Duration::from_micros(1001)), 2);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }
}
