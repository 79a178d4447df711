//! The agent's state and its event loop.

use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use linux::signals::{self, SignalFd};
use rustix::event::epoll::EventFlags;
use wire::StreamTag;

use crate::context::AgentContext;
use crate::event_loop::alarms::Alarm;
use crate::event_loop::connection_table::ConnectionTable;
use crate::event_loop::event_sources::EventSources;
use crate::event_loop::poll::EventToken;
use crate::files::worker::WorkerPool;
use crate::net::ports::TunnelTable;
use crate::net::reserve_port::ReservedPorts;
use crate::process::child_table::{ChildRole, ChildTable};
use crate::process::journal::MAX_RECORD_BYTES;
use crate::process::table::ProcessTable;
use crate::session::table::SessionTable;

/// The parts of the agent. Each owns its data and works on it alone; the methods of `Agent` are the
/// places where an event or a request concerns several of them.
pub(crate) struct Agent {
    pub(crate) context: AgentContext,
    pub(crate) events: EventSources,
    pub(crate) child_signals: SignalFd,
    pub(crate) connections: ConnectionTable,
    /// Processes with a name and a journal, whether they run or have ended.
    pub(crate) processes: ProcessTable,
    /// The children of the agent, and what they run.
    pub(crate) children: ChildTable,
    pub(crate) sessions: SessionTable,
    pub(crate) file_workers: WorkerPool,
    pub(crate) tunnels: TunnelTable,
    pub(crate) reserved_ports: ReservedPorts,
    pub(crate) buffers: LoopBuffers,
    /// Whether any request has been handled that leaves traces.
    pub(crate) used: bool,
}

/// Buffers that are allocated once, because the event loop needs them in every turn.
pub(crate) struct LoopBuffers {
    /// For bytes that are read; `page` is for bytes that are sent.
    pub(crate) scratch: Vec<u8>,
    pub(crate) page: Vec<u8>,
    /// For reports of shells and kernels; handling one uses the two buffers above.
    pub(crate) reports: Vec<u8>,
}

impl Agent {
    pub(crate) fn new(context: AgentContext) -> io::Result<Self> {
        let events = EventSources::new()?;
        let child_signals = SignalFd::watch(&[signals::SIGCHLD])?;
        events.poll.register_borrowed(child_signals.as_fd(), EventToken::Children)?;
        events.poll.register_borrowed(context.listener.as_fd(), EventToken::Listener)?;
        let mut children = ChildTable::default();
        if let Some(broker) = context.broker.pid() {
            children.insert_role(broker, ChildRole::NamespaceBroker);
        }
        let buffer = || vec![0; MAX_RECORD_BYTES];
        Ok(Self {
            connections: ConnectionTable::new(&context.null)?,
            context,
            events,
            child_signals,
            processes: ProcessTable::default(),
            children,
            sessions: SessionTable::default(),
            file_workers: WorkerPool::default(),
            tunnels: TunnelTable::default(),
            reserved_ports: ReservedPorts::default(),
            buffers: LoopBuffers { scratch: buffer(), page: buffer(), reports: buffer() },
            used: false,
        })
    }

    /// Runs the event loop forever.
    pub(crate) fn run(mut self) -> io::Result<Infallible> {
        loop {
            for (token, flags) in self.events.poll.wait(self.events.alarms.until_next())? {
                self.on_event(token, flags);
            }
            self.fire_due_alarms();
            self.children.remove_empty_groups(&self.context);
            self.children.prepare_spare_group(&self.context, &mut self.events);
        }
    }

    fn on_event(&mut self, token: EventToken, flags: EventFlags) {
        match token {
            EventToken::Listener => self.accept_connections(),
            EventToken::Children => self.reap_children(),
            EventToken::Connection(number) => self.on_connection(number, flags),
            EventToken::Near(tunnel) => self.tunnels.on_near(tunnel, flags, &mut self.buffers.scratch),
            EventToken::Far(tunnel) => {
                let scratch = &mut self.buffers.scratch;
                self.tunnels.on_far(tunnel, flags, &mut self.connections, &mut self.events, scratch);
            }
            EventToken::Stdout(running) => self.on_output(running, StreamTag::Stdout),
            EventToken::Stderr(running) => self.on_output(running, StreamTag::Stderr),
            EventToken::Terminal(running) => self.on_output(running, StreamTag::Terminal),
            EventToken::Input(running) => self.feed_input(running),
            EventToken::Report(running) => self.on_exec_report(running),
            EventToken::Runner(running) => self.on_runner_readable(running),
            EventToken::Commands(session) => self.sessions.write_commands(session),
            EventToken::Verdict(session) => self.on_shell_report(session),
            EventToken::ReservedPort(port) => self.reserved_ports.close_waiting(port),
            EventToken::NamespaceInit(session) => self.on_init_report(session),
            EventToken::LimitView => self.context.on_limit_view_read(&mut self.events),
        }
    }

    fn fire_due_alarms(&mut self) {
        let now = Instant::now();
        while let Some(alarm) = self.events.alarms.pop_due(now) {
            match alarm {
                Alarm::Deadline(process) => self.deadline_passed(process),
                Alarm::Dial(dial) => self.tunnels.dial_timed_out(dial, &mut self.connections),
                Alarm::Ready(session) => self.kernel_ready_timed_out(session),
                Alarm::Idle(session) => self.close_if_idle(session),
                Alarm::ResendInterrupt(process) => {
                    self.processes.resend_interrupt(process, &mut self.events.alarms);
                }
                Alarm::CloseGrace(session) => self.kill_command_run(session),
                Alarm::Stall(process) => self.reader_stalled(process),
                Alarm::LimitView => self.context.watch_limit_view_again(&mut self.events),
            }
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
