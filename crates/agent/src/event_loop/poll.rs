//! Waiting for many descriptors at once: a thin layer over epoll(7).
//!
//! A [`RegisteredFd`] deregisters itself before it is closed. This is necessary: forked children hold
//! copies of our descriptors for a moment, and epoll would report a closed one as long as a copy
//! exists.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData};
use rustix::event::{Timespec, epoll::EventFlags};
use rustix::io::Errno;

use crate::event_loop::handles::{ConnectionId, ReservedPortId, RunningHandle, SessionHandle, TunnelId};

/// The maximum number of events in one turn of the event loop.
const MAX_EVENTS_PER_TURN: usize = 64;

/// The subject of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventToken {
    Listener,
    Children,
    Connection(ConnectionId),
    /// The server's side of a tunnel, and the port's.
    Near(TunnelId),
    Far(TunnelId),
    Stdout(RunningHandle),
    Stderr(RunningHandle),
    Terminal(RunningHandle),
    Input(RunningHandle),
    /// Reports whether an exec succeeded.
    Report(RunningHandle),
    Runner(RunningHandle),
    /// The pipe on which a session's shell reads what to run, and the one on which it reports how
    /// that ended.
    Commands(SessionHandle),
    Verdict(SessionHandle),
    /// A reserved port.
    ReservedPort(ReservedPortId),
    /// The report pipe of an isolated session's first process.
    NamespaceInit(SessionHandle),
    /// A file that shows limits was read.
    LimitView,
}

/// A registered descriptor.
#[derive(Debug)]
pub(crate) struct RegisteredFd {
    fd: OwnedFd,
    list: Rc<OwnedFd>,
    data: u64,
    /// `None` once it was deregistered.
    interest: Option<EventFlags>,
}

/// The epoll instance.
pub(crate) struct Epoll {
    list: Rc<OwnedFd>,
    events: Vec<Event>,
}

const NUMBER_BITS: u32 = 56;

impl EventToken {
    fn to_word(self) -> u64 {
        let (kind, number): (u64, u64) = match self {
            Self::Listener => (0, 0),
            Self::Children => (1, 0),
            Self::Connection(handle) => (2, handle.into()),
            Self::Near(handle) => (3, handle.into()),
            Self::Stdout(handle) => (4, handle.into()),
            Self::Stderr(handle) => (5, handle.into()),
            Self::Terminal(handle) => (6, handle.into()),
            Self::Input(handle) => (7, handle.into()),
            Self::Report(handle) => (8, handle.into()),
            Self::Runner(handle) => (9, handle.into()),
            Self::Far(handle) => (10, handle.into()),
            Self::Commands(handle) => (11, handle.into()),
            Self::Verdict(handle) => (12, handle.into()),
            Self::ReservedPort(handle) => (13, handle.into()),
            Self::NamespaceInit(handle) => (14, handle.into()),
            Self::LimitView => (15, 0),
        };
        kind << NUMBER_BITS | number
    }

    fn from_word(word: u64) -> Self {
        let number = word & ((1 << NUMBER_BITS) - 1);
        match word >> NUMBER_BITS {
            0 => Self::Listener,
            1 => Self::Children,
            2 => Self::Connection(number.into()),
            3 => Self::Near(number.into()),
            4 => Self::Stdout(number.into()),
            5 => Self::Stderr(number.into()),
            6 => Self::Terminal(number.into()),
            7 => Self::Input(number.into()),
            8 => Self::Report(number.into()),
            9 => Self::Runner(number.into()),
            10 => Self::Far(number.into()),
            11 => Self::Commands(number.into()),
            12 => Self::Verdict(number.into()),
            13 => Self::ReservedPort(number.into()),
            14 => Self::NamespaceInit(number.into()),
            _ => Self::LimitView,
        }
    }
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        let list = Rc::new(epoll::create(CreateFlags::CLOEXEC)?);
        Ok(Self { list, events: Vec::with_capacity(MAX_EVENTS_PER_TURN) })
    }

    /// Registers a descriptor.
    pub(crate) fn register_fd(
        &self,
        fd: OwnedFd,
        token: EventToken,
        interest: EventFlags,
    ) -> io::Result<RegisteredFd> {
        let data = token.to_word();
        epoll::add(&self.list, &fd, EventData::new_u64(data), interest)?;
        Ok(RegisteredFd { fd, list: Rc::clone(&self.list), data, interest: Some(interest) })
    }

    /// Registers a descriptor that stays open as long as the epoll instance.
    pub(crate) fn register_borrowed(&self, fd: BorrowedFd<'_>, token: EventToken) -> io::Result<()> {
        Ok(epoll::add(&self.list, fd, EventData::new_u64(token.to_word()), EventFlags::IN)?)
    }

    /// Waits for events or the timeout, and returns the events.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<(EventToken, EventFlags)>> {
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(&self.list, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(self.events.iter().map(|event| (EventToken::from_word(event.data.u64()), event.flags)).collect())
    }
}

impl RegisteredFd {
    /// Changes the events that are waited for. With no events, errors and hang-ups are still
    /// reported.
    pub(crate) fn set_interest(&mut self, interest: EventFlags) {
        if self.interest.is_none_or(|current| current == interest) {
            return;
        }
        epoll::modify(&self.list, &self.fd, EventData::new_u64(self.data), interest)
            .expect("the descriptor is registered");
        self.interest = Some(interest);
    }

    /// Deregisters the descriptor permanently. Hang-ups are reported for every registered
    /// descriptor and would wake the event loop endlessly.
    pub(crate) fn deregister(&mut self) {
        if self.interest.take().is_some() {
            epoll::delete(&self.list, &self.fd).expect("the descriptor is registered");
        }
    }
}

impl RegisteredFd {
    pub(crate) fn is_deregistered(&self) -> bool {
        self.interest.is_none()
    }

    /// Deregisters the descriptor and returns it.
    pub(crate) fn into_fd(mut self) -> rustix::io::Result<OwnedFd> {
        self.deregister();
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)
    }
}

impl AsFd for RegisteredFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for RegisteredFd {
    fn drop(&mut self) {
        self.deregister();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_round_trips() {
        for token in [
            EventToken::Listener,
            EventToken::Children,
            EventToken::Connection(1.into()),
            EventToken::Stdout(3.into()),
            EventToken::Stderr(4.into()),
            EventToken::Terminal(5.into()),
            EventToken::Input(6.into()),
            EventToken::Report(7.into()),
            EventToken::Runner(8.into()),
            EventToken::Near(9.into()),
            EventToken::Far(10.into()),
            EventToken::Commands(11.into()),
            EventToken::ReservedPort(12.into()),
            EventToken::LimitView,
            EventToken::Verdict(((1 << NUMBER_BITS) - 1).into()),
        ] {
            assert_eq!(EventToken::from_word(token.to_word()), token);
        }
    }

    #[test]
    fn dropped_source_is_silent_while_a_copy_exists() {
        let mut poll = Epoll::new().expect("epoll exists");
        let (read, write) = rustix::pipe::pipe().expect("pipes exist");
        let copy = rustix::io::dup(&read).expect("a descriptor can be copied");
        drop(poll.register_fd(read, EventToken::Listener, EventFlags::IN).expect("a pipe can be watched"));
        rustix::io::write(&write, b"x").expect("a pipe takes a byte");
        assert!(poll.wait(Some(Duration::ZERO)).expect("waiting works").is_empty());
        drop(copy);
    }
}
