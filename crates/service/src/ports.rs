//! The ports of a sandbox: byte streams to them, and the tokens that open them.

mod listening;

use backend::AgentStream;
use wire::AgentRequest;

use crate::agent::faults;
use crate::files::transfer::TunnelStream;
use crate::{SandboxRef, Secret, ServiceError};

/// The ports of one sandbox.
#[derive(Clone, Copy)]
pub struct SandboxPorts<'a>(pub(crate) &'a SandboxRef);

impl SandboxPorts<'_> {
    /// Opens a byte stream to `127.0.0.1:port` inside the sandbox.
    pub async fn open_tunnel(self, port: u16) -> Result<AgentStream, ServiceError> {
        self.connect_port(port).await.map_err(|error| self.0.explain_failure(error))
    }

    async fn connect_port(self, port: u16) -> Result<AgentStream, ServiceError> {
        let (handle, activity) = self.0.begin_use()?;
        let agent = &handle.agent;
        let mut connection = agent.open_request(AgentRequest::Tunnel { port }).await?;
        match agent.first_answer(&mut connection).await? {
            Ok(()) => Ok(Box::new(TunnelStream::new(connection, activity))),
            Err(fault) => Err(faults::tunnel_error(agent, port, fault)),
        }
    }

    /// Makes the agent listen on a port of the sandbox's loopback, for clients that probe this port before they use
    /// contexts.
    pub async fn reserve_port(self, port: u16) -> Result<(), ServiceError> {
        let (handle, _activity) = self.0.begin_use()?;
        let reserved = handle.agent.request::<()>(AgentRequest::Occupy { port }).await?;
        reserved.map_err(|fault| handle.agent.fault_error(fault))
    }

    /// The token that opens the sandbox for one purpose. It is the same after a server restart.
    pub fn access_token(self, purpose: &str) -> Secret {
        let handle = &self.0.handle;
        self.0.core.tenancy.mint.derive_token(&handle.id, purpose, handle.epoch)
    }

    /// Whether a presented token opens the sandbox for this purpose.
    pub fn accepts_token(self, purpose: &str, presented: &str) -> bool {
        let handle = &self.0.handle;
        self.0.core.tenancy.mint.is_valid_token(&handle.id, purpose, handle.epoch, presented)
    }
}
