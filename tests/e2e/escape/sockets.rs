//! Sockets that reach past the sandbox's own network.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::{Attack, Secret};
use e2e::server::TestServer;

const FILTER: &str = "the filter for commands, which knows the families that may be used";
const OWN_NETWORK: &str = "a network namespace of its own, with its own loopback and abstract names";

#[test]
fn raw_and_packet_sockets_are_refused() {
    for kind in ["raw", "packet"] {
        Attack {
            words: &["socket", kind],
            refusals: &["EPERM", "EACCES", "EAFNOSUPPORT"],
            stopped_by: FILTER,
        }
        .check();
    }
}

#[test]
fn sockets_to_the_hypervisor_are_refused() {
    let attack =
        Attack { words: &["socket", "vsock"], refusals: &["EPERM", "EAFNOSUPPORT"], stopped_by: FILTER };
    attack.check_if_offered();
}

#[test]
fn sockets_into_little_used_parts_of_the_kernel_are_refused() {
    for kind in ["crypto", "netfilter"] {
        let refusals = &["EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT"];
        Attack { words: &["socket", kind], refusals, stopped_by: FILTER }.check_if_offered();
    }
}

#[test]
fn pairs_of_sockets_do_not_bypass_the_filter() {
    for kind in ["netfilter", "udp-lite", "tcp"] {
        Attack { words: &["socketpair", kind], refusals: &["EAFNOSUPPORT"], stopped_by: FILTER }
            .check_if_offered();
    }
}

#[test]
fn an_abstract_socket_of_the_host_is_out_of_reach() {
    let name = format!("coracle-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    let _listener = UnixListener::bind_addr(&address).expect("the name is unused");
    Attack {
        words: &["connect-unix", &format!("@{name}")],
        refusals: &["ECONNREFUSED"],
        stopped_by: OWN_NETWORK,
    }
    .check();
}

#[test]
fn a_path_socket_of_the_host_is_out_of_reach() {
    let host = Secret::new();
    let path = host.directory.path().join("socket");
    let _listener = UnixListener::bind(&path).expect("our own directory");
    let words = ["connect-unix", &path.to_string_lossy()];
    Attack { words: &words, refusals: &["ENOENT"], stopped_by: "a root of its own" }.check();
}

#[test]
fn no_socket_of_the_agent_or_the_launcher_is_visible() {
    let _listener = {
        let name = format!("coracle-in-sight-{}", std::process::id());
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).expect("a short name"))
            .expect("it is free")
    };
    let attack = Attack {
        words: &["connect-any-unix"],
        refusals: &["no way was found", "ENOENT", "ECONNREFUSED"],
        stopped_by: "sockets that are paths outside the sandbox's root",
    };
    attack.check();
}

#[test]
fn the_servers_own_port_is_out_of_reach() {
    let server = TestServer::start();
    let words = ["connect-tcp", server.port()];
    Attack { words: &words, refusals: &["ECONNREFUSED", "ENETUNREACH"], stopped_by: OWN_NETWORK }.check();
}
