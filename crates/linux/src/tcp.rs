//! Options of TCP sockets for which there is no safe wrapper. See tcp(7).

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::check_int;

/// Sets how many bytes that are not sent yet a socket accepts before it stops being writable (TCP_NOTSENT_LOWAT).
pub fn set_unsent_limit(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let length = libc::socklen_t::try_from(mem::size_of_val(&bytes)).map_err(io::Error::other)?;
    // SAFETY: the option takes an unsigned int, to which the pointer points.
    check_int(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            length,
        )
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    #[test]
    fn limit_is_accepted_by_the_kernel() {
        let socket = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        set_unsent_limit(socket.as_fd(), 128 << 10).expect("an option of every TCP socket");
    }
}
