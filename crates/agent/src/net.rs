//! Ports of the sandbox: tunnels from the server to them, and ports that the agent reserves.

pub(crate) mod ports;
pub(crate) mod reserve_port;
