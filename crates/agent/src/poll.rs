//! Waiting for many descriptors at once: a thin layer over epoll(7).
//!
//! A [`Source`] deregisters itself before it is closed. This is necessary: forked children hold
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

/// The maximum number of events in one turn of the event loop.
const EVENTS: usize = 64;

/// The subject of an event. The number identifies a connection, a process or a session; numbers are
/// never reused, so a late event finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Listener,
    Children,
    Connection(u64),
    /// The server's side of a tunnel, and the port's.
    Near(u64),
    Far(u64),
    Stdout(u64),
    Stderr(u64),
    Terminal(u64),
    Input(u64),
    /// Reports whether an exec succeeded.
    Report(u64),
    Runner(u64),
    /// The pipe on which a session's shell reads what to run, and the one on which it reports how
    /// that ended.
    Orders(u64),
    Verdict(u64),
    /// A reserved port.
    Occupied(u64),
    /// The report pipe of an isolated session's first process.
    Nest(u64),
    /// A file that shows limits was read.
    LimitView,
}

/// A registered descriptor.
#[derive(Debug)]
pub(crate) struct Source {
    fd: OwnedFd,
    list: Rc<OwnedFd>,
    data: u64,
    /// `None` once it was deregistered.
    interest: Option<EventFlags>,
}

/// The epoll instance.
pub(crate) struct Poll {
    list: Rc<OwnedFd>,
    events: Vec<Event>,
}

const NUMBER_BITS: u32 = 56;

impl Token {
    fn to_word(self) -> u64 {
        let (kind, number) = match self {
            Self::Listener => (0, 0),
            Self::Children => (1, 0),
            Self::Connection(number) => (2, number),
            Self::Near(number) => (3, number),
            Self::Stdout(number) => (4, number),
            Self::Stderr(number) => (5, number),
            Self::Terminal(number) => (6, number),
            Self::Input(number) => (7, number),
            Self::Report(number) => (8, number),
            Self::Runner(number) => (9, number),
            Self::Far(number) => (10, number),
            Self::Orders(number) => (11, number),
            Self::Verdict(number) => (12, number),
            Self::Occupied(number) => (13, number),
            Self::Nest(number) => (14, number),
            Self::LimitView => (15, 0),
        };
        kind << NUMBER_BITS | number
    }

    fn from_word(word: u64) -> Self {
        let number = word & ((1 << NUMBER_BITS) - 1);
        match word >> NUMBER_BITS {
            0 => Self::Listener,
            1 => Self::Children,
            2 => Self::Connection(number),
            3 => Self::Near(number),
            4 => Self::Stdout(number),
            5 => Self::Stderr(number),
            6 => Self::Terminal(number),
            7 => Self::Input(number),
            8 => Self::Report(number),
            9 => Self::Runner(number),
            10 => Self::Far(number),
            11 => Self::Orders(number),
            12 => Self::Verdict(number),
            13 => Self::Occupied(number),
            14 => Self::Nest(number),
            _ => Self::LimitView,
        }
    }
}

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        let list = Rc::new(epoll::create(CreateFlags::CLOEXEC)?);
        Ok(Self { list, events: Vec::with_capacity(EVENTS) })
    }

    /// Registers a descriptor.
    pub(crate) fn watch(&self, fd: OwnedFd, token: Token, interest: EventFlags) -> io::Result<Source> {
        let data = token.to_word();
        epoll::add(&self.list, &fd, EventData::new_u64(data), interest)?;
        Ok(Source { fd, list: Rc::clone(&self.list), data, interest: Some(interest) })
    }

    /// Registers a descriptor that stays open as long as the epoll instance.
    pub(crate) fn watch_always(&self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        Ok(epoll::add(&self.list, fd, EventData::new_u64(token.to_word()), EventFlags::IN)?)
    }

    /// Waits for events or the timeout, and returns the events.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<(Token, EventFlags)>> {
        let timeout = timeout.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        self.events.clear();
        match epoll::wait(&self.list, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(self.events.iter().map(|event| (Token::from_word(event.data.u64()), event.flags)).collect())
    }
}

impl Source {
    /// Changes the events that are waited for. With no events, errors and hang-ups are still
    /// reported.
    pub(crate) fn want(&mut self, interest: EventFlags) {
        if self.interest.is_none_or(|current| current == interest) {
            return;
        }
        epoll::modify(&self.list, &self.fd, EventData::new_u64(self.data), interest)
            .expect("the descriptor is registered");
        self.interest = Some(interest);
    }

    /// Deregisters the descriptor permanently. Hang-ups are reported for every registered
    /// descriptor and would wake the event loop endlessly.
    pub(crate) fn mute(&mut self) {
        if self.interest.take().is_some() {
            epoll::delete(&self.list, &self.fd).expect("the descriptor is registered");
        }
    }
}

impl Source {
    pub(crate) fn is_muted(&self) -> bool {
        self.interest.is_none()
    }

    /// Deregisters the descriptor and returns it.
    pub(crate) fn into_fd(mut self) -> rustix::io::Result<OwnedFd> {
        self.mute();
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)
    }
}

impl AsFd for Source {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.mute();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_round_trips() {
        for token in [
            Token::Listener,
            Token::Children,
            Token::Connection(1),
            Token::Stdout(3),
            Token::Stderr(4),
            Token::Terminal(5),
            Token::Input(6),
            Token::Report(7),
            Token::Runner(8),
            Token::Near(9),
            Token::Far(10),
            Token::Orders(11),
            Token::Occupied(12),
            Token::LimitView,
            Token::Verdict((1 << NUMBER_BITS) - 1),
        ] {
            assert_eq!(Token::from_word(token.to_word()), token);
        }
    }

    #[test]
    fn dropped_source_is_silent_while_a_copy_exists() {
        let mut poll = Poll::new().expect("epoll exists");
        let (read, write) = rustix::pipe::pipe().expect("pipes exist");
        let copy = rustix::io::dup(&read).expect("a descriptor can be copied");
        drop(poll.watch(read, Token::Listener, EventFlags::IN).expect("a pipe can be watched"));
        rustix::io::write(&write, b"x").expect("a pipe takes a byte");
        assert!(poll.wait(Some(Duration::ZERO)).expect("waiting works").is_empty());
        drop(copy);
    }
}
