//! Converts between the types of the service and those of the wire protocol. Data from the agent is validated here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use domain::process::{
    CommandLine, MissingDirectory, ProcessIo, ProcessSpec, StdinMode, TerminalSize, WorkingDirectory,
};
use domain::{
    Backpressure, ExitReason, IsolatedMount, IsolatedSessionSpec, IsolatedSessionStatus, MountView,
    OutputRetention, OverlayStore, ProcessId, ResourceSharing, SessionId, SessionName, StreamKind,
    UserIdentity,
};
use wire::StreamTag;

use crate::agent::client::{AgentError, truncate_text};
use crate::{
    BusyPolicy, FileAttributes, FileChange, FileEdit, FileInfo, FileKind, LineEnds, OpenSessionRequest,
    ProcessEnd, ProcessStatus, ProcessTree, RunShell, SessionRunRequest, SessionStatus, SharedSessionKind,
    SharedSessionUse, SignalTarget, TextEdit, TextOccurrence, TreeKind, TreeUsage, UndoOutcome, UndoPolicy,
    WatchEvent,
};

/// The longest text of a command and the longest tag that an agent shows.
const MAX_SHOWN_TEXT: usize = 4096;

/// The longest path of a directory.
const MAX_DIRECTORY_BYTES: usize = 4096;

/// The years 1 to 9999, which every calendar and format can show.
const CALENDAR_MILLIS: std::ops::RangeInclusive<i64> = -62_135_596_800_000..=253_402_300_799_999;

pub(crate) fn wire_start(id: &ProcessId, process: ProcessSpec) -> wire::process::StartProcess {
    wire::process::StartProcess {
        process: id.as_str().to_owned(),
        command: match process.command {
            CommandLine::Argv(words) => wire::process::CommandLine::Argv(words),
            CommandLine::Shell { text, login } => wire::process::CommandLine::Shell { text, login },
        },
        identity: wire_identity(&process.identity),
        directory: process.directory.map(wire_directory),
        env: process.env,
        terminal: match process.io {
            ProcessIo::Pipes => None,
            ProcessIo::Terminal(size) => Some(wire_terminal(size)),
        },
        stdin: process.stdin == StdinMode::Piped,
        tag: process.tag,
        deadline_ms: process.deadline.map(whole_millis),
        retention: wire_retention(process.retention, process.backpressure),
        follow: true,
    }
}

pub(crate) fn wire_open_session(id: &SessionId, request: OpenSessionRequest) -> wire::process::OpenSession {
    wire::process::OpenSession {
        session: id.as_str().to_owned(),
        identity: wire_identity(&request.identity),
        directory: request.directory.map(wire_directory),
        env: request.env,
        terminal: request.terminal.map(wire_terminal),
        text_terminal: false,
        isolation: request.isolation.map(wire_isolated_session),
        sharing: None,
    }
}

fn wire_isolated_session(spec: IsolatedSessionSpec) -> wire::isolated_session::IsolatedSessionSpec {
    let mount = |mount: IsolatedMount| wire::isolated_session::IsolatedMount {
        source: mount.source,
        target: mount.target,
        without_links: mount.without_links,
        view: match mount.view {
            MountView::ReadWrite => wire::isolated_session::MountView::ReadWrite,
            MountView::ReadOnly => wire::isolated_session::MountView::ReadOnly,
            MountView::Overlay(store) => {
                wire::isolated_session::MountView::Overlay { kept: store == OverlayStore::Disk }
            }
        },
    };
    wire::isolated_session::IsolatedSessionSpec {
        mounts: spec.mounts.into_iter().map(mount).collect(),
        share_temporary: spec.temporary == ResourceSharing::Shared,
        share_network: spec.network == ResourceSharing::Shared,
        screen: wire::isolated_session::EnvFilter {
            only: spec.env_filter.only,
            without: spec.env_filter.without,
        },
        idle_ms: spec.idle.map(whole_millis),
        note: spec.note,
    }
}

pub(crate) fn wire_run(
    session: &SessionId,
    id: &ProcessId,
    run: SessionRunRequest,
) -> wire::process::RunInSession {
    wire::process::RunInSession {
        session: session.as_str().to_owned(),
        process: id.as_str().to_owned(),
        text: run.text,
        directory: run.directory.map(wire_directory),
        deadline_ms: run.deadline.map(whole_millis),
        retention: wire_retention(run.retention, run.backpressure),
        follow: true,
        queue: run.busy == BusyPolicy::Queue,
        detached: false,
        env: run.env,
        beside: run.shell == RunShell::Separate,
    }
}

pub(crate) fn wire_identity(identity: &UserIdentity) -> wire::process::UserIdentity {
    match identity {
        UserIdentity::Default => wire::process::UserIdentity::Default,
        UserIdentity::User(name) => wire::process::UserIdentity::User(name.clone()),
        UserIdentity::Ids { uid, gid } => wire::process::UserIdentity::Ids { uid: *uid, gid: *gid },
    }
}

pub(crate) fn wire_signal_target(reach: SignalTarget) -> wire::process::SignalTarget {
    match reach {
        SignalTarget::Group => wire::process::SignalTarget::Group,
        SignalTarget::Tree => wire::process::SignalTarget::Tree,
    }
}

pub(crate) fn wire_attributes(attributes: FileAttributes) -> wire::files::FileAttributes {
    let FileAttributes { mode, owner, group } = attributes;
    wire::files::FileAttributes { mode, new_mode: None, owner, group }
}

pub(crate) fn wire_edit(edit: FileEdit) -> wire::files::FileEdit {
    let FileEdit { path, old, new } = edit;
    wire::files::FileEdit { path, old, new }
}

pub(crate) fn wire_text_edit(edit: TextEdit) -> wire::file_edits::TextEdit {
    let adapt = |line_ends| line_ends == LineEnds::AsInFile;
    match edit {
        TextEdit::Replace { old, occurrence, line_ends } => wire::file_edits::TextEdit::Replace {
            old,
            occurrence: match occurrence {
                TextOccurrence::Only => wire::file_edits::TextOccurrence::Only,
                TextOccurrence::First => wire::file_edits::TextOccurrence::First,
                TextOccurrence::Last => wire::file_edits::TextOccurrence::Last,
                TextOccurrence::All => wire::file_edits::TextOccurrence::All,
            },
            adapt_line_ends: adapt(line_ends),
        },
        TextEdit::Insert { after_line, line_ends } => {
            wire::file_edits::TextEdit::Insert { after_line, adapt_line_ends: adapt(line_ends) }
        }
        TextEdit::Create { attributes, new_file_mode } => wire::file_edits::TextEdit::Create {
            attributes: wire::files::FileAttributes {
                new_mode: new_file_mode,
                ..wire_attributes(attributes)
            },
        },
    }
}

pub(crate) fn wire_undo_policy(policy: UndoPolicy) -> wire::file_edits::UndoPolicy {
    match policy {
        UndoPolicy::Overwrite => wire::file_edits::UndoPolicy::Overwrite,
        UndoPolicy::Refuse => wire::file_edits::UndoPolicy::Refuse,
    }
}

pub(crate) fn undo_outcome(outcome: wire::file_edits::UndoOutcome) -> UndoOutcome {
    match outcome {
        wire::file_edits::UndoOutcome::Restored => UndoOutcome::Restored,
        wire::file_edits::UndoOutcome::Removed => UndoOutcome::Removed,
        wire::file_edits::UndoOutcome::NoHistory => UndoOutcome::NoHistory,
        wire::file_edits::UndoOutcome::ChangedSince => UndoOutcome::ChangedSince,
    }
}

fn wire_directory(directory: WorkingDirectory) -> wire::process::WorkingDirectory {
    wire::process::WorkingDirectory {
        path: directory.path,
        missing: match directory.missing {
            MissingDirectory::Fail => wire::process::MissingDirectory::Fail,
            MissingDirectory::Create => wire::process::MissingDirectory::Create,
            MissingDirectory::Ignore => wire::process::MissingDirectory::Ignore,
        },
        expand: directory.expand,
    }
}

pub(crate) fn wire_terminal(size: TerminalSize) -> wire::process::TerminalSize {
    wire::process::TerminalSize { columns: size.columns, rows: size.rows }
}

fn wire_retention(retention: OutputRetention, backpressure: Backpressure) -> wire::process::OutputRetention {
    let (hold, stall_limit) = match backpressure {
        Backpressure::Off => (false, None),
        Backpressure::On { stall_limit } => (true, stall_limit),
    };
    let OutputRetention { first, last } = retention;
    wire::process::OutputRetention { first, last, lossless: hold, stall_ms: stall_limit.map(whole_millis) }
}

/// Whole milliseconds, at least one: a deadline of zero would have another meaning.
fn whole_millis(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1000)).unwrap_or(u64::MAX).max(1)
}

pub(crate) fn process_status(status: wire::process::ProcessStatus) -> Result<ProcessStatus, AgentError> {
    Ok(ProcessStatus {
        process: parse_process_id(&status.process)?,
        tag: status.tag.map(shown_text),
        session: status.session.as_deref().map(parse_session_id).transpose()?,
        command: shown_text(status.command),
        started: clamped_time(i64::try_from(status.started_ms).unwrap_or(i64::MAX)),
        written: status.written,
        first: status.first,
        ended: status.ended.as_ref().map(process_end),
        left: status.left,
    })
}

pub(crate) fn process_tree(tree: wire::process::TreeStatus) -> Result<ProcessTree, AgentError> {
    Ok(ProcessTree {
        id: parse_process_id(&tree.id)?,
        kind: match tree.kind {
            wire::process::TreeKind::Command => TreeKind::Command,
            wire::process::TreeKind::Run => TreeKind::Run,
            wire::process::TreeKind::Session => TreeKind::Session,
            wire::process::TreeKind::Context => TreeKind::Context,
        },
        session: tree.session.as_deref().map(parse_session_id).transpose()?,
        tag: tree.tag,
        text: tree.text,
        busy: tree.busy,
        started: Some(clamped_time(i64::try_from(tree.started_ms).unwrap_or(i64::MAX))),
        ended: tree.ended.as_ref().map(process_end),
        left: tree.left,
        usage: tree.usage.map(|usage| TreeUsage {
            cpu: Duration::from_millis(usage.cpu_ms),
            memory: domain::Bytes(usage.memory_bytes),
            processes: usage.processes,
        }),
    })
}

/// A session of an agent that does not support [`wire::AgentRequest::Trees`].
pub(crate) fn session_tree(status: &wire::process::SessionStatus) -> Result<ProcessTree, AgentError> {
    let shell = if status.terminal { "terminal" } else { "shell" };
    Ok(ProcessTree {
        id: parse_process_id(&status.session)?,
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

pub(crate) fn session_status(status: &wire::process::SessionStatus) -> Result<SessionStatus, AgentError> {
    let session = parse_session_id(&status.session)?;
    let isolation = status.isolation.as_ref().map(|isolation| IsolatedSessionStatus {
        created: clamped_time(i64::try_from(isolation.created_ms).unwrap_or(i64::MAX)),
        used: clamped_time(i64::try_from(isolation.used_ms).unwrap_or(i64::MAX)),
        idle_left: isolation.idle_left_ms.map(Duration::from_millis),
        alive: isolation.alive,
    });
    // A context may have a name as well, but it is not a session that several callers may open.
    let shared = status.shared.as_ref().filter(|_| status.kernel.is_none());
    let shared = shared.map(|shared| shared_session_use(shared, status.terminal)).transpose()?;
    Ok(SessionStatus { session, busy: status.busy, terminal: status.terminal, isolation, shared })
}

/// The texts come from inside the sandbox; one that no client can have chosen is left out.
pub(crate) fn shared_session_use(
    shared: &wire::process::SharedSessionStatus,
    terminal: bool,
) -> Result<SharedSessionUse, AgentError> {
    use wire::shared_session::{MAX_SESSION_NOTE_BYTES, SharedSessionKind as WireKind};
    let time = |milliseconds: u64| clamped_time(i64::try_from(milliseconds).unwrap_or(i64::MAX));
    Ok(SharedSessionUse {
        name: shared.name.as_deref().and_then(|name| SessionName::parse(name).ok()),
        opened: time(shared.opened_ms),
        used: time(shared.used_ms),
        kind: match shared.kind {
            Some(WireKind::Commands) => SharedSessionKind::Commands,
            Some(WireKind::Terminal) => SharedSessionKind::TerminalShell,
            Some(WireKind::Pipes) => SharedSessionKind::PipeShell,
            // An older agent has shells only.
            None if terminal => SharedSessionKind::TerminalShell,
            None => SharedSessionKind::PipeShell,
        },
        directory: shared.directory.clone().filter(|path| path.len() <= MAX_DIRECTORY_BYTES),
        run: shared.run.as_deref().map(parse_process_id).transpose()?,
        command: shared.command.clone().map(shown_text),
        last_run: shared.last_run.as_deref().map(parse_process_id).transpose()?,
        last_exit: shared.exit.map(exit_reason),
        runs: shared.runs,
        idle_limit: shared.idle_ms.map(Duration::from_millis),
        note: shared.note.clone().filter(|note| note.len() <= MAX_SESSION_NOTE_BYTES),
    })
}

fn exit_reason(exit: wire::process::ExitReason) -> ExitReason {
    match exit {
        wire::process::ExitReason::Code(code) => ExitReason::Code(code),
        wire::process::ExitReason::Signal(signal) => ExitReason::Signal(signal),
        wire::process::ExitReason::Oom => ExitReason::Oom,
        wire::process::ExitReason::Deadline => ExitReason::Deadline,
        wire::process::ExitReason::Lost => ExitReason::Lost,
    }
}

pub(crate) fn process_end(ended: &wire::process::ProcessEnd) -> ProcessEnd {
    ProcessEnd {
        exit: exit_reason(ended.exit),
        written: ended.written,
        ended: clamped_time(i64::try_from(ended.ended_ms).unwrap_or(i64::MAX)),
        duration: Duration::from_millis(ended.duration_ms),
        user: Duration::from_millis(ended.user_ms),
        system: Duration::from_millis(ended.system_ms),
        max_rss: domain::Bytes(ended.max_rss_kib.saturating_mul(1024)),
        interrupted: ended.interrupted,
        signalled: ended.signalled,
    }
}

pub(crate) fn stream_kind(tag: StreamTag) -> StreamKind {
    match tag {
        StreamTag::Stdout => StreamKind::Stdout,
        StreamTag::Stderr => StreamKind::Stderr,
        StreamTag::Terminal => StreamKind::Terminal,
        StreamTag::KernelEvent => StreamKind::KernelEvent,
    }
}

pub(crate) fn file_info(info: wire::files::FileInfo) -> FileInfo {
    FileInfo {
        path: info.path,
        kind: file_kind(info.kind),
        size: info.size,
        mode: info.mode & 0o7777,
        uid: info.uid,
        gid: info.gid,
        owner: info.owner,
        group: info.group,
        modified: clamped_time(info.modified_ms),
        created: clamped_time(info.created_ms),
        link_target: info.link_target,
    }
}

pub(crate) fn file_kind(kind: wire::files::FileKind) -> FileKind {
    match kind {
        wire::files::FileKind::File => FileKind::File,
        wire::files::FileKind::Directory => FileKind::Directory,
        wire::files::FileKind::Symlink => FileKind::Symlink,
        wire::files::FileKind::Other => FileKind::Other,
    }
}

/// The longest path in an event of a watch: the kernel's own limit.
const MAX_WATCHED_PATH_BYTES: usize = 4096;

pub(crate) fn watch_event(event: wire::files::WatchEvent, sequence: u64) -> WatchEvent {
    let is_long = |path: &str| path.len() > MAX_WATCHED_PATH_BYTES;
    if is_long(&event.path) || event.new_path.as_deref().is_some_and(is_long) {
        // No path of the kernel is that long. The client learns that an event is missing.
        return WatchEvent {
            sequence,
            path: String::new(),
            change: FileChange::Overflow,
            new_path: None,
            kind: None,
            size: None,
            modified: None,
            inode: None,
        };
    }
    WatchEvent {
        sequence,
        path: event.path,
        change: match event.change {
            wire::files::FileChange::Created => FileChange::Created,
            wire::files::FileChange::Written => FileChange::Written,
            wire::files::FileChange::Removed => FileChange::Removed,
            wire::files::FileChange::Renamed => FileChange::Renamed,
            wire::files::FileChange::Attributes => FileChange::Attributes,
            wire::files::FileChange::Overflow => FileChange::Overflow,
        },
        new_path: event.new_path,
        kind: event.kind.map(file_kind),
        size: event.size,
        modified: event.modified_ms.map(clamped_time),
        inode: event.inode,
    }
}

/// A text for people, cut to its greatest length.
fn shown_text(mut text: String) -> String {
    truncate_text(&mut text, MAX_SHOWN_TEXT);
    text
}

fn parse_process_id(text: &str) -> Result<ProcessId, AgentError> {
    ProcessId::parse(text).map_err(|_error| AgentError::Impossible("a process with an invalid id"))
}

fn parse_session_id(text: &str) -> Result<SessionId, AgentError> {
    SessionId::parse(text).map_err(|_error| AgentError::Impossible("a session with an invalid id"))
}

/// A time that any front can format; times outside the calendar are clamped to its limits.
pub(crate) fn clamped_time(millis: i64) -> SystemTime {
    let millis = millis.clamp(*CALENDAR_MILLIS.start(), *CALENDAR_MILLIS.end());
    let span = Duration::from_millis(millis.unsigned_abs());
    if millis < 0 { UNIX_EPOCH - span } else { UNIX_EPOCH + span }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_from_the_agent_are_clamped_to_the_calendar() {
        for millis in [i64::MIN, -1, 0, 1, i64::MAX] {
            let time = clamped_time(millis);
            let years = Duration::from_secs(10_000 * 366 * 86_400);
            assert!(time < UNIX_EPOCH + years && time > UNIX_EPOCH - years);
        }
        assert_eq!(clamped_time(-1500), UNIX_EPOCH - Duration::from_millis(1500));
    }

    #[test]
    fn short_deadline_is_at_least_one_millisecond() {
        assert_eq!(whole_millis(Duration::ZERO), 1);
        assert_eq!(whole_millis(Duration::from_micros(1001)), 2);
        assert_eq!(whole_millis(Duration::MAX), u64::MAX);
    }
}
