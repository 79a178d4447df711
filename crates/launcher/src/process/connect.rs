//! The network of a sandbox: deciding how it reaches other machines, and adding a network to a running
//! sandbox.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use backend::{EnforcedMeasures, Measure, NetworkState};
use domain::SandboxId;
use egress_protocol::ServeMode;
use linux::namespaces::{self, NamespaceSet};
use linux::spawn::{self, ForkResult, ProcessExit};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, pidfd_send_signal};

use super::record::LauncherRecord;
use super::{Launcher, LauncherRights};
use crate::jail::step::{JailError, JailStep, StepContext};
use crate::network::{NetworkError, NetworkMode, UplinkKind, resolver};
use crate::protocol::OpError;

/// How long a child process may work inside a sandbox.
pub(super) const CHILD_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// What carries the connections of sandboxes without a link, and what does not pass.
pub(crate) const OPEN_BY: &str = "egress: TCP and DNS, but no other UDP, no ICMP and no packets from outside";

impl Launcher {
    /// Decides how a sandbox will reach other machines.
    pub(super) fn choose_network(
        &mut self,
        mode: NetworkMode,
    ) -> Result<(UplinkKind, NetworkState), OpError> {
        let chosen = match mode {
            NetworkMode::Off => Ok((UplinkKind::Nothing, NetworkState::Off { since: None })),
            NetworkMode::Filtered => self
                .check_egress()
                .map(|()| (UplinkKind::Egress(ServeMode::Filtered), NetworkState::Filtered)),
            NetworkMode::On => self.available_network(),
            NetworkMode::Auto => match self.automatic_network() {
                Ok(found) => Ok(found),
                Err(down) => {
                    let since = Some(format_error_chain(&down));
                    Ok((UplinkKind::Nothing, NetworkState::Off { since }))
                }
            },
        };
        chosen.map_err(|down| {
            let word = if mode == NetworkMode::Filtered { "filtered" } else { "on" };
            let message = format!("network `{word}` is not possible here: {}", format_error_chain(&down));
            OpError::unsupported(message, Some(down.hint()))
        })
    }

    /// Returns how sandboxes can reach other machines now, or why they cannot.
    fn available_network(&mut self) -> Result<(UplinkKind, NetworkState), NetworkError> {
        match self.rights.linked_network() {
            Err(NetworkError::NoForwarding | NetworkError::NotRoot) => self
                .check_egress()
                .map(|()| (UplinkKind::Egress(ServeMode::Open), NetworkState::On { by: OPEN_BY.to_owned() })),
            found => found,
        }
    }

    /// As above, for sandboxes that get no network if there is none.
    fn automatic_network(&mut self) -> Result<(UplinkKind, NetworkState), NetworkError> {
        if self.settings.network.auto_needs_link {
            self.rights.linked_network()
        } else {
            self.available_network()
        }
    }

    /// Whether a sandbox that asks for a network would get one. This changes nothing on the host.
    pub(super) fn has_network(&self) -> bool {
        let linked = match &self.rights {
            LauncherRights::Root(root) => root.netns_pool.uplink.check_ready(),
            LauncherRights::User { .. } => Err(NetworkError::NotRoot),
        };
        match linked {
            Ok(()) => true,
            Err(NetworkError::NoForwarding | NetworkError::NotRoot) => self.check_egress().is_ok(),
            Err(_) => false,
        }
    }
}

impl LauncherRights {
    /// Returns the network of sandboxes with a link, or why they cannot have one.
    fn linked_network(&mut self) -> Result<(UplinkKind, NetworkState), NetworkError> {
        match self {
            Self::Root(root) => {
                root.netns_pool.uplink.ensure_ready()?;
                Ok((UplinkKind::Link, NetworkState::On { by: root.netns_pool.uplink.describe() }))
            }
            Self::User { .. } => Err(NetworkError::NotRoot),
        }
    }

    /// Returns descriptors that become readable when the network of the host changes.
    pub(super) fn watched_network(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Root(root) => root.netns_pool.uplink.watched_descriptors(),
            Self::User { .. } => Vec::new(),
        }
    }

    /// Handles changes of the host's network; `true` if idle work has to be done.
    pub(super) fn handle_network_change(&mut self) -> bool {
        let Self::Root(root) = self else { return false };
        root.netns_pool.uplink.handle_host_changes().unwrap_or_else(|error| {
            tracing::error!(%error, "failed to handle a network change; sandboxes may be without the guard on the host");
            false
        })
    }

    /// Returns the resolv.conf for a new sandbox that has a link.
    pub(super) fn linked_resolv_conf(&self) -> Option<String> {
        match self {
            Self::Root(root) => Some(root.netns_pool.uplink.resolv_conf()),
            Self::User { .. } => None,
        }
    }

    fn add_link(&mut self, pid: i32, pidfd: &OwnedFd) -> Result<(), JailError> {
        let namespace = open_net_namespace(pid, pidfd).at_step(JailStep::NetNamespace)?;
        let Self::Root(root) = self else { return Ok(()) };
        root.netns_pool.add_link(namespace.as_fd()).at_step(JailStep::NetNamespace)
    }
}

impl Launcher {
    /// Takes over the packet filter of an earlier launcher, and logs once if sandboxes with network
    /// `auto` get no network. Without a network the running sandboxes can still be used.
    pub(super) fn open_network(&mut self) -> io::Result<()> {
        let lives = self.records.any_sandbox_runs()?;
        if let LauncherRights::Root(root) = &mut self.rights {
            if let Err(down) = root.netns_pool.uplink.take_over_table(lives) {
                let (reason, hint) = (format_error_chain(&down), down.hint());
                tracing::error!(
                    reason,
                    hint,
                    "failed to take over the network of running sandboxes; it may not work"
                );
            }
            root.outdated_guards = self.records.list()?;
        }
        Ok(())
    }

    /// Logs why sandboxes whose clients name no network get none, or fail. Call it once, at the start.
    pub fn warn_of_missing_network(&mut self) {
        let network = &self.settings.network;
        let missing = match network.default {
            NetworkMode::Off => return,
            NetworkMode::On => self.available_network().map(drop),
            NetworkMode::Auto => self.automatic_network().map(drop),
            NetworkMode::Filtered => self.check_egress(),
        };
        let Err(down) = missing else { return };
        let reason = format_error_chain(&down);
        if self.settings.network.auto_needs_link && self.available_network().is_ok() {
            let hint = "set `network.default` to `auto` to let egress carry the connections of sandboxes without a link, or \
                        to `off`";
            tracing::warn!(
                reason,
                hint,
                "network `auto` is `off`, because an earlier version made this state directory"
            );
        } else {
            tracing::warn!(
                reason,
                hint = down.hint(),
                "network is not available; sandboxes with network `auto` get none"
            );
        }
    }

    /// Installs the guard with the current settings inside a running sandbox.
    pub(super) fn reinstall_guard(&self, id: &SandboxId) {
        let LauncherRights::Root(root) = &self.rights else { return };
        let has_link = |record: &LauncherRecord| record.connected && record.filtered.is_none();
        let Some(record) = self.records.read(id).filter(has_link) else { return };
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process) else { return };
        let namespace = open_net_namespace(process.pid, &pidfd);
        if let Err(error) = namespace.and_then(|namespace| root.netns_pool.reinstall_guard(namespace.as_fd()))
        {
            tracing::warn!(%id, %error, "failed to update the guard inside a sandbox; it keeps its former settings");
        }
    }

    /// Removes the packet filter, unless a running sandbox needs it.
    pub(super) fn close_network(&mut self) -> io::Result<()> {
        let lives = self.records.any_sandbox_runs()?;
        match &mut self.rights {
            LauncherRights::Root(root) if !lives => {
                root.netns_pool.uplink.remove_table().map_err(io::Error::other)
            }
            LauncherRights::Root(_) | LauncherRights::User { .. } => Ok(()),
        }
    }

    /// Gives a running sandbox a network. A sandbox that has one keeps it.
    pub fn connect_network(
        &mut self,
        id: &SandboxId,
        mode: NetworkMode,
    ) -> Result<EnforcedMeasures, OpError> {
        let record = self.records.read(id).ok_or_else(OpError::gone)?;
        let (Some(pidfd), Some(process)) = (record.pidfd(), record.process.as_ref()) else {
            return Err(OpError::gone());
        };
        let (reach, state) = self.choose_network(mode)?;
        let is_filtered =
            record.filtered.as_ref().is_some_and(|filtered| filtered.mode == ServeMode::Filtered);
        match (record.connected, reach) {
            (true, UplinkKind::Nothing) => {
                return Err(OpError::unsupported("the network of a sandbox cannot be removed", None));
            }
            (true, UplinkKind::Egress(ServeMode::Filtered)) if is_filtered && self.serves(id) => {}
            (true, UplinkKind::Link | UplinkKind::Egress(ServeMode::Open)) if is_filtered => {
                let message = "a sandbox with a filtered network keeps its filter";
                let hint = "change its policy instead; one that allows everything is possible";
                return Err(OpError::unsupported(message, Some(hint)));
            }
            (true, UplinkKind::Link | UplinkKind::Egress(ServeMode::Open)) | (false, UplinkKind::Nothing) => {
            }
            (false, UplinkKind::Link) => {
                self.rights.add_link(process.pid, &pidfd)?;
                let text = self.rights.linked_resolv_conf().unwrap_or_default();
                self.write_resolv_conf_inside(&pidfd, &text).at_step(JailStep::Guest)?;
                self.records
                    .replace(id, &LauncherRecord { connected: true, ..record })
                    .at_step(JailStep::Record)?;
            }
            (_, UplinkKind::Egress(serve_mode)) => {
                let (filtered, sockets, layout) =
                    self.filter_running(&record, &pidfd, serve_mode).at_step(JailStep::NetNamespace)?;
                self.write_resolv_conf_inside(&pidfd, &layout.resolv_conf()).at_step(JailStep::Guest)?;
                // Before the sockets are handed over, so that a launcher that starts after a crash knows of them.
                let changed = LauncherRecord { connected: true, filtered: Some(filtered.clone()), ..record };
                self.records.replace(id, &changed).at_step(JailStep::Record)?;
                self.hand_over_sockets(id, &filtered, &sockets).at_step(JailStep::NetNamespace)?;
            }
        }
        Ok(vec![Measure::Network(state)])
    }

    /// Writes the resolv.conf of a running sandbox in a child that has entered it, so that names and
    /// links are resolved inside the sandbox.
    fn write_resolv_conf_inside(&self, pidfd: &OwnedFd, text: &str) -> io::Result<()> {
        let setgroups = self.rights.setgroups_policy();
        match self.thread.fork(NamespaceSet::NONE, None)? {
            ForkResult::Child => {
                let written =
                    namespaces::enter_namespace(pidfd.as_fd(), NamespaceSet::USER.and(NamespaceSet::MOUNT))
                        .and_then(|()| namespaces::switch_ids(0, 0, setgroups))
                        .and_then(|()| resolver::write_resolv_conf(text));
                spawn::exit_now(i32::from(written.is_err()))
            }
            ForkResult::Parent { pidfd: child, .. } => wait_for_child(&child),
        }
    }
}

/// Opens the net namespace of a running process.
pub(super) fn open_net_namespace(pid: i32, pidfd: &OwnedFd) -> io::Result<File> {
    let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
    // If the process is still running, the pid referred to it during the open.
    if super::record::has_ended(pidfd) {
        Err(io::Error::other("the sandbox has ended"))
    } else {
        Ok(namespace)
    }
}

/// Waits for a child, and kills it if it takes too long.
pub(super) fn wait_for_child(child: &OwnedFd) -> io::Result<()> {
    let mut watched = [PollFd::new(child, PollFlags::IN)];
    let ready = rustix::io::retry_on_intr(|| poll(&mut watched, Some(&CHILD_TIMEOUT)))?;
    if ready == 0 {
        pidfd_send_signal(child, Signal::KILL)?;
    }
    match spawn::wait_for_child(child.as_fd())? {
        ProcessExit::Code(0) => Ok(()),
        ProcessExit::Code(_) | ProcessExit::Signal(_) => {
            Err(io::Error::other("the child process inside the sandbox failed"))
        }
    }
}

/// Formats an error and its causes on one line.
fn format_error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}
