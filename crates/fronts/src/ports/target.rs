//! A port inside a sandbox, as a request addressed it.

use domain::SandboxId;

/// How a client addressed a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressForm {
    /// By a path on the server's own address, which all sandboxes share.
    Path,
    /// By a host or a header; the whole path belongs to the service.
    Gateway,
}

/// A port of a sandbox and the requested path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PortTarget {
    pub(crate) id: SandboxId,
    pub(crate) port: u16,
    /// The part of the path that names the port; redirects must stay below it.
    pub(crate) mount: String,
    /// The rest, as the client wrote it.
    pub(crate) path: String,
    pub(crate) form: AddressForm,
    pub(crate) grant: AddressGrant,
}

/// The access that an address gives without any other proof. An address that opens something must not be sent anywhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressGrant {
    Nothing,
    /// The port itself, so the service behind it may know the address.
    Port,
    /// More than the port, so the service behind it must not learn the address.
    Sandbox,
}
