//! The agent's state and its event loop.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use linux::signals::{self, SignalFd};
use rustix::event::epoll::EventFlags;
use rustix::process::Pid;
use wire::StreamTag;

use crate::context::AgentContext;
use crate::event_loop::alarms::{Alarm, AlarmQueue};
use crate::event_loop::connection::IncomingConnection;
use crate::event_loop::handles::{ConnectionId, RunningHandle};
use crate::event_loop::poll::{Epoll, EventToken};
use crate::files::worker::FileJob;
use crate::net::ports::TunnelTable;
use crate::net::reserve_port::ReservedPorts;
use crate::process::journal::MAX_RECORD_BYTES;
use crate::process::running_process::RunningProcess;
use crate::process::table::ProcessTable;
use crate::session::table::SessionTable;

/// All state of the agent. Its behaviour is split over the files of this crate, each with an `impl
/// Agent`.
pub(crate) struct Agent {
    pub(crate) context: AgentContext,
    pub(crate) poll: Epoll,
    pub(crate) child_signals: SignalFd,
    pub(crate) connections: HashMap<ConnectionId, IncomingConnection>,
    pub(crate) running_processes: HashMap<RunningHandle, RunningProcess>,
    pub(crate) processes: ProcessTable,
    pub(crate) children: HashMap<Pid, ChildRole>,
    /// Running processes whose main process has ended and whose groups may still be in use.
    pub(crate) lingering: BTreeSet<RunningHandle>,
    pub(crate) sessions: SessionTable,
    /// File operations that wait for a worker.
    pub(crate) jobs: VecDeque<FileJob>,
    pub(crate) workers: usize,
    pub(crate) watchers: usize,
    pub(crate) tunnels: TunnelTable,
    pub(crate) reserved_ports: ReservedPorts,
    pub(crate) alarms: AlarmQueue,
    /// Buffer for bytes that are read; `page` is the buffer for bytes that are sent.
    pub(crate) scratch: Vec<u8>,
    pub(crate) page: Vec<u8>,
    /// Buffer for reports of shells and kernels; handling one uses the two buffers above.
    pub(crate) reports: Vec<u8>,
    /// A spare descriptor, released for a moment when no other is left.
    pub(crate) spare_fd: Option<OwnedFd>,
    last_number: u64,
    /// Whether any request has been handled that leaves traces.
    pub(crate) used: bool,
    /// Whether the namespace broker has failed to answer.
    pub(crate) broker_failed: bool,
}

/// The role of a child process. A child that is not in the table is an orphan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChildRole {
    /// The main process of a command or shell.
    Leader(RunningHandle),
    /// The runner of a command or shell.
    Runner(RunningHandle),
    /// Does a file operation.
    Worker,
    /// Watches files.
    Watcher,
    /// Creates the namespaces of isolated sessions.
    NamespaceBroker,
}

impl Agent {
    pub(crate) fn new(context: AgentContext) -> io::Result<Self> {
        let poll = Epoll::new()?;
        let child_signals = SignalFd::watch(&[signals::SIGCHLD])?;
        poll.register_borrowed(child_signals.as_fd(), EventToken::Children)?;
        poll.register_borrowed(context.listener.as_fd(), EventToken::Listener)?;
        let broker = context.broker.as_ref().map(|(_, pid)| (*pid, ChildRole::NamespaceBroker));
        let reserve = Some(rustix::io::fcntl_dupfd_cloexec(&context.null, 3)?);
        Ok(Self {
            context,
            poll,
            child_signals,
            connections: HashMap::new(),
            running_processes: HashMap::new(),
            processes: ProcessTable::default(),
            children: broker.into_iter().collect(),
            lingering: BTreeSet::new(),
            sessions: SessionTable::default(),
            jobs: VecDeque::new(),
            workers: 0,
            watchers: 0,
            tunnels: TunnelTable::default(),
            reserved_ports: ReservedPorts::default(),
            alarms: AlarmQueue::default(),
            scratch: vec![0; MAX_RECORD_BYTES],
            page: vec![0; MAX_RECORD_BYTES],
            reports: vec![0; MAX_RECORD_BYTES],
            spare_fd: reserve,
            last_number: 0,
            used: false,
            broker_failed: false,
        })
    }

    /// Runs the event loop forever.
    pub(crate) fn run(mut self) -> io::Result<Infallible> {
        loop {
            for (token, flags) in self.poll.wait(self.alarms.until_next())? {
                self.on_event(token, flags);
            }
            self.fire_due_alarms();
            self.remove_empty_groups();
        }
    }

    fn on_event(&mut self, token: EventToken, flags: EventFlags) {
        match token {
            EventToken::Listener => self.accept_connections(),
            EventToken::Children => self.reap_children(),
            EventToken::Connection(number) => self.on_connection(number, flags),
            EventToken::Near(tunnel) => self.on_near(tunnel, flags),
            EventToken::Far(tunnel) => self.on_far(tunnel, flags),
            EventToken::Stdout(running) => self.on_output(running, StreamTag::Stdout),
            EventToken::Stderr(running) => self.on_output(running, StreamTag::Stderr),
            EventToken::Terminal(running) => self.on_output(running, StreamTag::Terminal),
            EventToken::Input(running) => self.on_input_writable(running),
            EventToken::Report(running) => self.on_exec_report(running),
            EventToken::Runner(running) => self.on_runner_readable(running),
            EventToken::Commands(session) => self.on_commands_writable(session),
            EventToken::Verdict(session) => self.on_shell_report(session),
            EventToken::ReservedPort(port) => self.reserved_ports.close_waiting(port),
            EventToken::NamespaceInit(session) => self.on_init_report(session),
            EventToken::LimitView => self.on_limit_view_read(),
        }
    }

    /// Returns a handle whose number no other object has or will have.
    pub(crate) fn next_handle<H: From<u64>>(&mut self) -> H {
        self.last_number += 1;
        self.last_number.into()
    }

    fn fire_due_alarms(&mut self) {
        let now = Instant::now();
        while let Some(alarm) = self.alarms.pop_due(now) {
            match alarm {
                Alarm::Deadline(process) => self.deadline_passed(process),
                Alarm::Dial(dial) => self.dial_timed_out(dial),
                Alarm::Ready(session) => self.kernel_ready_timed_out(session),
                Alarm::Idle(session) => self.close_if_idle(session),
                Alarm::ResendInterrupt(process) => self.resend_interrupt(process),
                Alarm::Stall(process) => self.reader_stalled(process),
                Alarm::LimitView => self.watch_limit_view_again(),
            }
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
