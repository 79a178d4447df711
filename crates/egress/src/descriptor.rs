//! Descriptors for which the runtime has no type of its own: packet sockets and sockets that tell destinations.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Makes a descriptor non-blocking and has the runtime watch it.
#[expect(
    deprecated,
    reason = "its replacement is unsafe for types whose descriptor could change; that of OwnedFd cannot"
)]
pub(crate) fn watch_descriptor(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    AsyncFd::with_interest(fd, interest)
}
