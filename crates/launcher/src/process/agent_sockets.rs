//! The directory in which agents listen, each on a socket with the id of its sandbox.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use domain::SandboxId;
use rustix::fs::{AtFlags, Uid};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

pub(super) struct AgentSockets {
    path: PathBuf,
    directory: OwnedFd,
    /// The uid of the server, which connects to the sockets, if it differs from the launcher's.
    server_uid: Option<u32>,
}

impl AgentSockets {
    pub(super) fn open(path: &Path, server_uid: Option<u32>) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), directory: super::open_directory(path)?, server_uid })
    }

    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Returns the path of the socket of a sandbox.
    pub(super) fn path_of(&self, id: &SandboxId) -> PathBuf {
        self.path.join(id.as_str())
    }

    /// Binds the agent's socket. The agent itself calls listen, so that a successful connect means that
    /// the agent is at the other end and not the launcher.
    pub(super) fn bind(&self, id: &SandboxId) -> io::Result<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // The directory is addressed by its descriptor, because a socket's path is limited to 108 bytes.
        let path = format!("/proc/self/fd/{}/{id}", self.directory.as_raw_fd());
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::fs::chmodat(
            &self.directory,
            id.as_str(),
            rustix::fs::Mode::from_raw_mode(0o600),
            AtFlags::empty(),
        )?;
        if let Some(uid) = self.server_uid {
            let uid = Some(Uid::from_raw(uid));
            rustix::fs::chownat(&self.directory, id.as_str(), uid, None, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(socket)
    }

    /// Whether the agent of `id` listens. Only a connect shows that: the launcher binds the socket long
    /// before the agent listens on it. An agent that does not accept must not block the launcher, so this
    /// does not wait for space in its queue: a full queue also means that it listens.
    pub(super) fn is_listening(&self, id: &SandboxId) -> bool {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let path = format!("/proc/self/fd/{}/{id}", self.directory.as_raw_fd());
        let connected = SocketAddrUnix::new(path).and_then(|address| {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&socket, &address)
        });
        matches!(connected, Ok(()) | Err(rustix::io::Errno::AGAIN))
    }

    /// Removes the socket of a sandbox, if there is one.
    pub(super) fn remove(&self, id: &SandboxId) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.directory, id.as_str(), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
