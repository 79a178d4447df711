//! Sockets that reach past the sandbox's own network.

use std::fs;
use std::io;
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

use crate::call::{call, constant, pointer, pointer_mut};
use crate::verdict::{Attempt, decide, decide_permitted, first_success};

/// Opens a socket of a kind that can see or forge other users' packets, or leave the machine.
pub(crate) fn open(kind: &str) -> Attempt {
    const ALL_PROTOCOLS: u64 = 0x0300;
    let (family, kind, protocol) = match kind {
        "raw" => (libc::AF_INET, libc::SOCK_RAW, constant(libc::IPPROTO_ICMP)),
        "packet" => (libc::AF_PACKET, libc::SOCK_RAW, ALL_PROTOCOLS),
        "vsock" => (libc::AF_VSOCK, libc::SOCK_STREAM, 0),
        "crypto" => (libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        "netfilter" => (libc::AF_NETLINK, libc::SOCK_RAW, constant(libc::NETLINK_NETFILTER)),
        _ => return Err(format!("no such socket: {kind}")),
    };
    decide("socket", call(libc::SYS_socket, &[constant(family), constant(kind), protocol]))
}

/// Has the kernel create sockets of a family that makes no pairs. It refuses the pair only after it has created them.
pub(crate) fn open_pair(kind: &str) -> Attempt {
    let (family, kind, protocol) = match kind {
        "netfilter" => (libc::AF_NETLINK, libc::SOCK_RAW, constant(libc::NETLINK_NETFILTER)),
        "udp-lite" => (libc::AF_INET, libc::SOCK_DGRAM, constant(libc::IPPROTO_UDPLITE)),
        "tcp" => (libc::AF_INET, libc::SOCK_STREAM, 0),
        _ => return Err(format!("no such socket: {kind}")),
    };
    let mut pair = [0_i32; 2];
    let made = call(
        libc::SYS_socketpair,
        &[constant(family), constant(kind), protocol, pointer_mut(pair.as_mut_slice())],
    );
    decide_permitted("socketpair", made, &[libc::EOPNOTSUPP])
}

/// Connects to a socket by path, or by abstract name when it starts with `@`.
pub(crate) fn connect_unix(name: &str) -> Attempt {
    decide("connect", connect(name))
}

/// Connects to every listening socket it can find, in `/proc/net/unix` and in the file tree.
pub(crate) fn connect_any_unix() -> Attempt {
    let listed = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut names: Vec<String> =
        listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(7)).map(str::to_owned).collect();
    find_sockets(Path::new("/"), 0, &mut names);
    first_success(names.into_iter().map(|name| {
        let connected = connect(&name);
        (name, connected)
    }))
}

/// Connects to a service on the host's loopback.
pub(crate) fn connect_tcp(port: &str) -> Attempt {
    let port: u16 = port.parse().map_err(|_not_a_number| format!("{port} is no port"))?;
    decide("connect", TcpStream::connect(("127.0.0.1", port)))
}

/// Turns a TCP connection that was inherited into one to a service on the host's loopback. No filter of socket(2) can
/// prevent it.
pub(crate) fn reconnect_tcp(port: &str) -> Attempt {
    const MAX_DESCRIPTORS: u64 = 1024;
    let port: u16 = port.parse().map_err(|_not_a_number| format!("{port} is no port"))?;
    // The family 0 ends a connection; see connect(2).
    let disconnected = [0_u8; 16];
    let mut service = [0_u8; 16];
    service[..2].copy_from_slice(&INTERNET.to_ne_bytes());
    service[2..4].copy_from_slice(&port.to_be_bytes());
    service[4..8].copy_from_slice(&[127, 0, 0, 1]);
    let to = |descriptor, address: &[u8; 16]| call(libc::SYS_connect, &[descriptor, pointer(address), 16]);
    match (0..MAX_DESCRIPTORS).find(|descriptor| is_tcp_connection(*descriptor)) {
        Some(connection) => {
            to(connection, &disconnected).map_err(|error| format!("disconnect: {error}"))?;
            decide_permitted("connect", to(connection, &service), &[libc::EINPROGRESS])
        }
        None => Err("no connection was inherited".to_owned()),
    }
}

/// The family of IPv4, as in a socket address.
const INTERNET: u16 = 2;

fn is_tcp_connection(descriptor: u64) -> bool {
    let mut peer = [0_u8; 128];
    let mut length = 128_u32;
    let asked = call(libc::SYS_getpeername, &[descriptor, pointer_mut(&mut peer), pointer_mut(&mut length)]);
    asked.is_ok() && peer[..2] == INTERNET.to_ne_bytes()
}

fn connect(name: &str) -> io::Result<UnixStream> {
    match name.strip_prefix('@') {
        Some(hidden) => UnixStream::connect_addr(&SocketAddr::from_abstract_name(hidden)?),
        None => UnixStream::connect(name),
    }
}

/// Collects socket files; a few levels are enough for the usual locations.
fn find_sockets(directory: &Path, depth: usize, found: &mut Vec<String>) {
    const MAX_SEARCH_DEPTH: usize = 4;
    let skipped = ["/proc", "/sys", "/usr"].map(Path::new);
    if depth > MAX_SEARCH_DEPTH || skipped.contains(&directory) {
        return;
    }
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => find_sockets(&entry.path(), depth + 1, found),
            Ok(kind) if kind.is_socket() => found.push(entry.path().to_string_lossy().into_owned()),
            Ok(_) | Err(_) => {}
        }
    }
}
