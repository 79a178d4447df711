//! The agent's state and its loop.

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

/// Everything the agent knows. The parts of its behaviour are in the files that are named
/// after them, each an `impl Agent`.
pub(crate) struct Agent {
    pub(crate) place: Place,
    pub(crate) poll: Poll,
    pub(crate) child_signals: Signals,
    pub(crate) connections: HashMap<u64, Connection>,
    pub(crate) bodies: HashMap<u64, Body>,
    pub(crate) processes: HashMap<u64, Process>,
    pub(crate) process_names: HashMap<String, u64>,
    /// Those that have ended, the oldest first.
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
    /// Ports on which nobody is answered.
    pub(crate) occupied: HashMap<u64, Source>,
    alarms: BTreeSet<(Instant, Alarm)>,
    /// For bytes that come in, and for bytes that go out.
    pub(crate) scratch: Vec<u8>,
    pub(crate) page: Vec<u8>,
    /// For what shells and kernels say, which makes the two above be used.
    pub(crate) reports: Vec<u8>,
    /// Given up for a moment when no other descriptor is left.
    pub(crate) reserve: Option<OwnedFd>,
    last_number: u64,
    /// Whether anything was ever asked of it that leaves traces.
    pub(crate) used: bool,
    /// Whether there was a nester that did not answer.
    pub(crate) nester_failed: bool,
}

/// What a child is to us. A child that is not known is an orphan.
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
    /// Makes nests.
    Nester,
}

/// What happens at a certain time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Alarm {
    /// A process has run for as long as it may.
    Deadline(u64),
    /// A port has not accepted.
    Dial(u64),
    /// A kernel is not ready yet.
    Ready(u64),
    /// A nest has gone unused.
    Idle(u64),
    /// A process was interrupted a while ago.
    Insist(u64),
    /// The reader of a held process has taken no byte.
    Stall(u64),
    /// The files that show limits were refreshed a moment ago.
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

    /// Turns for ever.
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

    /// A number that nothing else has or will have.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// The time at which it will ring; a time beyond what the clock can tell never comes.
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
