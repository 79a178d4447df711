//! The network of a sandbox: deciding how it reaches other machines, and giving a living one its
//! link late.

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

/// The measure under which a sandbox's network is told.
const MEASURE: &str = "network";

/// How long a child of ours may take for something inside a sandbox.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

impl Launcher {
    /// Says how a sandbox will reach other machines, and in words what is in force for it.
    pub(super) fn reach(&mut self, wish: Wish) -> Result<(Reach, String), Refusal> {
        if wish == Wish::Off {
            return Ok((Reach::Nothing, "off".to_owned()));
        }
        match (self.way_out(), wish) {
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

    /// Whether sandboxes can reach other machines now, and how.
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

    /// Whether a sandbox that asks for a network would get one. Nothing is changed for the answer.
    pub fn has_network(&self) -> bool {
        match &self.rights {
            Rights::Root(root) => root.nets.uplink.look().is_ok(),
            Rights::User { .. } => Program::find().is_ok(),
        }
    }

    /// Takes over the packet filter that an earlier launcher left, and says once if sandboxes
    /// that leave the choice open stay without a network. A network that is down keeps nobody
    /// from reaching the sandboxes that live.
    pub(super) fn open_network(&mut self) -> io::Result<()> {
        let lives = self.some_live()?;
        if let Rights::Root(root) = &mut self.rights
            && let Err(down) = root.nets.uplink.take_over(lives)
        {
            let (reason, hint) = (chain(&down), down.hint());
            tracing::error!(reason, hint, "the network of living sandboxes could not be taken over");
        }
        self.outdated = self.records.list()?.into_iter().collect();
        if self.settings.network.default != Wish::Off
            && let Err(down) = self.way_out()
        {
            let (reason, hint) = (chain(&down), down.hint());
            tracing::warn!(reason, hint, "sandboxes that leave the choice open get no network");
        }
        Ok(())
    }

    /// Gives the guard inside a living sandbox today's settings.
    pub(super) fn guard_again(&self, id: &str) {
        let Rights::Root(root) = &self.rights else { return };
        let Some(record) = self.records.read(id).filter(|record| record.connected) else { return };
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process) else { return };
        let namespace = net_namespace(process.pid, &pidfd);
        if let Err(error) = namespace.and_then(|namespace| root.nets.guard_again(namespace.as_fd())) {
            tracing::warn!(id, %error, "the guard inside a sandbox keeps its settings");
        }
    }

    /// What is readable when the network of the host has changed.
    pub(super) fn watched_network(&self) -> Vec<BorrowedFd<'_>> {
        match &self.rights {
            Rights::Root(root) => root.nets.uplink.watched(),
            Rights::User { .. } => Vec::new(),
        }
    }

    /// Hears what changed there; `true` if a restock has something to tidy up.
    pub(super) fn hear_network(&mut self) -> bool {
        let Rights::Root(root) = &mut self.rights else { return false };
        root.nets.uplink.hear().unwrap_or_else(|error| {
            tracing::error!(%error, "sandboxes may be without the guard on the host");
            false
        })
    }

    /// Takes the packet filter away, unless a sandbox lives that needs it.
    pub(super) fn close_network(&mut self) -> io::Result<()> {
        let lives = self.some_live()?;
        match &mut self.rights {
            Rights::Root(root) if !lives => root.nets.uplink.remove().map_err(io::Error::other),
            Rights::Root(_) | Rights::User { .. } => Ok(()),
        }
    }

    /// Whether a sandbox lives. Remains of dead ones have no use for a network.
    fn some_live(&self) -> io::Result<bool> {
        Ok(self.records.list()?.iter().any(|id| self.pidfd(id).is_some()))
    }

    /// What a new sandbox finds as its resolv.conf, if it is to have one of ours.
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

    /// Gives a living sandbox a network. One that has it already keeps it.
    pub fn connect(&mut self, id: &str, wish: Wish) -> Result<Measures, Refusal> {
        let record = self.records.read(id).ok_or_else(Refusal::gone)?;
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process.as_ref()) else {
            return Err(Refusal::gone());
        };
        let (reach, words) = self.reach(wish)?;
        match (record.connected, reach) {
            (true, Reach::Nothing) => {
                return Err(Refusal::unsupported("a sandbox keeps the network it has", None));
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

    /// Has a program carry the packets of an ordinary user's sandbox.
    pub(super) fn carry(&self, sandbox: &Process) -> Result<(), JailError> {
        let program = Program::find().map_err(io::Error::other).at(Step::NetNamespace)?;
        program.start(sandbox, &self.settings.network).at(Step::NetNamespace)
    }

    fn link(&mut self, pid: i32, pidfd: &OwnedFd) -> Result<(), JailError> {
        let namespace = net_namespace(pid, pidfd).at(Step::NetNamespace)?;
        let Rights::Root(root) = &mut self.rights else { return Ok(()) };
        root.nets.connect(namespace.as_fd()).at(Step::NetNamespace)
    }

    /// Writes the resolv.conf of a living sandbox, by a child that has become part of it: what
    /// names and links mean there is the sandbox's own affair.
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

/// The net namespace of a living process.
fn net_namespace(pid: i32, pidfd: &OwnedFd) -> io::Result<File> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // The number meant this process all the time, or the process has ended by now.
    if super::record::ended(pidfd) { Err(io::Error::other("the sandbox has ended")) } else { Ok(namespace) }
}

/// Waits for a child that must not keep us: one that takes too long is killed.
fn wait_briefly(child: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(child, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&PATIENCE)))?;
    if ready == 0 {
        pidfd_send_signal(child, Signal::KILL)?;
    }
    match spawn::wait(child.as_fd())? {
        End::Code(0) => Ok(()),
        End::Code(_) | End::Signal(_) => Err(io::Error::other("it could not be done inside the sandbox")),
    }
}

/// An error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}
