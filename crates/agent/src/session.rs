//! Sessions: shells and kernels that are kept open between runs.
//!
//! ```text
//! open ─► idle ⇄ running (one run at a time; others are refused or wait)
//!           │        │ the shell ends for any reason
//!           ▼        ▼
//!          without a shell ── next run ─► a new shell with the last known directory and exports
//! ```
//! A run is a process with its own journal. It shares the running process of the shell, so that
//! signals and deadlines reach everything the session has started. A session may have a kernel instead of a shell;
//! `kernel.rs` has its protocol.

mod change_dir;
pub(crate) mod kernel;
mod lifecycle;
mod run;
pub(crate) mod shell;
pub(crate) mod table;

use std::collections::VecDeque;
use std::os::fd::AsFd;

use linux::spawn::{ProcessExit, ProcessUsage};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use wire::process::{KernelProgram, KernelSpec, OpenSession, RunInSession, SessionStatus};
use wire::{AgentReply, Fault, FaultKind, StreamTag};

use crate::context::AgentContext;
use crate::event_loop::agent::{Agent, now_ms};
use crate::event_loop::handles::{ConnectionId, ProcessHandle, RunningHandle, SessionHandle};
use crate::event_loop::poll::RegisteredFd;
use crate::fault;
use crate::isolation::isolated_session::SessionNamespaces;
use crate::process::child_table::ChildTable;
use crate::process::input::InputWriter;
use crate::process::running_process::RunningProcess;
use crate::process::{FaultSubjects, is_safe_name};
use crate::session::kernel::KernelReportParser;
use crate::session::shell::{ShellDialect, VerdictKind};
use crate::session::table::SessionTable;

/// How much is read at once from the reports of a shell or kernel. One that never stops must not
/// starve everything else.
const MAX_REPORT_BYTES_PER_TURN: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) name: String,
    pub(crate) open: OpenSession,
    kernel: Option<KernelSpec>,
    shell: Option<SessionShell>,
    /// The namespaces of its shells, if it is isolated.
    pub(crate) namespaces: Option<SessionNamespaces>,
    /// The directory and exports that the next shell starts with.
    pub(crate) directory: Option<String>,
    pub(crate) exports: String,
    pub(crate) current: Option<SessionRun>,
    /// The number of runs so far.
    runs: u64,
    /// Variables of the last run, which the next run must not see.
    run_variables: Vec<String>,
    queue: VecDeque<(ConnectionId, RunInSession)>,
    /// The connection that waits for the first shell.
    pub(crate) opener: Option<ConnectionId>,
    pub(crate) closing: bool,
    /// The connections that wait for the end of its shell.
    restarters: Vec<ConnectionId>,
    /// When it was opened.
    pub(crate) opened_ms: u64,
}

/// A running shell or kernel, and the private pipes to it.
#[derive(Debug)]
struct SessionShell {
    running: RunningHandle,
    protocol: SessionProtocol,
    commands: InputWriter,
    verdicts: RegisteredFd,
    received: Vec<u8>,
    started: bool,
    /// Whether it replaced a shell that had died.
    is_replacement: bool,
    subjects: FaultSubjects,
}

/// The protocol on the private pipes.
#[derive(Debug)]
enum SessionProtocol {
    Shell(ShellDialect),
    Kernel(KernelReportParser),
}

/// The run in progress.
#[derive(Debug)]
pub(crate) struct SessionRun {
    pub(crate) process: ProcessHandle,
    pub(crate) key: String,
    request: RunInSession,
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
        self.kernel.as_ref().map(|kernel| kernel.language.as_str())
    }

    /// Whether the session is open as soon as its first shell runs.
    pub(crate) fn opens_with_its_shell(&self) -> bool {
        self.kernel.as_ref().is_none_or(|kernel| kernel.program == KernelProgram::Shell)
    }
}

impl Agent {
    /// Opens a session; the reply comes when its shell runs.
    pub(crate) fn open_session(&mut self, connection: ConnectionId, open: OpenSession) -> Result<(), Fault> {
        self.add_session(connection, open, None).map(drop)
    }

    pub(crate) fn add_session(
        &mut self,
        connection: ConnectionId,
        open: OpenSession,
        kernel: Option<KernelSpec>,
    ) -> Result<SessionHandle, Fault> {
        if !is_safe_name(&open.session) {
            return Err(fault::from_kind(FaultKind::Invalid, "open session", "the name of the session"));
        }
        if self.sessions.find(&open.session).is_ok() {
            return Err(fault::from_kind(FaultKind::AlreadyExists, "open session", &open.session));
        }
        // A closed session does not count, provided that it ends soon.
        let most = usize::try_from(self.context.config.max_processes).unwrap_or(usize::MAX);
        let open_ones = self.sessions.values().filter(|session| !session.closing).count();
        if open_ones >= most || self.sessions.len() >= most.saturating_mul(2) {
            return Err(fault::from_kind(FaultKind::Busy, "open session", "too many sessions"));
        }
        let number = self.events.next_handle();
        let session = Session {
            name: open.session.clone(),
            open,
            kernel,
            shell: None,
            namespaces: None,
            directory: None,
            exports: String::new(),
            current: None,
            runs: 0,
            run_variables: Vec::new(),
            queue: VecDeque::new(),
            opener: Some(connection),
            closing: false,
            restarters: Vec::new(),
            opened_ms: now_ms(),
        };
        let nested = session.open.nest.is_some();
        self.sessions.insert(number, session);
        let begun = if nested { self.create_namespaces(number) } else { self.start_shell(number) };
        begun.inspect_err(|_| self.sessions.remove(number))?;
        Ok(number)
    }

    /// Closes a session and kills everything in it.
    pub(crate) fn close_session(&mut self, name: &str) -> Result<(), Fault> {
        let number = self.sessions.find(name)?;
        self.sessions.free_name(name);
        let session = self.sessions.get_mut(number).expect("it was just found");
        session.closing = true;
        for (connection, _) in std::mem::take(&mut session.queue) {
            self.connections
                .refuse_request(connection, fault::from_kind(FaultKind::NotFound, "find session", name));
        }
        self.sessions.kill_shell(number, &self.children, &self.context);
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
        session.directory = None;
        session.exports = String::new();
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
        shell.received.extend_from_slice(&buffer[..count]);
        if shell.received.len() > shell::MAX_VERDICT_BYTES {
            shell.received.clear();
            self.sessions.kill_shell(number, &self.children, &self.context);
            return None;
        }
        self.handle_verdicts(number);
        Some(count)
    }

    /// Handles the complete verdicts. Those without the right key do not come from the shell.
    fn handle_verdicts(&mut self, number: SessionHandle) {
        loop {
            let Some(session) = self.sessions.get_mut(number) else { return };
            let Some(shell) = &mut session.shell else { return };
            let Some(verdict) = shell::take_verdict(&mut shell.received) else { return };
            let Some(verdict) = verdict else { continue };
            if session.current.as_ref().is_none_or(|run| run.key != verdict.key) {
                continue;
            }
            session.directory = Some(verdict.directory);
            session.exports = verdict.exports;
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
        let status = |session: &Session| {
            let running = session.running_process().and_then(|running| children.get(running));
            let has_company = |running: &RunningProcess| {
                running.tree.has_other_members(context.commands.as_ref(), running.pid)
            };
            SessionStatus {
                session: session.name.clone(),
                busy: session.current.is_some(),
                terminal: session.open.terminal.is_some(),
                pid: running.and_then(|running| running.pid).map(rustix::process::Pid::as_raw_pid),
                kernel: session.kernel.as_ref().map(|kernel| kernel.language.clone()),
                nest: session.namespaces.as_ref().map(SessionNamespaces::status),
                left: session.opens_with_its_shell() && running.is_some_and(has_company),
            }
        };
        let mut statuses: Vec<_> = self.values().filter(|s| !s.closing).map(status).collect();
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
