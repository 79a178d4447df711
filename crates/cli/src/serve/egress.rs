//! How the supervisor starts egress, the process that carries the connections of sandboxes without a link, and what it
//! tells it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use egress_protocol::{EGRESS_SOCKET, EgressLimits, EgressSettings};
use launcher::network::settings::ALWAYS_DENIED;
use rustix::fs::{AtFlags, Mode, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use super::child_process::{ProcessRole, RoleEnvironment, StartRule};
use super::child_settings::ChildSettings;
use super::keeper::SocketKeeper;
use super::state;
use crate::config::{Config, LogSettings};
use crate::egress_process::{EGRESS_SUBCOMMAND, EGRESS_VARIABLES};
use launcher::identity::ServerIdentity;

/// The length of the queue of servers that connect; there is one server.
const SERVER_BACKLOG: i32 = 4;

/// What egress is told at its start: nothing that it could give away. The rest comes over its connections.
#[derive(Serialize, Deserialize)]
pub(crate) struct EgressStart {
    pub log: LogSettings,
    /// Its own uid; `None` if the supervisor is not root.
    pub uid: Option<u32>,
    /// The instance whose control group for egress it joins, as root.
    pub group: Option<String>,
}

impl EgressStart {
    fn new(settings: &ChildSettings) -> Self {
        Self {
            log: settings.config.log.clone(),
            uid: settings.egress_uid(),
            group: settings.server_uid.map(|_| settings.identity.instance.clone()),
        }
    }
}

/// The process that carries the connections of sandboxes without a link. It is started before the launcher, which hands
/// over their sockets.
pub(crate) fn egress_role(keeper: SocketKeeper, server_listener: OwnedFd) -> ProcessRole {
    let descriptors = move || {
        let listener = server_listener.as_fd().try_clone_to_owned()?;
        Ok(vec![keeper.connect_egress()?, listener])
    };
    ProcessRole {
        name: "egress process",
        subcommand: EGRESS_SUBCOMMAND,
        start: StartRule::WhenReady,
        stop_grace: |_| super::STOP_GRACE,
        descriptors: Box::new(descriptors),
        settings: Box::new(|settings| Ok(serde_json::to_vec(&EgressStart::new(&settings))?)),
        environment: RoleEnvironment::Only(&EGRESS_VARIABLES),
    }
}

/// The settings of a configuration that concern egress.
pub(crate) fn egress_settings(config: &Config) -> EgressSettings {
    let network = &config.network;
    let usual = EgressLimits::default();
    let strings = |list: &[domain::PolicyTarget]| list.iter().map(ToString::to_string).collect();
    let denied = network.deny.iter().map(ToString::to_string);
    EgressSettings {
        resolvers: network.resolvers.clone(),
        allow: network.allow.iter().map(ToString::to_string).collect(),
        deny: ALWAYS_DENIED.into_iter().map(str::to_owned).chain(denied).collect(),
        always_deny: strings(&network.filter.always_deny),
        always_allow: strings(&network.filter.always_allow),
        limits: EgressLimits {
            connections_per_sandbox: network.filter.connections.unwrap_or(usual.connections_per_sandbox),
            ..usual
        },
        upstream_proxy: network.upstream_proxy.clone(),
    }
}

/// Listens for the server, at a socket that only its uid may open. One that a killed supervisor left is replaced.
pub(crate) fn bind_egress_socket(config: &Config, identity: &ServerIdentity) -> Result<OwnedFd> {
    let path = config.state_dir.join(EGRESS_SOCKET);
    bind_packet_socket(&config.state_dir, &path, state::server_uid(config, identity))
        .with_context(|| format!("could not listen on `{}`", path.display()))
}

fn bind_packet_socket(directory: &Path, path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // Through a descriptor: the path may be longer than the kernel accepts.
    let directory = fs::File::open(directory)?;
    let short = format!("/proc/self/fd/{}/{EGRESS_SOCKET}", directory.as_raw_fd());
    // The umask closes the socket to others from the moment it is created.
    let mask = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = rustix::net::bind(&listener, &SocketAddrUnix::new(short)?);
    rustix::process::umask(mask);
    bound?;
    let owner = owner.map(Uid::from_raw);
    rustix::fs::chownat(&directory, EGRESS_SOCKET, owner, None, AtFlags::SYMLINK_NOFOLLOW)?;
    rustix::net::listen(&listener, SERVER_BACKLOG)?;
    Ok(listener)
}
