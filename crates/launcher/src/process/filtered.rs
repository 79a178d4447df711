//! Sandboxes whose connections egress carries: preparing their net namespaces while they run, handing over their
//! sockets, and taking over those of an earlier launcher.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use domain::SandboxId;
use egress_protocol::ServeMode;
use linux::namespaces::{self, NamespaceSet};
use linux::netlink::nftables;
use linux::packet;
use linux::spawn::{self, ForkResult, SingleThread};
use linux::transparent::TransparentSockets;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::connect::{CHILD_TIMEOUT, open_net_namespace, wait_for_child};
use super::egress_keeper::EgressKeeper;
use super::record::{FilteredRecord, LauncherRecord};
use super::{Launcher, LauncherRights};
use crate::network::filtered::{self, FilteredLayout, FilteredNetwork};
use crate::network::{NetworkError, NetworkSettings};
use crate::network::{guard, uplink};
use crate::settings::LifetimePolicy;

/// How long the child may work inside a sandbox, in seconds.
const SET_UP_TIMEOUT_SECONDS: u32 = 5;

impl Launcher {
    /// Connects to the process that keeps the sockets of sandboxes. Sockets that it lacks, because it was started after
    /// their sandboxes, are opened again; those of ended sandboxes are closed.
    pub fn connect_keeper(&mut self, connection: OwnedFd) -> io::Result<()> {
        self.guard_egress();
        let mut keeper = EgressKeeper::new(connection);
        if self.settings.lifetime == LifetimePolicy::Ours {
            // Every other sandbox belongs to another process, which has a keeper of its own.
            self.keeper = Some(keeper);
            return Ok(());
        }
        let served = keeper.load_served()?.clone();
        self.keeper = Some(keeper);
        let mut stale = served.clone();
        for id in self.records.list()? {
            let Some((record, pidfd, filtered)) = self.running_filtered(&id) else { continue };
            stale.remove(&id);
            if !served.contains(&id)
                && let Err(error) = self.reopen_sockets(&id, &record, &pidfd, &filtered)
            {
                tracing::error!(%id, %error, "failed to take over the network of a sandbox; its connections fail");
            }
        }
        if let Some(keeper) = &mut self.keeper {
            stale.iter().for_each(|id| keeper.forget(id));
        }
        Ok(())
    }

    /// Installs a second guard for egress on this host. Without it egress still judges every connection.
    pub(super) fn guard_egress(&self) {
        let Some(uid) = self.settings.egress_uid.filter(|_| linux::privileges::is_host_root()) else {
            return;
        };
        let table = guard::build_egress_table(&self.egress_table(), uid, &self.settings.network);
        if let Err(error) = table.install() {
            tracing::warn!(%error, "failed to install the packet filter for egress; it judges connections alone");
        }
    }

    /// Removes what [`Launcher::guard_egress`] installed.
    pub(super) fn remove_egress_guard(&self) -> io::Result<()> {
        if self.settings.egress_uid.is_none() || !linux::privileges::is_host_root() {
            return Ok(());
        }
        nftables::remove_table(&self.egress_table())
    }

    fn egress_table(&self) -> String {
        format!("coracle-{}-egress", self.settings.instance)
    }

    fn running_filtered(&self, id: &SandboxId) -> Option<(LauncherRecord, OwnedFd, FilteredRecord)> {
        let record = self.records.read(id)?;
        let filtered = record.filtered.clone()?;
        let pidfd = record.pidfd()?;
        Some((record, pidfd, filtered))
    }

    fn reopen_sockets(
        &mut self,
        id: &SandboxId,
        record: &LauncherRecord,
        pidfd: &OwnedFd,
        filtered: &FilteredRecord,
    ) -> io::Result<()> {
        let settings = &self.settings.network;
        let sockets =
            self.run_in_namespace(record, pidfd, || filtered::open_sockets(settings, &filtered.own))?;
        self.hand_over_sockets(id, filtered, &sockets)
    }

    /// Gives the sockets of a sandbox to the process that keeps them.
    pub(super) fn hand_over_sockets(
        &mut self,
        id: &SandboxId,
        filtered: &FilteredRecord,
        sockets: &TransparentSockets,
    ) -> io::Result<()> {
        let keeper = self.keeper.as_mut().ok_or_else(|| io::Error::other(NetworkError::NoEgress))?;
        keeper.serve(id, filtered.mode, &filtered.own, sockets)
    }

    /// Makes egress carry the connections of a running sandbox. If it has a link, that is removed first.
    pub(super) fn filter_running(
        &mut self,
        record: &LauncherRecord,
        pidfd: &OwnedFd,
        mode: ServeMode,
    ) -> io::Result<(FilteredRecord, TransparentSockets, FilteredLayout)> {
        let settings = &self.settings.network;
        let layout = FilteredLayout::choose(settings)?;
        let placed = layout.clone();
        let has_link = record.connected && record.filtered.is_none();
        let sockets = self.run_in_namespace(record, pidfd, || {
            if has_link {
                uplink::remove_inner_link()?;
            }
            Ok(placed.set_up(settings)?.sockets)
        })?;
        Ok((FilteredRecord { mode, own: layout.own.clone() }, sockets, layout))
    }

    /// Sets up the net namespace of an ordinary user's new sandbox.
    pub(super) fn set_up_new_namespace(
        &self,
        pidfd: &OwnedFd,
        layout: FilteredLayout,
    ) -> io::Result<TransparentSockets> {
        let settings = &self.settings.network;
        open_in_child(&self.thread, pidfd.as_fd(), || {
            layout.set_up(settings).map(|FilteredNetwork { sockets, .. }| sockets)
        })
    }

    /// Runs `work` in the net namespace of a running sandbox.
    fn run_in_namespace(
        &self,
        record: &LauncherRecord,
        pidfd: &OwnedFd,
        work: impl FnOnce() -> io::Result<TransparentSockets>,
    ) -> io::Result<TransparentSockets> {
        match &self.rights {
            LauncherRights::Root(root) => {
                let process = record.process.as_ref().ok_or(io::ErrorKind::NotFound)?;
                let namespace = open_net_namespace(process.pid, pidfd)?;
                root.netns_pool.run_inside(namespace.as_fd(), work)
            }
            LauncherRights::User { .. } => open_in_child(&self.thread, pidfd.as_fd(), work),
        }
    }

    /// Whether the sockets of a sandbox were handed over.
    pub(super) fn serves(&self, id: &SandboxId) -> bool {
        self.keeper.as_ref().is_some_and(|keeper| keeper.serves(id))
    }

    /// Closes the sockets of an ended sandbox; until then its net namespace exists.
    pub(super) fn forget_filtered(&mut self, id: &SandboxId) {
        if let Some(keeper) = &mut self.keeper {
            keeper.forget(id);
        }
    }

    /// Checks that egress can carry connections here: there is such a process, and the kernel can divert packets.
    pub(super) fn check_egress(&self) -> Result<(), NetworkError> {
        if self.keeper.is_none() {
            return Err(NetworkError::NoEgress);
        }
        let checked = self.diversion.get_or_init(|| {
            probe_diversion(&self.thread, &self.settings.network).map_err(|error| error.to_string())
        });
        checked.clone().map_err(NetworkError::NoDiversion)
    }
}

/// Sets up a net namespace like that of a sandbox, in a child that has its own. This changes nothing on the host.
pub(crate) fn probe_diversion(thread: &SingleThread, settings: &NetworkSettings) -> io::Result<()> {
    let layout = FilteredLayout::choose(settings)?;
    let rootless = !linux::privileges::is_host_root();
    let namespaces = if rootless { NamespaceSet::USER.and(NamespaceSet::NET) } else { NamespaceSet::NET };
    match thread.fork(namespaces, None)? {
        ForkResult::Child => {
            spawn::set_exit_alarm(SET_UP_TIMEOUT_SECONDS);
            let done = namespaces::set_loopback_up().and_then(|()| layout.set_up(settings).map(drop));
            spawn::exit_now(done.err().map_or(0, |error| error.raw_os_error().unwrap_or(EXIT_OTHER_ERROR)))
        }
        ForkResult::Parent { pidfd, .. } => match spawn::wait_for_child(pidfd.as_fd())? {
            spawn::ProcessExit::Code(0) => Ok(()),
            spawn::ProcessExit::Code(EXIT_OTHER_ERROR) | spawn::ProcessExit::Signal(_) => {
                Err(io::Error::other("the attempt failed"))
            }
            spawn::ProcessExit::Code(errno) => Err(io::Error::from_raw_os_error(errno)),
        },
    }
}

/// The exit code for an error without a number.
const EXIT_OTHER_ERROR: i32 = 255;

/// Runs `work` in a child that has entered the user and net namespaces of an ordinary user's sandbox, and returns the
/// sockets that it opened there.
fn open_in_child(
    thread: &SingleThread,
    sandbox: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<TransparentSockets>,
) -> io::Result<TransparentSockets> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    match thread.fork(NamespaceSet::NONE, None)? {
        ForkResult::Child => {
            spawn::set_exit_alarm(SET_UP_TIMEOUT_SECONDS);
            let opened = namespaces::enter_namespace(sandbox, NamespaceSet::USER.and(NamespaceSet::NET))
                .and_then(|()| namespaces::set_loopback_up())
                .and_then(|()| work());
            let sent = opened.and_then(|sockets| {
                // A bounded rate of errors would only delay some of them.
                filtered::lift_error_limits().unwrap_or_default();
                let ports = (sockets.tcp_port, sockets.udp_port);
                packet::send_with_descriptors(
                    theirs.as_fd(),
                    &ports,
                    &[sockets.tcp.as_fd(), sockets.udp.as_fd()],
                )
            });
            spawn::exit_now(sent.err().map_or(0, |error| error.raw_os_error().unwrap_or(EXIT_OTHER_ERROR)))
        }
        ForkResult::Parent { pidfd, .. } => {
            drop(theirs);
            let received = receive_sockets(&ours);
            wait_for_child(&pidfd).and(received)
        }
    }
}

fn receive_sockets(socket: &OwnedFd) -> io::Result<TransparentSockets> {
    let mut watched = [PollFd::new(socket, PollFlags::IN)];
    rustix::io::retry_on_intr(|| poll(&mut watched, Some(&CHILD_TIMEOUT)))?;
    let received = packet::receive_with_descriptors::<(u16, u16)>(socket.as_fd())?;
    let ((tcp_port, udp_port), descriptors) = received.ok_or(io::ErrorKind::UnexpectedEof)?;
    let [tcp, udp] = <[OwnedFd; 2]>::try_from(descriptors)
        .map_err(|received| io::Error::other(format!("{} sockets arrived instead of 2", received.len())))?;
    Ok(TransparentSockets { tcp, tcp_port, udp, udp_port })
}
