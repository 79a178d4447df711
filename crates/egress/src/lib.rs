//! The process that carries the traffic of sandboxes without a link: names, connections and their policies.
//!
//! ```text
//! control   sockets and settings from the keeper, policies from the server
//! serve     one task that accepts and one that answers queries, for each sandbox
//! dns       the resolver that sandboxes see
//! connection   decides where each connection leads, dials and relays
//! vault     TLS interception of hosts that have credentials
//! sandbox   the policy, open connections, log and counters of one sandbox
//! ```
//!
//! It reads hostile TLS, HTTP and DNS and is therefore neither the server nor the launcher. It has no privileges: its
//! sockets inside sandboxes come from the keeper, and it dials from the host's namespace. If it dies, nothing passes until
//! its successor has sockets, settings and policies again.

mod address_check;
mod connection;
mod control;
mod descriptor;
mod dns;
mod given_addresses;
mod limits;
mod log;
mod pipe_pool;
mod policy;
mod relay;
mod sandbox;
mod serve;
mod settings;
mod shared;
#[cfg(test)]
mod test_world;
pub mod vault;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use egress_protocol::ConnectionRole;

use crate::shared::EgressState;
use crate::vault::{SealingKey, TrustedRoots, VaultStore};

const WORKER_THREADS: usize = 2;
/// How long open connections may take to end with the process.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// What egress is started with.
#[derive(Debug)]
pub struct EgressOptions {
    /// The SOCK_SEQPACKET connection to the keeper of the sockets. Egress ends when it is closed.
    pub keeper: OwnedFd,
    /// The listener to which servers connect (SOCK_SEQPACKET); none if the keeper sends the policies too.
    pub server_listener: Option<OwnedFd>,
    /// The key of the secrets at rest; without one, sealed values die with this process.
    pub sealing_key: Option<SealingKey>,
    /// Who may vouch for servers whose connections are intercepted.
    pub roots: TrustedRoots,
}

/// Carries the traffic of sandboxes until the keeper closes its connection.
pub fn run(options: EgressOptions) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .thread_name("egress")
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(serve_until_closed(options));
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    outcome
}

async fn serve_until_closed(options: EgressOptions) -> io::Result<()> {
    let key = match options.sealing_key {
        Some(key) => key,
        None => SealingKey::ephemeral().map_err(io::Error::other)?,
    };
    let egress = Arc::new(EgressState::open(VaultStore::new(key, options.roots))?);
    egress.keep_spare_descriptor();
    if let Some(listener) = options.server_listener {
        let egress = Arc::clone(&egress);
        tokio::spawn(async move {
            if let Err(error) = control::accept_servers(egress, listener).await {
                tracing::error!(%error, "servers cannot connect; policies stay as they are");
            }
        });
    }
    control::serve_control(egress, options.keeper, ConnectionRole::Keeper).await
}
