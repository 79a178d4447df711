//! Notifies a service manager about our state, as sd_notify(3) describes: datagrams to the socket that
//! `NOTIFY_SOCKET` names. Without that variable nothing is sent.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that names the socket; the parts must not inherit it.
pub(crate) const NOTIFY_VARIABLE: &str = "NOTIFY_SOCKET";

/// The address of the service manager, if there is one.
pub(crate) struct ServiceManager(Option<SocketAddr>);

impl ServiceManager {
    pub(crate) fn from_environment() -> Self {
        Self(std::env::var_os(NOTIFY_VARIABLE).and_then(parse_address))
    }

    /// Requests are being served, with the settings that were read last.
    pub(crate) fn notify_ready(&self) {
        self.send("READY=1\nSTATUS=Serving requests");
    }

    /// The configuration is being read again; [`ServiceManager::notify_ready`] follows.
    pub(crate) fn notify_reloading(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=Reloading the configuration"));
    }

    pub(crate) fn notify_stopping(&self) {
        self.send("STOPPING=1\nSTATUS=Stopping");
    }

    fn send(&self, message: &str) {
        let Some(address) = &self.0 else { return };
        let sent = UnixDatagram::unbound()
            .and_then(|socket| socket.send_to_addr(message.as_bytes(), address))
            .and_then(
                |length| if length == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) },
            );
        if let Err(error) = sent {
            tracing::warn!(%error, "could not notify the service manager");
        }
    }
}

/// A path, or, after an `@`, a name in the abstract namespace.
fn parse_address(text: OsString) -> Option<SocketAddr> {
    match text.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok(),
        [b'/', ..] => SocketAddr::from_pathname(&text).ok(),
        _ => None,
    }
}
