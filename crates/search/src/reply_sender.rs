//! The connection to the server: sends replies, and ends this process when no one waits for them any longer.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::SendFlags;
use wire::frame::MAX_PAYLOAD;
use wire::{AgentReply, Fault, FaultKind, Frame, Greeting};

/// How long a search may take. The server waits a little longer for an answer.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(100);

#[derive(Debug)]
pub(crate) struct ReplySender {
    connection: Arc<Mutex<Connection>>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    greeted: bool,
}

impl ReplySender {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { connection: Arc::new(Mutex::new(Connection { socket, greeted: false })) }
    }

    /// Ends this process when the server hangs up, or when the time is over. A search may wait for the disk, or for a
    /// pipe that was put in place of an ignore file, so another thread does it.
    pub(crate) fn watch_connection(&self) -> io::Result<()> {
        let connection = Arc::clone(&self.connection);
        let watched = rustix::io::fcntl_dupfd_cloexec(&self.lock().socket, 3)?;
        let watch = move || {
            // If the lock is taken, the server does not read what is being sent to it.
            if !wait_for_hangup(&watched)
                && let Ok(mut connection) = connection.try_lock()
            {
                connection.send(&AgentReply::Fault(timeout_fault())).ok();
            }
            std::process::exit(0)
        };
        std::thread::Builder::new().name("connection".to_owned()).spawn(watch).map(drop)
    }

    pub(crate) fn send(&self, reply: &AgentReply) -> Result<(), Fault> {
        self.lock().send(reply).map_err(|error| crate::io_fault(&error, "send", "the results"))
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().expect("no other thread panics with it")
    }

    /// Sends the last message. It does not matter whether it arrives.
    pub(crate) fn send_fault(&self, fault: Fault) {
        self.send(&AgentReply::Fault(fault)).ok();
    }
}

impl Connection {
    fn send(&mut self, reply: &AgentReply) -> io::Result<()> {
        let mut bytes = Vec::new();
        if !self.greeted {
            Frame::from_message(&Greeting { version: wire::VERSION }).encode(&mut bytes);
        }
        let frame = Frame::from_message(reply);
        if matches!(&frame, Frame::Control(json) if json.len() > MAX_PAYLOAD) {
            return Err(io::Error::other("a page of results does not fit a frame"));
        }
        frame.encode(&mut bytes);
        self.greeted = true;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match rustix::net::send(&self.socket, rest, SendFlags::NOSIGNAL) {
                Ok(count) => rest = &rest[count..],
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

/// Returns false if the time is over before the server hangs up.
fn wait_for_hangup(socket: &OwnedFd) -> bool {
    let end = Instant::now() + SEARCH_TIMEOUT;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let Ok(left) = Timespec::try_from(left) else { return false };
        // A hangup is reported without being requested.
        let mut fds = [PollFd::new(socket, PollFlags::empty())];
        match rustix::event::poll(&mut fds, Some(&left)) {
            Ok(0) => return false,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}

fn timeout_fault() -> Fault {
    let subject = format!("the files: the search took longer than {} s", SEARCH_TIMEOUT.as_secs());
    Fault { kind: FaultKind::Other, errno: None, operation: "search".into(), subject }
}
