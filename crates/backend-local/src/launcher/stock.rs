//! Net namespaces and volumes made ahead of need. No process exists for them yet.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use linux::namespaces::{self, Namespaces};

/// Net namespaces in stock, and ours to come back to.
pub struct NetStock {
    home: OwnedFd,
    ready: VecDeque<OwnedFd>,
    wanted: usize,
}

impl NetStock {
    pub fn open(wanted: usize) -> io::Result<Self> {
        Ok(Self { home: current()?, ready: VecDeque::new(), wanted })
    }

    pub fn home(&self) -> io::Result<OwnedFd> {
        self.home.try_clone()
    }

    pub fn count(&self) -> usize {
        self.ready.len()
    }

    /// One from the stock, or one made now.
    pub fn take(&mut self) -> io::Result<OwnedFd> {
        match self.ready.pop_front() {
            Some(namespace) => Ok(namespace),
            None => self.make(),
        }
    }

    /// Adds one if there are too few; `true` if more are missing.
    pub fn refill(&mut self) -> io::Result<bool> {
        if self.ready.len() < self.wanted {
            let namespace = self.make()?;
            self.ready.push_back(namespace);
        }
        Ok(self.ready.len() < self.wanted)
    }

    /// Makes a namespace with its loopback up. It belongs to us, so root inside the sandbox has
    /// no power over it; what a service inside needs is therefore allowed here: low ports and
    /// ping for everybody.
    fn make(&self) -> io::Result<OwnedFd> {
        namespaces::unshare(Namespaces::NET)?;
        let made = prepare();
        // Whatever happened, this process must not stay there.
        namespaces::enter(self.home.as_fd(), Namespaces::NET)?;
        made
    }
}

fn prepare() -> io::Result<OwnedFd> {
    namespaces::raise_loopback()?;
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
    fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    current()
}

fn current() -> io::Result<OwnedFd> {
    fs::File::open("/proc/self/ns/net").map(Into::into)
}
