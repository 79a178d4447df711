//! Sessions: shells and kernels that are kept open between runs.
//!
//! ```text
//! open ─► idle ⇄ running (one run at a time; others are refused or wait)
//!           │        │ the shell ends for any reason
//!           ▼        ▼
//!          without a shell ── next run ─► a new shell with the last known directory and state
//! ```
//! A run is a process with its own journal. It shares the running process of the shell, so that
//! signals and deadlines reach everything it has started; what earlier runs have left is kept apart
//! (`earlier_runs.rs`). A session may have a kernel instead of a shell;
//! `kernel.rs` has its protocol. In a session without either (`commands.rs`) each run has its own
//! running process.

mod change_dir;
pub(crate) mod commands;
mod earlier_runs;
pub(crate) mod kernel;
mod lifecycle;
mod run;
pub(crate) mod shared;
pub(crate) mod shell;
pub(crate) mod table;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::process::{ExitReason, KernelProgram, KernelSpec, OpenSession, RunInSession, SessionStatus};
use wire::shared_session::MAX_SESSION_RUNS;
use wire::{AgentReply, Fault, FaultKind, StreamTag};

use crate::context::AgentContext;
use crate::event_loop::agent::{Agent, now_ms};
use crate::event_loop::alarms::Alarm;
use crate::event_loop::handles::{ConnectionId, ProcessHandle, RunningHandle, SessionHandle};
use crate::event_loop::poll::RegisteredFd;
use crate::fault;
use crate::isolation::isolated_session::SessionNamespaces;
use crate::process::child_table::ChildTable;
use crate::process::input::InputWriter;
use crate::process::running_process::RunningProcess;
use crate::process::{FaultSubjects, is_safe_name};
use crate::session::commands::{CommandSettings, StartDirectory};
use crate::session::kernel::KernelReportParser;
use crate::session::shell::{ShellDialect, ShellVerdict, VerdictKind};
use crate::session::table::SessionTable;

/// How much is read at once from the reports of a shell or kernel. One that never stops must not
/// starve everything else.
const MAX_REPORT_BYTES_PER_TURN: usize = 256 << 10;

/// The longest directory that is kept. It is the value of a variable, so it can be anything.
const MAX_DIRECTORY_BYTES: usize = 4096;

/// How long the run of a closed session may take to end.
const MAX_CLOSE_GRACE_MS: u64 = 60_000;

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) name: String,
    pub(crate) open: OpenSession,
    kind: SessionKind,
    shell: Option<SessionShell>,
    /// Groups in which earlier runs have left processes.
    pub(crate) earlier_runs: Vec<RunningHandle>,
    /// The namespaces of its shells, if it is isolated.
    pub(crate) namespaces: Option<SessionNamespaces>,
    /// The directory, variables, functions and aliases that the next shell starts with: those after the last run
    /// that ended by itself.
    pub(crate) directory: Option<String>,
    pub(crate) state: String,
    /// The variables in that state that were set only for the run after which it was reported.
    state_run_variables: Vec<String>,
    pub(crate) current: Option<SessionRun>,
    /// The number of runs so far, and the last of them; they are forgotten after all other processes.
    runs: u64,
    recent_runs: VecDeque<ProcessHandle>,
    /// Variables of the last run, which the next run must not see.
    run_variables: Vec<String>,
    queue: VecDeque<QueuedRun>,
    /// The connections that wait for the first shell.
    pub(crate) openers: Vec<ConnectionId>,
    /// Whether a shell has started in it. If the first one cannot start, the session is not opened.
    had_shell: bool,
    pub(crate) closing: bool,
    /// The connections that wait for the end of its shell.
    restarters: Vec<ConnectionId>,
    /// When it was opened.
    pub(crate) opened_ms: u64,
    /// When a run last began or ended.
    pub(crate) used_ms: u64,
    /// The time at which it is closed as idle.
    pub(crate) idle: Option<Instant>,
    /// The process of the last run that has ended, and how.
    last_run: Option<String>,
    last_exit: Option<ExitReason>,
}

/// What executes the runs of a session.
#[derive(Debug)]
pub(crate) enum SessionKind {
    /// A shell.
    Shell,
    /// A program that keeps the state of one language.
    Kernel(KernelSpec),
    /// A new process for each run.
    Commands(CommandSettings),
}

/// A running shell or kernel, and the private pipes to it.
#[derive(Debug)]
struct SessionShell {
    running: RunningHandle,
    protocol: SessionProtocol,
    commands: InputWriter,
    verdicts: RegisteredFd,
    received: ReceivedVerdicts,
    started: bool,
    /// Whether it was killed while it was idle; the next run waits for its end and gets another shell.
    ending: bool,
    /// Whether it replaced a shell that had died.
    is_replacement: bool,
    /// Whether it was given something to run. Before that it has no background processes, unless the file that `BASH_ENV`
    /// names has started some; these end with the session.
    was_used: bool,
    subjects: FaultSubjects,
}

/// What was received of a shell's verdicts and not handled yet.
#[derive(Debug, Default)]
struct ReceivedVerdicts {
    bytes: Vec<u8>,
    /// How much of the state of the present verdict was dropped because it is too long.
    dropped: u64,
}

/// The protocol on the private pipes.
#[derive(Debug)]
enum SessionProtocol {
    Shell(ShellDialect),
    Kernel(KernelReportParser),
}

/// A run that waits for its turn.
#[derive(Debug)]
struct QueuedRun {
    request: RunInSession,
    caller: QueuedCaller,
}

/// What waits for a run that has not begun.
#[derive(Clone, Copy, Debug)]
enum QueuedCaller {
    /// A connection, which is answered when the run begins.
    Connection(ConnectionId),
    /// None: the caller was already answered. The process represents the run.
    Detached(ProcessHandle),
}

/// The run in progress.
#[derive(Debug)]
pub(crate) struct SessionRun {
    pub(crate) process: ProcessHandle,
    pub(crate) key: String,
    request: RunInSession,
    /// Where later runs start if this one can be started.
    new_directory: Option<StartDirectory>,
}

impl Session {
    /// Its kernel, and the state of its reports.
    pub(crate) fn report_parser(&mut self) -> Option<(RunningHandle, &mut KernelReportParser)> {
        match self.shell.as_mut()? {
            SessionShell { running, protocol: SessionProtocol::Kernel(parser), .. } => {
                Some((*running, parser))
            }
            SessionShell { protocol: SessionProtocol::Shell(_), .. } => None,
        }
    }

    /// Its shell or kernel, while there is one.
    pub(crate) fn running_process(&self) -> Option<RunningHandle> {
        self.shell.as_ref().map(|shell| shell.running)
    }

    /// The language of its kernel, if it has one.
    pub(crate) fn language(&self) -> Option<&str> {
        self.kernel().map(|kernel| kernel.language.as_str())
    }

    fn kernel(&self) -> Option<&KernelSpec> {
        match &self.kind {
            SessionKind::Kernel(kernel) => Some(kernel),
            SessionKind::Shell | SessionKind::Commands(_) => None,
        }
    }

    /// Counts a run that has begun.
    pub(crate) fn record_run(&mut self, process: ProcessHandle) {
        self.runs += 1;
        self.recent_runs.push_back(process);
        if self.recent_runs.len() > MAX_SESSION_RUNS {
            self.recent_runs.pop_front();
        }
    }

    fn status(&self, children: &ChildTable, context: &AgentContext) -> SessionStatus {
        let running = self.running_process().and_then(|running| children.get(running));
        let has_background_processes = |running: &RunningProcess| {
            self.shell_was_used() && running.tree.has_other_members(context.commands.as_ref(), running.pid)
        };
        SessionStatus {
            session: self.name.clone(),
            busy: self.current.is_some(),
            terminal: self.open.terminal.is_some(),
            pid: running.and_then(|running| running.pid).map(rustix::process::Pid::as_raw_pid),
            kernel: self.kernel().map(|kernel| kernel.language.clone()),
            isolation: self.namespaces.as_ref().map(|namespaces| namespaces.status(self)),
            left: self.opens_with_its_shell()
                && (running.is_some_and(has_background_processes)
                    || self.has_earlier_runs(children, context)),
            shared: self.shared_status(),
        }
    }

    /// Whether its present shell was given something to run.
    fn shell_was_used(&self) -> bool {
        self.shell.as_ref().is_some_and(|shell| shell.was_used)
    }

    /// Whether the session is open as soon as its first shell runs.
    pub(crate) fn opens_with_its_shell(&self) -> bool {
        self.kernel().is_none_or(|kernel| kernel.program == KernelProgram::Shell)
    }
}

impl ReceivedVerdicts {
    /// Like [`shell::take_verdict`]. A state that was too long is empty.
    fn take_verdict(&mut self) -> Option<Option<ShellVerdict>> {
        let verdict = shell::take_verdict(&mut self.bytes)?;
        let complete = std::mem::take(&mut self.dropped) == 0;
        Some(verdict.map(|verdict| match complete {
            true => verdict,
            false => ShellVerdict { state: String::new(), ..verdict },
        }))
    }

    /// Drops the state of an incomplete verdict that is too long. Returns `false` if the verdict cannot come from the
    /// shell's script.
    fn drop_long_state(&mut self) -> bool {
        let length = self.bytes.len();
        if length <= shell::MAX_VERDICT_BYTES {
            return true;
        }
        let has_state = shell::drop_partial_state(&mut self.bytes);
        self.dropped += length.saturating_sub(self.bytes.len()) as u64;
        has_state
            && self.bytes.len() <= shell::MAX_VERDICT_BYTES
            && self.dropped <= shell::MAX_READ_VERDICT_BYTES
    }
}

/// How many shared sessions of its sort there may be beside all others, if its opener limits them.
fn own_session_limit(open: &OpenSession, kind: &SessionKind) -> Option<usize> {
    let limit = open.sharing.as_ref().filter(|_| !matches!(kind, SessionKind::Kernel(_)))?.max_sessions?;
    usize::try_from(limit).ok()
}

impl Agent {
    /// Opens a session; the reply comes when its shell runs.
    pub(crate) fn open_session(&mut self, connection: ConnectionId, open: OpenSession) -> Result<(), Fault> {
        match open.sharing.clone() {
            Some(sharing) => self.open_shared_session(connection, open, &sharing, SessionKind::Shell),
            None => self.add_session(Some(connection), open, SessionKind::Shell).map(drop),
        }
    }

    /// Adds a session and starts what it needs. The opener, if there is one, is answered when it is open.
    pub(crate) fn add_session(
        &mut self,
        opener: Option<ConnectionId>,
        open: OpenSession,
        kind: SessionKind,
    ) -> Result<SessionHandle, Fault> {
        if !is_safe_name(&open.session) {
            return Err(fault::from_kind(FaultKind::Invalid, "open session", "the name of the session"));
        }
        if self.sessions.find(&open.session).is_ok() {
            return Err(fault::from_kind(FaultKind::AlreadyExists, "open session", &open.session));
        }
        // A shared session may have a limit of its own, which was checked already. A closed session does not count,
        // provided that it ends soon.
        let most = usize::try_from(self.context.config.max_processes).unwrap_or(usize::MAX);
        let own_limit = own_session_limit(&open, &kind);
        let count = |counts: fn(&Session) -> bool| self.sessions.values().filter(|one| counts(one)).count();
        let counted =
            |session: &Session| !session.closing && own_session_limit(&session.open, &session.kind).is_none();
        let is_full = own_limit.is_none() && count(counted) >= most;
        if is_full || count(|session| session.closing) >= own_limit.map_or(most, |own| own.max(most)) {
            return Err(fault::from_kind(FaultKind::Busy, "open session", "too many sessions"));
        }
        let (number, now) = (self.events.next_handle(), now_ms());
        let session = Session {
            name: open.session.clone(),
            open,
            kind,
            shell: None,
            earlier_runs: Vec::new(),
            namespaces: None,
            directory: None,
            state: String::new(),
            state_run_variables: Vec::new(),
            current: None,
            runs: 0,
            recent_runs: VecDeque::new(),
            run_variables: Vec::new(),
            queue: VecDeque::new(),
            openers: opener.into_iter().collect(),
            had_shell: false,
            closing: false,
            restarters: Vec::new(),
            opened_ms: now,
            used_ms: now,
            idle: None,
            last_run: None,
            last_exit: None,
        };
        let (isolated, runs_commands) = (session.open.isolation.is_some(), session.runs_commands());
        self.sessions.insert(number, session);
        let begun = match (isolated, runs_commands) {
            (true, _) => self.create_namespaces(number),
            (false, true) => self.begin_command_session(number),
            (false, false) => self.start_shell(number),
        };
        begun.inspect_err(|_| self.sessions.remove(number))?;
        Ok(number)
    }

    /// Closes a session and kills everything in it.
    pub(crate) fn close_session(&mut self, name: &str) -> Result<(), Fault> {
        self.close_session_after(name, None)
    }

    /// Closes a session. With a grace, its run is only asked to end, if it is a process of its own, and is killed later.
    pub(crate) fn close_session_after(&mut self, name: &str, grace_ms: Option<u64>) -> Result<(), Fault> {
        let number = self.sessions.find(name)?;
        self.sessions.free_name(name);
        let session = self.sessions.get_mut(number).expect("it was just found");
        session.closing = true;
        session.kill_earlier_runs(&self.children, &self.context);
        let queue = std::mem::take(&mut session.queue);
        self.refuse_queued_runs(queue, name);
        // A closing session has no idle limit, so this removes its alarm, which would otherwise stay in memory until the
        // limit has passed.
        self.sessions.set_idle_timer(number, &mut self.events.alarms);
        self.sessions.kill_shell(number, &self.children, &self.context);
        match grace_ms {
            Some(grace_ms) if self.terminate_command_run(number) => {
                let grace = Duration::from_millis(grace_ms.min(MAX_CLOSE_GRACE_MS));
                self.events.alarms.set(grace, Alarm::CloseGrace(number));
            }
            _ => self.kill_command_run(number),
        }
        let alarms = &mut self.events.alarms;
        self.sessions.kill_namespace_init(number, &self.children, &self.context, alarms);
        self.sessions.drop_if_closed(number);
        Ok(())
    }

    /// Kills a session's shell with everything in it; the reply comes when it has ended. The next
    /// run starts a new one.
    pub(crate) fn restart_session(&mut self, connection: ConnectionId, name: &str) -> Result<(), Fault> {
        let number = self.sessions.find(name)?;
        let session = self.sessions.get_mut(number).expect("it was just found");
        if session.runs_commands() {
            let subject = format!("{name}: it has no shell");
            return Err(fault::from_kind(FaultKind::Invalid, "restart session", &subject));
        }
        session.directory = None;
        session.state = String::new();
        session.kill_earlier_runs(&self.children, &self.context);
        if session.shell.is_none() {
            self.connections.send_final_reply(connection, &AgentReply::Ok);
            return Ok(());
        }
        session.restarters.push(connection);
        self.sessions.kill_shell(number, &self.children, &self.context);
        Ok(())
    }

    /// The shell or kernel has sent a report.
    pub(crate) fn on_shell_report(&mut self, number: SessionHandle) {
        let mut buffer = std::mem::take(&mut self.buffers.reports);
        let (mut taken, mut drains) = (0, 0);
        while taken < MAX_REPORT_BYTES_PER_TURN && drains < kernel::MAX_DRAINS_PER_TURN {
            let Some(count) = self.read_shell_report(number, &mut buffer, &mut drains) else { break };
            taken += count;
        }
        self.buffers.reports = buffer;
    }

    /// Reads and handles one piece of a report. Returns `None` if there was none.
    fn read_shell_report(
        &mut self,
        number: SessionHandle,
        buffer: &mut [u8],
        drains: &mut u32,
    ) -> Option<usize> {
        let shell = self.sessions.get_mut(number)?.shell.as_mut()?;
        let count = match rustix::io::read(shell.verdicts.as_fd(), &mut *buffer) {
            Ok(count @ 1..) => count,
            Err(Errno::INTR) => return Some(0),
            Err(Errno::AGAIN) => return None,
            Ok(_) | Err(_) => {
                shell.verdicts.deregister();
                if matches!(shell.protocol, SessionProtocol::Kernel(_)) {
                    self.sessions.kill_shell(number, &self.children, &self.context);
                }
                return None;
            }
        };
        if matches!(shell.protocol, SessionProtocol::Kernel(_)) {
            self.handle_kernel_reports(number, &buffer[..count], drains);
            return Some(count);
        }
        shell.received.bytes.extend_from_slice(&buffer[..count]);
        self.handle_verdicts(number);
        let kept = self.sessions.get_mut(number).and_then(|session| session.shell.as_mut());
        if kept.is_some_and(|shell| !shell.received.drop_long_state()) {
            self.sessions.kill_shell(number, &self.children, &self.context);
            return None;
        }
        Some(count)
    }

    /// Handles the complete verdicts. Those without the right key do not come from the shell.
    fn handle_verdicts(&mut self, number: SessionHandle) {
        loop {
            let Some(session) = self.sessions.get_mut(number) else { return };
            let Some(shell) = &mut session.shell else { return };
            let Some(verdict) = shell.received.take_verdict() else { return };
            let Some(verdict) = verdict else { continue };
            if session.current.as_ref().is_none_or(|run| run.key != verdict.key) {
                continue;
            }
            if verdict.directory.len() <= MAX_DIRECTORY_BYTES {
                session.directory = Some(verdict.directory);
            }
            session.state = verdict.state;
            session.state_run_variables = session.run_variables.clone();
            if let VerdictKind::Done(status) = verdict.kind {
                let running = shell.running;
                self.drain_outputs(running);
                self.finish_run(number, ProcessExit::Code(status), ProcessUsage::default());
                self.begin_next_run(number);
            }
        }
    }
}

impl SessionTable {
    pub(crate) fn statuses(&self, children: &ChildTable, context: &AgentContext) -> Vec<SessionStatus> {
        let open = self.values().filter(|session| !session.closing);
        let mut statuses: Vec<_> = open.map(|session| session.status(children, context)).collect();
        statuses.sort_unstable_by(|a, b| a.session.cmp(&b.session));
        statuses
    }

    /// A shell or kernel may have room for what it was sent.
    pub(crate) fn write_commands(&mut self, number: SessionHandle) {
        let shell = self.get_mut(number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell {
            // A shell that does not read has ended, which is reported elsewhere.
            shell.commands.write_queued().ok();
        }
    }

    /// Sends a line to a kernel. A kernel that does not read its lines gets no more of them.
    pub(crate) fn send_to_kernel(&mut self, number: SessionHandle, line: &[u8]) {
        let shell = self.get_mut(number).and_then(|session| session.shell.as_mut());
        if let Some(shell) = shell.filter(|shell| shell.commands.is_empty()) {
            shell.commands.queue_bytes(line);
            // A kernel that does not read has ended, which is reported elsewhere.
            shell.commands.write_queued().ok();
        }
    }

    /// Output that was printed while no run was in progress. Before a kernel is ready it may
    /// contain the reason why it never is.
    pub(crate) fn keep_startup_output(&mut self, number: SessionHandle, stream: StreamTag, bytes: &[u8]) {
        let parser = self.get_mut(number).and_then(Session::report_parser);
        if let Some((_, parser)) = parser.filter(|_| stream == StreamTag::Stderr) {
            parser.keep_startup_output(bytes);
        }
    }

    /// Pauses or resumes reading the reports of a shell or kernel, depending on its readers.
    pub(crate) fn set_report_interest(&mut self, name: &str, interest: EventFlags) {
        let session = self.find(name).ok().and_then(|number| self.get_mut(number));
        if let Some(shell) = session.and_then(|session| session.shell.as_mut()) {
            shell.verdicts.set_interest(interest);
        }
    }
}
