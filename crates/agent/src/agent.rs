//! The agent's state and its event loop.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use linux::signals::{self, Signals};
use rustix::event::epoll::EventFlags;
use rustix::process::Pid;
use wire::StreamTag;

use crate::body::Body;
use crate::connection::Connection;
use crate::journal::RECORD;
use crate::place::Place;
use crate::poll::{Poll, Source, Token};
use crate::ports::{Dial, Tunnel};
use crate::process::Process;
use crate::session::Session;
use crate::worker::Job;

/// All state of the agent. Its behaviour is split over the files of this crate, each with an `impl
/// Agent`.
pub(crate) struct Agent {
    pub(crate) place: Place,
    pub(crate) poll: Poll,
    pub(crate) child_signals: Signals,
    pub(crate) connections: HashMap<u64, Connection>,
    pub(crate) bodies: HashMap<u64, Body>,
    pub(crate) processes: HashMap<u64, Process>,
    pub(crate) process_names: HashMap<String, u64>,
    /// Ended processes, the oldest first.
    pub(crate) finished: VecDeque<u64>,
    pub(crate) children: HashMap<Pid, Child>,
    /// Bodies that have ended and whose groups may still be in use.
    pub(crate) lingering: BTreeSet<u64>,
    pub(crate) sessions: HashMap<u64, Session>,
    pub(crate) session_names: HashMap<String, u64>,
    /// File operations that wait for a worker.
    pub(crate) jobs: VecDeque<Job>,
    pub(crate) workers: usize,
    pub(crate) watchers: usize,
    pub(crate) dials: HashMap<u64, Dial>,
    pub(crate) tunnels: HashMap<u64, Tunnel>,
    /// Ports on which every connection is closed at once.
    pub(crate) occupied: HashMap<u64, Source>,
    alarms: BTreeSet<(Instant, Alarm)>,
    /// Buffer for bytes that are read; `page` is the buffer for bytes that are sent.
    pub(crate) scratch: Vec<u8>,
    pub(crate) page: Vec<u8>,
    /// Buffer for reports of shells and kernels; handling one uses the two buffers above.
    pub(crate) reports: Vec<u8>,
    /// A spare descriptor, released for a moment when no other is left.
    pub(crate) reserve: Option<OwnedFd>,
    last_number: u64,
    /// Whether any request has been handled that leaves traces.
    pub(crate) used: bool,
    /// Whether the namespace broker has failed to answer.
    pub(crate) nester_failed: bool,
}

/// The role of a child process. A child that is not in the table is an orphan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Child {
    /// The main process of a body.
    Leader(u64),
    /// The runner of a body.
    Runner(u64),
    /// Does a file operation.
    Worker,
    /// Watches files.
    Watcher,
    /// Creates the namespaces of isolated sessions.
    Nester,
}

/// An action that is due at a certain time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// A process has reached its deadline.
    Deadline(u64),
    /// A port has not accepted a connection in time.
    Dial(u64),
    /// A kernel is not ready in time.
    Ready(u64),
    /// An isolated session has been idle for too long.
    Idle(u64),
    /// An interrupted process still runs, so the interrupt is sent again.
    Insist(u64),
    /// The reader of a process with back-pressure has taken no byte.
    Stall(u64),
    /// The pause after a refresh of the limit files is over.
    LimitView,
}

impl Agent {
    pub(crate) fn new(place: Place) -> io::Result<Self> {
        let poll = Poll::new()?;
        let child_signals = Signals::watch(&[signals::CHILD])?;
        poll.watch_always(child_signals.as_fd(), Token::Children)?;
        poll.watch_always(place.listener.as_fd(), Token::Listener)?;
        let nester = place.nester.as_ref().map(|(_, pid)| (*pid, Child::Nester));
        let reserve = Some(rustix::io::fcntl_dupfd_cloexec(&place.null, 3)?);
        Ok(Self {
            place,
            poll,
            child_signals,
            connections: HashMap::new(),
            bodies: HashMap::new(),
            processes: HashMap::new(),
            process_names: HashMap::new(),
            finished: VecDeque::new(),
            children: nester.into_iter().collect(),
            lingering: BTreeSet::new(),
            sessions: HashMap::new(),
            session_names: HashMap::new(),
            jobs: VecDeque::new(),
            workers: 0,
            watchers: 0,
            dials: HashMap::new(),
            tunnels: HashMap::new(),
            occupied: HashMap::new(),
            alarms: BTreeSet::new(),
            scratch: vec![0; RECORD],
            page: vec![0; RECORD],
            reports: vec![0; RECORD],
            reserve,
            last_number: 0,
            used: false,
            nester_failed: false,
        })
    }

    /// Runs the event loop forever.
    pub(crate) fn run(mut self) -> io::Result<Infallible> {
        loop {
            for (token, flags) in self.poll.wait(self.until_next_alarm())? {
                self.on_event(token, flags);
            }
            self.ring_alarms();
            self.sweep_groups();
        }
    }

    fn on_event(&mut self, token: Token, flags: EventFlags) {
        match token {
            Token::Listener => self.accept(),
            Token::Children => self.reap(),
            Token::Connection(number) => self.on_connection(number, flags),
            Token::Near(tunnel) => self.on_near(tunnel, flags),
            Token::Far(tunnel) => self.on_far(tunnel, flags),
            Token::Stdout(body) => self.on_output(body, StreamTag::Stdout),
            Token::Stderr(body) => self.on_output(body, StreamTag::Stderr),
            Token::Terminal(body) => self.on_output(body, StreamTag::Terminal),
            Token::Input(body) => self.on_input(body),
            Token::Report(body) => self.on_report(body),
            Token::Runner(body) => self.on_runner(body),
            Token::Orders(session) => self.on_orders(session),
            Token::Verdict(session) => self.on_verdict(session),
            Token::Occupied(port) => self.hang_up(port),
            Token::Nest(session) => self.on_nest(session),
            Token::LimitView => self.on_limit_view_read(),
        }
    }

    /// Returns a number that no other object has or will have.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns the time at which the alarm is due; `None`, and no alarm, if the clock cannot
    /// represent it.
    pub(crate) fn set_alarm(&mut self, after: Duration, alarm: Alarm) -> Option<Instant> {
        let time = Instant::now().checked_add(after)?;
        self.alarms.insert((time, alarm));
        Some(time)
    }

    pub(crate) fn stop_alarm(&mut self, time: Option<Instant>, alarm: Alarm) {
        if let Some(time) = time {
            self.alarms.remove(&(time, alarm));
        }
    }

    fn until_next_alarm(&self) -> Option<Duration> {
        let (time, _) = self.alarms.first()?;
        Some(time.saturating_duration_since(Instant::now()))
    }

    fn ring_alarms(&mut self) {
        let now = Instant::now();
        while let Some((time, alarm)) = self.alarms.first().copied() {
            if time > now {
                return;
            }
            self.alarms.pop_first();
            match alarm {
                Alarm::Deadline(process) => self.deadline_passed(process),
                Alarm::Dial(dial) => self.dial_timed_out(dial),
                Alarm::Ready(session) => self.kernel_is_late(session),
                Alarm::Idle(session) => self.nest_idle(session),
                Alarm::Insist(process) => self.interrupt_again(process),
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
