//! The network of a sandbox: deciding how it reaches other machines, and adding a network to a running
//! sandbox.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux::namespaces::{self, Namespaces, Setgroups};
use linux::spawn::{self, End, Forked};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::protocol::{Measures, Refusal};
use super::record::{Process, Record};
use super::{Launcher, Rights};
use crate::jail::step::{At, JailError, Step};
use crate::network::userspace::Program;
use crate::network::{Down, Reach, Wish, resolver};

/// The name of the measure that describes a sandbox's network.
const MEASURE: &str = "network";

/// How long a child process may work inside a sandbox.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

impl Launcher {
    /// Decides how a sandbox will reach other machines, and describes that for the measures.
    pub(super) fn reach(&mut self, mode: Wish) -> Result<(Reach, String), Refusal> {
        if mode == Wish::Off {
            return Ok((Reach::Nothing, "off".to_owned()));
        }
        match (self.way_out(), mode) {
            (Ok(found), _) => Ok(found),
            (Err(down), Wish::On) => {
                let message = format!("network `on` is not possible here: {}", chain(&down));
                Err(Refusal::unsupported(message, Some(down.hint())))
            }
            (Err(down), Wish::Auto | Wish::Off) => {
                Ok((Reach::Nothing, format!("off, since {}", chain(&down))))
            }
        }
    }

    /// Returns how sandboxes can reach other machines now, or why they cannot.
    fn way_out(&mut self) -> Result<(Reach, String), Down> {
        match &mut self.rights {
            Rights::Root(root) => {
                root.nets.uplink.ready()?;
                Ok((Reach::Link, root.nets.uplink.describe()))
            }
            Rights::User { .. } => {
                let program = Program::find()?;
                Ok((Reach::Userspace, program.describe()))
            }
        }
    }

    /// Whether a sandbox that asks for a network would get one. This changes nothing on the host.
    pub fn has_network(&self) -> bool {
        match &self.rights {
            Rights::Root(root) => root.nets.uplink.look().is_ok(),
            Rights::User { .. } => Program::find().is_ok(),
        }
    }

    /// Takes over the packet filter of an earlier launcher, and logs once if sandboxes with network
    /// `auto` get no network. Without a network the running sandboxes can still be used.
    pub(super) fn open_network(&mut self) -> io::Result<()> {
        let lives = self.some_live()?;
        if let Rights::Root(root) = &mut self.rights
            && let Err(down) = root.nets.uplink.take_over(lives)
        {
            let (reason, hint) = (chain(&down), down.hint());
            tracing::error!(
                reason,
                hint,
                "failed to take over the network of running sandboxes; it may not work"
            );
        }
        self.outdated = self.records.list()?.into_iter().collect();
        if self.settings.network.default != Wish::Off
            && let Err(down) = self.way_out()
        {
            let (reason, hint) = (chain(&down), down.hint());
            tracing::warn!(reason, hint, "network is not available; sandboxes with network `auto` get none");
        }
        Ok(())
    }

    /// Installs the guard with the current settings inside a running sandbox.
    pub(super) fn guard_again(&self, id: &str) {
        let Rights::Root(root) = &self.rights else { return };
        let Some(record) = self.records.read(id).filter(|record| record.connected) else { return };
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process) else { return };
        let namespace = net_namespace(process.pid, &pidfd);
        if let Err(error) = namespace.and_then(|namespace| root.nets.guard_again(namespace.as_fd())) {
            tracing::warn!(id, %error, "failed to update the guard inside a sandbox; it keeps its former settings");
        }
    }

    /// Returns descriptors that become readable when the network of the host changes.
    pub(super) fn watched_network(&self) -> Vec<BorrowedFd<'_>> {
        match &self.rights {
            Rights::Root(root) => root.nets.uplink.watched(),
            Rights::User { .. } => Vec::new(),
        }
    }

    /// Handles changes of the host's network; `true` if idle work has to be done.
    pub(super) fn hear_network(&mut self) -> bool {
        let Rights::Root(root) = &mut self.rights else { return false };
        root.nets.uplink.hear().unwrap_or_else(|error| {
            tracing::error!(%error, "failed to handle a network change; sandboxes may be without the guard on the host");
            false
        })
    }

    /// Removes the packet filter, unless a running sandbox needs it.
    pub(super) fn close_network(&mut self) -> io::Result<()> {
        let lives = self.some_live()?;
        match &mut self.rights {
            Rights::Root(root) if !lives => root.nets.uplink.remove().map_err(io::Error::other),
            Rights::Root(_) | Rights::User { .. } => Ok(()),
        }
    }

    /// Whether any sandbox is running. Dead sandboxes need no network.
    fn some_live(&self) -> io::Result<bool> {
        Ok(self.records.list()?.iter().any(|id| self.pidfd(id).is_some()))
    }

    /// Returns the resolv.conf for a new sandbox, if it needs one.
    pub(super) fn resolv_conf(&self, reach: Reach) -> Option<String> {
        match (&self.rights, reach) {
            (_, Reach::Nothing)
            | (Rights::User { .. }, Reach::Link)
            | (Rights::Root(_), Reach::Userspace) => None,
            (Rights::Root(root), Reach::Link) => Some(root.nets.uplink.resolv_conf()),
            (Rights::User { .. }, Reach::Userspace) => {
                Program::find().ok().map(|program| program.resolv_conf())
            }
        }
    }

    /// Gives a running sandbox a network. A sandbox that has one keeps it.
    pub fn connect(&mut self, id: &str, mode: Wish) -> Result<Measures, Refusal> {
        let record = self.records.read(id).ok_or_else(Refusal::gone)?;
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process.as_ref()) else {
            return Err(Refusal::gone());
        };
        let (reach, words) = self.reach(mode)?;
        match (record.connected, reach) {
            (true, Reach::Nothing) => {
                return Err(Refusal::unsupported("the network of a sandbox cannot be removed", None));
            }
            (true, Reach::Link | Reach::Userspace) | (false, Reach::Nothing) => {}
            (false, Reach::Link | Reach::Userspace) => {
                match reach {
                    Reach::Link => self.link(process.pid, &pidfd)?,
                    Reach::Userspace | Reach::Nothing => self.carry(process)?,
                }
                let text = self.resolv_conf(reach).unwrap_or_default();
                self.write_inside(&pidfd, &text).at(Step::Guest)?;
                self.records.replace(id, &Record { connected: true, ..record }).at(Step::Record)?;
            }
        }
        Ok(vec![(MEASURE.to_owned(), words)])
    }

    /// Starts the program that forwards the packets of an ordinary user's sandbox.
    pub(super) fn carry(&self, sandbox: &Process) -> Result<(), JailError> {
        let program = Program::find().map_err(io::Error::other).at(Step::NetNamespace)?;
        program.start(sandbox, &self.settings.network).at(Step::NetNamespace)
    }

    fn link(&mut self, pid: i32, pidfd: &OwnedFd) -> Result<(), JailError> {
        let namespace = net_namespace(pid, pidfd).at(Step::NetNamespace)?;
        let Rights::Root(root) = &mut self.rights else { return Ok(()) };
        root.nets.connect(namespace.as_fd()).at(Step::NetNamespace)
    }

    /// Writes the resolv.conf of a running sandbox in a child that has entered it, so that names and
    /// links are resolved inside the sandbox.
    fn write_inside(&self, pidfd: &OwnedFd, text: &str) -> io::Result<()> {
        let setgroups = match self.rights {
            Rights::Root(_) => Setgroups::Allow,
            Rights::User { .. } => Setgroups::Deny,
        };
        match self.thread.fork(Namespaces::NONE, None)? {
            Forked::Child => {
                let written = namespaces::enter(pidfd.as_fd(), Namespaces::USER.and(Namespaces::MOUNT))
                    .and_then(|()| namespaces::become_ids(0, 0, setgroups))
                    .and_then(|()| resolver::write(text));
                spawn::exit_now(i32::from(written.is_err()))
            }
            Forked::Parent { pidfd: child, .. } => wait_briefly(&child),
        }
    }
}

/// Opens the net namespace of a running process.
fn net_namespace(pid: i32, pidfd: &OwnedFd) -> io::Result<File> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // If the process is still running, the pid referred to it during the open.
    if super::record::ended(pidfd) { Err(io::Error::other("the sandbox has ended")) } else { Ok(namespace) }
}

/// Waits for a child, and kills it if it takes too long.
fn wait_briefly(child: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(child, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&PATIENCE)))?;
    if ready == 0 {
        pidfd_send_signal(child, Signal::KILL)?;
    }
    match spawn::wait(child.as_fd())? {
        End::Code(0) => Ok(()),
        End::Code(_) | End::Signal(_) => Err(io::Error::other("the child process inside the sandbox failed")),
    }
}

/// Formats an error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}
